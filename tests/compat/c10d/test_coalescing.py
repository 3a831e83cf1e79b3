"""Collectives that leave together, and estimates."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm import Comm, NotSentError
from asynccomm.comm.scopes import Estimate
from tests.compat.c10d.worlds import alone, run_ranks


async def test_all_reduces_leave_at_the_end() -> None:
    async def body(rank: int) -> None:
        tensors = [torch.full((n,), rank + 1.0) for n in (1, 2, 3)]
        async with dist._coalescing_manager() as manager:
            for tensor in tensors:
                assert await dist.all_reduce(tensor) is None
            assert [tensor[0].item() for tensor in tensors] == [rank + 1.0] * 3
            assert manager.works == []
        assert [tensor[0].item() for tensor in tensors] == [3.0] * 3
        assert dist._world.pg_coalesce_state == {}

    await run_ranks(2, body)


async def test_gathers_and_scatters_of_tensors() -> None:
    async def body(rank: int) -> None:
        outputs = [torch.empty(2), torch.empty(4)]
        async with dist._coalescing_manager():
            for n, output in enumerate(outputs):
                dist.all_gather_into_tensor(output, torch.full((n + 1,), float(rank)))
        assert outputs[1].tolist() == [0, 0, 1, 1]
        parts = [torch.empty(1), torch.empty(2)]
        async with dist._coalescing_manager():
            for n, part in enumerate(parts):
                dist.reduce_scatter_tensor(part, torch.arange(2.0 * (n + 1)), dist.ReduceOp.MAX)
        assert parts[1].tolist() == ([2, 3] if rank else [0, 1])

    await run_ranks(2, body)


async def test_waiting_later() -> None:
    async def body(rank: int) -> None:
        tensor = torch.ones(2)
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(tensor)
        assert len(manager.works) == 1
        await manager.wait()
        assert tensor.tolist() == [2.0, 2.0]
        async with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(tensor)
        await manager.works[0]
        assert tensor.tolist() == [4.0, 4.0]

    await run_ranks(2, body)


async def test_waiting_needs_an_await() -> None:
    async with alone():
        with pytest.raises(RuntimeError, match="use `async with`"), dist._coalescing_manager():
            pass


def test_what_a_manager_keeps() -> None:
    manager = dist._CoalescingManager()
    manager.append(None)
    manager.append()
    manager.append("work")
    assert manager.works == ["work"]


async def test_a_recorded_collective_has_no_handle() -> None:
    async with alone():
        tensor = torch.ones(1)
        async with dist._coalescing_manager():
            works = [dist.all_reduce(tensor, async_op=True)]
        async with dist._coalescing_manager():
            works.append(dist.all_gather_into_tensor(tensor, tensor.clone(), async_op=True))
        async with dist._coalescing_manager():
            works.append(dist.reduce_scatter_tensor(tensor, tensor.clone(), async_op=True))
        for work in works:
            assert isinstance(work, dist._IllegalWork)
            for name in (
                "wait",
                "result",
                "exception",
                "is_success",
                "is_completed",
                "source_rank",
                "_source_rank",
                "synchronize",
                "get_future",
            ):
                with pytest.raises(ValueError, match="was not sent yet"):
                    getattr(work, name)()
            with pytest.raises(ValueError, match="was not sent yet"):
                await work
            assert "not sent yet" in repr(work)


async def test_only_one_kind_at_a_time() -> None:
    async with alone():
        one = torch.ones(1)
        async with dist._coalescing_manager():
            dist.all_reduce(one)
            with pytest.raises(ValueError, match="all_gather_into_tensor cannot be coalesced with all_reduce"):
                dist.all_gather_into_tensor(one, one)
            with pytest.raises(ValueError, match=r"by RedOpType.MAX cannot be coalesced with one by RedOpType.SUM"):
                dist.all_reduce(one, dist.ReduceOp.MAX)
            dist.all_reduce(one, dist.ReduceOp.SUM)


async def test_a_body_that_raises_leaves_nothing_behind() -> None:
    async with alone():
        tensor = torch.ones(1)
        with pytest.raises(KeyError):
            async with dist._coalescing_manager():
                dist.all_reduce(tensor, dist.ReduceOp.SUM)
                raise KeyError
        assert dist._world.pg_coalesce_state == {}
        work = dist.all_reduce(tensor, async_op=True)  # sent, and not recorded
        await work


async def test_what_cannot_be_sent_leaves_nothing_behind() -> None:
    async with alone():
        with pytest.raises(ValueError, match="complex"):
            async with dist._coalescing_manager():
                dist.all_reduce(torch.ones(1, dtype=torch.complex64), dist.ReduceOp.MAX)
        assert dist._world.pg_coalesce_state == {}
        await dist.all_reduce(torch.ones(1))


async def test_managers_do_not_nest() -> None:
    async with alone() as pg:
        other = await dist.new_group([0])
        async with dist._coalescing_manager():
            dist.all_reduce(torch.ones(1))
            with pytest.raises(ValueError, match="is in a coalescing manager of this task already"):
                async with dist._coalescing_manager(pg):
                    pass
            async with dist._coalescing_manager(other):  # of another group
                pass


async def test_an_empty_body() -> None:
    async with alone():
        async with dist._coalescing_manager(async_ops=True) as manager:
            pass
        assert manager.works == []
        await manager.wait()


async def test_other_tasks_are_not_recorded() -> None:
    async def body(rank: int) -> None:
        async def other() -> None:
            tensor = torch.ones(1)
            await dist.all_reduce(tensor)
            assert tensor.item() == 2

        held = torch.ones(1)
        async with dist._coalescing_manager():
            dist.all_reduce(held)
            await asyncio.create_task(other())
            assert held.item() == 1
        assert held.item() == 2

    await run_ranks(2, body)


async def test_what_else_is_called_goes_at_once() -> None:
    async def body(rank: int) -> None:
        async with dist._coalescing_manager():
            tensor = torch.tensor([rank])
            await dist.broadcast(tensor, 1)
            assert tensor.item() == 1
            other = await dist.new_group([0, 1])
            await dist.all_reduce(tensor, group=other)
            assert tensor.item() == 2

    await run_ranks(2, body)


async def test_with_a_device_everything_is_held() -> None:
    async def body(rank: int) -> None:
        a, b = torch.tensor([rank]), torch.tensor([rank])
        async with dist._coalescing_manager(device=torch.device("cpu")) as manager:
            work = dist.broadcast(a, 1, async_op=True)
            dist.all_reduce(b)
            assert not work.is_completed()
        assert [a.item(), b.item()] == [1, 1]
        assert manager.works == []
        async with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            mine, theirs = torch.tensor([rank]), torch.tensor([-1])
            dist.isend(mine, 1 - rank)
            dist.irecv(theirs, 1 - rank)
        await manager.wait()
        assert theirs.item() == 1 - rank

    await run_ranks(2, body)


async def test_a_body_with_a_device_that_raises() -> None:
    async with alone():
        with pytest.raises(KeyError):
            async with dist._coalescing_manager(device=torch.device("cpu")):
                work = dist.all_reduce(torch.ones(1), async_op=True)
                raise KeyError
        with pytest.raises(NotSentError):
            await work
        await dist.all_reduce(torch.ones(1))


async def test_who_is_not_in_the_group() -> None:
    async with alone():
        with pytest.warns(UserWarning, match="_coalescing_manager does nothing"):
            manager = dist._coalescing_manager(-100)
        async with manager as kept:
            pass
        assert kept.works == []


def test_a_record() -> None:
    tensor = torch.ones(1)
    record = dist._CollOp(dist.all_reduce, tensor, None, dist.ReduceOp.SUM, 3)
    assert (record.op, record.tensor, record.dst_tensor) == (dist.all_reduce, tensor, None)
    assert (record.redop, record.root) == (dist.ReduceOp.SUM, 3)


async def test_only_nccl_estimates() -> None:
    async with alone():
        with pytest.raises(NotImplementedError):
            dist._time_estimator()


async def test_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    class Fake:
        seconds = 2.5e-6

        async def __aenter__(self) -> Any:
            steps.append("entered")
            return self

        async def __aexit__(self, *args: object) -> None:
            steps.append("left")

    def estimator(self: Comm) -> Estimate:
        return Fake()  # type: ignore[return-value]

    monkeypatch.setattr(Comm, "time_estimator", estimator)
    async with alone():
        async with dist._time_estimator() as estimate:
            assert estimate.estimated_time is None
        assert estimate.estimated_time == pytest.approx(2.5)  # microseconds
        with pytest.raises(KeyError):
            async with dist._time_estimator() as estimate:
                raise KeyError
        assert estimate.estimated_time is None
    assert steps == ["entered", "left"] * 2
