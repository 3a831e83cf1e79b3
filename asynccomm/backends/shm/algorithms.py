"""Collectives as generators over a board: each fills slots, looks at the others', and yields when it can do no more.

A generator yields True when it got on and False when it has to wait for other ranks; it never waits itself. So one
thread can keep any number of them going. Four forms are all there is:

- ``publish``: a slot is for all readers (broadcast, all_gather, gather);
- ``exchange``: a slot holds a part for each reader (scatter, all_to_all, and reduce_scatter, which combines them);
- ``reduce_whole``: small reductions; everybody who wants the result combines all slots;
- ``reduce_parts``: large ones; each rank combines its part of every step and publishes that (reduce-scatter, then
  all-gather), chunk by chunk through slots that stay in the caches.

Reductions go in rank order, whoever computes them, so every rank holds the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

import torch
from torch import Tensor

from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.reduction import Reduction
from asynccomm.backends.shm.segment import LINE, rounded_up

__all__ = ["Progress", "exchange", "meet", "publish", "reduce_parts", "reduce_whole", "steps_for"]

Progress = Generator[bool, None, None]
Stage = tuple[Callable[[int], bool], Callable[[int], None]]  # (may step i be done?, do it)


def steps_for(length: int, per_step: int) -> int:
    """How many steps; an operation on nothing takes one too, for it is a collective like any other."""
    return max(1, -(-length // per_step))


def _pipeline(steps: int, *stages: Stage) -> Progress:
    """Take ``steps`` steps through ``stages``: each in order, and none ahead of the stage before it.

    The first stages run ahead as far as they may, so that other ranks never wait for what could be there.
    """
    done = [0] * len(stages)
    while True:
        moved = False
        limit = steps
        for k, (ready, act) in enumerate(stages):
            i = done[k]
            if i < limit and ready(i):
                act(i)
                done[k] = i = i + 1
                moved = True
            limit = i
        if limit == steps:
            return
        yield moved


def meet(board: Board, step: int) -> Progress:
    """A step without data: done when all have come."""
    while not board.free(step):
        yield False
    board.post(step)
    while not board.posted(step):
        yield False
    board.finish(step)


def publish(board: Board, first: int, steps: int, source: Tensor | None, targets: Mapping[int, Tensor]) -> Progress:
    """Fill the slot from ``source``, if there is one; copy the slots of the ranks in ``targets`` there.

    All are vectors of bytes of one length. Without targets this rank waits for nobody.
    """
    me, room = board.rank, board.chunk
    others = [(rank, target) for rank, target in targets.items() if rank != me]
    if me in targets and source is not None:
        _copy(source, targets[me])

    def fill(i: int) -> None:
        if source is not None:
            part = source[i * room : (i + 1) * room]
            board.slot(torch.uint8, first + i, me)[: part.numel()].copy_(part)
        board.post(first + i)

    def there(i: int) -> bool:
        if len(others) == 1:
            return board.posted_by(others[0][0], first + i)
        return not others or board.posted(first + i)

    def take(i: int) -> None:
        for rank, target in others:
            part = target[i * room : (i + 1) * room]
            part.copy_(board.slot(torch.uint8, first + i, rank)[: part.numel()])
        board.finish(first + i)

    return _pipeline(steps, (lambda i: board.free(first + i), fill), (there, take))


def exchange(
    board: Board,
    first: int,
    steps: int,
    sources: Sequence[Tensor] | None,
    givers: Sequence[int],
    dtype: torch.dtype,
    length: int,
    take: Callable[[slice, Mapping[int, Tensor]], None],
) -> Progress:
    """Fill the slot with a part for each rank; let ``take`` have the parts that are for this rank.

    Args:
        sources: for each rank what it is to get, vectors of ``length`` and ``dtype``; None: this rank gives nothing.
        givers: the ranks that give, apart from this one.
        take: gets which part of the vectors it is, and that part by giver; this rank's own is not among them.
    """
    me, size = board.rank, board.size
    room = part_of(board, dtype)
    mine = me * room

    def fill(i: int) -> None:
        if sources is not None:
            slot = board.slot(dtype, first + i, me)
            for rank in range(size):
                if rank != me:
                    part = sources[rank][i * room : (i + 1) * room]
                    slot[rank * room : rank * room + part.numel()].copy_(part)
        board.post(first + i)

    def there(i: int) -> bool:
        if len(givers) == 1:
            return board.posted_by(givers[0], first + i)
        return not givers or board.posted(first + i)

    def read(i: int) -> None:
        where = slice(i * room, min(length, (i + 1) * room))
        n = where.stop - where.start
        take(where, {rank: board.slot(dtype, first + i, rank)[mine : mine + n] for rank in givers})
        board.finish(first + i)

    return _pipeline(steps, (lambda i: board.free(first + i), fill), (there, read))


def part_of(board: Board, dtype: torch.dtype) -> int:
    """Elements that a slot has room for, for each rank."""
    return board.chunk // board.size // LINE * LINE // dtype.itemsize


def reduce_whole(board: Board, step: int, source: Tensor, target: Tensor | None, reduction: Reduction) -> Progress:
    """Combine the ranks' ``source`` into ``target``, if it is given; at most a slot's worth."""
    while not board.free(step):
        yield False
    rows = board.heads(reduction.dtype, step, source.numel())
    rows[board.rank].copy_(source)
    board.post(step)
    if target is not None:
        while not board.posted(step):
            yield False
        reduction.combine(rows, target)
    board.finish(step)


def reduce_parts(
    board: Board, first: int, steps: int, source: Tensor, target: Tensor | None, reduction: Reduction
) -> Progress:
    """Combine the ranks' ``source`` into ``target``, if it is given; of any length.

    In a step each rank combines one part and posts it as its result: from its own ``source`` and the others' slots.
    ``target`` may be ``source``.
    """
    me, size, dtype = board.rank, board.size, reduction.dtype
    room = board.chunk // dtype.itemsize
    length = source.numel()
    line = LINE // dtype.itemsize

    def bounds(i: int) -> tuple[int, list[int]]:
        """Where step i begins, and where in it each rank's part does; all of it beyond the last."""
        start = i * room
        here = min(room, length - start)
        part = rounded_up(-(-here // size), line)
        return start, [min(here, rank * part) for rank in range(size + 1)]

    def fill(i: int) -> None:
        start, at = bounds(i)
        slot = board.slot(dtype, first + i, me)
        for a, b in ((0, at[me]), (at[me + 1], at[size])):
            if a < b:
                slot[a:b].copy_(source[start + a : start + b])
        board.post(first + i)

    def combine(i: int) -> None:
        start, at = bounds(i)
        a, b = at[me], at[me + 1]
        if a < b:
            own = slice(start + a, start + b)
            rows = [source[own] if r == me else board.slot(dtype, first + i, r)[a:b] for r in range(size)]
            result = board.result(dtype, first + i, me)[: b - a]
            reduction.combine(rows, result)
            if target is not None:
                target[own].copy_(result)
        board.post_result(first + i)

    def take(i: int) -> None:
        if target is not None:
            start, at = bounds(i)
            for rank in range(size):
                a, b = at[rank], at[rank + 1]
                if rank != me and a < b:
                    target[start + a : start + b].copy_(board.result(dtype, first + i, rank)[: b - a])
        board.finish(first + i)

    def results(i: int) -> bool:
        return target is None or board.results_posted(first + i)

    return _pipeline(
        steps,
        (lambda i: board.free(first + i), fill),
        (lambda i: board.posted(first + i), combine),
        (results, take),
    )


def _copy(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
