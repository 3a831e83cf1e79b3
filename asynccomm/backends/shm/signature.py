"""A collective in two words, so that ranks can see in shared memory whether they are in the same one.

The words say what must agree (kind, dtype, reduction, root; number of elements) and can be turned into a description
again, for the error when they do not.
"""

from __future__ import annotations

from typing import Final

import torch

from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Gather,
    Op,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    TensorOp,
)
from asynccomm.reduce_op import RedOpType, ReduceOp

__all__ = ["Signature", "describe", "signature"]

Signature = tuple[int, int]

_KINDS: Final[tuple[type[Op], ...]] = (
    Barrier,
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    AllGatherSingle,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    Gather,
    AllToAllSingle,
)
_DTYPES: Final = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
_REDUCTIONS: Final = tuple(RedOpType)
_codes: dict[tuple[type[Op], torch.dtype, RedOpType | None, int], int] = {}  # as many as a program has forms of calls


def signature(op: Op) -> Signature:
    """The two words of ``op``; equal on two ranks if ``op.fits`` the other's."""
    if not isinstance(op, TensorOp):
        return _KINDS.index(type(op)), 0
    reduction = getattr(op, "reduction", None)
    key = (type(op), op.dtype, None if reduction is None else reduction.type, getattr(op, "root", -1))
    code = _codes.get(key)
    if code is None:
        kind, dtype, reduced, root = key
        code = _KINDS.index(kind) | _DTYPES.index(dtype) << 8 | (root + 1) << 32
        if reduced is not None:
            code |= (_REDUCTIONS.index(reduced) + 1) << 16
        _codes[key] = code
    return code, op.numel


def describe(words: Signature) -> str:
    """What the words say, as the operation itself would; for an error."""
    code, numel = words
    try:
        kind = _KINDS[code & 0xFF]
        if kind is Barrier:
            return str(Barrier())
        fields: dict[str, object] = {"dtype": _DTYPES[code >> 8 & 0xFF], "numel": numel}
        if code >> 32:
            fields["root"] = (code >> 32) - 1
        reduction = code >> 16 & 0xFF
        if reduction:
            of = _REDUCTIONS[reduction - 1]
            fields["reduction"] = ReduceOp.PREMUL_SUM(1) if of is RedOpType.PREMUL_SUM else ReduceOp(of)
        return str(kind(**fields))
    except (IndexError, TypeError):
        return f"something unknown ({code:#x}, {numel})"
