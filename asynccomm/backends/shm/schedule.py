"""Schedules of operations: the vectors that travel in the steps, and the copies to the outputs at the end.

Movement transfers bytes. Data for an output that is not plain memory (strides, lazy conjugation) is received in a
buffer, and copied to the output at the end. Tensors that share memory are separated first (``backends/hazards.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.hazards import separated
from asynccomm.backends.shm import programs
from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.programs import Part
from asynccomm.backends.shm.reduction import Reduction, reduction_for
from asynccomm.backends.shm.vectors import Operand, Share, scattered, share_of, where
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllToAllSingle,
    Broadcast,
    Gather,
    Op,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)

Lands = list[Callable[[], object]]


class Schedule(NamedTuple):
    """A collective as a part of a program, with the memory that the part refers to."""

    key: Hashable  #: with the room in a slot, determines the part
    part: Callable[[int], Part]  #: takes the room, for each reader if the slot has a part for each
    operands: Sequence[Operand | int]  #: the vectors
    lands: Lands  #: called at the end
    reductions: Sequence[Reduction] = ()
    owners: object = None  #: of the vectors' memory; kept alive


def schedule(board: Board, submission: Submission, lends: bool) -> Schedule:
    """This rank's part in a collective with equal steps, and with sizes that all ranks know.

    Args:
        lends: whether ranks may lend tensors, as far as the operation allows; the same on all ranks.
    """
    return _SCHEDULES[type(submission.op)](board, submission, lends)


# -- reductions -------------------------------------------------------------------------------------------------------


def in_place(board: Board, submission: Submission) -> tuple[Tensor, Reduction] | None:
    """The tensor of an all_reduce or reduce that is read and written as it is, which most are; None for all others."""
    if submission.outputs is not submission.inputs or len(submission.inputs) != 1 or submission.copies:
        return None
    (tensor,) = submission.inputs
    op: Any = submission.op
    reduction = reduction_for(op.dtype, op.reduction, board.size)
    if not reduction.as_it_is or not arithmetic.is_plain(tensor) or tensor.requires_grad or tensor.is_inference():
        return None
    return (tensor if tensor.stride() == (1,) else arithmetic.flat(tensor)), reduction


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


def targets_of(target: Operand | None, reduction: Reduction) -> list[Operand]:
    """The vectors that a small reduction writes: the target, behind a flat vector if it is in pieces."""
    if target is None or isinstance(target, Tensor):
        return [] if target is None else [target]
    nbytes = target.nbytes
    return [torch.empty(nbytes // reduction.dtype.itemsize, dtype=reduction.dtype, device="cpu"), target]


def _reduce_scatter(board: Board, submission: Submission, lends: bool) -> Schedule:
    op: Any = submission.op
    size, me = board.size, board.rank
    reduction = reduction_for(op.dtype, op.reduction, size)
    inputs, outputs, after = separated(submission, me)
    lands: Lands = []
    target = _target(reduction, outputs, lands)
    sources = _sources(reduction, op, inputs, size)
    sizes = tuple([source.nbytes for source in sources])
    # in place, the first of several additions would overwrite the input of a later one
    direct = isinstance(target, Tensor) and where(sources[me]) != where(target)

    # in place, only this rank reads the part of the input that it writes
    lent = True if lends and isinstance(op, ReduceScatterSingle) else None

    def part(room: int) -> Part:
        inline = board.layout.inline_part
        return programs.scattered_sums(me, sizes, room, direct=direct, lends=lent, inline=inline)

    key = ReduceScatter, sizes, direct, lent
    return Schedule(key, part, [*sources, target], [*lands, *after], (reduction,), sources)


def _sources(reduction: Reduction, op: Op, inputs: Sequence[Tensor], size: int) -> Sequence[Operand]:
    """This rank's contributions to each rank's result."""
    if isinstance(op, ReduceScatterSingle):
        vector = reduction.contribution(inputs[0])
        return vector.view(size, -1).unbind() if vector.numel() else [vector] * size
    each = len(inputs) // size
    return [_contribution(reduction, inputs[rank * each : (rank + 1) * each]) for rank in range(size)]


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


def _publish(board: Board, submission: Submission, lends: bool) -> Schedule:
    """The schedule of a broadcast, all_gather, all_gather_single or gather."""
    op: Any = submission.op
    me = board.rank
    given, places, after = separated(submission, me)
    copies: Lands = []
    outputs = [landed(output, copies) for output in places]
    inputs = [arithmetic.plain(tensor) for tensor in given]
    source = [share_of(me, inputs)] if inputs else []
    shares = _targets(op, outputs, board.size)
    nbytes = source[0][2] if source else None
    targets = [(rank, n) for rank, _, n in shares]
    readers = (op.root,) if isinstance(op, Gather) else tuple(board.others)
    key = Broadcast, nbytes, tuple(targets), lends, readers
    vectors = [vector for _, vector, _ in (*source, *shares)]
    inline = board.layout.inline
    part = partial(programs.published, me, nbytes, targets, lends=lends or None, readers=readers, inline=inline)
    return Schedule(key, part, vectors, [*copies, *after], owners=(inputs, outputs))


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


def _distribute(board: Board, submission: Submission, lends: bool) -> Schedule:
    """The schedule of a scatter or all_to_all_single."""
    op: Any = submission.op
    size, me = board.size, board.rank
    given, (place,), after = separated(submission, me)
    copies: Lands = []
    output = landed(place, copies)
    inputs = [arithmetic.plain(tensor) for tensor in given]
    nbytes = op.part_nbytes(size)
    if isinstance(op, AllToAllSingle):
        sources, targets = _chunks(inputs[0], nbytes, size), _chunks(output, nbytes, size)
    else:
        sources, targets = by_rank(inputs), [(op.root, output.data_ptr(), op.nbytes)]
    fills, takes = [(rank, n) for rank, _, n in sources], [(rank, n) for rank, _, n in targets]
    row = nbytes if lends and isinstance(op, AllToAllSingle) else 0
    apart = bool(sources) and targets[0][1] != sources[0][1]  # in place, it writes where others may still read
    key = Scatter, tuple(fills), tuple(takes), row, apart
    vectors = [vector for _, vector, _ in (*sources, *targets)]
    part = partial(programs.exchanged, me, fills, takes, row=row, lends=apart, inline=board.layout.inline_part)
    return Schedule(key, part, vectors, [*copies, *after], owners=(inputs, output))


def exchange(
    board: Board, submission: Submission
) -> tuple[tuple[int, ...], tuple[int, ...], Sequence[Operand | int], Lands, object]:
    """The bytes of an all_to_all for and from each rank, its vectors, final copies, and the owners of the memory."""
    given, places, after = separated(submission, board.rank)
    copies: Lands = []
    outputs = [landed(output, copies) for output in places]
    inputs = [arithmetic.plain(tensor) for tensor in given]
    sends, receives = tuple([tensor.nbytes for tensor in inputs]), tuple([tensor.nbytes for tensor in outputs])
    vectors = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
    return sends, receives, vectors, [*copies, *after], (inputs, outputs)


def by_rank(tensors: Sequence[Tensor]) -> list[Share]:
    """The shares of plain tensors, one per rank."""
    return [(rank, tensor.data_ptr(), tensor.nbytes) for rank, tensor in enumerate(tensors)]


def _chunks(tensor: Tensor, nbytes: int, size: int) -> list[Share]:
    """The shares of a plain tensor, in equal parts of ``nbytes`` per rank."""
    start = tensor.data_ptr()
    return [(rank, start + rank * nbytes, nbytes) for rank in range(size)]


_SCHEDULES: Final[Mapping[type[Op], Callable[[Board, Submission, bool], Schedule]]] = {
    ReduceScatter: _reduce_scatter,
    ReduceScatterSingle: _reduce_scatter,
    Broadcast: _publish,
    AllGather: _publish,
    AllGatherSingle: _publish,
    Gather: _publish,
    Scatter: _distribute,
    AllToAllSingle: _distribute,
}


def landed(output: Tensor, copies: Lands) -> Tensor:
    """Plain memory to be filled for ``output``; if it is a buffer, the copy to ``output`` is appended to ``copies``."""
    place, copy = arithmetic.landing(output)
    if copy is not None:
        copies.append(copy)
    return place
