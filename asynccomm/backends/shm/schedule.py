"""Schedules of operations: the vectors that travel in the steps, and the copies to the outputs at the end.

Movement transfers bytes. Data for an output that is not plain memory (strides, lazy conjugation) is received in a
buffer, and copied to the output at the end. Tensors that share memory are separated first (``backends/hazards.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.hazards import separated
from asynccomm.backends.shm.algorithms import Part, combined, exchanged, published
from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.reduction import Reduction, reduction_for
from asynccomm.backends.shm.vectors import Operand, Share, copy, scattered, share_of, where, write
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

Lands = list[Callable[[], object]]


def part_of(board: Board, submission: Submission) -> Part:
    """This rank's part in a collective with sizes known to all ranks."""
    return _PARTS[type(submission.op)](board, submission)


def _barrier(board: Board, submission: Submission) -> Part:
    return Part(lambda *_: None, lambda *_: None, board.others)


# -- reductions -------------------------------------------------------------------------------------------------------


def reducing(board: Board, submission: Submission) -> tuple[Operand, Operand | None, Reduction, Lands]:
    """Source, target (perhaps the source), reduction and final copies of an all_reduce or reduce."""
    op: Any = submission.op
    reduction = reduction_for(op.dtype, op.reduction, board.size)
    inputs, outputs, after = separated(submission, board.rank)
    source = _contribution(reduction, inputs)
    lands: Lands = []
    target: Operand | None = None
    if outputs is inputs and _is_in(source, inputs):
        target = source
    elif outputs:
        target = _target(reduction, outputs, lands)
    return source, target, reduction, [*lands, *after]


def _reduce(board: Board, submission: Submission) -> Part:
    return combined(board, *reducing(board, submission))


def _reduce_scatter(board: Board, submission: Submission) -> Part:
    op: Any = submission.op
    size, me = board.size, board.rank
    reduction = reduction_for(op.dtype, op.reduction, size)
    inputs, outputs, after = separated(submission, me)
    lands: Lands = []
    target = _target(reduction, outputs, lands)
    sources, shares = _sources(reduction, op, inputs, size)
    own = sources[me]
    # in place, the first of several additions would overwrite the input of a later one
    direct = not isinstance(own, Tensor) or not isinstance(target, Tensor) or own.data_ptr() != target.data_ptr()
    if isinstance(own, Tensor):
        del shares[me]  # read in place, not through the slot
    take = _combine_parts(board, own, target, reduction, direct=direct)
    return exchanged(shares, board.others, take, [*lands, *after], sources)


def _sources(
    reduction: Reduction, op: Op, inputs: Sequence[Tensor], size: int
) -> tuple[Sequence[Operand], list[Share]]:
    """This rank's contributions to each rank's result, as operands and as shares."""
    sources: Sequence[Operand]
    if isinstance(op, ReduceScatterSingle):
        vector = reduction.contribution(inputs[0])
        sources = vector.view(size, -1).unbind() if vector.numel() else [vector] * size
    else:
        each = len(inputs) // size
        sources = [_contribution(reduction, inputs[rank * each : (rank + 1) * each]) for rank in range(size)]
    return sources, [(rank, where(source), source.nbytes) for rank, source in enumerate(sources)]


