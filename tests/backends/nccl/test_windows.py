"""Windows of the NCCL backend on a simulated GPU: the conformance checks, NCCL's calls, and failures."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest
import torch

from asynccomm import AbortedError, BackendError, BrokenError, ClosedError, Comm, Work
from asynccomm.backends.base import UnsuitableError
from asynccomm.backends.nccl import window_memory as module
from asynccomm.testing.conformance import experts, memory, queues, windows
from asynccomm.testing.conformance.suite import _checks
from asynccomm.windows.window import Window
from tests.sampling import some

from .conftest import World
from .simulation import LIMIT, SimulatedNccl, SimulatedStream
from .test_backend import backend_of, conform, until

CHECKS = [check.__name__ for check in _checks(windows)]
BESIDE = [check for module in (memory, queues, experts) for check in _checks(module)]


@pytest.mark.parametrize("size", some([3, 2, 1], 2))
async def test_conformance(size: int) -> None:
    await conform(size, CHECKS)
    await until(freed)


async def test_what_lies_beside_windows_conforms_while_one_is_open(world: World) -> None:
    async with world(3) as comms, opened(comms) as (one, two, _):
        for check in BESIDE:
            await asyncio.gather(*(check(comm) for comm in comms))
        await ready(one.put(torch.ones(1), 1), one.signal(1), two.wait_signal())
        assert two.tensor(dtype=torch.float32)[0] == 1.0


def nccl_of(comm: Comm) -> SimulatedNccl:
    return backend_of(comm).nccl


def freed() -> bool:
    gc.collect()
    return not SimulatedNccl.memory


@asynccontextmanager
async def opened(comms: list[Comm], nbytes: int = 4096) -> AsyncIterator[list[Window]]:
    """A window of all ranks, whose NCCL calls are listed from now on."""
    made = await asyncio.gather(*(comm.window(nbytes, signals=2) for comm in comms))
    for comm in comms:
        nccl_of(comm).calls.clear()
    yield made
    await asyncio.gather(*(window.aclose() for window in made))


async def ready(*works: Work[Any]) -> None:
    async with asyncio.timeout(30):
        await asyncio.gather(*works)


# -- NCCL's calls --------------------------------------------------------------------------------------------------


async def test_a_window_has_a_communicator_and_memory_of_its_own(world: World) -> None:
    async with world(2) as comms:
        for comm in comms:
            nccl_of(comm).calls.clear()
        windows = await asyncio.gather(*(comm.window(100) for comm in comms))
        calls = ["mem_alloc", "init", "window_register", "signal", "wait_signal"]
        for comm in comms:
            assert [call for call in nccl_of(comm).calls if call not in "[all_gather]"] == calls
            assert not nccl_of(comm).configs[-1].blocking, "an abort could not end it"
            nccl_of(comm).calls.clear()
        memory = windows[0].tensor()
        assert memory.tolist() == [0] * 100
        await asyncio.gather(*(window.aclose() for window in windows))
        for comm, window in zip(comms, windows, strict=True):
            await until(lambda window=window: window._backend.join(0.0))
            assert nccl_of(comm).calls[:2] == ["window_deregister", "abort"]
        memory.fill_(1)
        await until(lambda: len(SimulatedNccl.memory) < 2)
        assert len(SimulatedNccl.memory) == 1, "the memory of a view was freed"
        assert memory.tolist() == [1] * 100
        del memory
        await until(freed)
        assert nccl_of(comms[0]).calls[-1] == "mem_free"


async def test_one_wait_of_nccl_shows_all_puts_before_a_signal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[dict[int, int]] = []
    wait_signal = SimulatedNccl.wait_signal

    def noted(self: SimulatedNccl, wanted: dict[int, int], *rest: Any) -> None:
        counts.append(dict(wanted))
        wait_signal(self, wanted, *rest)

    monkeypatch.setattr(SimulatedNccl, "wait_signal", noted)
    async with world(3) as comms, opened(comms) as (one, two, three):
        counts.clear()
        puts = [one.put(torch.full((4,), float(turn)), 2, 4 * turn) for turn in range(3)]
        await ready(*puts, one.fence(2), two.put(torch.ones(1), 2), two.signal(2))
        await ready(three.wait_signal())
        assert counts == [{0: 3, 1: 1}]
        assert three.tensor(dtype=torch.float32)[:12].tolist() == [1.0, *[0.0] * 3, *[1.0] * 4, *[2.0] * 4]
        await ready(one.signal(2, 1), three.wait_signal(1))
        assert len(counts) == 1, "there was no new put"
        assert nccl_of(comms[0]).calls == ["put_signal"] * 3
        assert nccl_of(comms[2]).calls == ["wait_signal"]


async def test_large_puts_go_in_pieces_and_those_of_the_window_in_place(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 4096)
    sources: list[tuple[int, int]] = []
    put_signal = SimulatedNccl.put_signal

    def noted(self: SimulatedNccl, buf: int, nbytes: int, *rest: Any) -> None:
        sources.append((buf, nbytes))
        put_signal(self, buf, nbytes, *rest)

    monkeypatch.setattr(SimulatedNccl, "put_signal", noted)
    async with world(2) as comms, opened(comms, 40000) as (one, two):
        values = torch.arange(5000.0)
        strided = values.view(100, 50).T.contiguous().T
        for turn, tensor in enumerate((values, strided), 1):
            sources.clear()
            two.tensor().zero_()
            await ready(one.put(tensor, 1, 10), one.signal(1, 0, turn), two.wait_signal(0, turn))
            assert two.tensor(None, (5000,), torch.float32, 10).tolist() == values.tolist()
            assert [nbytes for _, nbytes in sources] == [4096] * 4 + [3616]
            assert len({buf for buf, _ in sources}) == 1
        sources.clear()
        own = one.tensor(None, (1000,), torch.float32, 500).copy_(values[:1000])
        await ready(one.put(own, 1), one.signal(1, 0, 3), two.wait_signal(0, 3))
        assert two.tensor(None, (1000,), torch.float32).tolist() == values[:1000].tolist()
        assert sources == [(own.data_ptr(), 4000)]


async def test_a_barrier_shows_what_was_fenced_before(world: World) -> None:
    async with world(3) as comms, opened(comms) as windows:

        async def one(comm: Comm, window: Window) -> None:
            for turn in range(3):
                for target in range(comm.size):
                    window.put(torch.tensor([turn * 10 + comm.rank]), target, comm.rank)
                await window.fence()
                await comm.barrier()
                assert window.tensor(None, (3,), torch.int64).tolist() == [10 * turn, 10 * turn + 1, 10 * turn + 2]
                await comm.barrier()

        await asyncio.gather(*map(one, comms, windows))


# -- order ---------------------------------------------------------------------------------------------------------


async def test_a_put_follows_the_callers_stream_and_holds_up_no_wait(world: World) -> None:
    async with world(2) as comms, opened(comms) as (one, two):
        device, user = backend_of(comms[0]).device, SimulatedStream()
        monkey, gate, tensor = device.user, threading.Event(), torch.zeros(2)
        user.put(lambda: gate.wait(LIMIT))
        user.run(lambda: tensor.fill_(3.0))
        device.user = user  # type: ignore[assignment]
        put, late = one.put(tensor, 1), one.signal(1)
        device.user = monkey
        behind = two.wait_signal()
        await ready(two.put(torch.ones(1), 0), two.signal(0, 1), one.wait_signal(1))
        assert one.tensor(dtype=torch.float32)[0] == 1.0
        assert not put.done()
        assert not late.done()
        assert not behind.done()
        gate.set()
        await ready(put, late, behind)
        assert two.tensor(dtype=torch.float32)[:2].tolist() == [3.0, 3.0]


async def test_streams_can_follow_a_wait(world: World) -> None:
    async with world(2) as comms, opened(comms) as (one, two):
        wait = two.wait_signal()
        assert wait.order is not None
        assert not wait.order.issued
        await ready(one.put(torch.ones(3), 1), one.signal(1))
        await asyncio.wait_for(wait.ordered(), 30)
        assert two.tensor(dtype=torch.float32)[:3].tolist() == [1.0] * 3


# -- refusals ------------------------------------------------------------------------------------------------------


async def test_a_library_without_one_sided_calls_is_named(world: World) -> None:
    async with world(2, native=["all_to_all"]) as comms:
        results = await asyncio.gather(*(comm.window(8) for comm in comms), return_exceptions=True)
        for result in results:
            assert isinstance(result, UnsuitableError)
            assert str(result) == (
                "rank 0: NCCL 2.30.7 has no one-sided calls, and windows on backend 'nccl' need 2.29.0 or newer"
            )
        await asyncio.gather(*(comm.barrier() for comm in comms))  # the comm goes on
    await until(freed)


async def test_without_memory_on_one_rank_no_rank_has_a_window(world: World) -> None:
    async with world(2) as comms:
        nccl_of(comms[1]).fail["mem_alloc"] = "out of memory"
        results = await asyncio.gather(*(comm.window(8) for comm in comms), return_exceptions=True)
        assert [str(result) for result in results] == ["rank 1: out of memory"] * 2
        assert all(isinstance(result, UnsuitableError) for result in results)
        del results
        await until(freed)
        nccl_of(comms[1]).fail.clear()
        async with opened(comms) as (one, two):
            await ready(one.signal(1), two.wait_signal())


async def test_operations_that_nccl_lacks_are_refused_by_name(world: World) -> None:
    async with world(2) as comms, opened(comms) as (one, two):
        for kind in ("get", "accumulate"):
            with pytest.raises(
                NotImplementedError, match=rf"cannot {kind}: .* only write; {kind}\(float32\[3\], rank=1"
            ):
                getattr(one, kind)(torch.zeros(3), 1)
        assert not one.can_map(1)
        with pytest.raises(ValueError, match="rank must be one whose memory can be mapped here, got 1"):
            one.tensor(1)
        await ready(one.signal(1), two.wait_signal())  # the comm goes on


async def test_windows_are_no_part_of_a_graph(world: World) -> None:
    async with world(2) as comms, opened(comms) as (one, two):
        device = backend_of(comms[0]).device
        device.capture = SimulatedStream()
        for call in (lambda: one.put(torch.ones(1), 1), lambda: one.signal(1), one.wait_signal, one.fence):
            with pytest.raises(RuntimeError, match=r"cannot become part of a CUDA graph: it needs the host"):
                call()
        device.capture = None
        await ready(one.signal(1), two.wait_signal())


# -- failures and ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["put_signal", "wait_signal"])
async def test_a_call_that_fails_breaks_the_comm(world: World, call: str) -> None:
    async with world(2) as comms:
        async with opened(comms) as (one, two):
            nccl_of(comms[0 if call == "put_signal" else 1]).fail[call] = "the link is down"
            works = [one.put(torch.ones(1), 1), one.signal(1), two.wait_signal()]
            results = await asyncio.gather(*works, return_exceptions=True)
            assert any(isinstance(result, BackendError) and "the link is down" in str(result) for result in results)
            with pytest.raises(BrokenError):
                comms[0 if call == "put_signal" else 1].barrier()
            for comm in comms:
                comm.abort()
        del one, two
    await until(freed)


async def test_a_window_that_cannot_be_registered(world: World) -> None:
    async with world(2) as comms:
        for comm in comms:
            nccl_of(comm).fail["window_register"] = "One sided RMA: host RMA is not supported in this communicator."
        results = await asyncio.gather(*(comm.window(8) for comm in comms), return_exceptions=True)
        assert all(isinstance(result, BackendError) and "RMA is not supported" in str(result) for result in results)
        await asyncio.gather(*(comm.barrier() for comm in comms))
    del results
    await until(freed)


async def test_an_abort_ends_everything(world: World) -> None:
    async with world(2) as comms:
        windows = await asyncio.gather(*(comm.window(64) for comm in comms))
        waits = [window.wait_signal() for window in windows]
        comms[0].abort("enough")
        for wait in waits:
            with pytest.raises(AbortedError, match="enough"):
                await wait
        del windows, waits, wait
    await until(freed)


async def test_a_making_that_is_cancelled_leaves_nothing(world: World) -> None:
    async with world(2) as comms:
        making = [asyncio.ensure_future(comm.window(64)) for comm in comms]
        await until(lambda: len(SimulatedNccl.memory) == 2)
        for task in making:
            task.cancel()
        await asyncio.wait(making)
        await until(freed)
        await asyncio.gather(*(comm.barrier() for comm in comms))


async def test_a_making_that_takes_too_long_ends_its_communicator(world: World) -> None:
    async with world(2) as comms:

        async def window(*_: object) -> NoReturn:
            raise BackendError("this rank cannot")

        backend_of(comms[1]).window = window  # type: ignore[method-assign]
        results = await asyncio.gather(*(comm.window(8, timeout=1) for comm in comms), return_exceptions=True)
        assert [str(result) for result in results] == ["window 0 was not made within 1 s", "this rank cannot"]
        del results
        await until(freed)
        await asyncio.gather(*(comm.barrier() for comm in comms))


async def test_an_exception_closes_a_window_with_a_put_that_waits(world: World) -> None:
    async with world(2) as comms:
        windows = await asyncio.gather(*(comm.window(64) for comm in comms))
        device, gate, user = backend_of(comms[0]).device, threading.Event(), SimulatedStream()
        user.put(lambda: gate.wait(LIMIT))
        monkey, device.user = device.user, user  # type: ignore[assignment]
        with pytest.raises(KeyError):
            async with windows[0] as window:
                works = [window.put(torch.ones(1), 1), window.signal(1)]
                device.user = monkey
                raise KeyError
        gate.set()
        for work in works:
            with pytest.raises(ClosedError, match="window 0 of comm 'test' is closed"):
                await asyncio.wait_for(work, 30)
        await asyncio.gather(*(comm.barrier() for comm in comms))
