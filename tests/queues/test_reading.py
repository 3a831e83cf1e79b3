"""The reading end: the sources in turn, damage, and its end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from asynccomm import BackendError, ClosedError, EndOfQueueError, PayloadError
from asynccomm.core.native import CoreUnavailable
from asynccomm.queues import reading
from asynccomm.queues.layout import BYTES, DATA, ENDED, SLEEPING, STATE, header, slot_word
from asynccomm.queues.options import QueueOptions, QueueWelcome
from asynccomm.queues.reading import COUNTED, FLOOD, POLL_SECONDS, VAIN, ReadingEnd, Source
from asynccomm.queues.ring import FULL, PUBLISHED
from tests.queues.rings import ENDS, ends, hosted, readers_of

RING = 4096
WELCOME = QueueWelcome("token", ring=RING)


async def test_the_sources_are_read_in_turn() -> None:
    end = ReadingEnd(QueueOptions(), 2)
    for source in range(2):
        segment, writer, _ = ends(ENDS[-1], RING)
        for number in range(3):
            data = f"{source}".encode()
            writer.put(BYTES, 1, 0, 1, number, data, 1)
        segment.words[STATE] = ENDED
        end.add(Source(segment, WELCOME, f"rank {source}", BackendError("lost")))
    assert end.many(100) == [b"0", b"0", b"0", b"1", b"1", b"1"]
    with pytest.raises(EndOfQueueError):
        while True:
            assert end.next() is None


async def test_a_damaged_ring_is_an_error_that_stays() -> None:
    end = ReadingEnd(QueueOptions(), None)
    segment, writer, _ = ends(ENDS[-1], RING)
    writer.put(BYTES, 1, 0, 8, 0, b"fourfour", 4)  # an item of 8 bytes; the next frame has too many
    writer.put(BYTES, 0, 0, 8, 0, b"fourfour", 8)
    end.add(Source(segment, WELCOME, "rank 0", BackendError("lost")))
    for _ in range(2):
        with pytest.raises(BackendError, match="an item of rank 0 is longer than it says"):
            end.next()
    assert not end._arm()


async def test_damage_that_arming_finds_is_raised_by_the_next_read() -> None:
    end = ReadingEnd(QueueOptions(), None)
    segment, writer, _ = ends(ENDS[-1], RING)
    writer.put(BYTES, 1, 0, 4, 0, b"four", 4)
    header.pack_into(segment.raw, DATA, 1 << 31, BYTES, 1, 0, 4, 0)
    end.add(Source(segment, WELCOME, "rank 0", BackendError("lost")))
    assert not end._arm()
    with pytest.raises(BackendError, match="corrupt"):
        end.next()


async def test_looks_before_a_sleep_end_when_they_are_in_vain() -> None:
    segment, writer, _ = ends(ENDS[-1], RING)
    source = Source(segment, WELCOME, "rank 0", BackendError("lost"))
    assert not source.poll()
    writer.put(BYTES, 1, 0, 4, 0, b"four", 4)
    assert [source.poll() for _ in range(VAIN + 1)] == [False] * VAIN + [False]
    assert source.poll()
    assert POLL_SECONDS < 1e-3


@dataclass
class Clock:
    """``time`` of a test, whose pauses let items come."""

    now: float = 100.0
    paused: Callable[[], object] = print

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.paused()


@pytest.mark.parametrize(("per_second", "pauses"), [(2 * FLOOD, True), (FLOOD // 2, False)])
async def test_a_reader_lets_the_items_of_a_flood_come(
    monkeypatch: pytest.MonkeyPatch, per_second: int, pauses: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr(reading, "time", clock)
    segment, writer, _ = ends(ENDS[-1], 1 << 16)
    source = Source(segment, QueueWelcome("token", ring=1 << 16), "rank 0", BackendError("lost"))
    end = ReadingEnd(QueueOptions(), None)
    end.add(source)

    def put(count: int) -> None:
        for _ in range(count):
            assert writer.put_bytes(b"item") == PUBLISHED
        clock.now += count / per_second

    put(COUNTED)
    end.many(COUNTED)
    clock.paused = lambda: put(10)
    assert source.poll() is pauses
    if not pauses:
        put(1)
    assert end.many(100) == [b"item"] * (10 if pauses else 1)
    clock.now += 1.0  # the writer rests
    clock.paused = lambda: put(COUNTED)
    source.poll()
    end.many(COUNTED)
    clock.paused = lambda: pytest.fail("the flood is over")
    source.poll()


async def test_a_reader_polls_before_it_sleeps_for_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(reading, "time", clock)
    segment, writer, _ = ends(ENDS[-1], RING)
    end = ReadingEnd(QueueOptions(busy_poll=timedelta(milliseconds=5)), None)
    end.add(Source(segment, WELCOME, "rank 0", BackendError("lost")))
    word = slot_word(0) + SLEEPING
    for _ in range(2):
        for elapsed in (0.0, 0.004, 0.0009):
            clock.now += elapsed
            assert end.next() is None
            assert not end._arm(), "it polls"
            assert not segment.words[word]
        clock.now += 0.001
        assert end._arm(), "it sleeps"
        assert segment.words[word]
        segment.words[word] = 0
        writer.put_bytes(b"item")
        assert end.next() == (b"item",)


async def test_what_is_read_ahead_is_ready_and_checked_as_any_item() -> None:
    options = QueueOptions(max_bytes=5)
    end = ReadingEnd(options, None)
    segment, writer, _ = ends(ENDS[-1], RING)
    for data in (b"first", b"second", b"third"):
        assert writer.put_bytes(data)
    end.add(Source(segment, WELCOME, "rank 0", BackendError("lost")))
    assert end.ready() is None, "nothing was read ahead"
    assert end.next() == (b"first",)
    with pytest.raises(PayloadError, match="an item has 6 bytes, but max_bytes is 5"):
        end.ready()
    assert end.ready() == (b"third",)
    assert end.ready() is None
    end.fail(ClosedError("closed"))
    assert end.ready() is None


async def test_threads_get_each_item_once_with_and_without_the_lock() -> None:
    end = ReadingEnd(QueueOptions(), None)
    segment, writer, _ = ends(ENDS[-1], 1 << 20)
    end.add(Source(segment, QueueWelcome("token", ring=1 << 20), "rank 0", BackendError("lost")))
    got: list[list[bytes]] = [[], [], []]
    count = 2000

    def get(number: int) -> None:
        while sum(map(len, got)) < count:
            if number == 0:
                found = end.ready() or end.next()
                got[0] += found or ()
            elif number == 1:
                got[1] += end.next() or ()
            else:
                got[2] += end.many(3) or []

    threads = [threading.Thread(target=get, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for number in range(count):
        assert writer.put_bytes(b"%d" % number) != FULL
    for thread in threads:
        thread.join()
    assert sorted(int(item) for each in got for item in each) == list(range(count))
    for each in got:
        assert [int(item) for item in each] == sorted(int(item) for item in each)


# -- the next item ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["c", "python"])
def _takers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An await takes its item in C, or in Python."""
    if request.param == "python":
        monkeypatch.setattr(reading, "_core", CoreUnavailable("it was not built"))


