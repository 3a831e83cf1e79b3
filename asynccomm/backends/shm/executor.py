"""The executors of programs: in C where ``_core`` could be built, else in Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from torch import Tensor

from asynccomm.backends.shm import reference
from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.layout import WORD, Layout
from asynccomm.backends.shm.programs import Program
from asynccomm.backends.shm.reduction import Reduction
from asynccomm.backends.shm.reference import Progress
from asynccomm.backends.shm.vectors import Operand
from asynccomm.core.native import CoreUnavailable

if TYPE_CHECKING:
    from asynccomm.backends.shm import _core

_MOST_PROGRAMS: Final = 1024  # kept per comm; programs of other sizes and forms are made again


@final
class Pace(NamedTuple):
    """How a call of C without the GIL drives; the default returns at the first wait.

    A call that may not sleep has others beside it, and returns after a fifth of a millisecond in any case.
    """

    patience: float = 0.0  #: seconds of a wait in vain, after which the thread sleeps or the call returns
    stretch: float = math.inf  #: seconds after which the core is offered to other threads
    events: int = -1  #: a descriptor to sleep on: an epoll instance that has the progress thread's bell; -1: not to


NO_WAIT: Final = Pace()


@final
class Compiled(NamedTuple):
    """A program, and its form in C."""

    program: Program
    core: _core.Program | None


@final
class Executor:
    """Runs programs on the segment of a board.

    Args:
        memory: the whole segment.
        bells: by rank, the eventfds of its two bells; -1 for a bell that is never rung.
        core: the module ``_core``, or :class:`CoreUnavailable`.
    """

    def __init__(self, board: Board, memory: memoryview, bells: Sequence[tuple[int, int]], core: Any) -> None:
        self.board = board
        self.core = core
        self._programs: dict[Hashable, Compiled] = {}
        self.running: _core.Run | None = None  #: the run in C that is in progress, if one is
        self.segment: _core.Segment | None = None  #: the segment as the executor in C knows it
        if not isinstance(core, CoreUnavailable):
            self.segment = core_segment(core, board.layout, board.rank, memory, bells)
            self.segment.map_by(board.peers)
            self.segment.follow(board.state)  # type: ignore[arg-type]  # its form in C

    def compiled(self, key: Hashable, build: Callable[[], Program]) -> Compiled:
        """The program of ``key``, which ``build`` makes the first time."""
        found = self._programs.get(key)
        if found is None:
            program = build()
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            found = self._programs[key] = self.compile(program)
        return found

    def compile(self, program: Program) -> Compiled:
        """A program in the form that ``run`` takes."""
        return Compiled(program, self.segment and self.segment.program(*program))

    def run(
        self, compiled: Compiled, first: int, operands: Sequence[Operand | int], reductions: Sequence[Reduction] = ()
    ) -> Progress:
        """Run a program from step ``first`` on; see ``reference.run``."""
        kernels = [reduction.kernel for reduction in reductions]
        if self.segment is None or compiled.core is None or None in kernels:
            return reference.run(self.board, compiled.program, first, operands, reductions)
        board = self.board
        vectors = [_vector(operand) for operand in operands]
        words = (*board.signature, board.state.history)
        return self.driven(self.segment.run(compiled.core, first, words, vectors, kernels, board.difference))

    def driven(self, run: _core.Run) -> Progress:
        """Go on with a run in C."""
        self.running = run
        try:
            yield from run
        finally:
            self.running = None

    def drive(self, pace: Pace) -> None:
        """Go on with ``running`` until it is done, or Python has something to do."""
        if self.running is not None:
            self.running.drive(*pace)

    def interrupt(self) -> None:
        """Make a thread in C return soon. From any thread."""
        if self.segment is not None:
            self.segment.interrupt()

    def resume(self) -> None:
        """End an interruption."""
        if self.segment is not None:
            self.segment.resume()


def core_segment(
    core: Any, layout: Layout, rank: int, memory: memoryview, bells: Sequence[tuple[int, int]]
) -> _core.Segment:
    """The segment of a rank as the executor in C knows it; the arguments are those of :class:`Executor`."""
    starts = layout.record(0, 0) * WORD, layout.slot(0, 0), layout.result(0, 0), layout.ring_start(0, 0)
    size, banks, chunk, ring = layout.size, layout.banks, layout.chunk, layout.ring
    segment: _core.Segment = core.Segment(memory, rank, size, banks, chunk, layout.piece, ring, starts, bells)
    return segment


def _vector(operand: Operand | int) -> int | tuple[list[int], list[int]]:
    if isinstance(operand, int):
        return operand
    if isinstance(operand, Tensor):
        return operand.data_ptr()
    return operand.addresses, operand.starts
