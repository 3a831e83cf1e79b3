"""Streams of which only the giver knows the length: steps, who waits for whom, what arrives."""

import ctypes
from collections.abc import Mapping
from ctypes import memmove
from itertools import product

import torch

from asynccomm.backends.shm.executor import Executor
from asynccomm.backends.shm.programs import room_per_reader
from asynccomm.backends.shm.reference import Progress
from asynccomm.backends.shm.variable_length import PayloadSource, stream
from asynccomm.ops import Parcels
from tests.cases import cases

from .test_programs import finish
from .world import each_executor, executors  # noqa: F401

OP = Parcels("test")


class Collected:
    """A sink that keeps all bodies."""

    def __init__(self) -> None:
        self.begun: list[Mapping[int, tuple[int, int]]] = []
        self.heads: dict[int, bytes] = {}
        self.bodies: dict[int, torch.Tensor] = {}

    def begin(self, lengths: Mapping[int, tuple[int, int]]) -> None:
        self.begun.append(lengths)
        self.heads = dict.fromkeys(lengths, b"")
        self.bodies = {rank: torch.zeros(body, dtype=torch.uint8) for rank, (_, body) in lengths.items()}

    def take(self, source: int, start: int, n: int, address: int) -> None:
        head, _ = self.begun[0][source]
        skip = min(n, max(0, head - start))
        self.heads[source] += ctypes.string_at(address, skip)
        if n > skip:
            memmove(self.bodies[source].data_ptr() + start + skip - head, address + skip, n - skip)

    def target(self, source: int) -> int:
        assert len(self.heads[source]) == self.begun[0][source][0], "the head was taken"
        return self.bodies[source].data_ptr()

    @property
    def data(self) -> dict[int, bytes]:
        return {rank: bytes(body.tolist()) for rank, body in self.bodies.items()}


def content(rank: int, n: int) -> torch.Tensor:
    return ((torch.arange(n) + 50 * rank) % 251).to(torch.uint8)


def shared(executor: Executor, n: int | None, givers: list[int], into: Collected | None) -> Progress:
    """One stream for all ranks, with ``n`` bytes of this rank."""
    board = executor.board
    gives = {}
    if n is not None:
        data = content(board.rank, n)
        gives = {0: PayloadSource(0, n, data.data_ptr())}
    first = board.begin(0, OP, 1)
    yield from stream(executor, first, board.chunk, 0, gives, givers, into)
    if n is not None:
        del data


@cases("lengths", [[0, 0, 0], [1, 2, 3], [256, 0, 0], [257, 0, 0], [5000, 1, 300], [0, 10_000, 0]])
def test_everybody_to_everybody(lengths: list[int]) -> None:
    world = executors(3, chunk=256)
    collected = [Collected() for _ in world]
    finish(*(shared(each, lengths[each.board.rank], each.board.others, collected[each.board.rank]) for each in world))
    steps = max(1, -(-max(lengths) // 256))
    assert [each.board.state.step for each in world] == [steps] * 3
    for rank, found in enumerate(collected):
        others = {0, 1, 2} - {rank}
        assert found.begun == [{other: (0, lengths[other]) for other in others}]
        for other in others:
            assert found.data[other] == bytes(content(other, lengths[other]).tolist())


@cases("n", [0, 32, 33, 1000])
def test_one_for_each(n: int) -> None:
    world = executors(3, chunk=192)
    room = room_per_reader(world[0].board.chunk, 3)
    assert room == 64
    data = [[content(3 * s + r, n + s + r) for r in range(3)] for s in range(3)]
    collected = [Collected() for _ in world]

    def run(executor: Executor) -> Progress:
        board = executor.board
        me = board.rank
        gives = {r: PayloadSource(0, n + me + r, tensor.data_ptr()) for r, tensor in enumerate(data[me])}
        return stream(executor, board.begin(0, OP, 1), room, me, gives, board.others, collected[me])

    finish(*map(run, world))
    for rank, found in enumerate(collected):
        for other in {0, 1, 2} - {rank}:
            assert found.data[other] == bytes(data[other][rank].tolist())


def test_the_only_giver_waits_for_nobody() -> None:
    world = executors(3, chunk=256)
    assert all(shared(world[0], 700, [], None))  # 3 steps into 4 banks
    found = Collected()
    finish(shared(world[1], None, [0], found))  # rank 2 has not come
    assert len(found.data[0]) == 700


def test_who_does_not_take_learns_the_steps_and_waits_no_longer() -> None:
    world = executors(3, chunk=256)
    late = shared(world[2], 900, [0, 1], None)
    first = shared(world[1], 10, [0, 2], None)
    assert next(first) is False  # it cannot know how many steps there are
    assert next(late) is False
    found = Collected()
    taking = shared(world[0], None, [1, 2], found)
    next(taking)
    for _ in range(20):
        next(first, None)
    assert next(first, None) is None  # rank 2 has only begun
    assert world[1].board.state.step == 4
    finish(late, taking)
    assert (len(found.data[1]), len(found.data[2])) == (10, 900)


def test_more_steps_than_banks() -> None:
    world = executors(2, chunk=64, banks=2)
    collected = [Collected(), Collected()]
    finish(*(shared(each, 5000, each.board.others, collected[each.board.rank]) for each in world))
    assert all(len(found.data[1 - rank]) == 5000 for rank, found in enumerate(collected))


@cases("heads, body", product([(0, 0), (5, 64), (65, 0), (300, 10)], [0, 50, 1000]))
def test_heads_arrive_before_the_memory_for_bodies_is_asked_for(heads: tuple[int, int], body: int) -> None:
    world = executors(2, chunk=64, banks=2)
    collected = [Collected(), Collected()]
    data = [content(rank, head + body + rank) for rank, head in enumerate(heads)]

    def run(executor: Executor) -> Progress:
        board = executor.board
        me = board.rank
        gives = {0: PayloadSource(heads[me], body + me, data[me].data_ptr())}
        return stream(executor, board.begin(0, OP, 1), board.chunk, 0, gives, board.others, collected[me])

    finish(*map(run, world))
    for rank, found in enumerate(collected):
        other = 1 - rank
        sent = bytes(data[other].tolist())
        assert found.heads[other] + found.data[other] == sent
        assert len(found.heads[other]) == heads[other]
