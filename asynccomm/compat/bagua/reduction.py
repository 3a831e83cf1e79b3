"""Bagua's reductions, with its numbers."""

from __future__ import annotations

import enum

from asynccomm.ops import reduce_op as _ours


class ReduceOp(enum.IntEnum):
    """The ways to combine tensors; the numbers are Bagua's, and differ from those of other libraries."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


def reduction(op: object) -> _ours.ReduceOp:
    """``op`` as asynccomm's reduction: a ReduceOp of Bagua, its number, or a reduction of asynccomm or torch.

    Raises: ValueError for other numbers; TypeError.
    """
    if not isinstance(op, int) or isinstance(op, bool):
        return _ours.ReduceOp.of(op)
    try:
        name = ReduceOp(op).name
    except ValueError:
        numbers = ", ".join(f"{each.value} ({each.name})" for each in ReduceOp)
        raise ValueError(f"op must be one of {numbers}, got {op}") from None
    return getattr(_ours.ReduceOp, name)  # type: ignore[no-any-return]
