"""Collectives as generators over a board: each fills slots, looks at the others', and yields when it can do no more.

A generator yields True when it got on and False when it has to wait for other ranks; it never waits itself. So one
thread can keep any number of them going. Four forms are all there is:

- ``publish``: a slot is for all readers (broadcast, all_gather, gather);
- ``exchange``: a slot holds a part for each reader (scatter, all_to_all, and reduce_scatter, which combines them);
- ``reduce_whole``: small reductions; everybody who wants the result combines all slots;
- ``reduce_parts``: large ones; each rank combines its part of every step and publishes that (reduce-scatter, then
  all-gather), chunk by chunk through slots that stay in the caches.

Reductions go in rank order, whoever computes them, so every rank holds the same bits.

What is only moved is moved by address: a view for each piece would take longer than moving a small one. Callers keep
the tensors. ``memmove`` gives up the interpreter's lock, as torch's operations do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from ctypes import memmove

from torch import Tensor

from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.reduction import Reduction
from asynccomm.backends.shm.segment import LINE, rounded_up

__all__ = ["Progress", "exchange", "meet", "part_bytes", "publish", "reduce_parts", "reduce_whole", "steps_for"]

Progress = Generator[bool, None, None]
Stage = tuple[Callable[[int], bool], Callable[[int], None]]  # (may step i be done?, do it)


def steps_for(nbytes: int, per_step: int) -> int:
    """How many steps; an operation on nothing takes one too, for it is a collective like any other."""
    return -(-nbytes // per_step) or 1


def _pipeline(steps: int, *stages: Stage) -> Progress:
    """Take ``steps`` steps through ``stages``: each in order, and none ahead of the stage before it.

    The first stages run ahead as far as they may, so that other ranks never wait for what could be there.
    """
    if steps == 1:
        for ready, act in stages:
            while not ready(0):
                yield False
            act(0)
        return
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


def _free(board: Board, first: int) -> Callable[[int], bool]:
    return lambda i: board.free(first + i)


def _posted(board: Board, first: int, ranks: Sequence[int]) -> Callable[[int], bool]:
    return lambda i: board.posted(first + i, ranks)


def meet(board: Board, step: int) -> Progress:
    """A step without data: done when all have come."""
    while not board.free(step):
        yield False
    board.post(step)
    while not board.posted(step, board.others):
        yield False
    board.finish(step)


def publish(
    board: Board, first: int, steps: int, nbytes: int, source: int | None, targets: Mapping[int, int]
) -> Progress:
    """Fill the slot from ``source``, if there is one; copy the slots of the ranks in ``targets`` there.

    All are addresses of ``nbytes`` bytes. Without targets this rank waits for nobody.
    """
    me, room = board.rank, board.chunk
    givers = [rank for rank in targets if rank != me]
    if source is not None and targets.get(me, source) != source:
        memmove(targets[me], source, nbytes)

    def fill(i: int) -> None:
        if source is not None:
            memmove(board.slot_address(first + i, me), source + i * room, min(room, nbytes - i * room))
        board.post(first + i)

    def take(i: int) -> None:
        for rank in givers:
            memmove(targets[rank] + i * room, board.slot_address(first + i, rank), min(room, nbytes - i * room))
        board.finish(first + i)

    return _pipeline(steps, (_free(board, first), fill), (_posted(board, first, givers), take))


def part_bytes(board: Board) -> int:
    """Bytes of a slot that each rank has in an ``exchange``."""
    return board.chunk // board.size // LINE * LINE


def exchange(
    board: Board,
    first: int,
    steps: int,
    nbytes: int,
    sources: Sequence[int] | None,
    givers: Sequence[int],
    take: Callable[[int, int], None],
) -> Progress:
    """Fill the slot with a part for each rank; have ``take`` fetch the parts that are for this rank.

    Args:
        sources: for each rank the address of the ``nbytes`` bytes it is to get; None: this rank gives nothing.
        givers: the ranks that give, apart from this one.
        take: called with a step and the byte at which it begins in the vectors, once the givers' slots are filled; the
            parts for this rank are ``rank * part_bytes(board)`` into them.
    """
    me, room = board.rank, part_bytes(board)

    def fill(i: int) -> None:
        if sources is not None:
            slot, start = board.slot_address(first + i, me), i * room
            n = min(room, nbytes - start)
            for rank in board.others:
                memmove(slot + rank * room, sources[rank] + start, n)
        board.post(first + i)

    def read(i: int) -> None:
        take(first + i, i * room)
        board.finish(first + i)

    return _pipeline(steps, (_free(board, first), fill), (_posted(board, first, givers), read))


def reduce_whole(board: Board, step: int, source: Tensor, target: Tensor | None, reduction: Reduction) -> Progress:
    """Combine the ranks' ``source`` into ``target``, if it is given; at most a slot's worth."""
    while not board.free(step):
        yield False
    memmove(board.slot_address(step, board.rank), source.data_ptr(), source.nbytes)
    board.post(step)
    if target is not None:
        while not board.posted(step, board.others):
            yield False
        reduction.combine(board.parts(reduction.dtype, step, 0, source.numel()), target)
    board.finish(step)


def reduce_parts(
    board: Board, first: int, steps: int, source: Tensor, target: Tensor | None, reduction: Reduction
) -> Progress:
    """Combine the ranks' ``source`` into ``target``, if it is given; of any length.

    In a step each rank combines one part and posts it as its result: from its own ``source`` and the others' slots.
    ``target`` may be ``source``.
    """
    me, size, dtype = board.rank, board.size, reduction.dtype
    item = dtype.itemsize
    room = board.chunk // item
    length = source.numel()
    from_address = source.data_ptr()
    to_address = None if target is None else target.data_ptr()

    def shares(n: int) -> list[int]:
        """Where each rank's part of ``n`` elements begins, and the last one ends."""
        part = rounded_up(-(-n // size), LINE // item)
        return [min(n, rank * part) for rank in range(size + 1)]

    full, last = shares(room), shares(length - (steps - 1) * room)

    def bounds(i: int) -> tuple[int, list[int]]:
        """Where step i begins, and where in it each rank's part does; in elements."""
        return i * room, full if i < steps - 1 else last

    def fill(i: int) -> None:
        start, at = bounds(i)
        slot = board.slot_address(first + i, me)
        for a, b in ((0, at[me]), (at[me + 1], at[size])):
            if a < b:
                memmove(slot + a * item, from_address + (start + a) * item, (b - a) * item)
        board.post(first + i)

    def combine(i: int) -> None:
        start, at = bounds(i)
        a, b = at[me], at[me + 1]
        if a < b:
            rows = list(board.parts(dtype, first + i, a, b - a))
            rows[me] = source[start + a : start + b]
            reduction.combine(rows, board.result(dtype, first + i, me)[: b - a])
            if to_address is not None:
                memmove(to_address + (start + a) * item, board.result_address(first + i, me), (b - a) * item)
        board.post_result(first + i)

    def results(i: int) -> bool:
        return target is None or board.results_posted(first + i)

    def take(i: int) -> None:
        if to_address is not None:
            start, at = bounds(i)
            for rank in range(size):
                a, b = at[rank], at[rank + 1]
                if rank != me and a < b:
                    memmove(to_address + (start + a) * item, board.result_address(first + i, rank), (b - a) * item)
        board.finish(first + i)

    posted = _posted(board, first, board.others)
    return _pipeline(steps, (_free(board, first), fill), (posted, combine), (results, take))
