"""The comm as users see it: numbers, threads, loops, names, back-pressure."""

import asyncio
import gc
import threading
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from asynccomm import (
    AbortedError,
    Comm,
    MemoryStore,
    ReduceOp,
    new_comm,
)
from asynccomm.backends.loopback import Hub, LoopbackBackend
from asynccomm.comm.comm import reason_of
from asynccomm.testing.local import loopback_world


def hub_of(comm: Comm) -> Hub:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, LoopbackBackend)
    return backend.hub


async def test_the_properties_of_a_comm() -> None:
    async with loopback_world(3, timeout=7.5, max_ops=5, max_bytes=1000) as comms:
        for rank, comm in enumerate(comms):
            assert (comm.rank, comm.size, comm.name, comm.backend) == (rank, 3, "test", "loopback")
            assert comm.device == torch.device("cpu")
            assert comm.options.timeout == 7.5
            assert comm.options.max_ops == 5
            assert comm.loop is asyncio.get_running_loop()
            assert f"rank {rank} of 3" in repr(comm)


async def test_a_call_sends_before_anybody_awaits() -> None:
    async with loopback_world(2) as (a, b):
        tensor = torch.ones(3)
        work = a.all_reduce(tensor)
        b.all_reduce(torch.ones(3))
        assert work.done(), "the operation must run without an await"
        assert tensor.tolist() == [2, 2, 2]


async def test_collectives_and_messages_are_numbered_apart() -> None:
    async with loopback_world(1) as (comm,):
        assert [comm.barrier().seq, comm.barrier().seq] == [0, 1]
        assert comm.recv(torch.ones(1), 0).seq == 0
        assert comm.send(torch.ones(1), 0).seq == 1
        assert comm.barrier().seq == 2


async def test_a_receive_names_its_source() -> None:
    async with loopback_world(3) as comms:
        work = comms[0].recv(torch.zeros(2))
        assert work.source is None
        send = comms[2].send(torch.ones(2), 0)
        assert await work is not None
        assert work.source == 2
        assert send.source is None


async def test_a_refused_call_takes_no_number() -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(ValueError, match="root must be in"):
            comm.broadcast(torch.ones(1), 1)
        with pytest.raises(TypeError, match="hints must be a mapping"):
            comm.barrier(hints=["x"])  # type: ignore[arg-type]
        assert comm.barrier(hints={"unknown": "ignored"}).seq == 0


async def test_ready_holds_back_above_the_limits() -> None:
    async with loopback_world(2, max_ops=3, max_bytes=1000) as (a, b):
        for _ in range(3):
            a.barrier()
        waiting = asyncio.ensure_future(a.ready())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        assert a.statistics().in_flight == 3
        b.barrier()
        await waiting
        b.barrier()
        b.barrier()
        big = a.all_reduce(torch.ones(1000))
        assert a.statistics().bytes_in_flight == 4000
        waiting = asyncio.ensure_future(a.ready())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        b.all_reduce(torch.ones(1000))
        await waiting
        assert big.done()
        assert a.statistics()[:3] == (4, 0, 0)


async def test_ready_raises_when_the_comm_breaks() -> None:
    async with loopback_world(2, max_ops=1) as (a, b):
        a.barrier()
        waiting = asyncio.ensure_future(a.ready())
        await asyncio.sleep(0)
        b.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            await waiting


@pytest.mark.parametrize("reason", [b"enough", ZeroDivisionError("enough"), None])
async def test_a_reason_to_abort_is_a_text(reason: Any) -> None:
    async with loopback_world(2) as (a, b):
        work = a.barrier()
        with pytest.raises(TypeError, match="reason must be a str, got") as caught:
            a.abort(reason)
        assert repr(reason) in str(caught.value)
        assert not work.done()
        await b.barrier()
        await work


async def test_a_foreign_loop_is_refused() -> None:
    async with loopback_world(1) as (comm,):

        async def elsewhere() -> None:
            comm.barrier()

        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, elsewhere())


