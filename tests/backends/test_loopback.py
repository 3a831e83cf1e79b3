"""Loopback: the conformance suite, and what its hub lets tests do."""

import asyncio

import pytest

from asynccomm import MemoryStore, new_comm
from asynccomm.testing import check_backend


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
async def test_conformance(size: int) -> None:
    store = MemoryStore()

    async def one(rank: int) -> None:
        await check_backend(lambda name: new_comm("loopback", name=name, store=store, rank=rank, size=size))

    async with asyncio.TaskGroup() as group:
        for rank in range(size):
            group.create_task(one(rank))
