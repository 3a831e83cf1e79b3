"""The steps before and after gloo's reductions, and asynccomm's own reduction.

gloo reduces in place, and supports some dtypes. Other dtypes are widened first (``backends/arithmetic.py``), and
tensors that must not be clobbered are copied. gloo's MIN and MAX of floats lose a NaN or keep it, depending on its
position: floats are therefore mapped to integers of the same order, with NaN at the winning end, and mapped back
afterwards.

reduce_scatter is an all_to_all and a sum here: half the traffic of gloo's reduce_scatter, which reduces everything on
all ranks; in rank order, with fp32 accumulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.gloo.staging import AS_IT_IS, pack, room
from asynccomm.backends.regions import adjoining
from asynccomm.ops.reduce_op import RedOpType, ReduceOp

_UNCHANGED: Final = frozenset(RedOpType) - {RedOpType.AVG, RedOpType.PREMUL_SUM}  # no step before or after is needed
_ORDER: Final = frozenset({RedOpType.MIN, RedOpType.MAX})
_BITS: Final = {torch.float32: torch.int32, torch.float64: torch.int64}
_CHUNK: Final = 1 << 17  # bytes that stay in the cache over several passes


def is_native(dtype: torch.dtype, reduction: ReduceOp) -> bool:
    """Whether gloo can reduce plain tensors of ``dtype`` without a step before or after."""
    return dtype in AS_IT_IS and reduction.type in _UNCHANGED and not _as_bits(dtype, reduction)


def _as_bits(dtype: torch.dtype, reduction: ReduceOp) -> bool:
    return reduction.type in _ORDER and dtype.is_floating_point


def in_order(wide: Tensor, reduction: ReduceOp) -> Tensor:
    """``wide`` mapped to values that gloo can reduce, in the same memory, which it changes."""
    if not _as_bits(wide.dtype, reduction):
        return wide
    limits = torch.iinfo(_BITS[wide.dtype])
    last = limits.max if reduction.type is RedOpType.MAX else limits.min
    with torch.inference_mode(wide.is_inference()):
        for part in torch.split(wide, _CHUNK // wide.itemsize):
            nans = part.isnan()
            _swap(part.view(_BITS[wide.dtype])).masked_fill_(nans, last)
        return wide.view(_BITS[wide.dtype])


def _swap(bits: Tensor) -> Tensor:
    """Map the bits of floats to integers in the same order, or back, in place."""
    mask = bits >> (8 * bits.itemsize - 1)  # all ones where the float is negative
    return bits.bitwise_xor_(mask.bitwise_and_(torch.iinfo(bits.dtype).max))


def brought(source: Tensor, output: Tensor | None, reduction: ReduceOp) -> Tensor:
    """This rank's contribution, flat and widened, in memory that gloo may change: that of ``output``, if possible."""
    wide = arithmetic.widen(source, reduction)
    if output is source or wide.data_ptr() != source.data_ptr():
        return wide
    if output is not None and arithmetic.is_plain(output) and output.data_ptr() != source.data_ptr():
        # gloo can use the source directly, so it can use the output, too
        arithmetic.write(output, source.view(output.shape))
        return arithmetic.widen(output, reduction)
    return wide.clone()


def wide_dtype(dtype: torch.dtype, reduction: ReduceOp) -> torch.dtype:
    """The dtype of widened tensors as gloo gets them."""
    wide = arithmetic.accumulator(dtype, reduction.type)
    return _BITS[wide] if _as_bits(wide, reduction) else wide


def widened_bytes(dtype: torch.dtype, reduction: ReduceOp, numel: int) -> int:
    return numel * wide_dtype(dtype, reduction).itemsize * (2 if dtype.is_complex else 1)


def widen_all(memory: Tensor, tensors: Sequence[Tensor], reduction: ReduceOp) -> None:
    """Widen ``tensors`` into bytes for gloo, one after the other."""
    pack(memory, [arithmetic.widen(tensor, reduction) for tensor in tensors])
    in_order(memory.view(arithmetic.accumulator(tensors[0].dtype, reduction.type)), reduction)


def narrow_all(total: Tensor, outputs: Sequence[Tensor], reduction: ReduceOp, size: int) -> None:
    """Write the combined values into ``outputs``, one after the other."""
    with torch.inference_mode(total.is_inference()):  # it is clobbered, here on gloo's thread
        floats = arithmetic.accumulator(outputs[0].dtype, reduction.type)
        if total.dtype is not floats:
            for part in torch.split(total, _CHUNK // total.itemsize):
                _swap(part)
            total = total.view(floats)
        if len(outputs) == 1:
            arithmetic.narrow(total, outputs[0], reduction, size)
            return
        pairs = 2 if outputs[0].is_complex() else 1
        parts = total.split_with_sizes([pairs * output.numel() for output in outputs])
        for output, part in zip(outputs, parts, strict=True):
            arithmetic.narrow(part, output, reduction, size)


def rows_of(tensors: Sequence[Tensor], reduction: ReduceOp) -> Tensor:
    """The bytes that reduce_scatter sends: the tensors unchanged, or with a factor their unrounded products."""
    found = adjoining(tensors) if reduction.factor is None else None
    if found is not None:
        return found
    rows = room(row_bytes(tensors[0].dtype, reduction, sum([tensor.numel() for tensor in tensors])))
    gather_rows(rows, tensors, reduction)
    return rows


def row_bytes(dtype: torch.dtype, reduction: ReduceOp, numel: int) -> int:
    """The size of ``numel`` elements in those rows, in bytes."""
    return numel * dtype.itemsize if reduction.factor is None else widened_bytes(dtype, reduction, numel)


def gather_rows(rows: Tensor, tensors: Sequence[Tensor], reduction: ReduceOp) -> None:
    """Write ``tensors`` into ``rows``."""
    if reduction.factor is None:
        pack(rows, tensors)
    else:
        widen_all(rows, tensors, reduction)


def reduce_rows(received: Tensor, outputs: Sequence[Tensor], reduction: ReduceOp, size: int) -> None:
    """Combine the ``rows_of`` all ranks, received as bytes, into ``outputs``."""
    dtype = outputs[0].dtype
    if reduction.factor is None:
        wide = arithmetic.widen(received.view(dtype), reduction)
    else:
        wide = received.view(wide_dtype(dtype, reduction))
        reduction = ReduceOp.SUM
    total = arithmetic.combine(wide.view(size, -1), reduction, bools=dtype == torch.bool)
    narrow_all(total, outputs, reduction, size)
