"""Collectives of variable length, known only to the sending ranks: all collectives of parcels.

A rank sends one *stream* to all ranks, or one stream to each rank. The slot of the first step has a header: the lengths
of the stream, and the number of steps that the sender needs. Each rank reads a header of each sender, even if it takes
no stream, so that all ranks know the number of steps of the collective. A stream that fits into one slot takes one
step. Once the heads have arrived, which say where the bodies go, the remaining steps are a program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.executor import Executor
from asynccomm.backends.shm.programs import MOST_STEPS, Action, Part, Ref, Space, program, steps_for
from asynccomm.backends.shm.reference import Progress
from asynccomm.backends.shm.vectors import Vector, read
from asynccomm.errors import BackendError


class PayloadSource(NamedTuple):
    """A stream that a rank sends: a head and a body."""

    head: int  #: bytes of the head
    body: int  #: bytes of the body
    data: Vector  #: head and body as one vector


class PayloadSink(Protocol):
    """Receives other ranks' streams."""

    def begin(self, lengths: Mapping[int, tuple[int, int]]) -> None:
        """The lengths of all streams, (head, body) by rank, before the first ``take``."""

    def take(self, source: int, start: int, n: int, address: int) -> None:
        """Copy ``n`` bytes of a stream from ``address``, those from byte ``start`` on, in order from byte 0."""

    def target(self, source: int) -> Vector | None:
        """The memory for a body, once the head was taken; None: the body is discarded."""


def stream(
    executor: Executor,
    first: int,
    room: int,
    part: int,
    gives: Mapping[int, PayloadSource],
    givers: Sequence[int],
    sink: PayloadSink | None,
) -> Progress:
    """Transfer streams.

    Args:
        first: the one step that the collective has begun with.
        room: bytes of each part of a slot; the whole slot if a sender has one stream for all ranks.
        part: the part of other ranks' slots that this rank reads.
        gives: this rank's streams by the part of its slot; either none, or one for each part.
        givers: the other ranks that send.
        sink: None if no stream is for this rank.
    """
    board = executor.board
    own_steps = steps_for(max([head + body for head, body, _ in gives.values()], default=0), room)

    def fill(i: int) -> None:
        slot, start = board.address(Space.SLOT, first + i, board.rank), i * room
        for at, (head, body, data) in gives.items():
            if i == 0:
                board.put(first, at, (head, body, own_steps))
            n = min(room, head + body - start)
            if n > 0:
                read(data, start, n, slot + at * room)
        board.post(first + i)

    def take(i: int) -> None:
        if sink is not None:
            start = i * room
            for rank, (head, body) in lengths.items():
                n = min(room, head + body - start)
                if n > 0 or i == 0:
                    sink.take(rank, start, n, board.address(Space.SLOT, first + i, rank) + part * room)
        board.finish(first + i)

    while not board.free(first):
        yield False
    fill(0)
    while not board.posted(first, givers):
        yield False
    lengths, steps = _announced(board, first, room, part, givers)
    steps = max(own_steps, steps)
    board.extend(steps - 1)
    awaited: Sequence[int] = ()
    heads = 1  # steps to the end of the longest head
    if sink is not None:
        sink.begin(lengths)
        awaited = givers
        heads = steps_for(max([head for head, _ in lengths.values()], default=0), room)
    take(0)
    for i in range(1, heads):
        while not board.free(first + i):
            yield False
        fill(i)
        while not board.posted(first + i, awaited):
            yield False
        take(i)
        yield True
    if heads < steps:
        yield True
        vectors, rest = _rest(board.rank, room, part, gives, lengths, sink, heads * room)
        yield from executor.run(executor.compile(program(steps - heads, rest)), first + heads, vectors)


def _announced(
    board: Board, first: int, room: int, part: int, givers: Sequence[int]
) -> tuple[dict[int, tuple[int, int]], int]:
    """The lengths of the streams, (head, body) by rank, and the most steps. Raises: BackendError if they do not fit."""
    lengths, steps = {}, 0
    for rank in givers:
        head, body, needed = board.get(first, rank, part)
        if head + body > needed * room or needed > MOST_STEPS:
            raise BackendError(f"rank {rank} announces {head + body} bytes in {needed} steps of {room}")
        lengths[rank] = head, body
        steps = max(steps, needed)
    return lengths, steps


def _rest(
    me: int,
    room: int,
    part: int,
    gives: Mapping[int, PayloadSource],
    lengths: Mapping[int, tuple[int, int]],
    sink: PayloadSink | None,
    start: int,
) -> tuple[list[Vector], Part]:
    """The vectors and the part that transfer the streams from byte ``start`` on; other arguments as of ``stream``."""
    vectors: list[Vector] = []
    fill, take = [], []
    for at, (head, body, data) in gives.items():
        if (left := head + body - start) > 0:
            source = Ref(Space.VECTOR, len(vectors), start, room)
            fill.append(Action(Ref(Space.SLOT, me, at * room), (source,), left, room, room))
            vectors.append(data)
    for rank, (head, body) in lengths.items():
        if sink and (left := head + body - start) > 0 and (vector := sink.target(rank)) is not None:
            target = Ref(Space.VECTOR, len(vectors), start - head, room)
            take.append(Action(target, (Ref(Space.SLOT, rank, part * room),), left, room, room))
            vectors.append(vector)
    return vectors, Part(tuple(fill), tuple(take), tuple(lengths) if sink else ())
