"""Collectives as generators over a board: each fills slots, looks at the others', and yields when it can do no more.

A generator yields True when it got on and False when it has to wait for other ranks; it never waits itself. So one
thread can keep any number of them going. Four forms are all there is:

- ``published``: a slot is for all readers (broadcast, all_gather, gather);
- ``exchanged``: a slot holds a part for each reader (scatter, all_to_all, and reduce_scatter, which combines them);
- ``reduce_whole``: small reductions; everybody who wants the result combines all slots;
- ``reduce_parts``: large ones; each rank combines its part of every step and publishes that (reduce-scatter, then
  all-gather), chunk by chunk through slots that stay in the caches.

All but the last can share a step with others, each at its own place in the slots: they are a :class:`Part`, which
``transfer`` takes through the steps of a collective by itself, and ``lowering.py`` through one step for all.

Reductions go in rank order, whoever computes them, so every rank holds the same bits.

What is only moved is moved by address: a view for each piece would take longer than moving a small one. Callers keep
the tensors, and see to it that what is written does not clobber what is still to be read (``backends/hazards.py``).
Collectives of which only the givers know the lengths are in ``variable_length.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from ctypes import memmove
from typing import NamedTuple

import torch
from torch import Tensor

from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.layout import LINE, rounded_up
from asynccomm.backends.shm.reduction import Reduction
from asynccomm.backends.shm.vectors import Operand, Share, copy, read, where, write

Progress = Generator[bool, None, None]
Stage = tuple[Callable[[int], bool], Callable[[int], None]]  # (may step i be done?, do it)


def steps_for(nbytes: int, per_step: int) -> int:
    """How many steps; an operation on nothing takes one too, for it is a collective like any other."""
    return -(-nbytes // per_step) or 1


def pipeline(steps: int, *stages: Stage) -> Progress:
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


def free(board: Board, first: int) -> Callable[[int], bool]:
    """Whether this rank's slot of step i may be filled."""
    return lambda i: board.free(first + i)


def posted(board: Board, first: int, ranks: Sequence[int]) -> Callable[[int], bool]:
    """Whether ``ranks`` have filled their slots of step i."""
    return lambda i: board.posted(first + i, ranks)


def meet(board: Board, step: int) -> Progress:
    """A step without data: done when all have come."""
    while not board.free(step):
        yield False
    board.post(step)
    while not board.posted(step, board.others):
        yield False
    board.finish(step)


class Part(NamedTuple):
    """What a rank does in the steps of a collective, wherever in the slots that has its place."""

    #: (byte of the vectors, how many fit, address in this rank's slot)
    fill: Callable[[int, int, int], None]
    #: (step, byte of the vectors, how many fit, byte of the slots)
    take: Callable[[int, int, int, int], None]
    givers: Sequence[int]  #: ranks other than this one whose slots it takes from
    lands: Sequence[Callable[[], object]] = ()  #: to be called at the end
    owners: object = None  #: of the vectors' memory; to be kept


def transfer(board: Board, first: int, steps: int, room: int, part: Part) -> Progress:
    """A collective by itself, ``room`` bytes in a step."""
    fill, take, givers, lands, _ = part
    me = board.rank
    if steps == 1:
        while not board.free(first):
            yield False
        fill(0, room, board.slot_address(first, me))
        board.post(first)
        while not board.posted(first, givers):
            yield False
        take(first, 0, room, 0)
        board.finish(first)
    else:

        def fill_one(i: int) -> None:
            fill(i * room, room, board.slot_address(first + i, me))
            board.post(first + i)

        def take_one(i: int) -> None:
            take(first + i, i * room, room, 0)
            board.finish(first + i)

        yield from pipeline(steps, (free(board, first), fill_one), (posted(board, first, givers), take_one))
    for land in lands:
        land()


def published(
    board: Board,
    source: Share | None,
    targets: Sequence[Share],
    lands: Sequence[Callable[[], object]] = (),
    owners: object = None,
) -> Part:
    """Fill the slot from ``source``, if there is one; copy the slots of the ranks that ``targets`` are for there.

    Without targets this rank waits for nobody.
    """
    me = board.rank
    givers = []
    for rank, target, nbytes in targets:
        if rank != me:
            givers.append(rank)
        elif source is not None:
            copy(source[1], target, nbytes)

    def fill(start: int, room: int, address: int) -> None:
        if source is not None:
            _, vector, nbytes = source
            if start < nbytes:
                read(vector, start, min(room, nbytes - start), address)

    def take(step: int, start: int, room: int, at: int) -> None:
        for rank, target, nbytes in targets:
            if rank != me and start < nbytes:
                write(target, start, min(room, nbytes - start), board.slot_address(step, rank) + at)

    return Part(fill, take, givers, lands, owners)


