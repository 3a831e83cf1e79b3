"""One heap and one timer for all the deadlines of a comm."""

from __future__ import annotations

import asyncio
import gc
import heapq
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from asynccomm.core.deadlines import SLACK, Deadlines
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.ops import Barrier


class WatchedLoop:
    """The running loop, with its timers recorded."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.timers: list[asyncio.TimerHandle] = []

    def call_later(self, delay: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        self.timers.append(self._loop.call_later(delay, call))
        return self.timers[-1]

    def live(self) -> int:
        now = self._loop.time()
        return sum(not timer.cancelled() and timer.when() > now for timer in self.timers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class Bench:
    """Deadlines, and Works to watch."""

    def __init__(self) -> None:
        self.loop = WatchedLoop()
        self.mailbox = Mailbox(self.loop)  # type: ignore[arg-type]
        self.expired: list[Work[Any]] = []
        self.fired = asyncio.Event()
        self.deadlines = Deadlines(self.mailbox, self._on_expired)
        self._count = 0

    def _on_expired(self, work: Work[Any]) -> None:
        self.expired.append(work)
        self.fired.set()

    def work(self, timeout: float) -> Work[None]:
        self._count += 1
        return Work(Barrier(), self._count, self.mailbox, value=None, timeout=timeout, on_settled=lambda work: None)

    def watched(self, timeout: float) -> Work[None]:
        work = self.work(timeout)
        self.deadlines.add(work)
        return work


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_the_late_one_expires(bench: Bench) -> None:
    late = bench.watched(0.02)
    async with asyncio.timeout(10):
        await bench.fired.wait()
    assert bench.expired == [late]
    assert time.monotonic() - late.started >= 0.02


async def test_only_the_late_one_expires(bench: Bench) -> None:
    far = bench.watched(60.0)
    quick = bench.watched(0.01)
    late = bench.watched(0.03)
    quick.settle()
    async with asyncio.timeout(10):
        await bench.fired.wait()
    assert bench.expired == [late]
    assert not far.done()
    assert not late.done(), "what happens to it is for the comm to say"


async def test_another_one_expires_only_once_the_late_one_has_ended_by_itself(bench: Bench) -> None:
    late, other = bench.watched(0.01), bench.watched(0.02)
    async with asyncio.timeout(10):
        await bench.fired.wait()
        bench.watched(0.001).settle()
        await asyncio.sleep(0)
        assert bench.loop.live() == 0
        assert bench.expired == [late]
        late.settle()
        bench.fired.clear()
        bench.deadlines.look()
        await bench.fired.wait()
    assert bench.expired == [late, other]


async def test_the_nearest_deadline_counts_whatever_the_order(bench: Bench) -> None:
    bench.watched(60.0)
    bench.watched(30.0)
    near = bench.watched(0.01)
    bench.watched(40.0)
    async with asyncio.timeout(10):
        await bench.fired.wait()
    assert bench.expired == [near]


async def test_a_deadline_long_past_expires_at_once(bench: Bench) -> None:
    late = bench.work(0.01)
    late.started -= 5.0
    bench.deadlines.add(late)
    async with asyncio.timeout(10):
        await bench.fired.wait()
    assert bench.expired == [late]


async def test_the_next_one_is_armed_when_the_first_was_settled(bench: Bench) -> None:
    first, second = bench.watched(0.01), bench.watched(0.05)
    first.settle()
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await bench.fired.wait()
    assert bench.expired == [second]
    assert time.monotonic() >= second.started + 0.05


async def test_works_after_a_quiet_time_are_watched_too(bench: Bench) -> None:
    bench.watched(0.005).settle()
    while bench.loop.live() or not bench.loop.timers:
        await asyncio.sleep(0)
    late = bench.watched(0.01)
    async with asyncio.timeout(10):
        await bench.fired.wait()
    assert bench.expired == [late]


async def test_one_timer_however_many_works(bench: Bench) -> None:
    works = [bench.watched(60.0) for _ in range(1000)]
    await asyncio.sleep(0)
    assert len(bench.loop.timers) == 1
    for work in works:
        work.settle()
    works = [bench.watched(60.0) for _ in range(1000)]
    await asyncio.sleep(0)
    assert len(bench.loop.timers) == 1
    for timeout in (50.0, 40.0, 30.0):
        bench.watched(timeout)
        await asyncio.sleep(0)
        assert bench.loop.live() == 1
    bench.deadlines.close()
    assert bench.loop.live() == 0


async def test_the_heap_does_not_grow_behind_an_old_work(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    push = heapq.heappush

    def measured(heap: list[Any], item: Any) -> None:
        push(heap, item)
        sizes.append(len(heap))

    monkeypatch.setattr(heapq, "heappush", measured)
    old = bench.watched(30.0)
    for _ in range(10_000):
        bench.watched(60.0).settle()
    assert len(sizes) == 10_001
    assert max(sizes) <= 2 * SLACK
    assert not old.done()


async def test_works_are_not_kept(bench: Bench) -> None:
    work = weakref.ref(bench.watched(60.0))
    gc.collect()
    assert work() is None, "a finished Work would be kept with its output, for as long as its deadline is away"


async def test_a_rebuilt_heap_still_expires_in_order(bench: Bench) -> None:
    bench.watched(30.0)
    for _ in range(3 * SLACK):
        bench.watched(60.0).settle()
    kept = [bench.watched(40.0) for _ in range(3 * SLACK)]
    late = bench.watched(0.01)
    async with asyncio.timeout(10):
        await bench.fired.wait()
    assert bench.expired == [late]
    assert not any(work.done() for work in kept)


async def test_infinity_is_never_watched(bench: Bench) -> None:
    bench.watched(math.inf)
    await asyncio.sleep(0)
    assert bench.loop.timers == []
    late = bench.watched(0.01)
    async with asyncio.timeout(10):
        await bench.fired.wait()
    assert bench.expired == [late]


async def test_closing_forgets_everything(bench: Bench) -> None:
    bench.watched(60.0)
    await asyncio.sleep(0)
    assert bench.loop.live() == 1
    bench.deadlines.close()
    assert bench.loop.live() == 0
    bench.deadlines.close()


async def test_closing_before_the_timer_was_set(bench: Bench) -> None:
    bench.watched(0.001)
    bench.deadlines.close()
    bench.watched(0.0005)  # from a thread that did not know yet
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bench.loop.timers == []
    assert bench.expired == []


async def test_works_are_added_from_threads(bench: Bench) -> None:
    late: list[Work[None]] = []

    def add() -> None:
        for _ in range(500):
            bench.watched(60.0)
        late.append(bench.watched(0.01))

    thread = threading.Thread(target=add)
    thread.start()
    async with asyncio.timeout(10):
        await bench.fired.wait()
    thread.join()
    assert bench.expired == late
