"""Rare interleavings and hostile surroundings, each made to happen. On real processes."""

import asyncio
import gc
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asynccomm import AsyncCommError, Comm, ReduceOp, new_comm
from asynccomm.core import outcome
from tests.waiting import until


def engine_of(comm: Comm) -> Any:
    backend: Any = comm._session.backend
    return backend._engine


class Interrupted:
    """The words of a segment, for a rank that loses its core right after it has seen who is asleep."""

    def __init__(self, words: memoryview, at: int, seconds: float) -> None:
        self._words, self._at, self._seconds = words, at, seconds

    def __getitem__(self, i: int) -> int:
        value = self._words[i]
        if i == self._at and value and self._seconds:
            seconds, self._seconds = self._seconds, 0.0
            time.sleep(seconds)
        return value

    def __setitem__(self, i: int, value: int) -> None:
        self._words[i] = value


@pytest.mark.ranks(2, backend="shm")
async def test_a_late_ring_does_not_silence_another_bell(comm: Comm) -> None:
    """Rank 0 sees bell LOOP and is preempted; rank 1 goes to sleep anew, on bell WORKER; rank 0 clears that."""
    async with new_comm("shm", name="quiet", timeout=20, hints={"spin_us": "0"}) as quiet:
        await quiet.barrier()
        if comm.rank == 0:
            await asyncio.sleep(0.2)
            bells = engine_of(quiet)._bells
            bells._words = Interrupted(bells._words, bells._others[1][0][0], 0.8)
            await quiet.send(torch.ones(1), 1, 2)
            await quiet.send(torch.ones(1), 1, 1)
            await asyncio.sleep(4)
        else:
            work, other = quiet.recv(torch.zeros(1), 0, 1), quiet.recv(torch.zeros(1), 0, 2)
            await asyncio.sleep(0.5)  # asleep on the loop's bell; rank 0 has seen that
            seen: list[str] = []

            def wait() -> None:
                try:
                    work.wait(timeout=3)
                    seen.append("done")
                except TimeoutError:
                    seen.append("lost")

            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()  # blocks the loop: only the worker can hear
            assert seen == ["done"]
            await other
        await comm.barrier()


@pytest.mark.ranks(2, backend="shm")
async def test_an_operation_submitted_while_the_worker_goes_to_sleep_is_seen(comm: Comm) -> None:
    if comm.rank == 0:
        engine = engine_of(comm)
        work = comm.recv(torch.zeros(1), 1, 1)
        messages, progress = engine._messages, engine._messages.progress
        within, go_on, once = threading.Event(), threading.Event(), [True]

        def interrupted(*arguments: float) -> bool:
            moved: bool = progress(*arguments)
            if once and engine._dozing and threading.current_thread().name == "asynccomm shm":
                once.clear()
                within.set()  # the worker loses the interpreter's lock here, in doze(), with the inbox seen empty
                go_on.wait(5)
            return moved

        messages.progress = interrupted
        thread = threading.Thread(target=work.wait)
        thread.start()
        while not within.is_set():
            await asyncio.sleep(0.001)
        small = comm.all_reduce(torch.ones(1))
        await asyncio.sleep(0.02)  # _arm has run, too
        go_on.set()
        async with asyncio.timeout(3):
            await small
        await asyncio.to_thread(thread.join)
    else:
        await comm.all_reduce(torch.ones(1))
        await comm.send(torch.ones(1), 0, 1)


@pytest.mark.ranks(2, backend="shm")
@pytest.mark.parametrize("cause", ["mismatch", "abort", "timeout", "close"])
async def test_a_blocked_caller_hears_of_errors_without_the_loop(comm: Comm, cause: str) -> None:
    other = await new_comm("shm", name="other", timeout=1)
    await other.barrier()
    if comm.rank == 0:
        seen: list[BaseException] = []

        def wait() -> None:
            try:
                other.all_reduce(torch.ones(4)).wait(timeout=5)
            except Exception as exc:
                seen.append(exc)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()  # blocks the loop
        assert type(seen[0]) is not TimeoutError
    elif cause == "mismatch":
        await asyncio.sleep(0.1)
        assert (await asyncio.gather(other.all_reduce(torch.ones(5)), return_exceptions=True))[0] is not None
    elif cause == "abort":
        await asyncio.sleep(0.1)
        other.abort("enough")
    elif cause == "close":
        await other.aclose()
    await comm.barrier()
    other.abort("over")
    await other.aclose()


@pytest.mark.ranks(2, backend="shm")
async def test_tensors_made_in_inference_mode(comm: Comm) -> None:
    with torch.inference_mode():
        tensor, half, part = torch.ones(4), torch.ones(4, dtype=torch.half), torch.zeros(1 << 19)
    assert (await comm.all_reduce(tensor)).eq(2).all()
    assert (await comm.all_reduce(half, ReduceOp.AVG)).eq(1).all()
    with torch.inference_mode():  # the worker has a mode of its own
        assert (await comm.reduce_scatter_single(part, torch.ones(1 << 20))).eq(2).all()


@pytest.mark.ranks(2, backend="shm")
async def test_default_device_is_not_ours(comm: Comm) -> None:
    """SIGSEGV: a tensor to land in is made on the default device, and its address taken."""
    tensor = torch.full((4, 4), float(comm.rank + 1)).t()
    with torch.device("meta"):
        await comm.broadcast(tensor, 0)
    assert tensor.eq(1).all()


