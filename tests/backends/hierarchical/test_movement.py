"""Moving tensors over two levels: every chunk arrives at its place, with one message from host to host if possible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.hierarchical import movement
from asynccomm.backends.hierarchical.pipeline import Lane
from asynccomm.backends.loopback import LoopbackBackend
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Gather,
    Scatter,
    TensorOp,
)

from .world import WORLDS, World

WAYS = pytest.mark.parametrize("limit", [0, 1 << 20], ids=["on rails", "by leaders"])
HOSTS = pytest.mark.parametrize("hosts", WORLDS)
N = 6


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    monkeypatch.setattr(movement, "SMALL", 1 << 20 if callspec is None else callspec.params.get("limit", 1 << 20))
    monkeypatch.setattr(movement, "PIECE", 16)


def data(rank: int, n: int) -> Tensor:
    return torch.arange(n) + 1000.0 * (rank + 1)


@HOSTS
@WAYS
async def test_broadcast(hosts: str, limit: int) -> None:
    world = World(WORLDS[hosts])
    for root in range(world.size):
        calls = world.run(lambda group, root=root: Broadcast.of(group, data(group.rank, N), root))
        assert all(call.result.equal(data(root, N)) for call in calls)
        lists = [[data(rank, 3), data(rank, 2).int()] for rank in range(world.size)]
        world.run(lambda group, root=root, lists=lists: Broadcast.of_several(group, lists[group.rank], root))
        assert all(one.equal(lists[root][0]) and other.equal(lists[root][1]) for one, other in lists)


async def test_a_leader_forwards_the_data_also_if_its_own_outputs_overlap() -> None:
    world = World(WORLDS["2x2"])
    shared = torch.zeros(2)
    tensors = [[data(rank, 2), data(rank, 2) + 5] for rank in range(4)]
    tensors[2] = [shared, shared]  # the leader of the other host; the later one stays
    world.run(lambda group: Broadcast.of_several(group, tensors[group.rank], 0))
    assert tensors[3][0].equal(data(0, 2))
    assert tensors[3][1].equal(shared)
    assert shared.equal(data(0, 2) + 5)


@HOSTS
@WAYS
async def test_all_gather(hosts: str, limit: int) -> None:
    world = World(WORLDS[hosts])
    expected = torch.cat([data(rank, N) for rank in range(world.size)])
    for call in world.run(lambda group: AllGatherSingle.of(group, None, data(group.rank, N))):
        assert call.result.equal(expected)
    for call in world.run(lambda group: AllGather.of(group, None, data(group.rank, N))):
        assert torch.cat(call.result).equal(expected)
    wholes = [torch.empty(world.size * N) for _ in range(world.size)]
    for rank, whole in enumerate(wholes):
        whole.chunk(world.size)[rank].copy_(data(rank, N))
    world.run(
        lambda group: AllGatherSingle.of(group, wholes[group.rank], wholes[group.rank].chunk(world.size)[group.rank])
    )
    assert all(whole.equal(expected) for whole in wholes)


@HOSTS
@WAYS
async def test_all_gather_of_uneven_shares(hosts: str, limit: int) -> None:
    world = World(WORLDS[hosts])
    counts = [3, 0, 5, 1, 2, 4][: world.size]
    outputs = [[torch.empty(n) for n in counts] for _ in range(world.size)]
    world.run(lambda group: AllGather.of(group, outputs[group.rank], data(group.rank, counts[group.rank])))
    for found in outputs:
        assert all(part.equal(data(rank, counts[rank])) for rank, part in enumerate(found))


@HOSTS
async def test_gather_and_scatter(hosts: str) -> None:
    world = World(WORLDS[hosts])
    size = world.size
    for root in range(size):
        calls = world.run(lambda group, root=root: Gather.of(group, None, data(group.rank, N), root))
        for rank, part in enumerate(calls[root].result):
            assert part.equal(data(rank, N))
        parts = [data(rank, N) for rank in range(size)]
        outputs = [torch.empty(N) for _ in range(size)]
        world.run(
            lambda group, root=root, outputs=outputs, parts=parts: Scatter.of(
                group, outputs[group.rank], parts if group.rank == root else None, root
            )
        )
        assert all(output.equal(data(rank, N)) for rank, output in enumerate(outputs))


@HOSTS
async def test_all_to_all(hosts: str) -> None:
    world = World(WORLDS[hosts])
    size = world.size
    inputs = [data(rank, 2 * size) for rank in range(size)]
    expected = [torch.cat([each.chunk(size)[rank] for each in inputs]) for rank in range(size)]
    for rank, call in enumerate(world.run(lambda group: AllToAllSingle.of(group, None, inputs[group.rank]))):
        assert call.result.equal(expected[rank])
    kept = [each.clone() for each in inputs]
    world.run(lambda group: AllToAllSingle.of(group, kept[group.rank], kept[group.rank]))
    assert all(each.equal(one) for each, one in zip(kept, expected, strict=True))


@HOSTS
async def test_tensors_without_elements(hosts: str) -> None:
    world = World(WORLDS[hosts])
    empty = torch.empty(0)
    for call in world.run(lambda group: AllGatherSingle.of(group, None, empty)):
        assert call.result.numel() == 0
    world.run(lambda group: Broadcast.of(group, torch.empty(0), 1))
    world.run(lambda group: Gather.of(group, None, empty, 1))
    world.run(lambda group: AllToAllSingle.of(group, None, empty))
    world.run(lambda group: Scatter.of(group, torch.empty(0), [empty] * world.size if group.rank == 1 else None, 1))


@HOSTS
async def test_a_barrier_waits_for_all_ranks(hosts: str) -> None:
    world = World(WORLDS[hosts])
    works = [world.submit_on(rank, Barrier.of(world.groups[rank])) for rank in range(world.size - 1)]
    assert not any(work.done() for work in works)
    world.submit_on(world.size - 1, Barrier.of(world.groups[-1]))
    assert all(work.done() for work in works)


@pytest.mark.parametrize("op", [Gather, AllGatherSingle, AllToAllSingle])
async def test_small_data_crosses_the_network_once_for_each_host(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(WORLDS["3+1"])
    across: list[TensorOp] = []
    submit = LoopbackBackend.submit
    rails = {id(rank._lanes[Lane.ACROSS]) for rank in world.ranks if Lane.ACROSS in rank._lanes}

    def counted(self: LoopbackBackend, batch: tuple[Submission, ...]) -> None:
        if id(self) in rails:
            across.extend(submission.op for submission in batch)  # type: ignore[misc]
        submit(self, batch)

    monkeypatch.setattr(LoopbackBackend, "submit", counted)
    arguments = (1,) if op is Gather else ()
    world.run(lambda group: op.of(group, None, data(group.rank, 4), *arguments))
    assert len(across) == len(world.hosts)
