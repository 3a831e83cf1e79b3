"""The face on the simulated NCCL of the backend's tests, in place of the real one."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm import BrokenError, CommOptions
from asynccomm.backends import registry
from asynccomm.compat.c10d import create
from tests.backends.nccl import simulation
from tests.compat.c10d.worlds import run_ranks

OPTIONS = CommOptions(hints={"side": "loopback"})


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN, "nccl", (simulation.__name__, "SimulatedBackend"))
    monkeypatch.setattr(simulation.SimulatedBackend, "settings", {"connects": True})
    monkeypatch.setattr(create, "is_nccl_available", lambda: True)


async def run(size: int, body: Any) -> None:
    await run_ranks(size, body, backend="cpu:nccl", pg_options=OPTIONS)
    assert not simulation.SimulatedNccl.comms, "communicators were left open"


async def test_collectives_and_groups() -> None:
    async def body(rank: int) -> None:
        assert dist.get_backend_config() == "cpu:nccl"
        assert dist.group.WORLD.name() == "nccl"  # type: ignore[union-attr]
        tensor = torch.tensor([rank + 1.0])
        await dist.all_reduce(tensor)
        assert tensor.item() == 6
        pg = await dist.new_group([2, 0], pg_options=OPTIONS)
        if rank != 1:
            await dist.broadcast(tensor.fill_(rank), 2, pg)
            assert tensor.item() == 2
        split = await dist.split_group(None, [[0, 1], [2]])
        await dist.all_reduce(tensor.fill_(1), group=split)
        assert tensor.item() == (2 if rank < 2 else 1)
        room: list[Any] = [None] * 3
        await dist.all_gather_object(room, {"rank": rank})
        assert room[2] == {"rank": 2}

    await run(3, body)


async def test_batches_and_coalescing() -> None:
    async def body(rank: int) -> None:
        mine, theirs = torch.tensor([rank]), torch.tensor([-1])
        ops = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        (work,) = dist.batch_isend_irecv(ops)
        await work
        assert theirs.item() == 1 - rank
        tensors = [torch.ones(n + 1) for n in range(3)]
        async with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        await manager.wait()
        assert [tensor[-1].item() for tensor in tensors] == [2, 2, 2]
        outputs = [torch.empty(2), torch.empty(3)]
        await dist.all_gather(outputs, torch.full((rank + 2,), float(rank)))  # uneven
        assert outputs[1].tolist() == [1.0] * 3

    await run(2, body)


async def test_estimates() -> None:
    async def body(rank: int) -> None:
        tensor = torch.ones(100)
        await dist.all_reduce(tensor)
        async with dist._time_estimator() as estimate:
            dist.all_reduce(tensor)
        assert estimate.estimated_time is not None
        assert estimate.estimated_time > 0
        assert tensor[0].item() == 2  # nothing was done
        await dist.all_reduce(tensor)
        assert tensor[0].item() == 4

    await run(2, body)


async def test_shrinking_with_what_is_stuck() -> None:
    called = asyncio.Barrier(3)

    async def body(rank: int) -> None:
        dist._set_pg_timeout(timedelta(seconds=30))
        if rank == 2:
            work = dist.irecv(torch.ones(1), 0)
            await called.wait()
            assert work is not None
            with pytest.raises(BrokenError):
                await work
            return
        stuck = dist.all_reduce(torch.ones(1), async_op=True)
        await called.wait()
        left = await dist.shrink_group([2], shrink_flags=dist.SHRINK_ABORT)
        with pytest.raises(BrokenError):
            await stuck
        tensor = torch.ones(1)
        await dist.all_reduce(tensor, group=left)
        assert tensor.item() == 2

    await run(3, body)


async def test_what_a_group_supports_and_its_number() -> None:
    async def body(rank: int) -> None:
        world = dist._get_default_group()
        assert world.supports_time_estimate
        pair = await dist.new_group([0, 1], pg_options=OPTIONS)
        numbers = dist._get_process_group_uid(world), dist._get_process_group_uid(pair)
        assert min(numbers) >= 0
        everybodys: list[Any] = [None, None]
        await dist.all_gather_object(everybodys, numbers)
        assert everybodys == [numbers, numbers]
        assert numbers[0] != numbers[1]
        await dist.destroy_process_group(pair)
        assert dist._get_process_group_uid(pair) == -1

    await run(2, body)
