"""The state of a Work, and the counts, log, lock and streak of a comm: alike in Python and in C."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from asynccomm.core import python_state
from asynccomm.core.native import CoreUnavailable, load
from asynccomm.core.python_state import STREAK_AWAITS, STREAK_SECONDS

IN_C = load("asynccomm.core._work")


@pytest.fixture(params=["python", "C"])
def state(request: pytest.FixtureRequest) -> Any:
    """The module under test."""
    if request.param == "python":
        return python_state
    if isinstance(IN_C, CoreUnavailable):
        pytest.skip(IN_C.reason)
    return IN_C


def pass_time(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_the_clock_starts_with_the_streak(state: Any) -> None:
    streak = state.Streak()
    pass_time(1.1 * STREAK_SECONDS)
    assert not streak.should_yield()
    pass_time(1.1 * STREAK_SECONDS)
    assert streak.should_yield()


def test_a_streak_has_a_length(state: Any) -> None:
    def longest() -> int:
        streak = state.Streak()
        awaits = 1
        while not streak.should_yield():
            awaits += 1
        return awaits

    assert max(longest() for _ in range(1000)) == STREAK_AWAITS  # shorter where the process lost its core for 1 ms


def test_suspending_ends_the_streak(state: Any) -> None:
    for _ in range(1000):
        streak = state.Streak()
        start = time.monotonic()
        for _ in range(STREAK_AWAITS - 1):
            streak.should_yield()
        streak.reset_streak()
        answer = streak.should_yield()
        if time.monotonic() - start < STREAK_SECONDS:
            assert not answer
            return
    raise AssertionError("the process lost its core in each of 1000 rounds")


def test_counts_begin_at_zero(state: Any) -> None:
    counts = state.CallCounts()
    assert (counts.collectives, counts.messages, counts.submitted, counts.detours, counts.closed) == (0, 0, 0, 0, False)
    counts.limit = 3
    counts.closed = True
    counts.collectives += 2**40
    assert (counts.limit, counts.closed, counts.collectives) == (3.0, True, 2**40)


class Held:
    """An object that can be watched."""


def stated(state: Any) -> Any:
    """A subclass of WorkState as ``Work`` is."""

    class Stated(state.WorkState):
        __slots__ = ("__weakref__",)

        def _wait(self) -> Generator[Any, None, Any]:
            yield "waits"
            return "waited"

        def _report_unretrieved(self) -> None:
            reports.append(self._error)

    reports: list[Any] = []
    Stated.reports = reports
    return Stated


def test_a_pending_state_has_defaults(state: Any) -> None:
    work = stated(state)()
    assert not work._done
    assert not work.captured
    for name in ("finished", "source", "site", "order", "driver", "_error", "_finish", "_on_settled", "_traceback"):
        assert getattr(work, name) is None, name
    lists = [work._waiters, work._listeners, work._callbacks]
    assert lists == [[], [], []]
    work._waiters.append(1)
    assert work._waiters == [1]
    assert work._listeners == []
    work.finished = 3.5
    assert work.finished == 3.5
    work.finished = None
    assert work.finished is None


def test_an_unfinished_state_waits_by_its_method(state: Any) -> None:
    waiting = stated(state)().__await__()
    assert next(waiting) == "waits"
    with pytest.raises(StopIteration) as stop:
        next(waiting)
    assert stop.value.value == "waited"


def test_cycles_are_collected(state: Any) -> None:
    class Loop:
        pass

    work, held, streak = stated(state)(), Held(), state.Streak()
    loop = Loop()
    loop.streak = streak  # type: ignore[attr-defined]
    streak.loop = loop
    work._value, work._callbacks = [work, held], [streak]
    gone = [weakref.ref(held), weakref.ref(work), weakref.ref(loop)]
    del work, held, streak, loop
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_an_error_is_reported_when_the_state_ends(state: Any) -> None:
    kind = stated(state)
    work = kind()
    del work
    assert kind.reports == []
    work = kind()
    work._error = error = OSError("lost")
    del work
    assert kind.reports == [error]


def delegated(work: Any) -> Generator[Any, None, Any]:
    return (yield from work.__await__())


async def test_a_finished_state_is_awaited_without_the_method() -> None:
    if isinstance(IN_C, CoreUnavailable):
        pytest.skip(IN_C.reason)
    streak = IN_C.Streak()
    streak.loop = asyncio.get_running_loop()

    for value in (None, 3, (1, 2), StopIteration(5), ValueError("a value"), [1]):
        work = stated(IN_C)()
        work._mailbox, work._value, work._done = streak, value, True
        streak.reset_streak()
        assert await work is value
        streak.reset_streak()
        assert await asyncio.ensure_future(work) is value
        streak.reset_streak()

        with pytest.raises(StopIteration) as stop:
            next(delegated(work))
        assert stop.value.value is value
    for name, unusual in (("_error", OSError()), ("_finish", print), ("captured", True), ("_done", False)):
        work = stated(IN_C)()
        work._mailbox, work._value, work._done = streak, 3, True
        setattr(work, name, unusual)
        assert next(work.__await__()) == "waits", name
    work = stated(IN_C)()
    work._mailbox, work._done = IN_C.Streak(), True  # of no loop
    assert next(work.__await__()) == "waits"


def test_the_owner_of_a_lock_takes_it_again(state: Any) -> None:
    lock = state.ReentrantLock()

    def is_free() -> bool:
        """Whether another thread gets the lock."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: lock.acquire(False) and lock.release() is None).result()

    with lock:
        assert lock.acquire()
        assert lock.acquire(blocking=False)
        lock.release()
        assert not is_free()
        lock.release()
        assert not is_free()
    assert is_free()
    with pytest.raises(RuntimeError):
        lock.release()