@pytest.mark.ranks(2, backend="shm")
async def test_data_swapped_while_in_flight(comm: Comm) -> None:
    """SIGSEGV: ``param.data = ...`` frees the memory that the operation writes to by address."""
    param = torch.nn.Parameter(torch.ones(16 << 20))
    await comm.barrier()
    if comm.rank == 1:
        await asyncio.sleep(0.2)
    work = comm.broadcast(param, 1)
    if comm.rank == 0:
        await asyncio.sleep(0.05)
        param.data = torch.zeros(1)
    await work
    await comm.barrier()


@pytest.mark.ranks(2, backend="shm")
async def test_different_collectives_that_wait_for_nobody_are_told_apart(comm: Comm) -> None:
    async with new_comm("shm", name="apart", timeout=5) as apart:
        with pytest.raises(AsyncCommError):
            await (apart.broadcast(torch.ones(4), 0) if comm.rank == 0 else apart.reduce(torch.ones(4), 0))
            for _ in range(8):
                await apart.barrier()


@pytest.mark.ranks(2, backend="shm")
async def test_a_dropped_comm_leaves_no_descriptors(comm: Comm) -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    def let_go() -> bool:
        gc.collect()
        return engine() is None and held() <= before

    gc.collect()
    before = held()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for i in range(4):
            dropped = await new_comm("shm", name=f"dropped {i}", timeout=10)
            await dropped.barrier()
            engine = weakref.ref(engine_of(dropped))
            await comm.barrier()
            del dropped
            await until(let_go)


@pytest.mark.ranks(2, backend="shm")
async def test_a_closed_comm_needs_no_garbage_collection(comm: Comm) -> None:
    def segments() -> int:
        with open("/proc/self/maps") as file:
            return sum("asynccomm" in line for line in file)

    gc.collect()
    before = segments()
    gc.disable()
    try:
        for i in range(3):
            async with new_comm("shm", name=f"closed {i}", timeout=10) as closed:
                await closed.barrier()
                del closed
        await until(lambda: segments() <= before)
    finally:
        gc.enable()


@pytest.mark.ranks(2, backend="shm")
async def test_ready_sees_what_settles_meanwhile(comm: Comm) -> None:
    async with new_comm("shm", name="ready", timeout=10, max_ops=2) as few:
        if comm.rank == 0:
            first, second = few.recv(torch.zeros(1), 1, 1), few.recv(torch.zeros(1), 1, 2)
            in_flight: Any = few._session.in_flight
            crowded, calls = in_flight._crowded, itertools.count()

            def interrupted() -> Any:
                now = crowded()
                if next(calls) == 1:  # the last call before the waiter is registered
                    thread = threading.Thread(target=first.wait)
                    thread.start()
                    thread.join()
                return now

            in_flight._crowded = interrupted
            async with asyncio.timeout(3):
                await few.ready()
            assert next(calls) > 2
            await few.send(torch.zeros(1), 1, 3)
            await second
        else:
            await asyncio.sleep(0.3)
            await few.send(torch.zeros(1), 0, 1)
            await few.recv(torch.zeros(1), 0, 3)
            await few.send(torch.zeros(1), 0, 2)


class Interruption(BaseException):
    """As a signal handler may raise it, KeyboardInterrupt for one."""


@pytest.mark.ranks(2, backend="shm")
async def test_an_interrupted_step_does_not_pass_for_a_finished_operation(comm: Comm) -> None:
    """The generator is gone with the exception, and an exhausted one looks like one that is done."""
    async with new_comm("shm", name="broken", timeout=3) as broken:
        await broken.barrier()
        tensor = torch.ones(4)
        if comm.rank == 0:
            work = broken.all_reduce(tensor)  # waits for rank 1
            engine = engine_of(broken)

            def interrupted() -> Iterator[bool]:
                raise Interruption
                yield

            engine._current = interrupted()
            with pytest.raises(Interruption):
                engine._drive()
            engine._drive()
            assert not (work.done() and work.exception() is None), f"done with {tensor}"
        await comm.barrier()
        broken.abort("over")
        if comm.rank == 0:
            assert isinstance(work.exception(), AsyncCommError)


@pytest.mark.ranks(2, backend="shm")
async def test_an_error_handler_that_fails_does_not_end_the_worker(comm: Comm) -> None:
    """``threading.Timer`` cannot start at the limit of threads; all other comms of the process would hang."""
    if comm.rank == 0:
        async with new_comm("shm", name="solo", size=1, rank=0, timeout=5) as solo:
            engine = engine_of(comm)
            original = engine._on_error

            def fails(_: object) -> None:
                engine._on_error = original
                raise RuntimeError("can't start new thread")

            engine._on_error = fails
            worker = engine._worker
            here, there = os.pipe()
            worker.watch(here, lambda: engine.ended(1))
            os.close(there)
            await asyncio.sleep(0.3)
            os.close(here)
            assert any(thread.name == "asynccomm shm" for thread in threading.enumerate())
            await solo.all_reduce(torch.ones(1 << 20))
    else:
        await asyncio.sleep(0.5)


def test_a_fork_within_settle_leaves_the_child_able_to_settle() -> None:
    held, go_on = threading.Event(), threading.Event()

    def settle() -> None:  # as the worker does; here it loses the interpreter's lock
        with outcome.deciding:
            held.set()
            go_on.wait(5)

    thread = threading.Thread(target=settle)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if outcome.deciding.acquire(timeout=1) else 1)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
