"""Lowering of operations to algorithms: their form and number of steps; bundles take one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.hazards import separated
from asynccomm.backends.shm.algorithms import (
    Progress,
    meet,
    part_bytes,
    reduce_parts,
    reduce_whole,
    steps_for,
    transfer,
)
from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.bundles import Bundle, extent
from asynccomm.backends.shm.payloads import parcels
from asynccomm.backends.shm.schedule import Lands, by_rank, landed, part_of, reducing
from asynccomm.backends.shm.variable_length import PayloadSink, PayloadSource, stream
from asynccomm.backends.shm.vectors import copy, write
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Gather,
    GroupedOp,
    Op,
    Parcels,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)


def start(board: Board, submission: Submission | Bundle, whole: int) -> Progress:
    """Begin a collective, or a bundle of collectives.

    Args:
        whole: bytes up to which every rank combines a whole reduction (``reduce_whole``).
    """
    return _FORMS[type(submission.op)](board, submission, whole)


def _barrier(board: Board, submission: Submission, whole: int) -> Progress:
    return meet(board, board.begin(submission.work.seq, submission.op, 1))


def _parcels(board: Board, submission: Submission, whole: int) -> Progress:
    return parcels(board, submission)


def _reduce(board: Board, submission: Submission, whole: int) -> Progress:
    """The lowering of all_reduce and reduce."""
    source, target, reduction, lands = reducing(board, submission)
    nbytes = source.nbytes
    if nbytes <= whole:
        yield from reduce_whole(board, board.begin(submission.work.seq, submission.op, 1), source, target, reduction)
    else:
        steps = steps_for(nbytes, board.chunk)
        yield from reduce_parts(
            board, board.begin(submission.work.seq, submission.op, steps), steps, source, target, reduction
        )
    for land in lands:
        land()


def _transfer(board: Board, submission: Submission, whole: int) -> Progress:
    """The lowering of an operation that is one part, of which each step takes as much as fits."""
    part = part_of(board, submission)
    nbytes, split = extent(submission.op, board.size)
    room = part_bytes(board) if split else board.chunk
    steps = steps_for(nbytes, room)
    return transfer(board, board.begin(submission.work.seq, submission.op, steps), steps, room, part)


def _all_to_all(board: Board, submission: Submission, whole: int) -> Progress:
    op = submission.op
    assert isinstance(op, AllToAll)
    me, item = board.rank, op.dtype.itemsize
    given, places, after = separated(submission, me)
    copies: Lands = []
    outputs = [landed(output, copies) for output in places]
    inputs = [arithmetic.plain(tensor) for tensor in given]
    sources, targets = by_rank(inputs), by_rank(outputs)
    copy(sources[me][1], targets[me][1], inputs[me].nbytes)

    def begin(lengths: Mapping[int, tuple[int, int]]) -> None:
        for rank, (head, body) in lengths.items():
            if head or body != outputs[rank].nbytes:  # bytes behind a head would be written beyond the output
                dtype = str(op.dtype).removeprefix("torch.")
                raise board.mismatch(rank, f"all_to_all({dtype}, sends {body // item} elements to rank {me})")

    def take(source: int, start: int, n: int, address: int) -> None:
        if n > 0:
            write(targets[source][1], start, n, address)

    gives = {rank: PayloadSource(0, nbytes, address) for rank, address, nbytes in sources}
    gives[me] = PayloadSource(0, 0, 0)
    first = board.begin(submission.work.seq, submission.op, 1)
    yield from stream(board, first, part_bytes(board), me, gives, board.others, PayloadSink(begin, take))
    for land in (*copies, *after):
        land()


# -- batches ----------------------------------------------------------------------------------------------------------


def _bundle(board: Board, bundle: Bundle, whole: int) -> Progress:
    board.enter(bundle)
    if bundle.places:
        yield from _together(board, bundle)
    else:
        (submission,) = bundle.submissions
        bundle.op = submission.op
        yield from start(board, submission, whole)
    board.enter(None)


def _together(board: Board, bundle: Bundle) -> Progress:
    """Run a bundle in one step, in which every rank waits for all others."""
    everything, submissions, places = bundle.op, bundle.submissions, bundle.places
    parts = []
    for submission in submissions:
        bundle.op = submission.op
        parts.append(part_of(board, submission))
    bundle.op = everything
    step = board.begin_bundle(bundle)
    while not board.free(step):
        yield False
    slot = board.slot_address(step, board.rank)
    for submission, (start, room), part in zip(submissions, places, parts, strict=True):
        bundle.op = submission.op
        part.fill(0, room, slot + start)
    bundle.op = everything
    board.put_listing(step, bundle)
    board.post(step)
    while not board.posted(step, board.others):
        yield False
    for submission, (start, room), part in zip(submissions, places, parts, strict=True):
        bundle.op = submission.op
        part.take(step, 0, room, start)
    board.finish(step)
    for submission, part in zip(submissions, parts, strict=True):
        bundle.op = submission.op
        for land in part.lands:
            land()


_FORMS: Final[Mapping[type[Op], Callable[[Board, Any, int], Progress]]] = {
    AllReduce: _reduce,
    Reduce: _reduce,
    ReduceScatter: _transfer,
    ReduceScatterSingle: _transfer,
    Broadcast: _transfer,
    AllGather: _transfer,
    AllGatherSingle: _transfer,
    Gather: _transfer,
    Scatter: _transfer,
    AllToAllSingle: _transfer,
    AllToAll: _all_to_all,
    Parcels: _parcels,
    Barrier: _barrier,
    GroupedOp: _bundle,
}
