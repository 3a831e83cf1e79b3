"""The executor of programs in Python: the specification of ``_core.c``, and its substitute where that is missing."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from ctypes import memmove
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from asynccomm.backends.shm.arena import NOT_LENT, arena
from asynccomm.backends.shm.board import Board, Fault
from asynccomm.backends.shm.mapping import memory_at
from asynccomm.backends.shm.programs import MOST_STEPS, Announced, Program, Ref, Signal, Space, Stage, Wait
from asynccomm.backends.shm.reduction import Reduction
from asynccomm.backends.shm.vectors import Operand, Scattered, Vector, copy_between, read, write

Progress = Generator[bool, None, None]

# attributes of a module are faster than those of a class
_VECTOR: Final = Space.VECTOR
_NOTHING, _FREE, _POSTED, _READ = Wait.NOTHING, Wait.FREE, Wait.POSTED, Wait.READ
_POST, _FINISH = Signal.POST, Signal.FINISH
_LENT: Final = Space.SLOT, Space.RESULT  # that tensors may stand in for, in the order of ``Lending``


def run(
    board: Board, program: Program, first: int, operands: Sequence[Operand | int], reductions: Sequence[Reduction]
) -> Progress:
    """Run a program from step ``first`` on.

    A generator of an executor yields True after progress, and False when it has to wait for other ranks; it never waits
    itself, so one thread can drive any number of programs.

    Args:
        operands: the memory of the program's vectors; a reduction reads vectors of its dtype, and writes a flat tensor.
        reductions: the reductions that the program refers to by number.
    """
    return _Run(board, first, operands, reductions).progress(program)


class _Run:
    __slots__ = (
        "_address",
        "_announced",
        "_board",
        "_first",
        "_known",
        "_last",
        "_lends",
        "_lent",
        "_operands",
        "_places",
        "_reaches",
        "_reductions",
        "_steps",
        "_vectors",
    )

    def __init__(
        self, board: Board, first: int, operands: Sequence[Operand | int], reductions: Sequence[Reduction]
    ) -> None:
        self._board = board
        self._address = board.address
        self._first = first
        self._operands = operands
        self._vectors: list[Vector] = [v.data_ptr() if isinstance(v, Tensor) else v for v in operands]
        self._reductions = reductions
        self._lends = False  # whether this rank lends a tensor
        self._lent: list[int] | None = None  # the words that it publishes; None: no rank lends tensors
        self._places: dict[tuple[int, int], int] = {}  # addresses of lent tensors, by rank and space

    def progress(self, program: Program) -> Progress:
        self._steps, self._announced = program.steps, program.announced
        if program.lending is None:
            return self._progress(program)
        return self._lending(program)

    def _lending(self, program: Program) -> Progress:
        """Run a program of a collective that may lend tensors."""
        board = self._board
        self._known: set[int] = set()  # the ranks that have published whether they lend
        self._last = program.steps - 1
        self._reaches = _reaches(program)
        self._lent = []
        assert program.lending is not None
        for space, number in zip(_LENT, program.lending[:2], strict=True):
            vector = self._vectors[number] if number >= 0 else None
            lent = arena().find(vector) if isinstance(vector, int) else NOT_LENT
            self._lent += lent
            if isinstance(vector, int) and lent.nbytes:
                self._places[board.rank, space] = vector
                self._lends = True
        yield from self._progress(program)
        if any(rank != board.rank for rank, _ in self._places):
            board.check_lent()

    def _learn(self, ranks: Sequence[int], step: int) -> None:
        """Find the tensors of ranks that have posted the first step. Raises: BackendError."""
        peers = self._board.peers
        for rank in ranks:
            if rank in self._known:
                continue
            self._known.add(rank)
            peers.make_room(rank)
            for space, (start, nbytes, offset) in zip(_LENT, self._board.lent(rank, step), strict=True):
                if nbytes:
                    if offset + self._reaches.get((rank, space), 0) > nbytes:
                        raise self._board.difference(rank, Fault.IMPOSSIBLE)
                    self._places[rank, space] = peers.address(rank, start, nbytes) + offset

    def _agree(self, givers: Sequence[int], announced: Announced) -> None:
        """Compare the sizes that the ranks have announced, and find the number of steps. Raises: BrokenError."""
        board, own = self._board, self._steps
        for rank in givers:
            head, body, steps = board.get(self._first, rank, board.rank)
            if head or body != announced.receives[rank] or steps > MOST_STEPS or body > steps * announced.room:
                raise board.difference(rank, Fault.SIZES + self._first)
            self._steps = max(self._steps, steps)
        board.extend(self._steps - own)

    def _progress(self, program: Program) -> Progress:
        stages = program.stages
        if program.steps == 1 and program.announced is None:
            for stage in stages:
                while not self._ready(stage, 0):
                    yield False
                self._act(stage, 0)
            return
        done = [0] * len(stages)
        while True:
            moved = False
            limit = self._steps
            for k, stage in enumerate(stages):
                i = done[k]
                if i < limit and self._ready(stage, i):
                    self._act(stage, i)
                    done[k] = i = i + 1
                    moved = True
                limit = i
            if limit == self._steps:
                return
            yield moved

    def _ready(self, stage: Stage, i: int) -> bool:
        wait, ranks, _, _ = stage
        if wait == _POSTED:
            posted = self._board.posted(self._first + i, ranks)
            if posted and i == 0 and self._lent is not None:
                self._learn(ranks, self._first)
            if posted and i == 0 and self._announced is not None:
                self._agree(ranks, self._announced)
            return posted
        if wait == _FREE:
            return self._board.free(self._first + i)
        if wait == _READ:
            return i < self._last or not self._lends or self._board.finished(self._first + i, ranks)
        return wait == _NOTHING or self._board.results_posted(self._first + i)

    def _act(self, stage: Stage, i: int) -> None:
        step = self._first + i
        _, _, actions, signal = stage
        for target, sources, total, stride, most, number in actions:
            n = total - i * stride
            if n > most:
                n = most
            if n > 0:
                if number < 0:
                    self._copy(target, sources[0], step, i, n)
                else:
                    for start, end in pairwise(self._cuts(sources, i, n)):
                        refs = [_from(ref, start) for ref in sources] if start else sources
                        to = _from(target, start) if start else target
                        self._reduce(self._reductions[number], to, refs, step, i, end - start)
        if signal == _POST:
            if i == 0 and (announced := self._announced) is not None:
                for part, nbytes in enumerate(announced.sends):
                    own = part == self._board.rank
                    self._board.put(step, part, (0, 0 if own else nbytes, self._steps))
            self._board.post(step, self._lent if i == 0 and self._lent is not None else ())
        elif signal == _FINISH:
            self._board.finish(step)
        elif signal != _NOTHING:
            self._board.post_result(step)

    def _reduce(self, reduction: Reduction, target: Ref, sources: Sequence[Ref], step: int, i: int, n: int) -> None:
        rows = [self._elements(ref, reduction.dtype, step, i, n) for ref in sources]
        out = self._elements(target, reduction.dtype, step, i, n)
        if any(row.data_ptr() == out.data_ptr() for row in rows[2:]):  # in place, for a later rank
            combined = torch.empty_like(out)
            reduction.combine(rows, combined)
            out.copy_(combined)
        else:
            reduction.combine(rows, out)

    def _cuts(self, sources: Sequence[Ref], i: int, n: int) -> Sequence[int]:
        """The bytes, from 0 to ``n``, between which each source is in one piece."""
        cuts = {0, n}
        for space, number, offset, stride, _, _ in sources:
            vector = self._operands[number] if space == _VECTOR else None
            if isinstance(vector, Scattered):
                first = offset + i * stride
                cuts.update([start - first for start in vector.starts if first < start < first + n])
        return sorted(cuts)

    def _place(self, ref: Ref, step: int, i: int) -> int:
        """The address of a place that is not in a vector."""
        space, number, offset, _, lent, lent_stride = ref
        if self._places and lent >= 0 and (tensor := self._places.get((number, space))) is not None:
            return tensor + lent + i * lent_stride
        return self._address(space, step, number) + offset

    def _copy(self, target: Ref, source: Ref, step: int, i: int, n: int) -> None:
        if source.space == _VECTOR:
            vector = self._vectors[source.number]
            start = source.offset + i * source.stride
            if target.space == _VECTOR:
                copy_between(vector, start, self._vectors[target.number], target.offset + i * target.stride, n)
                return
            place = self._place(target, step, i)
            if not isinstance(vector, int) or vector + start != place:  # else the vector is lent
                read(vector, start, n, place)
            return
        address = self._place(source, step, i)
        if target.space == _VECTOR:
            vector, at = self._vectors[target.number], target.offset + i * target.stride
            if not isinstance(vector, int) or vector + at != address:
                write(vector, at, n, address)
        else:
            memmove(self._place(target, step, i), address, n)

    def _elements(self, ref: Ref, dtype: torch.dtype, step: int, i: int, n: int) -> Tensor:
        space, number, offset, stride, lent, _ = ref
        if space != _VECTOR:
            if self._places and lent >= 0 and (number, space) in self._places:
                return memory_at(self._place(ref, step, i), n, dtype)
            return self._board.elements(space, dtype, step, number, offset, n)
        vector = self._operands[number]
        if isinstance(vector, Scattered):
            return memory_at(vector.address(offset + i * stride), n, dtype)
        assert isinstance(vector, Tensor)
        if n == vector.nbytes:
            return vector
        start = (offset + i * stride) // dtype.itemsize
        return vector[start : start + n // dtype.itemsize]


def _from(ref: Ref, start: int) -> Ref:
    """A place from byte ``start`` on."""
    return ref._replace(offset=ref.offset + start, lent=ref.lent + start if ref.lent >= 0 else -1)


def _reaches(program: Program) -> dict[tuple[int, int], int]:
    """Bytes of a rank's tensor that a program may read in place of a slot and of a result, by rank and space."""
    reaches: dict[tuple[int, int], int] = {}
    for stage in program.stages:
        for action in stage.actions:
            for ref in (action.target, *action.sources):
                if ref.lent >= 0:
                    place = ref.number, ref.space
                    reaches[place] = max(reaches.get(place, 0), ref.lent + action.total)
    return reaches
