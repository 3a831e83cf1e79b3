"""The decision whether a wait begins with a spin, on all backends that spin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asynccomm import Comm, Work, new_comm
from asynccomm.backends.spinning import SHORT_WAIT_SECONDS, waited


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
async def test_a_rank_spins_unless_its_last_wait_was_long(
    comm: Comm, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with new_comm(backend, name="own", timeout=30) as own:
        tensor = torch.zeros(4)
        await own.send(tensor, 1) if own.rank == 0 else await own.recv(tensor, 0)  # connected
        if own.rank == 0:
            for k in range(3):
                await comm.barrier()
                await own.send(torch.full((4,), float(k)), 1)
            return
        made: Any = own.unsafe_get_backend()
        if backend == "shm":
            owner, field, watched, spin = made._engine._position, "message_wait", made._engine, "_spin"
        else:
            owner, field, watched, spin = made._p2p, "_waited", made._p2p._endpoint, "serve"
        spins: list[bool] = []
        monkeypatch.setattr(watched, spin, counting(getattr(watched, spin), spins))

        async def receive(k: int) -> None:
            work: Work[Any] = own.recv(tensor, 0)
            assert not work.done()
            made.before_await(work)
            await comm.barrier()
            await work
            assert tensor.tolist() == [float(k)] * 4

        setattr(owner, field, 2 * SHORT_WAIT_SECONDS)
        await receive(0)
        assert not spins
        assert getattr(owner, field) != 2 * SHORT_WAIT_SECONDS, "the wait is measured"
        setattr(owner, field, SHORT_WAIT_SECONDS / 2)
        await receive(1)
        assert spins
        await receive(2)


@pytest.mark.ranks(2)
async def test_a_collective_waits_from_the_end_of_the_one_before(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls made at once, as by a scope, do not all count the wait for the first as theirs."""
    since: list[float] = []

    def recording(started: float, nbytes: int = 0) -> float:
        since.append(started)
        return waited(started, nbytes)

    monkeypatch.setattr("asynccomm.backends.shm.engine.waited", recording)
    async with new_comm("shm", name="own", timeout=30) as own:
        if own.rank == 1:
            await comm.barrier()
        since.clear()
        works = [own.all_reduce(torch.ones(4)) for _ in range(2)]
        if own.rank == 0:
            assert not works[0].done()
            while time.monotonic() < works[1].started + 2 * SHORT_WAIT_SECONDS:
                await asyncio.sleep(0)
            await comm.barrier()
        for work in works:
            assert (await work).tolist() == [2.0] * 4
        if own.rank == 0:
            assert since[-1] > works[1].started + 2 * SHORT_WAIT_SECONDS


def counting(function: Callable[..., Any], calls: list[bool]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        calls.append(True)
        return function(*args)

    return counted


def test_the_time_that_data_take_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 10.0)
    assert waited(9.0) == pytest.approx(1.0)
    assert waited(9.996, 4 << 20) < SHORT_WAIT_SECONDS < waited(9.996, 1 << 20)
