"""Calls on the loop of another thread, from threads and from other loops."""

from __future__ import annotations

import asyncio
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from asynccomm import ClosedError, NotSentError, WouldBlockError, blocking, new_comm
from asynccomm.blocking.portal import Portal, _Call, awaited, made, run_on, settled
from tests.waiting import lets_others_run, until


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal()
    yield portal
    portal.release()


async def thread_of_loop() -> threading.Thread:
    return threading.current_thread()


async def fail() -> None:
    raise ZeroDivisionError("there")


def test_a_call_runs_on_the_loop_and_blocks(portal: Portal) -> None:
    assert portal.call(thread_of_loop) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError, match="there"):
        portal.call(fail)
    portal.release()
    portal.release()
    with pytest.raises(ClosedError, match="closed"):
        portal.call(thread_of_loop)


def test_an_interrupted_call_is_cancelled(portal: Portal) -> None:
    ended, main = [], threading.get_ident()

    async def forever() -> None:
        try:
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        portal.call(forever)
    assert ended == [True]


def test_a_call_that_has_ended_keeps_nothing(portal: Portal) -> None:
    gate = threading.Event()

    class Kept:
        pass

    async def give(given: Kept) -> Kept:
        asyncio.get_running_loop().call_soon(gate.wait)  # before the callbacks of the task
        return Kept()

    given = Kept()
    try:
        result = portal.call(partial(give, given))
        kept = weakref.ref(given), weakref.ref(result)
        del given, result
        assert [each() for each in kept] == [None, None]
    finally:
        gate.set()


class _Interrupted:
    """A lock: Ctrl-C interrupts the thread right after it has taken it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.release = lock.release

    def acquire(self, timeout: float) -> bool:
        if self._lock.acquire(timeout=timeout):
            raise KeyboardInterrupt
        return False


def test_a_call_that_is_interrupted_as_it_ends_does_not_wait_again(portal: Portal) -> None:
    call = _Call(portal.loop, thread_of_loop)
    call._ended._lock = _Interrupted(call._ended._lock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        call.result()


def test_a_call_is_interrupted_before_its_first_step(portal: Portal) -> None:
    called: list[object] = []

    async def never() -> None:
        called.append("the function")

    class Loop:
        """The loop, whose thread is busy until the calling thread has been interrupted."""

        create_task = staticmethod(portal.loop.create_task)

        def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
            called.append(callback)
            if len(called) == 1:
                raise KeyboardInterrupt
            portal.loop.call_soon_threadsafe(lambda: [each() for each in called.copy()])

    call = _Call(Loop(), never)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        call.result()
    assert called == [call._start, call._cancel]


def test_a_call_is_interrupted_before_it_is_begun(portal: Portal) -> None:
    class Loop:
        @staticmethod
        def call_soon_threadsafe(callback: Callable[[], object]) -> None:
            if callback == call._start:
                raise KeyboardInterrupt
            portal.loop.call_soon_threadsafe(callback)

    call = _Call(Loop(), thread_of_loop)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        call.result()


async def test_a_thread_with_a_loop_does_not_block(portal: Portal) -> None:
    with pytest.raises(WouldBlockError):
        run_on(portal.loop, thread_of_loop)
    assert await made(portal.loop, thread_of_loop) is not threading.current_thread()
    assert await made(asyncio.get_running_loop(), thread_of_loop) is threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await made(portal.loop, fail)


async def test_a_call_on_another_loop_can_be_cancelled(portal: Portal) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def forever() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.ensure_future(made(portal.loop, forever))
    await until(begun.is_set)
    task.cancel()
    await until(ended.is_set)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_works_of_another_loop_are_awaited() -> None:
    comm = await asyncio.to_thread(lambda: blocking.new_comm(alone=True))
    receive = comm.comm
    with pytest.raises(RuntimeError, match="another event loop"):
        receive.barrier()
    tensor = torch.zeros(1)
    work = await asyncio.to_thread(lambda: comm.recv(tensor, 0))
    waiting = asyncio.ensure_future(awaited(work))
    cancelled = asyncio.ensure_future(awaited(work))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.to_thread(lambda: comm.send(torch.ones(1), 0).wait())
    assert (await waiting).item() == 1
    assert (await settled(work)).item() == 1
    assert (await asyncio.to_thread(settled, work)).item() == 1
    assert await lets_others_run(lambda: awaited(work))
    lost = await asyncio.to_thread(lambda: comm.recv(tensor, 0))
    comm.abort("enough")
    with pytest.raises(Exception, match="enough"):
        await awaited(lost)
    await asyncio.to_thread(comm.close)


async def test_works_of_this_loop_are_awaited_as_ever() -> None:
    async with new_comm(alone=True) as comm:
        assert (await settled(comm.all_reduce(torch.ones(1)))).item() == 1
        with pytest.raises(ZeroDivisionError), comm.coalesce():
            held = comm.barrier()
            raise ZeroDivisionError
        with pytest.raises(NotSentError):
            await settled(held)
