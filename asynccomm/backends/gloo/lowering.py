"""From our operations to gloo's: which call, on which memory, and what is left to do when it has finished.

gloo knows some dtypes, in plain memory. So what is only moved travels as bytes if need be, and what is reduced is
widened first (``backends/arithmetic.py``). Memory that gloo cannot use as it is (strides, other dtypes, tensors that
must not be clobbered) is staged: copied before the call or after it.

reduce_scatter is an all_to_all and a sum of our own: half the traffic of gloo's, which reduces everything everywhere,
in rank order, with fp32 accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.torch_gloo import Gloo
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Gather,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)
from asynccomm.reduce_op import RedOpType, ReduceOp

__all__ = ["Finish", "movable", "place", "start"]

Finish = Callable[[], object]

_AS_IT_IS = frozenset({torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64})  # by gloo
_UNCHANGED = frozenset(RedOpType) - {RedOpType.AVG, RedOpType.PREMUL_SUM}  # nothing to do before or after


def movable(tensor: Tensor) -> Tensor:
    """The elements of ``tensor`` as a flat tensor of a dtype that gloo can move."""
    values = arithmetic.resolved(tensor)
    return values if values.dtype in _AS_IT_IS else values.view(torch.uint8)


def place(output: Tensor) -> tuple[Tensor, Finish | None]:
    """Where gloo may put what ``output`` is to hold, and what then brings it there, if that is not its own memory."""
    memory, copy_back = arithmetic.landing(output)
    return movable(memory), copy_back


def _places(outputs: Sequence[Tensor]) -> tuple[list[Tensor], Finish | None]:
    pairs = [place(output) for output in outputs]
    after = [finish for _, finish in pairs if finish is not None]

    def finish_all() -> None:
        for finish in after:
            finish()

    return [data for data, _ in pairs], finish_all if after else None


def start(gloo: Gloo, submission: Submission, size: int) -> tuple[Any, Finish | None]:
    """Start a collective; returns gloo's work and what to do after it, if anything."""
    inputs, outputs = submission.inputs, submission.outputs
    match submission.op:
        case AllReduce(reduction=reduction):
            return _all_reduce(gloo, inputs[0], reduction, size)
        case Reduce(reduction=reduction, root=root, dtype=dtype):
            wide = arithmetic.widen(inputs[0], reduction)
            if not outputs and wide.data_ptr() == inputs[0].data_ptr():
                wide = wide.clone()  # gloo uses it as scratch off the root, and it is not ours to change
            work = gloo.reduce(wide, root, reduction, bools=dtype == torch.bool)
            return work, _narrowing(wide, outputs[0], reduction, size) if outputs else None
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
            source = movable(inputs[0])
            if source.untyped_storage().data_ptr() == single.untyped_storage().data_ptr():
                source = source.clone()  # in place: chunks would be overwritten before they are sent
            return gloo.all_to_all_single(single, source), finish
        case Barrier():
            return gloo.barrier(), None
        case other:
            raise AssertionError(f"no such collective: {other}")


def _all_reduce(gloo: Gloo, tensor: Tensor, reduction: ReduceOp, size: int) -> tuple[Any, Finish | None]:
    if tensor.dtype in _AS_IT_IS and reduction.type in _UNCHANGED and arithmetic.is_plain(tensor):
        # the usual case, with as little Python as can be: after a large operation none of it is in the caches
        return gloo.all_reduce(tensor, reduction), None
    wide = arithmetic.widen(tensor, reduction)
    work = gloo.all_reduce(wide, reduction, bools=tensor.dtype == torch.bool)
    return work, _narrowing(wide, tensor, reduction, size)


def _reduce_scatter(
    gloo: Gloo, inputs: Sequence[Tensor], output: Tensor, reduction: ReduceOp, size: int
) -> tuple[Any, Finish]:
    if reduction.factor is not None:  # the product travels unrounded
        rows = torch.cat([arithmetic.widen(t, reduction) for t in inputs])
        reduction = ReduceOp.SUM
        widened = True
    else:
        rows = (
            torch.cat([arithmetic.resolved(t) for t in inputs]) if len(inputs) > 1 else arithmetic.resolved(inputs[0])
        )
        widened = False
    received = torch.empty_like(rows)
    work = gloo.all_to_all_single(movable(received), movable(rows))

    def finish() -> None:
        wide = received if widened else arithmetic.widen(received, reduction)
        total = arithmetic.combine(wide.view(size, -1), reduction, bools=output.dtype == torch.bool)
        arithmetic.narrow(total, output, reduction, size)

    return work, finish


def _narrowing(wide: Tensor, output: Tensor, reduction: ReduceOp, size: int) -> Finish:
    return lambda: arithmetic.narrow(wide, output, reduction, size)
