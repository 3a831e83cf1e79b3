"""Lowering of operations to programs: their form and number of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

from asynccomm.backends.base import Submission
from asynccomm.backends.shm.executor import Compiled, Executor
from asynccomm.backends.shm.payloads import parcels
from asynccomm.backends.shm.programs import (
    announced,
    barrier,
    combined,
    program,
    reduced_in_parts,
    room_per_reader,
    steps_for,
)
from asynccomm.backends.shm.reduction import Reduction, reduction_for
from asynccomm.backends.shm.reference import Progress
from asynccomm.backends.shm.schedule import Lands, exchange, in_place, reducing, schedule, targets_of
from asynccomm.backends.shm.settings import cores
from asynccomm.backends.shm.vectors import Operand
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Barrier,
    Op,
    Parcels,
    Reduce,
    TensorOp,
)

# a collective of so many bytes of each rank may read the ranks' tensors in place of copies in slots; in exchange, the
# owner of a tensor waits for its readers: bench/shared_tensors.py
LENT_BYTES: Final = 128 << 10
# the same in multiples of LENT_BYTES for a large reduction, of which every rank then waits for all readers at the end
LENT_REDUCTIONS: Final = 16
# the root alone does a reduction that only the root gets, up to so many times ``whole_bytes``: bench/README.md
_WHOLE_AT_ROOT: Final = 4
# The same of tensors in any memory (single copy), in collectives in which all ranks read at once: where one rank waits
# for another to read, the two copies by way of a slot, one on each core, are faster. So are slots in the caches for a
# short reduction, of which a rank reads data that the others have just written. Nor does the kernel store past the
# caches, as large collectives do. Where ranks share cores, the wait for the readers costs more than the copy:
# bench/hints.py
_GATHERED: Final = range(LENT_BYTES, 16 << 20)
_REDUCED: Final = range(2 << 20, 64 << 20)
_EXCHANGED: Final = range(LENT_BYTES, 64 << 20)
_EXCHANGED_ON_SHARED_CORES: Final = range(4 << 20, 64 << 20)
_NEVER: Final = range(0)


@final
class Lowered(NamedTuple):
    """A collective as a program, with the memory that the program refers to."""

    compiled: Compiled
    operands: Sequence[Operand | int] = ()
    reductions: Sequence[Reduction] = ()
    lands: Sequence[Callable[[], object]] = ()  #: called at the end
    owners: object = None  #: of the operands' memory; kept alive
    scratch: int = -1  #: the number of the operand that is memory of the lowering's own; -1: there is none


def start(executor: Executor, submission: Submission, whole: int) -> Progress:
    """Begin a collective.

    Args:
        whole: bytes up to which every rank combines a whole reduction (``programs.combined``).
    """
    if (run := submission.run) is not None:
        board = executor.board
        if not run.begun:
            first = board.begin(submission.work.seq, submission.op, run.steps)
            run.begin(first, (*board.signature, board.state.history))
        return executor.driven(run)
    return _FORMS.get(type(submission.op), _run)(executor, submission, whole)


def _run(executor: Executor, submission: Submission, whole: int) -> Progress:
    low = lowered(executor, submission, whole)
    first = executor.board.begin(submission.work.seq, submission.op, low.compiled.program.steps)
    yield from executor.run(low.compiled, first, low.operands, low.reductions)
    for land in low.lands:
        land()


def has_program(op: Op) -> bool:
    """Whether ``lowered`` takes the operation."""
    return type(op) not in _FORMS


def is_large(submission: Submission, inline_bytes: int) -> bool:
    """Whether an operation is for the progress thread: copying takes half the time of reducing as many bytes."""
    op = submission.op
    copies = not op.p2p and op.reduction is None and has_program(op)
    return submission.nbytes > (2 * inline_bytes if copies else inline_bytes)


def lowered(executor: Executor, submission: Submission, whole: int) -> Lowered:
    """The program of a collective."""
    return _LOWERINGS.get(type(submission.op), _transfer)(executor, submission, whole)


def _barrier(executor: Executor, submission: Submission, whole: int) -> Lowered:
    board = executor.board
    return Lowered(executor.compiled(Barrier, lambda: program(1, barrier(board.rank, board.size))))


def _reduce(executor: Executor, submission: Submission, whole: int) -> Lowered:
    """The lowering of all_reduce and reduce."""
    board = executor.board
    lands: Lands = []
    source: Operand
    target: Operand | None
    if (found := in_place(board, submission)) is not None:
        source, reduction = found
        target = source
    else:
        source, target, reduction, lands = reducing(board, submission)
    rank, size, nbytes, takes = board.rank, board.size, source.nbytes, target is not None
    targets: list[Operand] = [] if target is None else [target]
    scratch = -1
    if submission.op.root is not None:  # the other ranks would only wait for the root to read more
        whole = min(_WHOLE_AT_ROOT * whole, board.chunk)
    if nbytes <= whole:
        inline = nbytes <= board.layout.inline
        targets = targets_of(target, reduction)
        copies = len(targets) > 1
        scratch = 1 if copies else -1
        compiled = executor.compiled(
            (AllReduce, nbytes, len(targets)),
            lambda: program(1, combined(rank, size, nbytes, takes=takes, copies=copies, inline=inline)),
        )
    else:
        lends = nbytes >= LENT_REDUCTIONS * LENT_BYTES
        single_copy = lends and _single_copy(size, type(submission.op), nbytes)
        compiled = executor.compiled(
            (AllReduce, nbytes, takes, lends, single_copy),
            lambda: reduced_in_parts(
                rank, size, nbytes, board.chunk, takes=takes, lends=lends, single_copy=single_copy
            ),
        )
    return Lowered(compiled, [source, *targets], (reduction,), lands, scratch=scratch)


def _transfer(executor: Executor, submission: Submission, whole: int) -> Lowered:
    """The lowering of an operation that is one part, of which each step takes as much as fits."""
    board = executor.board
    nbytes, split = extent(submission.op, board.size)
    key, part, operands, lands, reductions, owners = schedule(board, submission, nbytes >= LENT_BYTES)
    room = room_per_reader(board.chunk, board.size) if split else board.chunk
    steps = steps_for(nbytes, room)
    single_copy = _single_copy(board.size, type(submission.op), submission.op.nbytes)
    compiled = executor.compiled((key, steps, single_copy), lambda: program(steps, part(room), single_copy=single_copy))
    return Lowered(compiled, operands, reductions, lands, owners)


def _single_copy(size: int, kind: type[Op], nbytes: int) -> bool:
    """Whether a rank lends its tensor, of ``nbytes``, in any memory."""
    alone = size <= cores()
    if kind in (AllToAll, AllToAllSingle):
        return nbytes in (_EXCHANGED if alone else _EXCHANGED_ON_SHARED_CORES)
    if kind is AllReduce:
        return alone and nbytes in _REDUCED
    return kind in (AllGather, AllGatherSingle) and alone and nbytes in _GATHERED


def extent(op: Op, size: int) -> tuple[int, bool]:
    """The bytes that a rank contributes to a slot (of the largest rank), and whether it contributes them per rank."""
    nbytes = op.part_nbytes(size)
    if op.reduction is not None:
        assert isinstance(op, TensorOp)
        travels = reduction_for(op.dtype, op.reduction, size).dtype
        nbytes = op.numel * travels.itemsize * (2 if op.dtype.is_complex else 1)
    return nbytes, op.split


def _parcels(executor: Executor, submission: Submission, whole: int) -> Progress:
    return parcels(executor, submission)


def _all_to_all(executor: Executor, submission: Submission, whole: int) -> Lowered:
    board = executor.board
    sends, receives, vectors, lands, owners = exchange(board, submission)
    room = room_per_reader(board.chunk, board.size)
    # in place, a rank writes where others may still read
    apart = all(vectors[rank] != vectors[board.size + rank] for rank in range(board.size) if sends[rank])
    single_copy = apart and _single_copy(board.size, AllToAll, sum(sends))
    compiled = executor.compiled(
        (AllToAll, sends, receives, single_copy),
        lambda: announced(board.rank, sends, receives, room, single_copy=single_copy),
    )
    return Lowered(compiled, vectors, (), lands, owners)


_LOWERINGS: Final[Mapping[type[Op], Callable[[Executor, Submission, int], Lowered]]] = {
    AllReduce: _reduce,
    Reduce: _reduce,
    Barrier: _barrier,
    AllToAll: _all_to_all,
}
_FORMS: Final[Mapping[type[Op], Callable[[Executor, Any, int], Progress]]] = {
    Parcels: _parcels,
}
