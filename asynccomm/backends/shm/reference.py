"""The executor of programs in Python: the specification of ``_core.c``, and its substitute where that is missing."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from ctypes import memmove
from typing import Final

import torch
from torch import Tensor

from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.programs import Program, Ref, Signal, Space, Stage, Wait
from asynccomm.backends.shm.reduction import Reduction
from asynccomm.backends.shm.vectors import Operand, Vector, copy_between, read, write

Progress = Generator[bool, None, None]

# attributes of a module are faster than those of a class
_VECTOR: Final = Space.VECTOR
_NOTHING, _FREE, _POSTED = Wait.NOTHING, Wait.FREE, Wait.POSTED
_POST, _FINISH = Signal.POST, Signal.FINISH


def run(
    board: Board, program: Program, first: int, operands: Sequence[Operand | int], reductions: Sequence[Reduction]
) -> Progress:
    """Run a program from step ``first`` on.

    A generator of an executor yields True after progress, and False when it has to wait for other ranks; it never waits
    itself, so one thread can drive any number of programs.

    Args:
        operands: the memory of the program's vectors; a reduction reads and writes flat tensors of its dtype.
        reductions: the reductions that the program refers to by number.
    """
    return _Run(board, first, operands, reductions).progress(program)


class _Run:
    __slots__ = ("_address", "_board", "_first", "_operands", "_reductions", "_vectors")

    def __init__(
        self, board: Board, first: int, operands: Sequence[Operand | int], reductions: Sequence[Reduction]
    ) -> None:
        self._board = board
        self._address = board.address
        self._first = first
        self._operands = operands
        self._vectors: list[Vector] = [v.data_ptr() if isinstance(v, Tensor) else v for v in operands]
        self._reductions = reductions

    def progress(self, program: Program) -> Progress:
        steps, stages = program
        if steps == 1:
            for stage in stages:
                while not self._ready(stage, 0):
                    yield False
                self._act(stage, 0)
            return
        done = [0] * len(stages)
        while True:
            moved = False
            limit = steps
            for k, stage in enumerate(stages):
                i = done[k]
                if i < limit and self._ready(stage, i):
                    self._act(stage, i)
                    done[k] = i = i + 1
                    moved = True
                limit = i
            if limit == steps:
                return
            yield moved

    def _ready(self, stage: Stage, i: int) -> bool:
        wait, ranks, _, _ = stage
        if wait == _POSTED:
            return self._board.posted(self._first + i, ranks)
        if wait == _FREE:
            return self._board.free(self._first + i)
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
                    reduction = self._reductions[number]
                    rows = [self._elements(ref, reduction.dtype, step, i, n) for ref in sources]
                    reduction.combine(rows, self._elements(target, reduction.dtype, step, i, n))
        if signal == _POST:
            self._board.post(step)
        elif signal == _FINISH:
            self._board.finish(step)
        elif signal != _NOTHING:
            self._board.post_result(step)

    def _copy(self, target: Ref, source: Ref, step: int, i: int, n: int) -> None:
        space, number, start, stride = source
        to_space, to_number, at, to_stride = target
        if space == _VECTOR:
            vector = self._vectors[number]
            start += i * stride
            if to_space == _VECTOR:
                copy_between(vector, start, self._vectors[to_number], at + i * to_stride, n)
            else:
                read(vector, start, n, self._address(to_space, step, to_number) + at)
            return
        address = self._address(space, step, number) + start
        if to_space == _VECTOR:
            write(self._vectors[to_number], at + i * to_stride, n, address)
        else:
            memmove(self._address(to_space, step, to_number) + at, address, n)

    def _elements(self, ref: Ref, dtype: torch.dtype, step: int, i: int, n: int) -> Tensor:
        space, number, offset, stride = ref
        if space != _VECTOR:
            return self._board.elements(space, dtype, step, number, offset, n)
        vector = self._operands[number]
        assert isinstance(vector, Tensor)
        if n == vector.nbytes:
            return vector
        start = (offset + i * stride) // dtype.itemsize
        return vector[start : start + n // dtype.itemsize]
