"""Collectives of tensors as a computation from each rank's contribution to the outputs.

For backends that have the contributions of all ranks in one place. Reductions go in rank order, so the result is
bitwise the same wherever it is computed. A contribution is flat bytes: the inputs one after the other, or, if a
reduction has a factor, the products, which are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.hazards import in_order
from asynccomm.backends.regions import bytes_of
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Gather,
    Op,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)
from asynccomm.ops.dtypes import REAL
from asynccomm.ops.reduce_op import ReduceOp

_NOTHING: Final = torch.empty(0, dtype=torch.uint8, device="cpu")


def contributed_bytes(op: Op, inputs: Sequence[Tensor]) -> int:
    """The length of :func:`contribution`."""
    reduction = op.reduction
    if reduction is None or reduction.factor is None:
        return sum([tensor.nbytes for tensor in inputs])
    dtype = inputs[0].dtype
    itemsize = arithmetic.accumulator(dtype, reduction.type).itemsize * (2 if dtype.is_complex else 1)
    return sum([tensor.numel() for tensor in inputs]) * itemsize


def contribution(op: Op, inputs: Sequence[Tensor]) -> Tensor:
    """The contribution of a rank with these inputs; in the memory of an input if possible."""
    reduction = op.reduction
    if reduction is not None and reduction.factor is not None:
        inputs = [arithmetic.widen(tensor, reduction) for tensor in inputs]
    if len(inputs) == 1:
        return bytes_of(inputs[0])
    return torch.cat([bytes_of(tensor) for tensor in inputs]) if inputs else _NOTHING


def perform(ops: Sequence[Op], given: Sequence[Tensor], outputs: Mapping[int, Sequence[Tensor]]) -> None:
    """Fill the outputs of a collective.

    Args:
        ops: the operation of each rank; all fit each other.
        given: the contribution of each rank, in memory that no output shares.
        outputs: the outputs of each rank that has some here.
    """
    op: Any = ops[0]
    size = len(given)
    match op:
        case AllReduce() | Reduce():
            total = _combined(op, given)
            for targets in outputs.values():
                _narrow(total if len(outputs) == 1 else total.clone(), targets, op.reduction, size)
        case ReduceScatter() | ReduceScatterSingle():
            pairs = 2 if op.dtype.is_complex else 1
            counts = op.counts or [op.numel] * size
            chunks = _combined(op, given).split_with_sizes([pairs * count for count in counts])
            for rank, targets in outputs.items():
                _narrow(chunks[rank], targets, op.reduction, size)
        case Broadcast():
            for targets in outputs.values():
                fill(targets, given[op.root])
        case AllGather() | AllGatherSingle() | Gather():
            for targets in outputs.values():
                if targets:
                    _gather(op, size, targets, torch.cat(list(given)))
        case Scatter():
            chunks = given[op.root].split_with_sizes([op.nbytes] * size)
            for rank, targets in outputs.items():
                fill(targets, chunks[rank])
        case AllToAllSingle():
            share = op.part_nbytes(size)
            for rank, targets in outputs.items():
                fill(targets, torch.cat([each[rank * share : (rank + 1) * share] for each in given]))
        case AllToAll():
            for rank, targets in outputs.items():
                fill(targets, torch.cat([_share(each, source, rank) for each, source in zip(ops, given, strict=True)]))
        case Barrier():
            pass
        case _:
            raise AssertionError(f"no such collective: {op}")


def _gather(op: Op, size: int, outputs: Sequence[Tensor], data: Tensor) -> None:
    parts = data.split_with_sizes([output.nbytes for output in outputs])
    pairs = in_order(op, len(outputs) // size, list(zip(outputs, parts, strict=True)))
    fill([output for output, _ in pairs], torch.cat([part for _, part in pairs]))


def fill(outputs: Sequence[Tensor], data: Tensor) -> None:
    """Copy ``data`` into the outputs, one after the other."""
    if not outputs:
        return
    for output, part in zip(outputs, data.split_with_sizes([output.nbytes for output in outputs]), strict=True):
        arithmetic.write(output, part.clone().view(output.dtype).view(output.shape))  # a clone, for its alignment


def _combined(op: Any, given: Sequence[Tensor]) -> Tensor:
    reduction: ReduceOp = op.reduction
    wide = arithmetic.accumulator(op.dtype, reduction.type)
    if reduction.factor is not None or wide is REAL.get(op.dtype, op.dtype):
        rows = [each.view(wide) for each in given]
    else:
        rows = [arithmetic.widen(each.view(op.dtype), reduction) for each in given]
    return arithmetic.combine(rows, reduction, bools=op.dtype == torch.bool)


def _narrow(total: Tensor, outputs: Sequence[Tensor], reduction: ReduceOp, size: int) -> None:
    """Write ``total`` into ``outputs``, and clobber it."""
    if len(outputs) == 1:
        arithmetic.narrow(total, outputs[0], reduction, size)
    if len(outputs) < 2:
        return
    pairs = 2 if outputs[0].is_complex() else 1
    parts = total.split_with_sizes([pairs * output.numel() for output in outputs])
    for output, part in zip(outputs, parts, strict=True):
        arithmetic.narrow(part, output, reduction, size)


def _share(op: Any, given: Tensor, rank: int) -> Tensor:
    """The bytes that the rank of ``op`` sends to ``rank``."""
    start = sum(op.sends[:rank]) * op.dtype.itemsize
    return given[start : start + op.sends[rank] * op.dtype.itemsize]
