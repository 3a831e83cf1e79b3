"""A trainer sends to several servers: some are lost in the middle, and the others get everything."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import Comm, new_comm
from asynccomm.testing import loopback_world
from asynccomm.weights import Publisher, Server, dispatch, trainer_link
from asynccomm.weights import meeting as meeting_module
from asynccomm.weights.meeting import Meeting
from tests.forkserver import Nursery
from tests.waiting import until
from tests.weights.scenes import Served, content, fill, publishers, state

BUCKET_MB = 1e-4


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery(__file__)
    yield found
    found.close()


def in_the_middle(act: Any) -> Any:
    """A replacement of ``receive``: the victim acts after the first bucket of its second version."""
    versions = 0

    async def receive(fan: Comm, buckets: Sequence[Any], tensors: Mapping[str, Tensor], layout: Any) -> None:
        nonlocal versions
        versions += 1
        if versions == 2:
            await fan.broadcast(torch.zeros(buckets[0].nbytes, dtype=torch.uint8), 0)
            act()
        await original(fan, buckets, tensors, layout)

    original = trainer_link.receive
    return receive


async def lose_one(rank: int, backend: str, broadcast: bool) -> list[Any]:
    """Rank 0 trains, the others serve; rank 2 is killed while the second version arrives."""
    tensors = state(1, tensors=20, dtype=torch.float64 if rank == 0 else torch.float32)
    if rank == 0:
        async with new_comm(backend, name="trainers", rank=0, size=1) as comm:
            publisher = Publisher(comm, tensors, servers=3, broadcast=broadcast, bucket_mb=BUCKET_MB, backend=backend)
            async with publisher:
                found = []
                for value in (1, 2, 3):
                    fill(tensors, value)
                    result = await publisher.push()
                    found.append([sorted(result.servers), [reason[:13] for reason in result.lost.values()]])
                return found
    server = Server(tensors, label=str(rank))
    if rank == 2:
        trainer_link.receive = in_the_middle(lambda: os.kill(os.getpid(), signal.SIGKILL))
    versions = []
    async with server.updates() as updates:
        async for update in updates:
            update.apply()
            versions.append([update.version, content(tensors)])
    return versions


@pytest.mark.parametrize(("backend", "broadcast"), [("shm", True), ("shm", False), ("gloo", True)])
def test_a_killed_server_stops_no_push(nursery: Nursery, backend: str, broadcast: bool) -> None:
    found = nursery.run(lose_one, 4, backend, broadcast)
    every = [[1, 1.0], [2, 2.0], [3, 3.0]]
    assert found == {
        0: [[["1", "2", "3"], []], [["1", "3"], ["PeerLostError"]], [["1", "3"], []]],
        1: every,
        3: every,
    }


async def test_a_server_that_does_not_get_ready_counts_as_lost() -> None:
    async with loopback_world(1) as comms:
        tensors = state(1)
        good, bad = Served(comms[0], state()), Server(state(), store=comms[0], label="bad")
        async with publishers(comms, [tensors], timeout=2.0) as (publisher,), bad.updates():
            while len(publisher.servers) < 2:
                await asyncio.sleep(0)
            await publisher.push()
            result = await publisher.push()  # the bad one has not applied the first
            assert result.lost == {"bad": "no answer within 2 s"}
            await good.reached(2)
            assert (await publisher.push()).servers == (good.server.label,)


async def test_where_a_fan_fails_each_server_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive(fan: Comm, *arguments: Any) -> None:
        if fan.size > 2:
            fan.abort("no broadcast today")
        await original(fan, *arguments)

    original = trainer_link.receive
    monkeypatch.setattr(trainer_link, "receive", receive)
    async with loopback_world(1) as comms:
        served = [Served(comms[0], state()) for _ in range(3)]
        async with publishers(comms, [state(1)], servers=3) as (publisher,):
            for version in (1, 2):
                result = await publisher.push()
                assert len(result.servers) == 3
                assert not result.lost
                for each in served:
                    await each.reached(version)
                    assert content(each.tensors) == 1


@pytest.fixture
def fans(monkeypatch: pytest.MonkeyPatch) -> list[Comm]:
    """The fans that are made."""
    found: list[Comm] = []
    original = dispatch.Dispatch._new_fan

    async def noted(self: dispatch.Dispatch, *arguments: Any) -> Comm:
        comm = await original(self, *arguments)
        found.append(comm)
        return comm

    monkeypatch.setattr(dispatch.Dispatch, "_new_fan", noted)
    return found


async def test_the_fan_of_a_server_that_has_left_or_is_lost_is_closed(fans: list[Comm]) -> None:
    async with loopback_world(1) as comms, publishers(comms, [state(1)], servers=0) as (publisher,):
        await publisher.push()
        for number in range(3):
            served = Served(comms[0], state())
            await served.reached(number + 1)
            await served.leave()
            await until(lambda: not publisher.servers)
            await publisher.push()
            assert len(fans) == number + 1
            assert all(", closed" in repr(fan) for fan in fans)


async def test_a_fan_is_made_again_when_servers_come_and_go(fans: list[Comm]) -> None:
    async with loopback_world(1) as comms:
        served = [Served(comms[0], state()) for _ in range(2)]
        async with publishers(comms, [state(1)], servers=2) as (publisher,):
            await publisher.push()
            await publisher.push()
            assert [comm.size for comm in fans] == [3]
            third = Served(comms[0], state())
            await third.reached(2)
            await publisher.push()
            await third.reached(3)
            assert [comm.size for comm in fans] == [3, 2, 4]  # one for the late server alone
            await served[0].leave()
            result = await publisher.push()
            assert len(result.servers) == 2
            await third.reached(4)
            assert [comm.size for comm in fans] == [3, 2, 4, 3]


@pytest.mark.parametrize("servers", [1, 2])
async def test_a_server_that_leaves_while_its_fan_is_made_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, servers: int
) -> None:
    waits = asyncio.Event()
    making = Meeting._fan

    async def fan(self: Meeting, trainer: int, key: int, rank: int, size: int) -> Comm:
        if rank == servers and size == servers + 1 and not waits.is_set():
            waits.set()
            await asyncio.get_running_loop().create_future()
        return await making(self, trainer, key, rank, size)

    monkeypatch.setattr(Meeting, "_fan", fan)
    monkeypatch.setattr(meeting_module, "CONNECT_SECONDS", 3600.0)
    async with loopback_world(1) as comms:
        served = [Served(comms[0], state()) for _ in range(servers)]
        async with publishers(comms, [state(1)], servers=servers, timeout=3600.0) as (publisher,):
            pushing = asyncio.ensure_future(publisher.push())
            await waits.wait()
            await served[-1].leave()
            async with asyncio.timeout(20):
                result = await pushing
            assert list(result.lost) == [served[-1].server.label]
            assert len(result.servers) == servers - 1
            for each in served[:-1]:
                await each.reached(1)
                assert content(each.tensors) == 1
