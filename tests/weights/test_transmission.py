"""Sending and receiving buckets: with and without copies, stopped in the middle, and on a broken comm."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import Tensor

from asynccomm import BrokenError
from asynccomm.testing import loopback_world
from asynccomm.weights.buckets import cut
from asynccomm.weights.layout import Layout
from asynccomm.weights.plan import plan
from asynccomm.weights.transmission import AHEAD, aside, receive, send

from .scenes import Gate
from .test_plan import part

CPU = torch.device("cpu")


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.arange(12, dtype=dtype).reshape(3, 4) for name in "abc"}


def layout(dtype: torch.dtype = torch.float32) -> Layout:
    return {name: part((3, 4), dtype=dtype) for name in "abc"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("servers", [1, 2])
async def test_all_buckets_arrive(dtype: torch.dtype, servers: int) -> None:
    (transfers,) = plan([layout(dtype)], layout())
    buckets = cut(transfers, 16)
    assert len(buckets) > AHEAD + 2
    found = [{name: torch.zeros(3, 4) for name in "abc"} for _ in range(servers)]
    async with asyncio.timeout(20), loopback_world(1 + servers) as (fan, *others):
        sending = send(fan, buckets, tensors(dtype), layout(dtype))
        receiving = [receive(other, buckets, each, layout()) for other, each in zip(others, found, strict=True)]
        await asyncio.gather(sending, *receiving)
        assert all(torch.equal(each[name], tensors()[name]) for name in "abc" for each in found)


async def test_no_buckets() -> None:
    async with loopback_world(2) as (first, second):
        await send(first, [], {}, {})
        await receive(second, [], {}, {})


@pytest.mark.parametrize("packed", [0, 2])
async def test_a_sender_that_is_cancelled_reads_no_tensor_any_more(
    monkeypatch: pytest.MonkeyPatch, packed: int
) -> None:
    (transfers,) = plan([layout(torch.float64)], layout())
    buckets = cut(transfers, 32)
    async with asyncio.timeout(20), loopback_world(2) as (first, second):
        gate = Gate(monkeypatch, packed)
        sending = asyncio.create_task(send(first, buckets, tensors(torch.float64), layout(torch.float64)))
        receiving = asyncio.create_task(receive(second, buckets, tensors(), layout()))
        await gate.blocked(1)
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled()
        first.abort("stopped")
        with pytest.raises(BrokenError, match="stopped"):
            await receiving


async def test_a_receiver_waits_without_a_limit_for_the_trainer() -> None:
    (transfers,) = plan([layout()], layout())
    buckets = cut(transfers, 32)
    async with loopback_world(2, timeout=0.01) as (first, second):
        receiving = asyncio.create_task(receive(second, buckets, tensors(), layout()))
        await asyncio.sleep(0.05)
        assert not receiving.done()
        await asyncio.gather(send(first, buckets, tensors(), layout()), receiving)


async def test_both_sides_see_a_broken_comm() -> None:
    (transfers,) = plan([layout()], layout())
    buckets = cut(transfers, 32)
    async with loopback_world(2) as (first, second):
        sending = asyncio.create_task(send(first, buckets, tensors(), layout()))
        await asyncio.sleep(0)
        second.abort("gone")
        with pytest.raises(BrokenError, match="gone"):
            await sending
        with pytest.raises(BrokenError, match="gone"):
            await receive(second, buckets, tensors(), layout())


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
