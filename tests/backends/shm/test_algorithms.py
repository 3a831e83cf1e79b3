"""The forms that all collectives are made of. Whole collectives are in test_collectives.py."""

import pytest
import torch

from asynccomm.backends.shm.algorithms import (
    Progress,
    combined,
    exchanged,
    meet,
    part_bytes,
    published,
    reduce_parts,
    reduce_whole,
    steps_for,
    transfer,
)
from asynccomm.backends.shm.reduction import Reduction
from asynccomm.ops.reduce_op import ReduceOp
from tests.cases import cases

from .world import boards


def finish(*running: Progress) -> None:
    alive = list(running)
    for _ in range(10_000):
        for progress in list(alive):
            if next(progress, None) is None:
                alive.remove(progress)
        if not alive:
            return
    raise AssertionError("stuck")


def test_steps() -> None:
    assert [steps_for(n, 10) for n in (0, 1, 10, 11, 100)] == [1, 1, 1, 2, 10]


def test_nobody_waits_inside() -> None:
    mine, theirs = boards(2)
    waiting = meet(mine, 0)
    assert [next(waiting) for _ in range(3)] == [False] * 3
    assert list(meet(theirs, 0)) == []
    assert list(waiting) == []


@pytest.mark.parametrize("n", [0, 1, 255, 256, 1000])
def test_publish(n: int) -> None:
    world = boards(3, chunk=256)
    sent = [(torch.arange(n) + rank).to(torch.uint8) for rank in range(3)]
    got = [[torch.zeros(n, dtype=torch.uint8) for _ in range(3)] for _ in range(3)]

    def run(me: int) -> Progress:
        targets = [(rank, tensor.data_ptr(), n) for rank, tensor in enumerate(got[me])]
        part = published(world[me], (me, sent[me].data_ptr(), n), targets)
        return transfer(world[me], 0, steps_for(n, 256), 256, part)

    finish(*(run(me) for me in range(3)))
    for mine in got:
        assert all(torch.equal(mine[rank], sent[rank]) for rank in range(3))


def test_a_reader_of_one_waits_for_that_one_only() -> None:
    world = boards(3, chunk=256)
    out, sent = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    reading = transfer(world[1], 0, 1, 256, published(world[1], None, [(0, out.data_ptr(), 4)]))
    finish(transfer(world[0], 0, 1, 256, published(world[0], (0, sent.data_ptr(), 4), [])), reading)
    assert out.tolist() == [1] * 4  # rank 2 has not come


@pytest.mark.parametrize("n", [0, 1, 64, 65, 400])
def test_exchange(n: int) -> None:
    world = boards(3, chunk=192)
    assert part_bytes(world[0]) == 64
    sent = [[(torch.arange(n) + 10 * source + reader).to(torch.uint8) for reader in range(3)] for source in range(3)]
    got = [[torch.zeros(n, dtype=torch.uint8) for _ in range(3)] for _ in range(3)]

    def run(me: int) -> Progress:
        others = [rank for rank in range(3) if rank != me]

        def take(step: int, start: int, room: int, at: int) -> None:
            assert (room, at) == (64, 0)
            for rank in others:
                part = got[me][rank][start : start + 64]
                part.copy_(world[me].slot(torch.uint8, step, rank)[64 * me : 64 * me + part.numel()])

        addresses = [(rank, sent[me][rank].data_ptr(), n) for rank in others]
        return transfer(world[me], 0, steps_for(n, 64), 64, exchanged(addresses, others, take))

    finish(*(run(me) for me in range(3)))
    for me in range(3):
        for rank in {0, 1, 2} - {me}:
            assert torch.equal(got[me][rank], sent[rank][me])


@cases("size", [1, 2, 3, 8])
@cases("n", [0, 1, 7, 64, 1000])
@cases("parts", [False, True])
def test_reduce(size: int, n: int, parts: bool) -> None:
    world = boards(size, chunk=4096 if not parts else 1024)
    tensors = [torch.arange(n) * (rank + 1.0) for rank in range(size)]
    want = torch.arange(n) * float(sum(range(1, size + 1)))

    def run(rank: int) -> Progress:
        reduction = Reduction(torch.float32, ReduceOp.SUM, size)
        if parts:
            steps = steps_for(4 * n, 1024)
            return reduce_parts(world[rank], 0, steps, tensors[rank], tensors[rank], reduction)
        return reduce_whole(world[rank], 0, tensors[rank], tensors[rank], reduction)

    finish(*(run(rank) for rank in range(size)))
    assert all(torch.equal(tensor, want) for tensor in tensors)


@pytest.mark.parametrize("at", [0, 64, 512])
def test_parts_at_any_place_in_the_slots(at: int) -> None:
    """As where several share a step: nothing beside its place is touched or looked at."""
    world = boards(2, chunk=1024)
    tensors = [torch.arange(16) * (rank + 1.0) for rank in range(2)]
    sent, got = [torch.full((64,), rank, dtype=torch.uint8) for rank in range(2)], torch.zeros(2, 64, dtype=torch.uint8)
    for board in world:
        board.slot(torch.uint8, 0, board.rank).fill_(77)
    parts = [combined(world[r], tensors[r], tensors[r], Reduction(torch.float32, ReduceOp.SUM, 2)) for r in range(2)]
    for rank, part in enumerate(parts):
        part.fill(0, 64, world[rank].slot_address(0, rank) + at)
        slot = world[rank].slot(torch.uint8, 0, rank)
        assert slot[:at].eq(77).all()
        assert slot[at + 64 :].eq(77).all()
    for part in parts:
        part.take(0, 0, 64, at)
        assert list(part.givers) == [1 - parts.index(part)]
    assert all(torch.equal(tensor, 3.0 * torch.arange(16)) for tensor in tensors)
    targets = [(rank, got[rank].data_ptr(), 64) for rank in range(2)]
    moving = [published(world[r], (r, sent[r].data_ptr(), 64), targets if r == 0 else []) for r in range(2)]
    for rank, part in enumerate(moving):
        part.fill(0, 64, world[rank].slot_address(1, rank) + at)
    moving[0].take(1, 0, 64, at)
    assert got.tolist() == [[0] * 64, [1] * 64]
    assert moving[1].givers == []


def test_what_is_to_be_done_at_the_end_is_done_after_the_slots_were_let_go() -> None:
    (board,) = boards(1)
    seen: list[bool] = []
    part = published(board, None, [], [lambda: seen.append(board.free(board.layout.banks))])
    finish(transfer(board, 0, 1, 64, part))
    assert seen == [True]
