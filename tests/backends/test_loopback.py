"""Loopback: the conformance suite, and what its hub lets tests do."""

import asyncio

import pytest
import torch

from asynccomm import MemoryStore, new_comm
from asynccomm.backends.loopback import LoopbackBackend
from asynccomm.testing import check_backend, loopback_world


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
async def test_conformance(size: int) -> None:
    store = MemoryStore()

    async def one(rank: int) -> None:
        await check_backend(lambda name: new_comm("loopback", name=name, store=store, rank=rank, size=size))

    async with asyncio.TaskGroup() as group:
        for rank in range(size):
            group.create_task(one(rank))


async def test_a_rank_that_closes_takes_its_messages_back() -> None:
    async with loopback_world(3) as comms:
        backend = comms[1].unsafe_get_backend()
        assert isinstance(backend, LoopbackBackend)
        comms[0].send(torch.ones(1), 2)
        backend.hub.drop(0)
        recv = comms[2].recv(torch.zeros(1))
        assert not recv.done()
        await comms[1].send(torch.full((1,), 5.0), 2)
        assert (await recv).item() == 5
        assert recv.source == 1
        comms[0].abort()


async def test_a_rank_that_closes_takes_only_its_own_operations_with_it() -> None:
    async with loopback_world(3) as comms:
        backend = comms[1].unsafe_get_backend()
        assert isinstance(backend, LoopbackBackend)
        backend.hub.hold()
        send, recv = comms[1].send(torch.ones(1), 2), comms[2].recv(torch.zeros(1), 1)
        await comms[0].aclose()
        backend.hub.release()
        await asyncio.gather(send, recv)
