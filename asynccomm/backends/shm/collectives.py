"""From operations to algorithms: which form, on which vectors, in how many steps.

What is only moved travels as bytes. Output that is not plain memory (strides, lazy conjugation) is received beside it
and copied there at the end. Inputs that overlap outputs in a way that the steps would clobber are cloned first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.shm.algorithms import (
    Progress,
    exchange,
    meet,
    part_of,
    publish,
    reduce_parts,
    reduce_whole,
    steps_for,
)
from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.reduction import Reduction
from asynccomm.backends.shm.signature import signature
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
)

__all__ = ["start"]


def start(board: Board, submission: Submission, whole: int) -> Progress:
    """Begin a collective.

    Args:
        whole: bytes up to which a reduction is done by everybody at once.
    """
    return _FORMS[type(submission.op)](board, submission, whole)


def _barrier(board: Board, submission: Submission, whole: int) -> Progress:
    return meet(board, _begin(board, submission, 1))


def _reduce(board: Board, submission: Submission, whole: int) -> Progress:
    """all_reduce and reduce."""
    op: Any = submission.op
    reduction = Reduction(op.dtype, op.reduction, board.size)
    source = reduction.contribution(submission.inputs[0])
    target = reduction.target(submission.outputs[0]) if submission.outputs else None
    if source.nbytes <= whole:
        yield from reduce_whole(board, _begin(board, submission, 1), source, target, reduction)
    else:
        steps = steps_for(source.nbytes, board.chunk)
        yield from reduce_parts(board, _begin(board, submission, steps), steps, source, target, reduction)
    reduction.land()


def _reduce_scatter(board: Board, submission: Submission, whole: int) -> Progress:
    op: Any = submission.op
    size, me = board.size, board.rank
    reduction = Reduction(op.dtype, op.reduction, size)
    output = submission.outputs[0]
    inputs = _apart(submission.inputs, [output], harmless=())
    if len(inputs) == 1:
        sources = _split(reduction.contribution(inputs[0]), size)
    else:
        sources = [reduction.contribution(tensor) for tensor in inputs]
    target = reduction.target(output)
    others = [rank for rank in range(size) if rank != me]

    def take(where: slice, parts: Mapping[int, Tensor]) -> None:
        own = sources[me][where]
        reduction.combine([own if rank == me else parts[rank] for rank in range(size)], target[where])

    steps = steps_for(target.numel(), part_of(board, reduction.dtype))
    first = _begin(board, submission, steps)
    yield from exchange(board, first, steps, sources, others, reduction.dtype, target.numel(), take)
    reduction.land()


def _publish(board: Board, submission: Submission, whole: int) -> Progress:
    """broadcast, all_gather, all_gather_single, gather."""
    op: Any = submission.op
    size, me = board.size, board.rank
    copies: list[Callable[[], object]] = []
    outputs = [_landing(output, copies) for output in submission.outputs]
    targets: Mapping[int, Tensor]
    if isinstance(op, Broadcast):
        targets = {op.root: outputs[0]} if outputs else {}
    elif isinstance(op, AllGatherSingle):
        targets = dict(enumerate(_split(outputs[0], size)))
    else:
        targets = dict(enumerate(outputs))
    source = None
    if submission.inputs:
        harmless = ((submission.inputs[0], submission.outputs[me]),) if len(submission.outputs) > 1 else ()
        single = isinstance(op, AllGatherSingle)
        if single and submission.inputs[0].data_ptr() == targets[me].data_ptr():
            source = _bytes(submission.inputs[0])  # in place: its own chunk of the output
        else:
            source = _bytes(_apart(submission.inputs, submission.outputs, harmless)[0])
    steps = steps_for(op.nbytes, board.chunk)
    yield from publish(board, _begin(board, submission, steps), steps, source, targets)
    for copy in copies:
        copy()


def _distribute(board: Board, submission: Submission, whole: int) -> Progress:
    """scatter and all_to_all_single."""
    op: Any = submission.op
    size, me = board.size, board.rank
    copies: list[Callable[[], object]] = []
    output = _landing(submission.outputs[0], copies)
    sources: Sequence[Tensor] | None = None
    if isinstance(op, AllToAllSingle):
        targets = _split(output, size)
        same = submission.inputs[0].data_ptr() == submission.outputs[0].data_ptr()
        harmless = ((submission.inputs[0], submission.outputs[0]),) if same else ()
        sources = _split(_bytes(_apart(submission.inputs, submission.outputs, harmless)[0]), size)
        givers = [rank for rank in range(size) if rank != me]
    else:
        targets = [output if rank == op.root else output[:0] for rank in range(size)]
        givers = [] if me == op.root else [op.root]
        if me == op.root:
            harmless = ((submission.inputs[me], submission.outputs[0]),)
            sources = [_bytes(tensor) for tensor in _apart(submission.inputs, submission.outputs, harmless)]
    length = targets[op.root if isinstance(op, Scatter) else me].numel()
    if sources is not None and sources[me].data_ptr() != targets[me].data_ptr():
        targets[me].copy_(sources[me])

    def take(where: slice, parts: Mapping[int, Tensor]) -> None:
        for rank, part in parts.items():
            targets[rank][where].copy_(part)

    steps = steps_for(length, part_of(board, torch.uint8))
    first = _begin(board, submission, steps)
    yield from exchange(board, first, steps, sources, givers, torch.uint8, length, take)
    for copy in copies:
        copy()


_FORMS: Final[Mapping[type[Op], Callable[[Board, Submission, int], Progress]]] = {
    AllReduce: _reduce,
    Reduce: _reduce,
    ReduceScatter: _reduce_scatter,
    ReduceScatterSingle: _reduce_scatter,
    Broadcast: _publish,
    AllGather: _publish,
    AllGatherSingle: _publish,
    Gather: _publish,
    Scatter: _distribute,
    AllToAllSingle: _distribute,
    Barrier: _barrier,
}


def _begin(board: Board, submission: Submission, steps: int) -> int:
    return board.begin(submission.work.seq, signature(submission.op), steps)


def _bytes(tensor: Tensor) -> Tensor:
    return arithmetic.resolved(tensor).view(torch.uint8)


def _split(vector: Tensor, size: int) -> Sequence[Tensor]:
    return vector.view(size, -1).unbind() if vector.numel() else [vector] * size


def _landing(output: Tensor, copies: list[Callable[[], object]]) -> Tensor:
    """Bytes to be filled for ``output``; what brings them there, if that is not its own memory, goes to ``copies``."""
    place, copy = arithmetic.landing(output)
    if copy is not None:
        copies.append(copy)
    return _bytes(place)


def _apart(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], harmless: Sequence[tuple[Tensor, Tensor]]
) -> Sequence[Tensor]:
    """``inputs``, cloned if they share memory with an output in other ways than the pairs that are ``harmless``."""
    pairs = {(a.data_ptr(), b.data_ptr()) for a, b in harmless if a.data_ptr() == b.data_ptr()}
    homes = {output.untyped_storage().data_ptr() for output in outputs}
    if not any(tensor.untyped_storage().data_ptr() in homes for tensor in inputs):
        return inputs
    for tensor in inputs:
        for output in outputs:
            if (tensor.data_ptr(), output.data_ptr()) not in pairs and _overlap(tensor, output):
                return [t.clone() for t in inputs]
    return inputs


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the spans of memory from first to last element meet."""
    (a0, a1), (b0, b1) = _span(a), _span(b)
    return a0 < b1 and b0 < a1


def _span(tensor: Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.itemsize
