"""The algorithms of collectives, as generators over a board: each fills slots and reads other ranks' slots.

A generator yields True after progress, and False when it has to wait for other ranks; a generator never waits itself,
so one thread can drive any number of generators. There are four forms:

- ``published``: a slot is for all readers (broadcast, all_gather, gather);
- ``exchanged``: a slot holds a part for each reader (scatter, all_to_all, and reduce_scatter, which combines them);
- ``reduce_whole``: small reductions; every rank that needs the result combines all slots;
- ``reduce_parts``: large reductions; each rank combines its part of every step and publishes the result
  (reduce-scatter, then all-gather), chunk by chunk through slots that stay in the caches.

All forms but the last can share a step with other collectives, each at its own offset in the slots. These forms are a
:class:`Part`: ``transfer`` takes one part through all steps of its collective, and ``lowering.py`` takes several parts
through one step.

Reductions combine in rank order on every rank, so all ranks hold the same bits.

Movement works on addresses, because a view per piece would cost more than moving a small piece. Callers keep the
tensors alive, and make sure that no write clobbers memory that is still to be read (``backends/hazards.py``).
``variable_length.py`` has the collectives of which only the sending ranks know the lengths.
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
Stage = tuple[Callable[[int], bool], Callable[[int], None]]  # (whether step i is ready, run step i)


def steps_for(nbytes: int, per_step: int) -> int:
    """The number of steps for ``nbytes``; an empty collective takes one step, too, because it also synchronizes."""
    return -(-nbytes // per_step) or 1


def pipeline(steps: int, *stages: Stage) -> Progress:
    """Run ``steps`` steps through ``stages``: each stage in step order, and never ahead of the previous stage.

    The first stages run ahead as far as they are ready, so that other ranks wait as little as possible.
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
    """A predicate of i: whether this rank may fill its slot of step ``first + i``."""
    return lambda i: board.free(first + i)


def posted(board: Board, first: int, ranks: Sequence[int]) -> Callable[[int], bool]:
    """A predicate of i: whether ``ranks`` have filled their slots of step ``first + i``."""
    return lambda i: board.posted(first + i, ranks)


def meet(board: Board, step: int) -> Progress:
    """A step without data, done when all ranks have posted it."""
    while not board.free(step):
        yield False
    board.post(step)
    while not board.posted(step, board.others):
        yield False
    board.finish(step)


class Part(NamedTuple):
    """A rank's part in the steps of a collective, independent of its offset in the slots."""

    #: writes to a slot: (first byte of the vectors, bytes that fit, address in this rank's slot)
    fill: Callable[[int, int, int], None]
    #: reads from slots: (step, first byte of the vectors, bytes that fit, offset in the slots)
    take: Callable[[int, int, int, int], None]
    givers: Sequence[int]  #: other ranks that it reads from
    lands: Sequence[Callable[[], object]] = ()  #: called at the end
    owners: object = None  #: of the vectors' memory; kept alive


def transfer(board: Board, first: int, steps: int, room: int, part: Part) -> Progress:
    """Run one part through the steps of its collective, ``room`` bytes per step."""
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
    """A part that fills this rank's slot from ``source``, if given, and copies other ranks' slots to ``targets``.

    Without targets, this rank waits for no other rank.
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
    """Bytes of a slot per reading rank in ``exchanged``."""
    return board.chunk // board.size // LINE * LINE


def exchanged(
    sources: Sequence[Share],
    givers: Sequence[int],
    take: Callable[[int, int, int, int], None],
    lands: Sequence[Callable[[], object]] = (),
    owners: object = None,
) -> Part:
    """A part that fills this rank's slot with data for each rank, and reads its own data from slots by ``take``.

    Args:
        sources: data for the other ranks, and for this rank if that goes through the slot.
        take: reads the data for this rank, which is at offset ``rank * room`` in the area of each of ``givers``.
    """

    def fill(start: int, room: int, address: int) -> None:
        for rank, source, nbytes in sources:
            if start < nbytes:
                read(source, start, min(room, nbytes - start), address + rank * room)

    return Part(fill, take, givers, lands, owners)


def reduce_whole(board: Board, step: int, source: Operand, target: Operand | None, reduction: Reduction) -> Progress:
    """Combine all ranks' ``source``, of at most a slot, into ``target`` if it is given."""
    nbytes = source.nbytes
    while not board.free(step):
        yield False
    slot = board.slot_address(step, board.rank)
    if isinstance(source, Tensor):  # read() inlined: small reductions are the most frequent
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
    """``reduce_whole`` as a part that can share a step."""
    nbytes = source.nbytes

    def fill(start: int, room: int, address: int) -> None:
        read(where(source), 0, nbytes, address)

    def take(step: int, start: int, room: int, at: int) -> None:
        if target is not None:
            combine(board, step, at, nbytes, target, reduction)

    return Part(fill, take, () if target is None else board.others, lands)


def combine(board: Board, step: int, at: int, nbytes: int, target: Operand, reduction: Reduction) -> None:
    """Combine ``nbytes`` at offset ``at`` of all slots into ``target``."""
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
    """Combine all ranks' ``source``, of any length, into ``target`` if it is given.

    In a step, each rank combines one part and posts it as its result. A rank combines from the other ranks' slots, and
    from its own ``source`` if that is contiguous, else from its own slot. ``target`` may be ``source``.
    """
    me, size, dtype = board.rank, board.size, reduction.dtype
    item = dtype.itemsize
    room = board.chunk // item
    length = source.nbytes // item
    from_vector = where(source)
    to_vector = None if target is None else where(target)
    own = source if isinstance(source, Tensor) else None

    def shares(n: int) -> list[int]:
        """The start of each rank's part of ``n`` elements, then the end of the last part."""
        part = rounded_up(-(-n // size), LINE // item)
        return [min(n, rank * part) for rank in range(size + 1)]

    full, last = shares(room), shares(length - (steps - 1) * room)

    def bounds(i: int) -> tuple[int, list[int]]:
        """The start of step i, and the bounds of the ranks' parts in it, in elements."""
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
