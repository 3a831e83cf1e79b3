"""The NCCL backend on a simulated GPU: the conformance suite, and what it asks of NCCL and of streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, Comm, MemoryStore, new_comm
from asynccomm.backends.base import BackendContext
from asynccomm.backends.nccl.platform import Platform
from asynccomm.errors import BackendError, BrokenError, CollectiveTimeoutError
from asynccomm.testing import check_backend

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


async def conform(size: int, only: list[str] | None = None) -> None:
    store = MemoryStore()

    async def one(rank: int) -> None:
        await check_backend(
            lambda name: new_comm(
                "simulated", name=name, store=store, rank=rank, size=size, hints={"side": "loopback"}
            ),
            only=only,
        )

    async with asyncio.TaskGroup() as group:
        for rank in range(size):
            group.create_task(one(rank))
    assert not SimulatedNccl.comms


@pytest.mark.parametrize("size", [1, 3])
async def test_conformance(size: int) -> None:
    await conform(size)


async def test_conformance_without_calls_that_older_libraries_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedBackend, "settings", {"native": ()})
    checks = [
        "every_dtype_in_every_form",
        "scatter_and_gather_every_root",
        "all_to_all_of_lists",
        "all_to_all_in_place",
    ]
    await conform(3, [*checks, "gather_in_place_at_the_root", "scatter_in_place_at_the_root"])


# -- groups and streams --------------------------------------------------------------------------------------------


async def test_several_tensors_are_one_group(world: World) -> None:
    async with world(2) as comms:
        nccls = [backend_of(comm).nccl for comm in comms]
        for nccl in nccls:
            nccl.calls.clear()
        tensors = [[torch.full((n,), float(n)) for n in (1, 2, 3)] for _ in comms]
        await asyncio.gather(*(c.all_reduce_coalesced(t) for c, t in zip(comms, tensors, strict=True)))
        assert [t.tolist() for t in tensors[0]] == [[2.0], [4.0, 4.0], [6.0, 6.0, 6.0]]
        for nccl in nccls:
            assert nccl.calls == ["[", "all_reduce", "all_reduce", "all_reduce", "]"]


async def test_only_the_first_of_a_kind_goes_through_a_thread(world: World) -> None:
    async with world(2) as comms:
        backends = [backend_of(comm) for comm in comms]
        first = [comm.all_reduce(torch.ones(4)) for comm in comms]
        await asyncio.gather(*first)
        await until(lambda: not any(backend._waiting for backend in backends))
        work = comms[0].all_reduce(torch.ones(4))
        assert work.order is not None
        assert work.order.issued, "it was not issued in the call"
        comms[1].all_reduce(torch.ones(4))
        await work
        assert work.order.issued


async def test_calls_behind_one_that_waits_for_peers_keep_their_order(world: World) -> None:
    async with world(2) as comms:
        tensors = [torch.full((4,), float(i)) for i in range(5)]
        works = [comms[0].all_reduce(tensor) for tensor in tensors]  # the first waits in NCCL for rank 1
        backend = backend_of(comms[0])
        await until(lambda: backend.nccl.calls.count("]") == 1)
        assert backend._waiting == 5
        others = [comms[1].all_reduce(torch.full((4,), 10.0 * i)) for i in range(5)]
        for i, (work, other) in enumerate(zip(works, others, strict=True)):
            assert (await work).tolist() == (await other).tolist() == [11.0 * i] * 4


async def test_the_host_is_not_held_up_by_a_rank_that_is_late_to_connect(world: World) -> None:
    async with world(2) as comms:
        work = comms[0].all_reduce(torch.ones(4))  # returns although NCCL waits for rank 1
        assert not work.done()
        beside = asyncio.gather(comms[0].send_object("x", 1), comms[1].recv_object(0))
        await beside
        comms[1].all_reduce(torch.ones(4))
        await work


async def test_wait_orders_and_ordered_suspends_until_it_can(world: World) -> None:
    async with world(2) as comms:
        tensor = torch.ones(4)
        work = comms[0].all_reduce(tensor)
        ordered = asyncio.create_task(work.ordered())
        await asyncio.sleep(0)
        assert not ordered.done()
        comms[1].all_reduce(torch.ones(4))
        assert await ordered is tensor
        assert tensor.tolist() == [2.0] * 4
        assert work.wait() is tensor  # on the loop's thread: the host does not wait


async def test_a_barrier_comes_after_what_this_rank_has_called(world: World) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        stream = backend_of(comms[0])._communicator.stream
        assert isinstance(stream, SimulatedStream)
        held = threading.Event()
        stream.put(held.wait)
        work = comms[0].all_reduce(torch.ones(4))
        barriers = [comm.barrier() for comm in comms]
        comms[1].all_reduce(torch.ones(4))
        await barriers[1]  # rank 1 had nothing in flight when it called
        assert not barriers[0].done()
        held.set()
        await barriers[0]
        assert work.done()


async def test_objects_and_barriers_need_no_nccl(world: World) -> None:
    async with world(2, hints={"connect": "lazy"}) as comms:
        nccls = [backend_of(comm).nccl for comm in comms]
        await asyncio.gather(*(comm.barrier() for comm in comms))
        await asyncio.gather(*(comm.broadcast_object(list(range(5)), 0) for comm in comms))
        assert [nccl.calls for nccl in nccls] == [[], []]
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        assert [nccl.calls for nccl in nccls] == [["init", "[", "all_reduce", "]"]] * 2


async def test_hints_become_the_configuration(world: World) -> None:
    hints = {"max_ctas": "4", "min_ctas": "2", "net_name": "Socket"}
    async with world(2, hints=hints) as comms:
        (config,) = backend_of(comms[1]).nccl.configs
        assert (config.min_ctas, config.max_ctas, config.net_name, config.name) == (2, 4, "Socket", "test")
        assert config.blocking


async def test_communicators_that_do_not_block(world: World) -> None:
    async with world(2, hints={"blocking": "0"}) as comms:
        assert not backend_of(comms[0]).nccl.configs[0].blocking
        for i in range(5):  # never in the call: NCCL's own thread launches
            works = [comm.all_reduce(torch.full((4,), float(i))) for comm in comms]
            assert [(await work).tolist() for work in works] == [[2.0 * i] * 4] * 2


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"max_ctas": "many"}, "'max_ctas' must be a number, got 'many'"),
        ({"blocking": "no"}, "'blocking' must be 0 or 1, got 'no'"),
        ({"connect": "soon"}, "'connect' must be eager or lazy, got 'soon'"),
        ({"side": "nothing"}, "'side' must name a backend for the CPU"),
    ],
)
def test_wrong_hints(hints: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_comm("simulated", store=MemoryStore(), rank=0, size=1, hints=hints)


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


# -- graphs --------------------------------------------------------------------------------------------------------


async def test_what_is_captured_runs_on_the_captured_stream(world: World) -> None:
    async with world(2) as comms:
        backends = [backend_of(comm) for comm in comms]
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        await until(lambda: not any(backend._waiting for backend in backends))
        tensors = [torch.ones(4) for _ in comms]
        works = []
        for comm, backend, tensor in zip(comms, backends, tensors, strict=True):
            backend.device.capture = SimulatedStream()
            works.append(comm.all_reduce(tensor))
            for refused in (comm.barrier, lambda comm=comm: comm.broadcast_object(1, 0)):
                with pytest.raises(RuntimeError, match="cannot become part of a CUDA graph"):
                    refused()
        for backend in backends:
            captured, backend.device.capture = backend.device.capture, None
            assert captured is not None
            done = captured.record()
            await until(done.passed.is_set)
        assert [tensor.tolist() for tensor in tensors] == [[2.0] * 4] * 2
        with pytest.raises(RuntimeError, match="part of a CUDA graph"):
            await works[0]
        with pytest.raises(RuntimeError, match="part of a CUDA graph"):
            works[0].result()
        assert works[0].wait() is tensors[0]
        assert comms[0].statistics().in_flight == 0  # nothing is due, and closing waits for nothing


async def test_batches_of_messages_can_be_captured(world: World) -> None:
    async with world(2) as comms:
        backends = [backend_of(comm) for comm in comms]
        outputs = [torch.zeros(3) for _ in comms]
        works = []
        threads = []
        for comm, backend, output in zip(comms, backends, outputs, strict=True):
            backend.device.capture = SimulatedStream()
            batch = comm.batch_op_create()
            batch.send(torch.full((3,), comm.rank + 1.0), 1 - comm.rank)
            batch.recv(output, 1 - comm.rank)
            threads.append(asyncio.to_thread(lambda batch=batch: works.append(batch.issue())))  # NCCL connects
        await asyncio.gather(*threads)
        for backend in backends:
            captured, backend.device.capture = backend.device.capture, None
            assert captured is not None
            await until(captured.record().passed.is_set)
        assert [output.tolist() for output in outputs] == [[2.0] * 3, [1.0] * 3]
        for work in works:
            with pytest.raises(RuntimeError, match="part of a CUDA graph"):
                await work


async def test_nothing_is_captured_before_nccl_has_connected(world: World) -> None:
    async with world(1, hints={"connect": "lazy"}) as (comm,):
        device = backend_of(comm).device
        device.capture = SimulatedStream()
        with pytest.raises(RuntimeError, match="NCCL is not connected yet"):
            comm.all_reduce(torch.ones(4))
        device.capture = None
        assert (await comm.all_reduce(torch.ones(4))).tolist() == [1.0] * 4


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


async def test_a_call_that_nccl_refuses_breaks_the_comm(world: World) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        backend_of(comms[0]).nccl.fail["all_reduce"] = "NCCL could not all_reduce: unhandled cuda error"
        works = [comm.all_reduce_coalesced([torch.ones(4), torch.ones(3)]) for comm in comms]
        for work in works:
            with pytest.raises(BrokenError, match="unhandled cuda error"):
                await work


async def test_a_step_that_torch_refuses_breaks_the_comm(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        stream = backend_of(comms[0])._communicator.stream

        def run(step: Callable[[], object]) -> None:
            raise torch.OutOfMemoryError("no memory is left")

        monkeypatch.setattr(stream, "run", run)
        strided = [torch.ones(4, 2)[:, 0] for _ in comms]  # is to be copied
        works = [comm.all_reduce(tensor) for comm, tensor in zip(comms, strided, strict=True)]
        for work in works:
            with pytest.raises(BrokenError, match=r"could not start all_reduce.*no memory is left"):
                await work


async def test_a_message_to_oneself_alone_cannot_be_captured(world: World) -> None:
    async with world(1) as (comm,):
        await comm.all_reduce(torch.ones(4))
        backend = backend_of(comm)
        await until(lambda: not backend._waiting)
        backend.device.capture = SimulatedStream()
        with pytest.raises(RuntimeError, match="to oneself can be captured in a batch only"):
            comm.send(torch.ones(1), 0)
        backend.device.capture = None


async def test_an_error_that_comes_later_is_seen_while_something_hangs(world: World) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        backend = backend_of(comms[0])
        work = comms[0].all_reduce(torch.ones(4))  # rank 1 does not come
        handle = backend._communicator._handle
        assert handle is not None
        handle.error = "NCCL could not go on: remote process exited or there was a network error"  # type: ignore[attr-defined]
        with pytest.raises(BackendError, match="network error"):
            await work
        with pytest.raises(BrokenError):
            await comms[1].recv(torch.ones(4), 0)


async def test_a_rank_without_a_gpu_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimulatedBackend._platform_for

    def on_rank(context: BackendContext) -> Platform:
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


async def test_connecting_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    nccls: list[SimulatedNccl] = []

    def platform(context: BackendContext) -> Platform:
        nccls.append(SimulatedNccl())
        return Platform(nccls[-1], SimulatedDevice())

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
