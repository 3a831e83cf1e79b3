"""Making windows: arguments, the order of calls, and ranks that do not come."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asynccomm import BackendError, CollectiveMismatchError, Comm, new_comm
from asynccomm.testing import loopback_world


@pytest.mark.ranks(2)
async def test_numbers_of_signals_must_agree_and_the_comm_goes_on() -> None:
    async with new_comm("shm", name="differ", timeout=20) as comm:
        with pytest.raises(ValueError, match=r"signals must be the same on all ranks, got \[1, 2\]"):
            await comm.window(8, signals=comm.rank + 1)
        for arguments in ({}, {"nbytes": 8, "like": torch.zeros(1)}):
            with pytest.raises(TypeError, match="give one of nbytes and like"):
                await comm.window(**arguments)  # type: ignore[arg-type]
        for nbytes, kind in ((-1, ValueError), ("8", TypeError)):
            with pytest.raises(kind, match="nbytes must be"):
                await comm.window(nbytes)  # type: ignore[arg-type]
        async with await comm.window(8) as window:
            assert "8 bytes and 256 signals" in repr(window)


async def test_refused_windows_have_no_number() -> None:
    def refuse(call: object) -> None:
        raise RuntimeError("refused")

    async with loopback_world(2) as comms:
        with pytest.raises(ValueError, match="timeout must be"):
            await comms[0].window(8, timeout=-1)
        hook = comms[0].add_hook(pre=refuse)
        with pytest.raises(RuntimeError, match="refused"):
            await comms[0].window(8)
        hook.remove()
        windows = await asyncio.gather(*[comm.window(8) for comm in comms])
        await asyncio.gather(*[window.aclose() for window in windows])


async def test_windows_that_are_made_at_the_same_time_are_numbered_alike() -> None:
    async def make(comm: Comm) -> list[tuple[int, ...]]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(comm.window(nbytes)) for nbytes in (8, 16, 24)]
        return [task.result().sizes for task in tasks]

    async with loopback_world(2) as comms:
        assert await asyncio.gather(*map(make, comms)) == [[(8, 8), (16, 16), (24, 24)]] * 2


async def test_a_rank_that_is_cancelled_does_not_hold_up_the_others() -> None:
    async with loopback_world(2) as comms:
        cancelled = asyncio.create_task(comms[0].window(8))
        await asyncio.sleep(0)
        cancelled.cancel()
        window = await comms[1].window(8)
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await window.put(torch.ones(1), 0)
        barrier = comms[0].barrier()
        await window.aclose()
        with pytest.raises(CollectiveMismatchError, match="end of window 0"):
            await barrier


async def test_a_window_that_a_rank_does_not_make_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(2) as comms:
        other = comms[1].unsafe_get_backend()

        async def never(window: object) -> None:
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(other, "window", never)
        outcomes = await asyncio.gather(*(comm.window(8, timeout=0.1) for comm in comms), return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, BackendError)
            assert str(outcome) == "window 0 was not made within 0.1 s"
        assert [comm.statistics().in_flight for comm in comms] == [0, 0]
