"""Barriers."""

from __future__ import annotations

import asyncio
import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm import Comm, MonitoredBarrierError
from asynccomm.compat.c10d import barriers
from asynccomm.compat.c10d.process_group import ProcessGroup
from tests.compat.c10d.worlds import alone, run_ranks


def test_arguments() -> None:
    assert list(inspect.signature(dist.barrier).parameters) == ["group", "async_op", "device_ids"]
    assert list(inspect.signature(dist.monitored_barrier).parameters) == ["group", "timeout", "wait_all_ranks"]


async def test_nobody_passes_before_all_have_come() -> None:
    here = []

    async def body(rank: int) -> None:
        for _ in range(rank):
            await asyncio.sleep(0)
        here.append(rank)
        await dist.barrier()
        assert sorted(here) == [0, 1, 2]
        work = dist.barrier(async_op=True)
        assert isinstance(work, dist.Work)
        await work

    await run_ranks(3, body)


async def test_devices_of_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    async with alone() as pg:
        where = barriers._barrier_device
        assert where(pg, None) == torch.device("cpu")
        monkeypatch.setattr(barriers, "accelerator", lambda: "cuda")
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
        assert where(pg, [2]) == torch.device("cuda:2")
        assert where(pg, []) == where(pg, None) == torch.device("cpu")  # objects are there, too
        gpu = await _on_a_gpu(pg)
        with pytest.warns(UserWarning, match="uses the current device: pass device_ids="):
            assert where(gpu, None) == torch.device("cuda:3")
        gpu._rank = 1
        assert where(gpu, None) == torch.device("cuda:3")  # only rank 0 says so
        gpu.bound_device_id = torch.device("cuda:1")
        assert where(gpu, None) == torch.device("cuda:1")
        await dist.barrier(device_ids=[0])
        await dist.barrier(device_ids=[])
        with pytest.raises(TypeError, match="device_ids must be a list"):
            dist.barrier(device_ids=0)  # type: ignore[arg-type]


async def _on_a_gpu(pg: dist.ProcessGroup) -> dist.ProcessGroup:
    class Elsewhere:
        device = torch.device("cuda:0")

    return ProcessGroup("gpu", "", [0], 0, "nccl", pg.config, {"cuda": Elsewhere()}, pg.timeout)  # type: ignore[dict-item]


async def test_a_monitored_barrier_names_who_is_missing() -> None:
    over = asyncio.Event()

    async def body(rank: int) -> None:
        await dist.monitored_barrier(timeout=timedelta(seconds=30))
        if rank < 2:
            for everybody, expected in ((False, (2,)), (True, (2, 3))):
                with pytest.raises(MonitoredBarrierError) as caught:  # all that have come
                    await dist.monitored_barrier(timeout=timedelta(seconds=0.1), wait_all_ranks=everybody)
                assert caught.value.missing == expected
            over.set()
        else:
            await over.wait()
            for _ in range(2):  # who comes too late does not pass, nor stand for the next round
                with pytest.raises(MonitoredBarrierError):
                    await dist.monitored_barrier(timeout=timedelta(seconds=30))
        await dist.monitored_barrier(timeout=timedelta(seconds=30))

    await run_ranks(4, body)


async def test_time_limits_of_a_monitored_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    ours = Comm.monitored_barrier

    def noted(self: Comm, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        limits.append(timeout)
        return ours(self, timeout, wait_all_ranks)

    monkeypatch.setattr(Comm, "monitored_barrier", noted)
    async with alone(timeout=timedelta(seconds=77)):
        await dist.monitored_barrier()
        with pytest.warns(UserWarning, match="2.5 counts as seconds"):
            await dist.monitored_barrier(timeout=2.5)
        with pytest.raises(TypeError, match="timeout must be a timedelta"):
            dist.monitored_barrier(timeout="3")  # type: ignore[arg-type]
    assert limits == [timedelta(seconds=77), timedelta(seconds=2.5)]


async def test_a_monitored_barrier_needs_the_cpu() -> None:
    async with alone("cpu:loopback") as pg:
        await dist.monitored_barrier()  # of pairs, and not only of gloo
        with pytest.raises(ValueError, match="needs a group with a backend for the CPU"):
            dist.monitored_barrier(await _on_a_gpu(pg))