@pytest.mark.usefixtures("_takers")
async def test_an_await_takes_the_next_item() -> None:
    async with hosted() as (_, queue):
        (reader,) = await readers_of(queue, 1, max_bytes=5)
        for item in (b"first", b"second", 7, b"third"):
            await queue.put(item)
        items = aiter(reader)
        got: list[Any] = []
        for _ in range(4):
            try:
                got.append(await anext(items))
            except PayloadError as exc:
                got.append(str(exc))
        assert got == [b"first", "an item has 6 bytes, but max_bytes is 5", 7, b"third"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(items), 0.001)
        await queue.put(b"last")
        waiting = asyncio.ensure_future(anext(items))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await anext(items) == b"last", "a wait that was cancelled before it began takes no item"
        for number in range(3):
            await queue.put(b"%d" % number)
        together = await asyncio.gather(*[anext(items) for _ in range(3)])
        assert sorted(together) == [b"0", b"1", b"2"], "an await lets other tasks run after some time, which go ahead"
        await queue.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(items)
        await reader.aclose()
        with pytest.raises(ClosedError):
            await anext(items)


@pytest.mark.usefixtures("_takers")
async def test_other_tasks_run_between_items() -> None:
    async with hosted() as (_, queue):
        (reader,) = await readers_of(queue, 1)
        for _ in range(64):
            await queue.put(b"item")
        ran = 0

        async def other() -> None:
            nonlocal ran
            while True:
                ran += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await reader.get()  # the rest is read ahead
        before, left = ran, 63
        async for _ in reader:
            left -= 1
            if not left:
                break
        assert before < ran < before + 10
        task.cancel()
        await reader.aclose()


@pytest.mark.usefixtures("_takers")
async def test_an_end_is_freed() -> None:
    end = ReadingEnd(QueueOptions(), 1)
    freed = weakref.ref(end)
    del end
    gc.collect()
    assert freed() is None


def test_a_taker_is_made_of_six_arguments() -> None:
    if isinstance(reading._core, CoreUnavailable):
        pytest.skip("it was not built")
    with pytest.raises(TypeError):
        reading._core.Next(deque())
