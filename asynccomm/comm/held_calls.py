"""Calls of a comm in the form in which the backend's fast path holds them: a check, and its arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asynccomm.backends.base import HeldCall, Submission
from asynccomm.ops import Call, Several
from asynccomm.ops.validation import CommInfo, check_unfreed


def checked_call(group: CommInfo, arguments: Sequence[Any]) -> Call:
    """The call of arguments that the fast path takes: a check, and its arguments."""
    check, *rest = arguments
    made = check(group, *rest)
    return made.calls[0] if isinstance(made, Several) else made


def submission_of(group: CommInfo, held: HeldCall, call_context: Any) -> Submission:
    """The submission of a call that the fast path holds. Raises: ValueError if memory of a tensor was freed."""
    submission = Submission(checked_call(group, restored(held)), held.work)
    submission.call_context = call_context
    return submission


def restored(held: HeldCall) -> list[Any]:
    """The arguments of a held call; a tensor that has changed since then is replaced by one as it was.

    Raises: ValueError if memory of a tensor was freed.
    """
    places = iter(held.places)

    def unchanged(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return [unchanged(item) for item in argument]
        if not isinstance(argument, Tensor):
            return argument
        storage, offset, address, shape, dtype = next(places)
        same = (argument.data_ptr(), argument.shape, argument.dtype) == (address, shape, dtype)
        if same and argument.is_contiguous():  # as all tensors are that the fast path holds
            return argument
        check_unfreed(storage, (offset + math.prod(shape)) * dtype.itemsize, shape, dtype)
        strides = torch.empty(shape, device="meta").stride()
        return torch.empty(0, dtype=dtype, device=argument.device).set_(storage, offset, shape, strides)

    return [unchanged(argument) for argument in held.arguments]