async def test_threads_may_call_and_order_is_kept() -> None:
    async with loopback_world(1) as (comm,):
        seen: list[int] = []

        def calls() -> None:
            seen.extend(comm.all_reduce(torch.ones(2)).seq for _ in range(200))

        threads = [threading.Thread(target=calls) for _ in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        assert sorted(seen) == list(range(800))


async def test_a_factor_is_read_when_the_operation_is_called() -> None:
    async with loopback_world(2) as (a, b):
        factor, tensor = torch.tensor(2.0), torch.ones(1)
        work = a.all_reduce(tensor, ReduceOp.PREMUL_SUM(factor))
        factor.fill_(100)
        b.all_reduce(torch.ones(1), ReduceOp.PREMUL_SUM(1))
        assert (await work).item() == 3


async def test_names_are_unique_among_open_comms() -> None:
    store = MemoryStore()
    async with await new_comm("loopback", name="t", store=store, rank=0, size=1):
        gc.collect()
        with pytest.raises(ValueError, match="name 't' is in use"):
            await new_comm("loopback", name="t", store=store, rank=0, size=1)
    async with new_comm("loopback", name="t", store=store, rank=0, size=1) as comm:
        await comm.barrier()


async def test_two_comms_share_a_loop() -> None:
    store = MemoryStore()
    async with AsyncExitStack() as stack:
        comms = [
            await stack.enter_async_context(new_comm("loopback", name=name, store=store, rank=0, size=1))
            for name in ("first", "second")
        ]
        tensor = torch.ones(1)
        for comm in comms * 3:
            await comm.all_reduce(tensor)


def test_two_loops_in_two_threads() -> None:
    def own_world() -> None:
        async def main() -> None:
            async with loopback_world(2) as (a, b):
                await asyncio.gather(a.barrier(), b.barrier())

        asyncio.run(main())

    threads = [threading.Thread(target=own_world) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def test_there_are_no_graphs_on_the_cpu() -> None:
    """Capturing, as far as that can be shown without a GPU; tests/gpu has the rest."""
    async with loopback_world(1) as (comm,):
        with pytest.raises(RuntimeError, match="needs a GPU, but comm 'test' is on cpu"), comm.graph_capture():
            pass


# -- the reason that other ranks get


@pytest.mark.ranks(2)
async def test_the_reason_is_the_errors_of_a_group(comm: Comm) -> None:
    await comm.barrier()  # rank 1 does not fail while rank 0 connects
    with pytest.raises((ExceptionGroup, AbortedError)) as failed:
        async with comm, asyncio.TaskGroup() as tasks:
            work = comm.barrier() if comm.rank == 0 else None
            tasks.create_task(fail(comm.rank))
            if work is not None:
                await work
    if comm.rank == 0:
        (error,) = failed.value.exceptions if isinstance(failed.value, ExceptionGroup) else (failed.value,)
        assert str(error) == "aborted by rank 1: ValueError: no such file; KeyError: 'step'"


async def fail(rank: int) -> None:
    if rank == 1:
        inner = ExceptionGroup("inner", [ValueError("no such file"), KeyError("step")])
        raise ExceptionGroup("outer", [inner, ValueError("no such file")])


class Unreadable(Exception):
    def __str__(self) -> str:
        raise TypeError("a mistake in an error's text")


@pytest.mark.ranks(2)
async def test_an_error_without_a_text_ends_the_comm_of_all_ranks(comm: Comm) -> None:
    await comm.barrier()  # rank 1 does not fail while rank 0 connects
    with pytest.raises((Unreadable, AbortedError)) as failed:
        async with comm:
            if comm.rank == 1:
                raise Unreadable
            await comm.barrier()
    if comm.rank == 0:
        assert str(failed.value) == "aborted by rank 1: Unreadable: <exception str() failed>"


def test_a_reason_in_words() -> None:
    assert (
        reason_of(BaseExceptionGroup("g", [KeyboardInterrupt(), ValueError("x")])) == "KeyboardInterrupt; ValueError: x"
    )
