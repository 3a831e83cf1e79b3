"""Calls of a comm in the form in which the backend's fast path holds them: a check, and its arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asynccomm.backends.base import HeldCall, Submission
from asynccomm.ops import Call, Several
from asynccomm.ops.validation import CommInfo


def checked_call(group: CommInfo, arguments: Sequence[Any]) -> Call:
    """The call of arguments that the fast path takes: a check, and its arguments."""
    check, *rest = arguments
    made = check(group, *rest)
    return made.calls[0] if isinstance(made, Several) else made


def submission_of(group: CommInfo, held: HeldCall, call_context: Any) -> Submission:
    """The submission of a call that the fast path holds."""
    submission = Submission(checked_call(group, _restored(held)), held.work)
    submission.call_context = call_context
    return submission


def _restored(held: HeldCall) -> list[Any]:
    """The arguments of a held call; a tensor that was given other memory since then is replaced by one like it was."""
    places = iter(held.places)

    def restored(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return [restored(item) for item in argument]
        if not isinstance(argument, Tensor):
            return argument
        storage, offset, address, shape, dtype = next(places)
        if (argument.data_ptr(), argument.shape, argument.dtype) == (address, shape, dtype):
            return argument
        if storage.nbytes() < (offset + math.prod(shape)) * dtype.itemsize:  # the memory was freed
            return argument
        strides = torch.empty(shape, device="meta").stride()
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)

    return [restored(argument) for argument in held.arguments]
