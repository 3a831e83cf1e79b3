"""The mapping of operations to gloo's: which call, on which memory, and the steps after it.

gloo supports some dtypes, in plain memory. Data that is only moved travels as bytes if necessary, and data that is
reduced is widened first. Memory that gloo cannot use directly (strides, other dtypes, tensors that must not be
clobbered) is staged: copied before the call or after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.gloo.groups import TransferGroup
from asynccomm.backends.gloo.reduction import brought, in_order, narrow_all, reduce_rows, rows_of
from asynccomm.backends.gloo.staging import Finish, collected, movable, place, room, spread
from asynccomm.backends.hazards import Buffers
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
from asynccomm.ops.reduce_op import ReduceOp

#: gloo may overwrite a chunk of their memory before it has sent the chunk
OUT_OF_PLACE: Final = frozenset({AllToAll, AllToAllSingle})


def start(gloo: TransferGroup, op: Op, buffers: Buffers, size: int) -> tuple[Any, Finish | None]:
    """Start a collective of one tensor, or of one for each rank; returns gloo's work and the step after it, if any.

    ``packing.py`` starts operations that are divided otherwise.
    """
    inputs, outputs = buffers.inputs, buffers.outputs
    match op:
        case AllReduce(reduction=reduction):
            return _all_reduce(gloo, inputs[0], outputs[0], reduction, size)
        case Reduce(reduction=reduction, root=root, dtype=dtype):
            output = outputs[0] if outputs else None
            wide = in_order(brought(inputs[0], output, reduction), reduction)  # gloo's scratch memory off the root
            work = gloo.reduce(wide, root, reduction, bools=dtype == torch.bool)
            return work, None if output is None else partial(narrow_all, wide, outputs, reduction, size)
        case ReduceScatter(reduction=reduction) | ReduceScatterSingle(reduction=reduction):
            return _reduce_scatter(gloo, inputs, outputs[0], reduction, size)
        case Broadcast(root=root):
            if inputs:
                return gloo.broadcast(movable(inputs[0]), root), None
            data, finish = place(outputs[0])
            return gloo.broadcast(data, root), finish
        case AllGather():
            chunks, finish = _places(outputs)
            return gloo.all_gather(chunks, movable(inputs[0])), finish
        case AllGatherSingle():
            single, finish = place(outputs[0])
            return gloo.all_gather_single(single, movable(inputs[0])), finish
        case Gather(root=root):
            chunks, finish = _places(outputs)
            return gloo.gather(chunks, movable(inputs[0]), root), finish
        case Scatter(root=root):
            single, finish = place(outputs[0])
            return gloo.scatter(single, [movable(t) for t in inputs], root), finish
        case AllToAllSingle():
            single, finish = place(outputs[0])
            return gloo.all_to_all_single(single, movable(inputs[0])), finish
        case AllToAll():
            return _all_to_all(gloo, inputs, outputs, op)
        case Barrier():
            return gloo.barrier(), None
        case other:
            raise AssertionError(f"no such collective: {other}")


def _places(outputs: Sequence[Tensor]) -> tuple[list[Tensor], Finish | None]:
    pairs = [place(output) for output in outputs]
    after = [finish for _, finish in pairs if finish is not None]

    def finish_all() -> None:
        for finish in after:
            finish()

    return [data for data, _ in pairs], finish_all if after else None


def _all_reduce(
    gloo: TransferGroup, tensor: Tensor, output: Tensor, reduction: ReduceOp, size: int
) -> tuple[Any, Finish | None]:
    # the ranks must send the same dtype, though the layouts of their tensors may differ
    if gloo.is_native(tensor.dtype, reduction):
        if tensor is output and arithmetic.is_plain(tensor):
            # the usual case, with as little Python as possible: after a large operation none of it is in the caches
            return gloo.all_reduce(tensor, reduction), None
        values = arithmetic.resolved(tensor)
        if arithmetic.is_plain(output):
            arithmetic.write(output, values.view(output.shape))
            return gloo.all_reduce(output, reduction), None
        if values.data_ptr() == tensor.data_ptr():
            values = values.clone()
        return gloo.all_reduce(values, reduction), partial(arithmetic.write, output, values.view(output.shape))
    wide = in_order(brought(tensor, output, reduction), reduction)
    work = gloo.all_reduce(wide, reduction, bools=tensor.dtype == torch.bool)
    return work, partial(narrow_all, wide, (output,), reduction, size)


def _reduce_scatter(
    gloo: TransferGroup, inputs: Sequence[Tensor], output: Tensor, reduction: ReduceOp, size: int
) -> tuple[Any, Finish]:
    rows = rows_of(inputs, reduction)
    received = room(rows.numel())
    work = gloo.all_to_all_single(received, rows)
    return work, partial(reduce_rows, received, (output,), reduction, size)


def _all_to_all(
    gloo: TransferGroup, inputs: Sequence[Tensor], outputs: Sequence[Tensor], op: AllToAll
) -> tuple[Any, Finish | None]:
    data, finish = spread(outputs)
    itemsize = op.dtype.itemsize
    receives, sends = [n * itemsize for n in op.receives], [n * itemsize for n in op.sends]
    return gloo.all_to_all_single(data, collected(inputs), receives, sends), finish
