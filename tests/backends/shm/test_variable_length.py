"""Streams of which only the giver knows the length: steps, who waits for whom, what arrives."""

import ctypes
from collections.abc import Mapping

import pytest
import torch

from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.programs import room_per_reader
from asynccomm.backends.shm.reference import Progress
from asynccomm.backends.shm.variable_length import PayloadSink, PayloadSource, stream
from asynccomm.ops import Parcels

from .test_programs import finish
from .world import boards

OP = Parcels("test")


class Collected:
    """A taker that keeps what comes."""

    def __init__(self) -> None:
        self.begun: list[Mapping[int, tuple[int, int]]] = []
        self.data: dict[int, bytearray] = {}
        self.taker = PayloadSink(self.begin, self.take)

    def begin(self, lengths: Mapping[int, tuple[int, int]]) -> None:
        self.begun.append(lengths)
        self.data = {rank: bytearray() for rank in lengths}

    def take(self, source: int, start: int, n: int, address: int) -> None:
        data = self.data[source]
        assert start == len(data)
        if n > 0:
            data += ctypes.string_at(address, n)


def content(rank: int, n: int) -> torch.Tensor:
    return ((torch.arange(n) + 50 * rank) % 251).to(torch.uint8)


def shared(board: Board, n: int | None, givers: list[int], into: Collected | None) -> Progress:
    """One stream for everybody; ``n`` of this rank."""
    gives = {}
    if n is not None:
        data = content(board.rank, n)
        gives = {0: PayloadSource(0, n, data.data_ptr())}
    first = board.begin(0, OP, 1)
    yield from stream(board, first, board.chunk, 0, gives, givers, into.taker if into else None)
    if n is not None:
        del data


@pytest.mark.parametrize("lengths", [[0, 0, 0], [1, 2, 3], [256, 0, 0], [257, 0, 0], [5000, 1, 300], [0, 10_000, 0]])
def test_everybody_to_everybody(lengths: list[int]) -> None:
    world = boards(3, chunk=256)
    collected = [Collected() for _ in world]
    finish(*(shared(b, lengths[b.rank], b.others, collected[b.rank]) for b in world))
    steps = max(1, -(-max(lengths) // 256))
    assert [board.state.step for board in world] == [steps] * 3
    for rank, found in enumerate(collected):
        others = {0, 1, 2} - {rank}
        assert found.begun == [{other: (0, lengths[other]) for other in others}]
        for other in others:
            assert found.data[other] == bytes(content(other, lengths[other]).tolist())


@pytest.mark.parametrize("n", [0, 32, 33, 1000])
def test_one_for_each(n: int) -> None:
    world = boards(3, chunk=192)
    room = room_per_reader(world[0].chunk, 3)
    assert room == 64
    data = [[content(3 * s + r, n + s + r) for r in range(3)] for s in range(3)]
    collected = [Collected() for _ in world]

    def run(board: Board) -> Progress:
        me = board.rank
        gives = {r: PayloadSource(0, n + me + r, tensor.data_ptr()) for r, tensor in enumerate(data[me])}
        return stream(board, board.begin(0, OP, 1), room, me, gives, board.others, collected[me].taker)

    finish(*map(run, world))
    for rank, found in enumerate(collected):
        for other in {0, 1, 2} - {rank}:
            assert found.data[other] == bytes(data[other][rank].tolist())


def test_the_only_giver_waits_for_nobody() -> None:
    world = boards(3, chunk=256)
    assert all(shared(world[0], 700, [], None))  # 3 steps into 4 banks
    found = Collected()
    finish(shared(world[1], None, [0], found))  # rank 2 has not come
    assert len(found.data[0]) == 700


def test_who_does_not_take_learns_the_steps_and_waits_no_longer() -> None:
    world = boards(3, chunk=256)
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
    assert world[1].state.step == 4
    finish(late, taking)
    assert (len(found.data[1]), len(found.data[2])) == (10, 900)


def test_more_steps_than_banks() -> None:
    world = boards(2, chunk=64, banks=2)
    collected = [Collected(), Collected()]
    finish(*(shared(b, 5000, b.others, collected[b.rank]) for b in world))
    assert all(len(found.data[1 - rank]) == 5000 for rank, found in enumerate(collected))