def part_bytes(board: Board) -> int:
    """Bytes of a slot that each rank has in an ``exchange``."""
    return board.chunk // board.size // LINE * LINE


def exchanged(
    sources: Sequence[Share],
    givers: Sequence[int],
    take: Callable[[int, int, int, int], None],
    lands: Sequence[Callable[[], object]] = (),
    owners: object = None,
) -> Part:
    """Fill the slot with a part for each rank; have ``take`` fetch the parts that are for this rank.

    Args:
        sources: what other ranks are to get, and this rank too if it is to be in the slot.
        take: the parts for this rank are ``rank * room`` into each giver's.
    """

    def fill(start: int, room: int, address: int) -> None:
        for rank, source, nbytes in sources:
            if start < nbytes:
                read(source, start, min(room, nbytes - start), address + rank * room)

    return Part(fill, take, givers, lands, owners)


def reduce_whole(board: Board, step: int, source: Operand, target: Operand | None, reduction: Reduction) -> Progress:
    """Combine the ranks' ``source`` into ``target``, if it is given; at most a slot's worth."""
    nbytes = source.nbytes
    while not board.free(step):
        yield False
    slot = board.slot_address(step, board.rank)
    if isinstance(source, Tensor):  # as read() would, at once: small reductions are what counts most
        memmove(slot, source.data_ptr(), nbytes)
    else:
        source.read(0, nbytes, slot)
    board.post(step)
    if target is not None:
        while not board.posted(step, board.others):
            yield False
        combine(board, step, 0, nbytes, target, reduction)
    board.finish(step)


def combined(
    board: Board,
    source: Operand,
    target: Operand | None,
    reduction: Reduction,
    lands: Sequence[Callable[[], object]] = (),
) -> Part:
    """The same where it shares a step."""
    nbytes = source.nbytes

    def fill(start: int, room: int, address: int) -> None:
        read(where(source), 0, nbytes, address)

    def take(step: int, start: int, room: int, at: int) -> None:
        if target is not None:
            combine(board, step, at, nbytes, target, reduction)

    return Part(fill, take, () if target is None else board.others, lands)


def combine(board: Board, step: int, at: int, nbytes: int, target: Operand, reduction: Reduction) -> None:
    """Combine the ``nbytes`` from byte ``at`` of all slots into ``target``."""
    item = reduction.dtype.itemsize
    parts = board.parts(reduction.dtype, step, at // item, nbytes // item)
    if isinstance(target, Tensor):
        reduction.combine(parts, target)
    else:
        values = torch.empty_like(parts[0])
        reduction.combine(parts, values)
        target.write(0, nbytes, values.data_ptr())


def reduce_parts(
    board: Board, first: int, steps: int, source: Operand, target: Operand | None, reduction: Reduction
) -> Progress:
    """Combine the ranks' ``source`` into ``target``, if it is given; of any length.

    In a step each rank combines one part and posts it as its result: from the others' slots, and its own ``source``
    where that is in one place. ``target`` may be ``source``.
    """
    me, size, dtype = board.rank, board.size, reduction.dtype
    item = dtype.itemsize
    room = board.chunk // item
    length = source.nbytes // item
    from_vector = where(source)
    to_vector = None if target is None else where(target)
    own = source if isinstance(source, Tensor) else None

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
        for a, b in ((0, at[size]),) if own is None else ((0, at[me]), (at[me + 1], at[size])):
            if a < b:
                read(from_vector, (start + a) * item, (b - a) * item, slot + a * item)
        board.post(first + i)

    def combine(i: int) -> None:
        start, at = bounds(i)
        a, b = at[me], at[me + 1]
        if a < b:
            rows = list(board.parts(dtype, first + i, a, b - a))
            if own is not None:
                rows[me] = own[start + a : start + b]
            reduction.combine(rows, board.result(dtype, first + i, me)[: b - a])
            if to_vector is not None:
                write(to_vector, (start + a) * item, (b - a) * item, board.result_address(first + i, me))
        board.post_result(first + i)

    def results(i: int) -> bool:
        return target is None or board.results_posted(first + i)

    def take(i: int) -> None:
        if to_vector is not None:
            start, at = bounds(i)
            for rank in range(size):
                a, b = at[rank], at[rank + 1]
                if rank != me and a < b:
                    write(to_vector, (start + a) * item, (b - a) * item, board.result_address(first + i, rank))
        board.finish(first + i)

    others_posted = posted(board, first, board.others)
    return pipeline(steps, (free(board, first), fill), (others_posted, combine), (results, take))
