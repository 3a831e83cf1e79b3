"""The handles: looked at, waited for, dropped, and their futures."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from asynccomm import AbortedError
from asynccomm.interop import torch_work
from asynccomm.interop.torch_work import TorchWork
from asynccomm.testing.local import loopback_world
from tests.interop.world import world


def until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.ranks(2)
async def test_it_need_not_be_waited_for() -> None:
    with world():
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, async_op=True)
        until(work.is_completed)
        assert tensor.tolist() == [2, 2, 2]
        assert work.is_success()
        assert work.exception() is None
        assert [found is tensor or torch.equal(found, tensor) for found in work.result()] == [True]
        assert work._get_duration() >= 0
        assert work._get_sequence_number() >= 0
        assert work.timeout == timedelta(seconds=60)
        work.synchronize()
        work.block_current_stream()
        dist.all_reduce(torch.ones(1 << 18), async_op=True)  # dropped
        dist.barrier()


@pytest.mark.ranks(2)
async def test_futures_give_the_tensors() -> None:
    with world():
        tensor = torch.ones(3)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        assert future.wait()[0].data_ptr() == tensor.data_ptr()
        outputs = [torch.zeros(2), torch.zeros(2)]
        work = dist.all_gather(outputs, torch.ones(2), async_op=True)
        assert work.get_future() is work.get_future()
        assert [each.tolist() for each in work.get_future().wait()[0]] == [[1, 1], [1, 1]]
        assert outputs[0].tolist() == [1, 1]
        seen = []
        then = (
            dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: seen.append(done.value()[0].tolist()))
        )
        then.wait()
        assert seen == [[4, 4, 4]]


@pytest.mark.ranks(2)
async def test_callbacks_may_wait_for_other_futures() -> None:
    """As those of PowerSGD do; any number at once."""
    with world():

        def again(done: torch.futures.Future[Any]) -> Any:
            return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

        gates = []
        for _ in range(12):  # each holds a thread until the others have come, too
            tensor = torch.ones(1)
            first = dist.all_reduce(tensor, async_op=True).get_future()
            first.wait()
            gates.append(first.then(again))
        assert [gate.wait().item() for gate in gates] == [4] * 12


@pytest.mark.ranks(2)
async def test_errors_are_in_futures_as_errors() -> None:
    with world() as group:
        dist.barrier()  # both have connected
        if dist.get_rank() == 0:
            work = dist.irecv(torch.zeros(1), 1)
            future = work.get_future()
            group.abort()
            with pytest.raises(RuntimeError, match="aborted"):
                future.wait()
            with pytest.raises(AbortedError):
                work.wait()
            assert isinstance(work.exception(), AbortedError)
            assert work.is_completed()
            assert not work.is_success()
            assert future.done()
            with pytest.raises(RuntimeError, match="aborted"):
                work.get_future().wait()
        else:
            with pytest.raises(RuntimeError):
                dist.recv(torch.zeros(1), 0)


async def test_waiting_on_a_thread_with_a_loop_blocks_it() -> None:
    """What asynccomm's own Works refuse: torch's programs mean it."""
    async with loopback_world(2) as comms:
        works = [TorchWork([comm.all_reduce(torch.ones(2))], []) for comm in comms]
        assert works[0].wait()
        assert works[1].wait(timedelta(0))
        assert asyncio.get_running_loop() is not None


async def test_what_is_put_together_is_so_once_before_anybody_sees_it() -> None:
    async with loopback_world(2) as comms:
        calls: list[int] = []
        part = comms[0].all_reduce(torch.ones(2))
        work = TorchWork([part], [], lambda: calls.append(1))
        assert not work.is_completed()
        assert calls == []
        comms[1].all_reduce(torch.ones(2))
        await part
        assert work.is_completed()
        assert calls == [1]
        work.wait()
        work.get_future().wait()
        assert calls == [1]


async def test_joined_works_are_put_together_once() -> None:
    async with loopback_world(2) as comms:
        calls: list[int] = []

        def fail() -> None:
            calls.append(2)
            raise ValueError("second")

        parts = [comms[0].all_reduce(torch.ones(2)) for _ in range(4)]
        plain = TorchWork(parts[:1], [])
        works = [TorchWork([part], [], lambda: calls.append(1)) for part in parts[1::2]]
        works.insert(1, TorchWork([parts[2]], [], fail))
        joined = TorchWork.joined([plain, *works])
        assert not joined.is_completed()
        for _ in parts:
            comms[1].all_reduce(torch.ones(2))
        for part in parts:
            await part
        assert joined.is_completed()
        assert sorted(calls) == [1, 1, 2]
        for work in (joined, TorchWork.joined(works)):
            assert work.is_completed()
            assert str(work.exception()) == "second"
        assert [work.is_completed() for work in works] == [True] * 3
        assert sorted(calls) == [1, 1, 2]
        assert TorchWork.joined([plain]).finish is None


async def test_it_is_put_together_though_nobody_asks() -> None:
    async with loopback_world(1) as [comm]:
        calls: list[int] = []
        works = [TorchWork([comm.all_reduce(torch.ones(2))], [], lambda: calls.append(1)) for _ in range(2)]
        del works[0]
        until(lambda: calls == [1, 1])


async def test_a_dropped_one_keeps_its_python_half_but_no_large_tensors() -> None:
    """torch's C++ may still hold the rest, and wait for it."""
    async with loopback_world(1) as [comm]:
        tensor = torch.ones(2000)
        part = comm.all_reduce(tensor)
        await part
        work = TorchWork([part], [tensor])
        gone = weakref.ref(tensor)
        del work, part, tensor
        gc.collect()
        kept = torch_work._kept[-1]
        assert kept.wait()
        assert kept.tensors() == []
        assert gone() is None
        part = comm.all_reduce(torch.ones(2))
        await part
        TorchWork([part], [torch.ones(2)])
        assert torch_work._kept[-1].get_future().wait()[0].tolist() == [1, 1]
