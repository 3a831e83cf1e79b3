"""Flat memory for the steps of an operation: that of its own tensors where these allow it, else new memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from asynccomm.backends.computing import fill
from asynccomm.backends.regions import adjoining
from asynccomm.ops.dtypes import REAL

Finish = Callable[[], object]


def room(numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """New memory, which any thread may write."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device="cpu")


def landing(outputs: Sequence[Tensor]) -> tuple[Tensor, Finish | None]:
    """Bytes to fill in place of ``outputs``, one after the other; and the function that then fills these, if needed."""
    if not any(output.is_inference() for output in outputs):
        own = adjoining(outputs)
        if own is not None:
            return own, None
    memory = room(sum([output.nbytes for output in outputs]))
    return memory, partial(fill, outputs, memory)


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which elements are narrowed and moved: reals, and integers in place of bools and uint64."""
    if dtype == torch.bool:
        return torch.uint8
    if dtype == torch.uint64:
        return torch.int64
    return REAL.get(dtype, dtype)


def cut(numel: int, parts: int) -> list[int]:
    """``numel`` in ``parts`` nearly equal numbers, the larger ones first."""
    least, more = divmod(numel, parts)
    return [least + (i < more) for i in range(parts)]
