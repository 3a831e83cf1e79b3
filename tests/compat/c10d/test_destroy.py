"""How groups end, and how long their operations may take."""

from __future__ import annotations

import asyncio
import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm import AbortedError, ClosedError, CollectiveTimeoutError, Comm, CommOptions, MemoryStore
from asynccomm.compat.c10d.process_group import ProcessGroup
from tests.compat.c10d.worlds import alone, run_ranks


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of comms, as they are closed."""
    names: list[str] = []
    close = Comm.aclose

    async def aclose(self: Comm) -> None:
        names.append(self.name)
        await close(self)

    monkeypatch.setattr(Comm, "aclose", aclose)
    return names


def test_arguments() -> None:
    assert list(inspect.signature(dist.destroy_process_group).parameters) == ["group"]


async def test_all_groups_end_the_last_first(closed: list[str]) -> None:
    async with alone():
        for _ in range(11):
            await dist.new_group([0])
        await dist.destroy_process_group()
        assert closed == [str(number) for number in range(11, -1, -1)]  # "9" is not after "10"
        assert not dist.is_initialized()
        assert dist.get_pg_count() == 0
        await dist.init_process_group("loopback", store=MemoryStore(), world_size=1, rank=0)
        assert dist.group.WORLD.group_name == "0"  # type: ignore[union-attr]


async def test_the_default_group_by_itself() -> None:
    async with alone() as pg:
        await dist.destroy_process_group(pg)
        assert not dist.is_initialized()


async def test_one_group_ends(closed: list[str]) -> None:
    async with alone():
        pg = await dist.new_group([0])
        await dist.destroy_process_group(pg)
        assert closed == ["1"]
        with pytest.raises(ClosedError):
            dist.all_reduce(torch.ones(1), group=pg)
        await dist.all_reduce(torch.ones(1))
        with pytest.raises(ValueError, match="not registered"):
            await dist.destroy_process_group(pg)
        assert (await dist.new_group([0])).group_name == "2"  # type: ignore[union-attr]


@pytest.mark.parametrize("end", [dist.destroy_process_group, dist._abort_process_group])
async def test_what_is_no_group(end: Any) -> None:
    with dist.use_world(dist.World()):
        await end(dist.GroupMember.NON_GROUP_MEMBER)
        with pytest.raises(AssertionError, match="init_process_group was not called"):
            await end()


async def test_what_is_in_flight_comes_to_its_end() -> None:
    async def body(rank: int) -> None:
        tensor = torch.ones(2)
        work = dist.all_reduce(tensor, async_op=True)
        await dist.destroy_process_group()
        await work
        assert tensor.tolist() == [2.0, 2.0]

    await run_ranks(2, body)


async def test_destroying_goes_on_when_it_is_cancelled(closed: list[str]) -> None:
    async def body(rank: int) -> None:
        if rank == 1:
            await asyncio.sleep(0)
        pg = dist._get_default_group()
        work = dist.recv(torch.ones(1), 0) if rank else dist.isend(torch.ones(1), 1)
        task = asyncio.ensure_future(dist.destroy_process_group())
        while dist.is_initialized():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await work
        while "closed" not in repr(pg.comm()):
            await asyncio.sleep(0)

    await run_ranks(2, body)


async def test_aborting_wakes_all_that_wait(closed: list[str]) -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([0, 1])
        works = [dist.irecv(torch.ones(1), 1 - rank, group) for group in (None, pg)]
        waiting = [asyncio.ensure_future(work.get_future()) for work in works]
        await dist.barrier()
        await dist._abort_process_group()
        assert not dist.is_initialized()
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, AbortedError)

    await run_ranks(2, body)


async def test_all_are_aborted_before_one_is_closed(monkeypatch: pytest.MonkeyPatch, closed: list[str]) -> None:
    steps: list[str] = []
    abort = Comm.abort
    monkeypatch.setattr(Comm, "abort", lambda self, reason: (steps.append(self.name), abort(self, reason))[1])
    async with alone():
        await dist.new_group([0])
        await dist._abort_process_group()
    assert steps == ["1", "0"]
    assert closed == ["1", "0"]


async def test_aborting_one_group() -> None:
    async with alone():
        pg = await dist.new_group([0])
        work = dist.irecv(torch.ones(1), 0, pg)
        await dist._abort_process_group(pg)
        assert work is not None
        with pytest.raises(AbortedError, match="process group '1' was aborted"):
            await work
        await dist.all_reduce(torch.ones(1))


async def test_a_group_with_recorded_collectives_warns() -> None:
    async with alone():
        pg = await dist.new_group([0])
        with pytest.raises(ClosedError):
            async with dist._coalescing_manager(pg):
                dist.all_reduce(torch.ones(1), group=pg)
                with pytest.warns(UserWarning, match="recorded collectives that were never sent"):
                    await dist.destroy_process_group(pg)
        assert dist._world.pg_coalesce_state == {}


async def test_errors_of_one_do_not_keep_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with alone():
        pg = await dist.new_group([0])
        close = Comm.aclose
        names: list[str] = []

        async def aclose(self: Comm) -> None:
            names.append(self.name)
            await close(self)
            if self.name == "1":
                raise RuntimeError("no")

        with monkeypatch.context() as patch:
            patch.setattr(Comm, "aclose", aclose)
            with pytest.raises(RuntimeError, match="no"):
                await dist.destroy_process_group()
        assert names == ["1", "0"]
        assert isinstance(pg, dist.ProcessGroup)


@pytest.mark.parametrize(("end", "count"), [(dist.destroy_process_group, 2), (dist._abort_process_group, 1)])
async def test_whom_the_host_of_the_store_waits_for(end: Any, count: int) -> None:
    async def body(rank: int) -> None:
        waits: list[tuple[int, int]] = []

        async def first(count: int) -> None:
            waits.append((1, count))

        async def second(count: int) -> None:
            waits.append((2, count))
            raise RuntimeError("no")

        dist._world.endings += [first, second]
        with pytest.raises(RuntimeError, match="no"):
            await end()
        assert waits == [(2, count), (1, count)]  # the last first, and all

    await run_ranks(2, body)


async def test_of_a_broken_group_the_host_waits_for_nobody() -> None:
    async with alone() as pg:
        waits: list[int] = []

        async def note(count: int) -> None:
            waits.append(count)

        dist._world.endings.append(note)
        pg.comm().abort("no")
        await dist.destroy_process_group()
        assert waits == [1]


# -- timeouts -----------------------------------------------------------------------------------------------------


async def test_timeouts_of_what_comes_later() -> None:
    async with alone() as pg:
        before = dist.all_reduce(torch.ones(1))
        dist._set_pg_timeout(timedelta(seconds=7))
        assert before.timeout == 1800
        assert dist.all_reduce(torch.ones(1)).timeout == 7
        assert pg.timeout == timedelta(seconds=7)
        other = await dist.new_group([0])
        dist._set_pg_timeout(timedelta(seconds=8), other)
        assert dist.all_reduce(torch.ones(1)).timeout == 7
        assert dist.all_reduce(torch.ones(1), group=other).timeout == 8
        assert pg.comm().all_reduce(torch.ones(1), timeout=3).timeout == 3  # its own counts more


async def test_timeouts_that_cannot_be_set() -> None:
    async with alone() as pg:
        with pytest.raises(ValueError, match="not in the group"):
            dist._set_pg_timeout(timedelta(1), -100)
        with pytest.raises(AssertionError, match="must be a ProcessGroup"):
            dist._set_pg_timeout(timedelta(1), "gloo")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="timedelta"):
            dist._set_pg_timeout(3)  # type: ignore[arg-type]
        empty = ProcessGroup("x", "", [0], 0, "", pg.config, {}, pg.timeout)
        with pytest.warns(UserWarning, match="no backend whose timeout could be set"):
            dist._set_pg_timeout(timedelta(1), empty)


async def test_more_time_for_a_while() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([0, 1])
        dist._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=100))
        works = [dist.all_reduce(torch.ones(1), group=group) for group in (None, pg)]
        assert [work.timeout for work in works] == [1900, 1900]
        for work in works:
            await work
        assert dist.all_reduce(torch.ones(1)).timeout == 1800
        assert dist.all_reduce(torch.ones(1), group=pg).timeout == 1800

    await run_ranks(2, body)


async def test_time_that_is_over_ends_the_group_and_not_the_process() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([0, 1])
        dist._set_pg_timeout(timedelta(seconds=0.1), pg)
        if rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="all_reduce"):
                await dist.all_reduce(torch.ones(1), group=pg)
            with pytest.raises(CollectiveTimeoutError):  # from now on
                dist.all_reduce(torch.ones(1), group=pg)
        await dist.barrier()

    await run_ranks(2, body)


@pytest.mark.parametrize("value", ["0", "1", "3"])
@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"])
async def test_variables_for_errors_of_nccl_change_nothing(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits is told, no process ends, and aborting needs none of them."""
    monkeypatch.setenv(name, value)

    async def body(rank: int) -> None:
        pg = await dist.new_group([0, 1])
        dist._set_pg_timeout(timedelta(seconds=0.1), pg)
        if rank == 0:
            work = dist.all_reduce(torch.ones(1), group=pg, async_op=True)
            with pytest.raises(CollectiveTimeoutError):
                await asyncio.to_thread(work.wait)
            with pytest.raises(CollectiveTimeoutError):
                await work
        await dist.barrier()
        await dist._abort_process_group(pg)
        other = await dist.new_group([0, 1])
        work = dist.irecv(torch.ones(1), 1 - rank, other)
        await dist.barrier()
        await dist._abort_process_group(other)
        with pytest.raises(AbortedError):
            await work
        await dist.barrier()

    await run_ranks(2, body)


async def test_a_process_may_end_by_its_errors_if_that_is_asked_for() -> None:
    options = CommOptions(abort_process_on_timeout_or_error=True)
    async with alone(pg_options=options) as pg:
        assert pg.comm().options.abort_process_on_timeout_or_error
    async with alone() as pg:
        assert not pg.comm().options.abort_process_on_timeout_or_error
