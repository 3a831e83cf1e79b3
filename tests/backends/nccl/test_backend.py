"""The NCCL backend on a simulated GPU: the conformance suite, and what it asks of NCCL and of streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pytest
import torch

from asynccomm import AbortedError, Comm, MemoryStore, new_comm
from asynccomm.backends.base import BackendContext
from asynccomm.backends.nccl.shared import DeviceRuntime
from asynccomm.backends.nccl.side_channel import SideChannel
from asynccomm.errors import BackendError, BrokenError, CollectiveTimeoutError
from asynccomm.testing import check_backend
from tests.sampling import exhaustive, some

from ..conformance import IN_ONE_PROCESS, USUAL  # noqa: TID252
from .conftest import World
from .simulation import SimulatedBackend, SimulatedDevice, SimulatedNccl, SimulatedStream


def backend_of(comm: Comm) -> SimulatedBackend:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, SimulatedBackend)
    return backend


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


async def conform(size: int, only: Sequence[str] | None = None, side: str = "loopback") -> None:
    store = MemoryStore()

    async def one(rank: int) -> None:
        await check_backend(
            lambda name: new_comm("simulated", name=name, store=store, rank=rank, size=size, hints={"side": side}),
            only=only,
        )

    async with asyncio.TaskGroup() as group:
        for rank in range(size):
            group.create_task(one(rank))
    assert not SimulatedNccl.comms


@pytest.mark.parametrize("size", some([2, 3, 1], 1))
@pytest.mark.parametrize("part", range(4))  # a slow machine needs minutes for the whole suite
async def test_conformance(size: int, part: int) -> None:
    await conform(size, IN_ONE_PROCESS[part::4])


@pytest.mark.parametrize("side", some(["shm", "gloo"], 1))
async def test_conformance_on_the_side_channels_of_real_ranks(side: str) -> None:
    words = ("message", "send", "recv", "receive", "object", "handle", "uneven", "barrier")
    await conform(2, [name for name in USUAL if any(word in name for word in words)], side)


async def test_conformance_without_calls_that_older_libraries_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedBackend, "settings", {"native": ()})
    checks = [
        "scatter_and_gather_every_root",
        "all_to_all_of_lists",
        "all_to_all_in_place",
        "gather_in_place_at_the_root",
        "scatter_in_place_at_the_root",
    ]
    await conform(3, ["every_dtype_in_every_form", *checks] if exhaustive() else checks)


async def test_objects_and_barriers_need_no_nccl(world: World) -> None:
    async with world(2, hints={"connect": "lazy"}) as comms:
        nccls = [backend_of(comm).nccl for comm in comms]
        await asyncio.gather(*(comm.barrier() for comm in comms))
        await asyncio.gather(*(comm.broadcast_object(list(range(5)), 0) for comm in comms))
        assert [nccl.calls for nccl in nccls] == [[], []]
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        assert [nccl.calls for nccl in nccls] == [["init", "[", "all_reduce", "]"]] * 2


async def test_communicators_that_do_not_block(world: World) -> None:
    async with world(2, hints={"blocking": "0"}) as comms:
        assert not backend_of(comms[0]).nccl.configs[0].blocking
        for i in range(5):  # never in the call: NCCL's own thread launches
            works = [comm.all_reduce(torch.full((4,), float(i))) for comm in comms]
            assert [(await work).tolist() for work in works] == [[2.0 * i] * 4] * 2


async def test_priority(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def new_stream(self: SimulatedDevice, *, high_priority: bool) -> SimulatedStream:
        asked.append(high_priority)
        return SimulatedStream()

    monkeypatch.setattr(SimulatedDevice, "new_stream", new_stream)
    async with world(1, high_priority_stream=True):
        pass
    assert asked
    assert all(asked)
    asked.clear()
    async with world(1):
        pass
    assert not any(asked)


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("connected", [True, False])
async def test_a_rank_that_never_arrives_is_named(world: World, connected: bool) -> None:
    async with world(3, timeout=20) as comms:
        if connected:
            await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        waiting = [comms[rank].all_reduce(torch.ones(4), timeout=0.5) for rank in (0, 2)]
        with pytest.raises(CollectiveTimeoutError) as found:
            await waiting[0]
        assert found.value.missing == (1,)
        with pytest.raises(BrokenError):
            await waiting[1]
        with pytest.raises(BrokenError):
            await comms[1].recv(torch.ones(4), 0)
        nccls = [backend_of_broken(comm).nccl for comm in comms]
        await until(lambda: all("abort" in nccl.calls for nccl in nccls))


def backend_of_broken(comm: Comm) -> SimulatedBackend:
    backend = comm._session.backend
    assert isinstance(backend, SimulatedBackend)
    return backend


async def test_abort_while_a_thread_is_stuck_in_nccl(world: World) -> None:
    async with world(2, timeout=20) as comms:
        work = comms[0].all_reduce(torch.ones(4))
        nccl = backend_of(comms[0]).nccl
        await until(lambda: nccl.calls.count("]") == 1)  # its group_end waits for rank 1
        comms[0].abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            await work
        with pytest.raises(AbortedError, match="enough"):
            await comms[1].recv(torch.ones(4), 0)


async def test_an_error_that_comes_later_is_seen_while_something_hangs(world: World) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        backend = backend_of(comms[0])
        work = comms[0].all_reduce(torch.ones(4))  # rank 1 does not come
        handle = backend._collectives.communicator._shared._handle
        assert handle is not None
        handle.error = "NCCL could not go on: remote process exited or there was a network error"  # type: ignore[attr-defined]
        with pytest.raises(BackendError, match="network error"):
            await work
        with pytest.raises(BrokenError):
            await comms[1].recv(torch.ones(4), 0)


async def test_a_rank_without_a_gpu_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimulatedBackend._platform_for

    def on_rank(context: BackendContext) -> DeviceRuntime:
        if context.group.rank == 1:
            raise BackendError("backend 'nccl' needs a GPU, but there is none")
        return platform(context)

    monkeypatch.setattr(SimulatedBackend, "_platform_for", on_rank)
    store = MemoryStore()
    made = [
        new_comm("simulated", store=store, rank=rank, size=2, hints={"side": "loopback"}, timeout=20)
        for rank in range(2)
    ]

    async def connect(rank: int) -> Comm:
        return await made[rank]

    results: list[Any] = await asyncio.gather(connect(0), connect(1), return_exceptions=True)
    assert isinstance(results[1], BackendError)
    assert "needs a GPU" in str(results[1])
    assert isinstance(results[0], BrokenError)
    assert "needs a GPU" in str(results[0])
    assert not SimulatedNccl.comms


async def test_a_gpu_that_has_no_memory_left_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(device: SimulatedDevice, *, high_priority: bool) -> NoReturn:
        raise RuntimeError("out of memory")

    left: list[str] = []
    leave, close = DeviceRuntime.leave, SideChannel.aclose

    async def closed(side: SideChannel) -> None:
        left.append("side")
        await close(side)

    def gone(platform: DeviceRuntime) -> None:
        left.append("platform")
        leave(platform)

    monkeypatch.setattr(SimulatedDevice, "new_stream", none_left)
    monkeypatch.setattr(SideChannel, "aclose", closed)
    monkeypatch.setattr(DeviceRuntime, "leave", gone)
    with pytest.raises(RuntimeError, match="out of memory"):
        await new_comm("simulated", store=MemoryStore(), rank=0, size=1, hints={"side": "loopback"}, timeout=20)
    assert left == ["side", "platform"]


async def test_connecting_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    nccls: list[SimulatedNccl] = []

    def platform(context: BackendContext) -> DeviceRuntime:
        nccls.append(SimulatedNccl())
        return DeviceRuntime(nccls[-1], SimulatedDevice())

    monkeypatch.setattr(SimulatedBackend, "_platform_for", platform)
    store = MemoryStore()

    async def connect(rank: int, how: str) -> Comm:
        hints = {"side": "loopback", "blocking": "0", "connect": how}
        return await new_comm("simulated", store=store, rank=rank, size=2, hints=hints, timeout=20)

    first = asyncio.create_task(connect(0, "eager"))
    comm = await connect(1, "lazy")  # never joins rank 0 in NCCL
    await until(lambda: any("init" in nccl.calls for nccl in nccls))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(BrokenError):
        await comm.recv(torch.ones(4), 0)
    await comm.aclose()
    await until(lambda: not SimulatedNccl.comms)
    assert all(thread.daemon for thread in threading.enumerate() if "asynccomm-nccl" in thread.name)


async def test_auto_is_nccl_on_gpus_and_says_what_is_missing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(BackendError, match=r"needs a GPU|needs the package nccl4py"):
        await new_comm("auto", "cuda", store=MemoryStore(), rank=0, size=1)
