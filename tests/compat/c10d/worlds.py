"""Worlds for the tests of the face: all ranks in this process, each in a task with a world of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final

import asynccomm.compat.c10d as dist
from asynccomm import Comm, MemoryStore
from asynccomm.store.base import PrefixStore

Body = Callable[[int], Awaitable[Any]]

#: the processes that ``run_ranks`` uses in place of tasks, if they are enough, and a number for each use
processes: Final[ContextVar[tuple[Comm, itertools.count[int]] | None]] = ContextVar("processes", default=None)
default_backend: Final = ContextVar("default_backend", default="loopback")  #: of ``run_ranks``


async def run_ranks(size: int, body: Body, *, backend: str | None = "", **options: Any) -> list[Any]:
    """What ``body(rank)`` returns on each rank, between making the default group and destroying it.

    Args:
        backend: of the default group; empty: ``default_backend``.
    """
    if (there := processes.get()) is not None:
        return await _run_own_rank(there[0], next(there[1]), size, body, backend, **options)
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


async def _run_own_rank(
    comm: Comm, number: int, size: int, body: Body, backend: str | None, **options: Any
) -> list[Any]:
    """As ``run_ranks``, with the result of this process's rank alone; ranks of ``comm`` beyond ``size`` have none."""
    assert size <= comm.size
    if comm.rank >= size:
        return []
    backend = default_backend.get() if backend == "" else backend
    store = PrefixStore(f"world{number}", comm._session.identity.job.store)
    with dist.use_world(dist.World()):
        await dist.init_process_group(backend, store=store, world_size=size, rank=comm.rank, **options)
        try:
            result = await body(comm.rank)
        except BaseException:
            await dist._abort_process_group()
            raise
        await dist.destroy_process_group()
        return [result]


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
