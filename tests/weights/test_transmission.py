"""Sending and receiving buckets: with and without copies, stopped in the middle, and on a broken comm."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import Tensor

from asynccomm import BrokenError
from asynccomm.testing import loopback_world
from asynccomm.weights import transmission
from asynccomm.weights.buckets import cut
from asynccomm.weights.conversation import Route
from asynccomm.weights.layout import Layout
from asynccomm.weights.plan import plan
from asynccomm.weights.transmission import aside, receive, send
from tests.waiting import until

from .scenes import Gate
from .test_plan import part

CPU = torch.device("cpu")


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.arange(12, dtype=dtype).reshape(3, 4) for name in "abc"}


def layout(dtype: torch.dtype = torch.float32) -> Layout:
    return {name: part((3, 4), dtype=dtype) for name in "abc"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
async def test_all_buckets_arrive(dtype: torch.dtype) -> None:
    (transfers,) = plan([layout(dtype)], layout())
    buckets = cut(transfers, 32)
    found = {name: torch.zeros(3, 4) for name in "abc"}
    async with asyncio.timeout(20), loopback_world(2) as (first, second):
        sending = send(Route(first, fan=False), buckets, tensors(dtype), layout(dtype))
        _, complete = await asyncio.gather(sending, receive(Route(second, fan=False), buckets, found, layout()))
        assert complete
        assert all(torch.equal(found[name], tensors()[name]) for name in "abc")


async def test_no_buckets() -> None:
    async with loopback_world(2) as (first, second):
        await send(Route(first, fan=False), [], {}, {})
        assert await receive(Route(second, fan=False), [], {}, {})


@pytest.mark.parametrize("packed", [0, 2])
async def test_a_sender_that_is_cancelled_ends_the_attempt(monkeypatch: pytest.MonkeyPatch, packed: int) -> None:
    (transfers,) = plan([layout(torch.float64)], layout())
    buckets = cut(transfers, 32)
    found = {name: torch.zeros(3, 4) for name in "abc"}
    async with asyncio.timeout(20), loopback_world(2) as (first, second):
        gate = Gate(monkeypatch, packed)
        sending = asyncio.create_task(
            send(Route(first, fan=False), buckets, tensors(torch.float64), layout(torch.float64))
        )
        receiving = asyncio.create_task(receive(Route(second, fan=False), buckets, found, layout()))
        await gate.blocked(1)
        sending.cancel()
        assert not await receiving
        await asyncio.wait([sending])
        assert sending.cancelled()
        assert first.statistics().in_flight == second.statistics().in_flight == 0


async def test_a_receiver_that_is_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transmission, "STOP_SECONDS", 0.01)
    (transfers,) = plan([layout()], layout())
    async with asyncio.timeout(20), loopback_world(2) as (first, second):
        sending = asyncio.create_task(send(Route(first, fan=False), cut(transfers, 32), tensors(), layout()))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled()
        await until(lambda: second._session.error is not None)
        with pytest.raises(BrokenError, match=r"a bucket did not arrive within 0\.01 s"):
            await second.recv(torch.ones(1), 0)


async def test_both_sides_see_a_broken_comm() -> None:
    (transfers,) = plan([layout()], layout())
    buckets = cut(transfers, 32)
    async with loopback_world(2) as (first, second):
        sending = asyncio.create_task(send(Route(first, fan=False), buckets, tensors(), layout()))
        await asyncio.sleep(0)
        second.abort("gone")
        with pytest.raises(BrokenError, match="gone"):
            await sending
        with pytest.raises(BrokenError, match="gone"):
            await receive(Route(second, fan=False), buckets, tensors(), layout())


async def test_large_copies_run_in_a_thread_and_are_awaited_to_their_end() -> None:
    started, may_end, ends = threading.Event(), threading.Event(), []

    def copy() -> None:
        started.set()
        may_end.wait(20)
        ends.append(threading.current_thread())

    running = asyncio.create_task(aside(copy, 1 << 20, CPU))
    await asyncio.to_thread(started.wait, 20)
    running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    may_end.set()
    await asyncio.wait([running])
    assert running.cancelled()
    assert ends != [threading.current_thread()]
    await aside(copy, 10, CPU)
    assert ends[1] is threading.current_thread()
