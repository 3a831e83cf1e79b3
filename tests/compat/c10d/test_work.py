"""Handles, and what else is awaited."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm import AbortedError, WouldBlockError
from asynccomm.compat.c10d.work import NOTHING, NoopWork, ResultWork
from tests.compat.c10d.worlds import alone, run_ranks


async def test_a_handle_has_the_methods_of_torch() -> None:
    async def body(rank: int) -> None:
        tensor = torch.ones(2)
        work = dist.all_reduce(tensor, async_op=True)
        assert isinstance(work, dist.Work)
        future = work.get_future()
        assert await work is tensor
        assert await future is tensor
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result() is work.get_future().result() is tensor
        assert work.source_rank() == work._source_rank() == -1
        assert "all_reduce" in repr(work)
        if rank == 0:
            await dist.isend(tensor, 1)
        else:
            receive = dist.irecv(tensor, 0)
            await receive
            assert receive.source_rank() == 0

    await run_ranks(2, body)


async def test_a_handle_that_is_pending_or_failed() -> None:
    called = asyncio.Barrier(2)

    async def body(rank: int) -> None:
        work = dist.irecv(torch.ones(2), 0 if rank else 1)
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        with pytest.raises(asyncio.InvalidStateError):
            work.result()
        with pytest.raises(WouldBlockError):
            work.wait()
        with pytest.raises(WouldBlockError):
            work.synchronize()
        await called.wait()
        await dist._abort_process_group()
        with pytest.raises(AbortedError):
            await work
        assert isinstance(work.exception(), AbortedError)
        assert work.get_future().exception() is work.exception()
        assert not work.is_success()

    await run_ranks(2, body)


async def test_waiting_in_a_thread() -> None:
    async with alone():
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert await asyncio.to_thread(work.wait, timedelta(seconds=30)) is True
        await asyncio.to_thread(work.synchronize)


async def test_what_follows_is_done_once() -> None:
    async with alone():
        calls = []
        then = ResultWork(dist.all_reduce(torch.ones(2)), lambda value: calls.append(value) or len(calls))
        assert [await then, await then] == [1, 1]
        assert len(calls) == 1


async def test_nothing_can_be_awaited_again_and_again() -> None:
    assert [await NOTHING, await NOTHING, await NoopWork(-1)] == [None, None, -1]
