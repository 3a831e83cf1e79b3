"""Reductions in plain torch, the same for every backend that computes on the host.

A reduction has three steps: ``widen`` turns a rank's tensor into a flat tensor of the accumulator's dtype (and applies
PREMUL_SUM's factor), ``combine`` reduces the ranks' rows in rank order, and ``narrow`` writes the result into the
caller's tensor (and divides for AVG). Half types and float8 accumulate in fp32, complex numbers as pairs of reals,
small integers in a type wide enough that AVG cannot wrap, bools as 0 and 1. All functions work on detached tensors:
autograd records nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from asynccomm.ops.dtypes import REAL, in_reals
from asynccomm.ops.reduce_op import RedOpType, ReduceOp

_ACCUMULATOR: Final = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.bool: torch.uint8,
    # wrapping around gives the same result modulo 2**16 or 2**32 in the wider type
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
_ORDERS: Final = frozenset({RedOpType.MIN, RedOpType.MAX})
_SUMS: Final = frozenset({RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM})
_AVG_ACCUMULATOR: Final = {torch.int8: torch.int32, torch.uint8: torch.int32, torch.int32: torch.int64}


def accumulator(dtype: torch.dtype, kind: RedOpType) -> torch.dtype:
    """The dtype in which tensors of ``dtype`` are combined."""
    real = REAL.get(dtype, dtype)
    if kind is RedOpType.AVG and real in _AVG_ACCUMULATOR:
        return _AVG_ACCUMULATOR[real]
    return _ACCUMULATOR.get(real, real)


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's memory is exactly its elements in row-major order."""
    # ``is_conj`` is for complex tensors: it releases the GIL, and on a hot path other threads take it
    conjugated = tensor.dtype.is_complex and tensor.is_conj()
    return tensor.is_contiguous() and not conjugated and not tensor.is_neg()


def plain(tensor: Tensor) -> Tensor:
    """``tensor`` without autograd, in memory that is exactly its elements in row-major order; a copy if necessary."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def resolved(tensor: Tensor) -> Tensor:
    """``tensor`` as a flat plain tensor without autograd: the tensor itself, a view, or a copy if it is not plain."""
    tensor = plain(tensor)
    return tensor if tensor.stride() == (1,) else flat(tensor)


def landing(output: Tensor) -> tuple[Tensor, Callable[[], object] | None]:
    """A plain tensor to fill in place of ``output``, and the function that then copies it to ``output``, if needed."""
    if is_plain(output):
        return output, None
    place = torch.empty(output.shape, dtype=output.dtype, device=output.device)  # not the default device
    return place, lambda: write(output, place)


def write(output: Tensor, values: Tensor) -> None:
    """Copy ``values`` to ``output``, even an inference-mode tensor, without recording the copy for autograd."""
    with torch.inference_mode(output.is_inference()):
        output.detach().copy_(values)


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements as a vector of stride 1; ``view(-1)`` keeps odd strides of single elements."""
    return tensor.as_strided((tensor.numel(),), (1,))


def widen(tensor: Tensor, reduction: ReduceOp) -> Tensor:
    """This rank's contribution: flat, real, in the accumulator's dtype. Shares the memory of ``tensor`` if possible."""
    target = accumulator(tensor.dtype, reduction.type)
    values = resolved(tensor)
    factor = reduction.factor
    if factor is not None:
        if isinstance(factor, Tensor):
            factor = factor.detach().to(values.device).reshape(())
        if values.dtype == torch.uint64:
            values = values.view(torch.int64)
        elif not values.is_complex():  # also because torch multiplies few of the small types, least of all on a GPU
            values = values.to(target)
        elif values.dtype == torch.complex32:
            values = values.to(torch.complex64)
        values = (values * factor).to(values.dtype)
    if values.is_complex():
        values = in_reals(values).view(-1)
    if values.dtype == torch.bool:
        return values.view(torch.uint8)
    if values.dtype == torch.uint64:
        return values.view(torch.int64)
    return values.to(target)


def combine(rows: Tensor | Sequence[Tensor], reduction: ReduceOp, *, bools: bool = False) -> Tensor:
    """Reduce ``rows`` of shape ``(ranks, n)``, each widened, over the ranks. For bools SUM is a logical or."""
    kind = reduction.type
    if kind in _ORDERS or (bools and kind is RedOpType.SUM):
        together = rows if isinstance(rows, Tensor) else torch.stack(tuple(rows))
        return together.amin(dim=0) if kind is RedOpType.MIN else together.amax(dim=0)
    return accumulate([rows[0].clone(), *rows[1:]], reduction)


def accumulate(rows: Sequence[Tensor], reduction: ReduceOp) -> Tensor:
    """Reduce ``rows`` as ``combine`` does, without bools; the result may lie in the memory of the first."""
    kind = reduction.type
    if kind in _ORDERS:
        return combine(rows, reduction)
    result = rows[0]
    for row in rows[1:]:
        if kind in _SUMS:
            result += row  # not sum(): its order of additions depends on an element's position
        elif kind is RedOpType.PRODUCT:
            result *= row
        elif kind is RedOpType.BAND:
            result &= row
        elif kind is RedOpType.BOR:
            result |= row
        else:
            result ^= row
    return result


def narrow(accumulated: Tensor, output: Tensor, reduction: ReduceOp, size: int) -> None:
    """Write the combined values into ``output``, whatever its strides; AVG divides by the number of ranks here.

    ``accumulated`` may be the memory of ``output``, and is clobbered otherwise.
    """
    if reduction.type is RedOpType.AVG:
        if accumulated.is_floating_point():
            accumulated.div_(size)
        else:
            accumulated.div_(size, rounding_mode="trunc")
    if accumulated.data_ptr() == output.data_ptr():
        return
    if output.is_complex():
        pairs = accumulated.view(*output.shape, 2)
        half = output.dtype == torch.complex32
        values = torch.view_as_complex(pairs.to(torch.float16) if half else pairs)
    elif output.dtype == torch.uint64:
        values = accumulated.view(torch.uint64).view(output.shape)
    else:
        # converted before it is copied: the bits of a NaN depend on whether torch converts into plain memory
        values = accumulated.to(output.dtype).view(output.shape)
    write(output, values)
