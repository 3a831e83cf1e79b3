"""Worlds for the tests of the face: all ranks in this process, each in a task with a world of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final

import asynccomm.compat.c10d as dist
from asynccomm import MemoryStore

Body = Callable[[int], Awaitable[Any]]

default_backend: Final = ContextVar("default_backend", default="loopback")  #: of ``run_ranks``


async def run_ranks(size: int, body: Body, *, backend: str | None = "", **options: Any) -> list[Any]:
    """What ``body(rank)`` returns on each rank, between making the default group and destroying it.

    Args:
        backend: of the default group; empty: ``default_backend``.
    """
    store = MemoryStore()
    backend = default_backend.get() if backend == "" else backend
    connected = asyncio.Barrier(size)

    async def one(rank: int) -> Any:
        with dist.use_world(dist.World()):
            await dist.init_process_group(backend, store=store, world_size=size, rank=rank, **options)
            try:
                await connected.wait()  # else one could abort what others are still connecting
                result = await body(rank)
            except BaseException:
                if dist.is_initialized():
                    await dist._abort_process_group()
                raise
            if dist.is_initialized():
                await dist.destroy_process_group()
            return result

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(rank)) for rank in range(size)]
    return [task.result() for task in tasks]


@asynccontextmanager
async def alone(backend: str | None = "loopback", **options: Any) -> AsyncIterator[dist.ProcessGroup]:
    """A world of one rank, in this task; gives its default group."""
    with dist.use_world(dist.World()):
        await dist.init_process_group(backend, store=MemoryStore(), world_size=1, rank=0, **options)
        try:
            pg = dist.group.WORLD
            assert pg is not None
            yield pg
        finally:
            if dist.is_initialized():
                await dist.destroy_process_group()