def test_a_lock_is_released_by_its_owner_only(state: Any) -> None:
    lock = state.ReentrantLock()
    with lock, ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError):
        pool.submit(lock.release).result()


def test_threads_wait_for_a_lock(state: Any) -> None:
    lock, counter = state.ReentrantLock(), [0]

    def add() -> None:
        for _ in range(200):
            with lock:
                before = counter[0]
                os.sched_yield()
                counter[0] = before + 1

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(add) for _ in range(4)]:
            done.result()
    assert counter == [800]


def test_a_signal_interrupts_the_wait_for_a_lock(state: Any) -> None:
    lock, main = state.ReentrantLock(), threading.get_ident()
    held, over = threading.Event(), threading.Event()
    signals = sent = 0

    def handle(*_: object) -> None:
        nonlocal signals
        if signals < sent:
            signals += 1
            if signals == 3:
                raise InterruptedError

    def hold() -> None:
        nonlocal sent
        with lock:
            held.set()
            for sent in range(1, 4):
                while signals < sent:  # a signal just before the wait does not interrupt it
                    signal.pthread_kill(main, signal.SIGUSR2)
                    over.wait(0.01)
            over.wait()

    before = signal.signal(signal.SIGUSR2, handle)
    try:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(hold)
            try:
                with pytest.raises(InterruptedError):
                    held.wait()
                    lock.acquire()
            finally:
                over.set()
            done.result()
        assert lock.acquire(False), "the interrupted thread does not hold it"
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_last_calls_are_kept(state: Any) -> None:
    calls = [("op", (number,), number, 0.5, None if number % 2 else 1.5) for number in range(7)]
    log = state.CallLog(calls[:2], 3)
    assert (list(log), len(log), log.maxlen) == (calls[:2], 2, 3)
    for call in calls[2:]:
        log.append(call)
        assert log[-1] == call
    assert list(log.copy()) == list(log) == [log[0], log[1], log[2]] == calls[4:]
    assert list(state.CallLog(log, 5)) == calls[4:]
    with pytest.raises(IndexError):
        log[3]
    none = state.CallLog((), 0)
    none.append(calls[0])
    assert not none


def test_kept_calls_are_collected(state: Any) -> None:
    class Op:
        pass

    op: Any = Op()
    op.log = state.CallLog([(op, None, 0, 0.0, None)], 2)
    end = weakref.ref(op)
    del op
    gc.collect()
    assert end() is None


def test_values_of_works(state: Any) -> None:
    def done(value: object) -> Any:
        work = state.WorkState()
        work._value, work._done = value, True
        return work

    assert state.values_of([]) == []
    works = [done(3), done(None), done([4])]
    values = state.values_of(works)
    assert values == [3, None, [4]]
    assert values[2] is works[2]._value
    for name, value in {"_done": False, "_error": OSError(), "_finish": list, "captured": True}.items():
        odd = done(5)
        setattr(odd, name, value)
        assert state.values_of([*works, odd]) is None, name
        odd._error = None


def test_held_calls(state: Any) -> None:
    class Queue(state.HeldCalls):  # type: ignore[misc]
        pass

    queue = Queue()
    queue.items, queue.works, queue.due = [queue], [], 3.0
    queue.items.append(4)
    assert queue.items[1:] == [4]
    assert (queue.works, queue.due) == ([], 3.0)
    gone = weakref.ref(queue)
    del queue
    gc.collect()
    assert gone() is None
