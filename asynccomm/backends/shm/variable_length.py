"""Collectives of variable length, known only to the sending ranks: all_to_all, and all collectives of parcels.

A rank sends one *stream* to all ranks, or one stream to each rank. Streams go through the slots as vectors do in
the programs, but the slot of the first step has a header: the lengths of the stream, and the number of steps that
the sender needs. Each rank reads a header of each sender, even if it takes no stream, so that all ranks know the number
of steps of the collective. A stream that fits into one slot takes one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.programs import steps_for
from asynccomm.backends.shm.reference import Progress
from asynccomm.backends.shm.vectors import Vector, read
from asynccomm.errors import BackendError

Stage = tuple[Callable[[int], bool], Callable[[int], None]]  # (whether step i is ready, run step i)


class PayloadSource(NamedTuple):
    """A stream that a rank sends: a head and a body."""

    head: int  #: bytes of the head
    body: int  #: bytes of the body
    data: Vector  #: head and body as one vector


class PayloadSink(NamedTuple):
    """The callbacks that receive other ranks' streams."""

    begin: Callable[[Mapping[int, tuple[int, int]]], None]  #: called once, with (head, body) by rank
    take: Callable[[int, int, int, int], None]  #: (source, byte of the stream, bytes here, address)


def stream(
    board: Board,
    first: int,
    room: int,
    part: int,
    gives: Mapping[int, PayloadSource],
    givers: Sequence[int],
    taker: PayloadSink | None,
) -> Progress:
    """Transfer streams.

    Args:
        first: the one step that the collective has begun with.
        room: bytes of each part of a slot; the whole slot if a sender has one stream for all ranks.
        part: the part of other ranks' slots that this rank reads.
        gives: this rank's streams by the part of its slot; either none, or one for each part.
        givers: the other ranks that send.
        taker: receives the streams; None if no stream is for this rank.
    """
    me = board.rank
    own_steps = steps_for(max([head + body for head, body, _ in gives.values()], default=0), room)

    def fill(i: int) -> None:
        slot, start = board.slot_address(first + i, me), i * room
        for at, (head, body, data) in gives.items():
            if i == 0:
                board.put(first, at, (head, body, own_steps))
            n = min(room, head + body - start)
            if n > 0:
                read(data, start, n, slot + at * room)
        board.post(first + i)

    while not board.free(first):
        yield False
    fill(0)
    while not board.posted(first, givers):
        yield False
    headers = [board.get(first, rank, part) for rank in givers]
    for rank, (head, body, needed) in zip(givers, headers, strict=True):
        if head + body > needed * room:
            raise BackendError(f"rank {rank} announces {head + body} bytes in {needed} steps of {room}")
    steps = max([own_steps, *[header[2] for header in headers]])
    board.extend(steps - 1)
    lengths = {rank: (head, body) for rank, (head, body, _) in zip(givers, headers, strict=True)}
    if taker is not None:
        taker.begin(lengths)

    def take(i: int) -> None:
        if taker is not None:
            start = i * room
            for rank, (head, body) in lengths.items():
                n = min(room, head + body - start)
                if n > 0 or i == 0:
                    taker.take(rank, start, n, board.slot_address(first + i, rank) + part * room)
        board.finish(first + i)

    take(0)
    if steps > 1:
        yield True
        awaited = givers if taker is not None else ()
        yield from pipeline(
            steps - 1,
            (free(board, first + 1), lambda i: fill(i + 1)),
            (posted(board, first + 1, awaited), lambda i: take(i + 1)),
        )


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
