"""The forms that all collectives are made of. Whole collectives are in test_collectives.py."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from asynccomm.backends.shm.algorithms import (
    Progress,
    exchange,
    meet,
    part_of,
    publish,
    reduce_parts,
    reduce_whole,
    steps_for,
)
from asynccomm.backends.shm.reduction import Reduction
from asynccomm.reduce_op import ReduceOp

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
    got = [{rank: torch.zeros(n, dtype=torch.uint8) for rank in range(3)} for _ in range(3)]
    steps = steps_for(n, 256)
    finish(*(publish(world[r], 0, steps, sent[r], got[r]) for r in range(3)))
    for r in range(3):
        assert all(torch.equal(got[r][rank], sent[rank]) for rank in range(3))


def test_a_reader_of_one_waits_for_that_one_only() -> None:
    world = boards(3, chunk=256)
    out = torch.zeros(4, dtype=torch.uint8)
    reading = publish(world[1], 0, 1, None, {0: out})
    finish(publish(world[0], 0, 1, torch.ones(4, dtype=torch.uint8), {}), reading)
    assert out.tolist() == [1] * 4  # rank 2 has not come


@pytest.mark.parametrize("n", [0, 1, 16, 17, 100])
def test_exchange(n: int) -> None:
    world = boards(3, chunk=192)  # a line, 16 floats, for each
    assert part_of(world[0], torch.float32) == 16
    sent = [[torch.arange(n) + 100.0 * source + 1000.0 * reader for reader in range(3)] for source in range(3)]
    got: list[dict[int, Tensor]] = [{} for _ in range(3)]

    def run(me: int) -> Progress:
        def take(where: slice, parts: Mapping[int, Tensor]) -> None:
            for rank, part in parts.items():
                got[me].setdefault(rank, torch.zeros(n))[where] = part

        others = [rank for rank in range(3) if rank != me]
        return exchange(world[me], 0, steps_for(n, 16), sent[me], others, torch.float32, n, take)

    finish(*(run(me) for me in range(3)))
    for me in range(3):
        for rank in {0, 1, 2} - {me}:
            assert torch.equal(got[me][rank], sent[rank][me])


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("parts", [False, True])
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