def _combine_parts(
    board: Board, own: Operand, target: Operand, reduction: Reduction, *, direct: bool
) -> Callable[[int, int, int, int], None]:
    """The function that combines the parts for this rank into ``target``, ``direct``ly or through this rank's result.

    Collectives other than ``reduce_parts`` leave the result unused. A scattered ``own`` part goes through the slot.
    """
    me, dtype = board.rank, reduction.dtype
    item = dtype.itemsize
    length = target.nbytes // item

    def take(step: int, byte: int, room: int, at: int) -> None:
        start = byte // item
        n = min(room // item, length - start)
        if n <= 0:
            return
        rows = list(board.parts(dtype, step, (at + me * room) // item, n))
        if isinstance(own, Tensor):
            rows[me] = own[start : start + n]
        if direct and isinstance(target, Tensor):
            reduction.combine(rows, target[start : start + n])
        else:
            reduction.combine(rows, board.result(dtype, step, me)[:n])
            write(where(target), byte, n * item, board.result_address(step, me))

    return take


def _contribution(reduction: Reduction, tensors: Sequence[Tensor]) -> Operand:
    if len(tensors) == 1:
        return reduction.contribution(tensors[0])
    return scattered(reduction.contributions(tensors))


def _target(reduction: Reduction, outputs: Sequence[Tensor], lands: Lands) -> Operand:
    """The target of a reduction; the functions that copy it to the outputs are appended to ``lands``."""
    if len(outputs) == 1:
        target, land = reduction.target(outputs[0])
        if land is not None:
            lands.append(land)
        return target
    targets, more = reduction.targets(outputs)
    lands += more
    return scattered(targets)


def _is_in(source: Operand, tensors: Sequence[Tensor]) -> bool:
    """Whether ``source`` is the memory of ``tensors``, and writable."""
    if isinstance(source, Tensor):
        return source.data_ptr() == tensors[0].data_ptr() and not tensors[0].is_inference()
    owners: Any = source.owners
    return all(a is b for a, b in zip(owners, tensors, strict=True))


# -- movement ---------------------------------------------------------------------------------------------------------


def _publish(board: Board, submission: Submission) -> Part:
    """The part of a broadcast, all_gather, all_gather_single or gather."""
    op: Any = submission.op
    me = board.rank
    given, places, after = separated(submission, me)
    copies: Lands = []
    outputs = [landed(output, copies) for output in places]
    targets = _targets(op, outputs, board.size)
    inputs = [arithmetic.plain(tensor) for tensor in given]
    source = share_of(me, inputs) if inputs else None
    return published(board, source, targets, [*copies, *after], (inputs, outputs))


def _targets(op: Op, outputs: Sequence[Tensor], size: int) -> list[Share]:
    """The destination of each publishing rank's data."""
    if not outputs:
        return []
    if isinstance(op, Broadcast):
        return [share_of(op.root, outputs)]
    if isinstance(op, AllGatherSingle):
        return _chunks(outputs[0], op.nbytes, size)
    if len(outputs) == size:
        return by_rank(outputs)
    each = len(outputs) // size
    return [share_of(rank, outputs[rank * each : (rank + 1) * each]) for rank in range(size)]


def _distribute(board: Board, submission: Submission) -> Part:
    """The part of a scatter or all_to_all_single."""
    op: Any = submission.op
    size, me = board.size, board.rank
    given, (place,), after = separated(submission, me)
    copies: Lands = []
    output = landed(place, copies)
    inputs = [arithmetic.plain(tensor) for tensor in given]
    nbytes = op.part_nbytes(size)
    if isinstance(op, AllToAllSingle):
        sources, targets = _chunks(inputs[0], nbytes, size), _chunks(output, nbytes, size)
        givers = board.others
    else:
        targets = [(me, output.data_ptr(), nbytes)] * size
        sources = by_rank(inputs)
        givers = [] if me == op.root else [op.root]
    if sources:
        copy(sources[me][1], targets[me][1], nbytes)
        del sources[me]

    def take(step: int, start: int, room: int, at: int) -> None:
        n = min(room, nbytes - start)
        for rank in givers:
            write(targets[rank][1], start, n, board.slot_address(step, rank) + at + me * room)

    return exchanged(sources, givers, take, [*copies, *after], (inputs, output))


def by_rank(tensors: Sequence[Tensor]) -> list[Share]:
    """The shares of plain tensors, one per rank."""
    return [(rank, tensor.data_ptr(), tensor.nbytes) for rank, tensor in enumerate(tensors)]


def _chunks(tensor: Tensor, nbytes: int, size: int) -> list[Share]:
    """The shares of a plain tensor, in equal parts of ``nbytes`` per rank."""
    start = tensor.data_ptr()
    return [(rank, start + rank * nbytes, nbytes) for rank in range(size)]


_PARTS: Final[Mapping[type[Op], Callable[[Board, Submission], Part]]] = {
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


def landed(output: Tensor, copies: Lands) -> Tensor:
    """Plain memory to be filled for ``output``; if it is a buffer, the copy to ``output`` is appended to ``copies``."""
    place, copy = arithmetic.landing(output)
    if copy is not None:
        copies.append(copy)
    return place
