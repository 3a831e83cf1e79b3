"""Reductions in plain torch, the same for every backend that computes on the host.

Three moves: ``widen`` what a rank brings into a flat tensor of the accumulator's dtype (this applies PREMUL_SUM's
factor), ``combine`` the ranks' rows in rank order, ``narrow`` the result into the caller's tensor (this divides for
AVG). Half types accumulate in fp32, complex numbers as pairs of reals, small integers wide enough that AVG cannot wrap;
bools as 0 and 1.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from asynccomm.reduce_op import RedOpType, ReduceOp

__all__ = ["combine", "is_plain", "narrow", "resolved", "widen"]

_REAL: Final = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_ACCUMULATOR: Final = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.uint8,
    # wrapping around is the same modulo 2**16 or 2**32 in the wider type
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
_AVG_ACCUMULATOR: Final = {torch.int8: torch.int32, torch.uint8: torch.int32, torch.int32: torch.int64}


def accumulator(dtype: torch.dtype, kind: RedOpType) -> torch.dtype:
    """The dtype in which tensors of ``dtype`` are combined."""
    real = _REAL.get(dtype, dtype)
    if kind is RedOpType.AVG and real in _AVG_ACCUMULATOR:
        return _AVG_ACCUMULATOR[real]
    return _ACCUMULATOR.get(real, real)


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's memory is just its elements in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def resolved(tensor: Tensor) -> Tensor:
    """``tensor`` as a flat plain tensor without autograd; a view if it is plain already."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def widen(tensor: Tensor, reduction: ReduceOp) -> Tensor:
    """What this rank brings: flat, real, in the accumulator's dtype. Shares memory with ``tensor`` when it can."""
    target = accumulator(tensor.dtype, reduction.type)
    flat = resolved(tensor)
    factor = reduction.factor
    if factor is not None:
        if isinstance(factor, Tensor):
            factor = factor.detach().to(flat.device).reshape(())
        if flat.dtype in (torch.float16, torch.bfloat16):
            flat = flat.to(torch.float32)
        elif flat.dtype == torch.complex32:
            flat = flat.to(torch.complex64)
        flat = (flat * factor).to(flat.dtype)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8)
    if flat.dtype == torch.uint64:
        return flat.view(torch.int64)
    return flat.to(target)


def combine(rows: Tensor, reduction: ReduceOp, *, bools: bool = False) -> Tensor:
    """Reduce ``rows`` of shape ``(ranks, n)``, each widened, over the ranks. For bools SUM is a logical or."""
    kind = reduction.type
    if kind is RedOpType.MAX or (bools and kind is RedOpType.SUM):
        return rows.amax(dim=0)
    if kind is RedOpType.MIN:
        return rows.amin(dim=0)
    if kind is RedOpType.PRODUCT:
        return rows.prod(dim=0, dtype=rows.dtype)
    if kind in (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM):
        return rows.sum(dim=0, dtype=rows.dtype)
    result = rows[0].clone()
    for row in rows[1:]:
        if kind is RedOpType.BAND:
            result &= row
        elif kind is RedOpType.BOR:
            result |= row
        else:
            result ^= row
    return result


def narrow(accumulated: Tensor, output: Tensor, reduction: ReduceOp, size: int) -> None:
    """Write the combined values into ``output``, whatever its strides; AVG divides by the number of ranks here.

    ``accumulated`` may be ``output``'s own memory, and is clobbered otherwise.
    """
    if reduction.type is RedOpType.AVG:
        if accumulated.is_floating_point():
            accumulated.div_(size)
        else:
            accumulated.div_(size, rounding_mode="trunc")
    out = output.detach()
    if accumulated.data_ptr() == out.data_ptr():
        return
    if out.is_complex():
        pairs = accumulated.view(*out.shape, 2)
        half = out.dtype == torch.complex32
        values = torch.view_as_complex(pairs.to(torch.float16) if half else pairs)
    elif out.dtype == torch.uint64:
        values = accumulated.view(torch.uint64).view(out.shape)
    else:
        values = accumulated.view(out.shape)
    out.copy_(values)
