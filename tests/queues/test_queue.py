"""Queues in one process: order, back-pressure, drops, threads, ends."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import os
import pickle
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import uvloop

from asynccomm import (
    ClosedError,
    EndOfQueueError,
    MessageQueue,
    PayloadError,
    PayloadTypeError,
    QueueError,
    WouldBlockError,
    attach_queue,
)
from asynccomm.core.hosts import host_name
from tests.forking import ending_child, exit_code, fork
from tests.queues.rings import hosted, readers_of
from tests.waiting import until


async def test_each_reader_gets_every_item_in_order() -> None:
    async with hosted() as (_, queue):
        readers = await readers_of(queue, 3)
        items = [7, "text", b"bytes", {"t": torch.arange(5)}, None]
        for item in items:
            await queue.put(item)
        await queue.aclose()
        for reader in readers:
            got = [item async for item in reader]
            assert [str(item) for item in got] == [str(item) for item in items]
            with pytest.raises(EndOfQueueError):
                await reader.get()
            await reader.aclose()


async def test_a_forked_child_leaves_a_queue_to_its_parent() -> None:
    async with hosted() as (_, queue):
        (reader,) = await readers_of(queue, 1)
        pid = fork()
        if pid == 0:
            with ending_child():
                await queue.aclose()
                await reader.aclose()
                queue.leave(failed=True)
        assert await asyncio.to_thread(exit_code, pid) == 0
        with pytest.raises(asyncio.QueueEmpty):
            reader.get_nowait()
        await queue.put("item")
        assert await reader.get() == "item"
        await reader.aclose()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_reader_that_was_dropped_is_waited_for_no_more(run: Callable[..., object]) -> None:
    async def main() -> None:
        async with hosted(capacity=4096) as (_, queue):
            readers = await readers_of(queue, 1)
            before = len(os.listdir("/proc/self/fd"))
            readers += await readers_of(queue, 3)
            with pytest.warns(ResourceWarning, match="<MessageQueue, reader> was never closed: use it in a"):
                del readers[1:]
                gc.collect()
            await until(lambda: len(queue.statistics().behind) == 1)
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
            for _ in range(10):
                await queue.put(bytes(900))
                assert await readers[0].get() == bytes(900)
            await readers[0].aclose()

    run(main())


async def test_a_writer_that_was_dropped_has_failed() -> None:
    async with hosted(writes=False) as (_, queue):
        (writer,) = await readers_of(queue, 1)
        await writer.put("last")
        with pytest.warns(ResourceWarning, match="<MessageQueue, writer> was never closed"):
            del writer
            gc.collect()
        assert await queue.get() == "last"
        with pytest.raises(QueueError, match="has left the queue by an exception"):
            await queue.get()


async def test_a_dropped_end_leaves_where_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    async with hosted(writes=False) as (_, queue):
        (writer,) = await readers_of(queue, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(args.exc_type))
            del writer
            gc.collect()
        assert seen == [ResourceWarning]
        with pytest.raises(QueueError, match="has left the queue by an exception"):
            await queue.get()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_queue_is_closed_when_it_is_dropped_after_its_loop(run: Callable[..., Any]) -> None:
    async def main() -> MessageQueue:
        async with hosted() as (_, queue):
            await queue.put(b"item")
            return await attach_queue(queue.handle)

    gc.collect()
    before = os.listdir("/proc/self/fd")
    queue = run(main())
    with pytest.warns(ResourceWarning, match="never closed"):
        del queue
        gc.collect()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("item", [b"plain", {"n": 1}], ids=["bytes", "object"])
async def test_a_wait_for_the_next_item_keeps_the_queue(item: object) -> None:
    async with hosted() as (_, queue):

        async def first() -> Any:
            got = await anext(await attach_queue(queue.handle))
            gc.collect()
            return got

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reading = asyncio.create_task(first())
            await queue.wait_readers(1)
            await until(lambda: reading.get_coro().cr_await is not None)  # type: ignore[attr-defined]
            gc.collect()
            assert not caught
            await queue.put(item)
            assert await reading == item
        await until(lambda: not queue.statistics().behind)


async def test_a_forked_child_drops_a_queue_without_a_trace() -> None:
    async with hosted() as (_, queue):
        readers = await readers_of(queue, 1)
        pid = fork()
        if pid == 0:
            with ending_child(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                dropped = weakref.ref(readers.pop())
                gc.collect()
                assert dropped() is None
                assert not caught
        assert await asyncio.to_thread(exit_code, pid) == 0
        await queue.put("item")
        assert await readers[0].get() == "item"
        await readers[0].aclose()


async def writer_calls(queue: MessageQueue) -> list[str]:
    return [
        await told(queue.put, b"child"),
        await told(queue.put, {"n": 1}),
        await told(queue.put_nowait, b"child"),
        await told(queue.put_nowait, {"n": 1}),
        await told(in_thread, queue.put_sync, b"child", 5),
        await told(queue.wait_readers, 1),
    ]


async def reader_calls(queue: MessageQueue) -> list[str]:
    return [
        await told(queue.get),
        await told(queue.get_nowait),
        await told(queue.get_many),
        await told(in_thread, queue.get_sync, 5),
        await told(lambda: anext(queue)),
    ]


def in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    with ThreadPoolExecutor() as threads:
        return threads.submit(call, *arguments).result()


async def told(call: Callable[..., Any], *arguments: Any) -> str:
    """The error of a call, or its result."""
    try:
        result = call(*arguments)
        return repr(await result if inspect.isawaitable(result) else result)
    except Exception as exc:
        return repr(exc)


async def in_child(calls: Callable[[], Coroutine[Any, Any, list[str]]], *, own_loop: bool) -> set[str]:
    """The results of ``calls()`` in a forked child, on a loop of its own or in the coroutine that has forked."""
    read, write = os.pipe()
    pid = fork()
    if pid == 0:
        with ending_child():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # ends the child if a call waits
            results = asyncio.run(calls()) if own_loop else await calls()
            os.write(write, "\n".join(set(results)).encode())
    os.close(write)
    with open(read) as results_of_child:
        text = await asyncio.to_thread(results_of_child.read)
    assert await asyncio.to_thread(exit_code, pid) == 0
    return set(text.split("\n"))


REFUSED = {"ClosedError('the queue was made before this process was forked; make a new one')"}


@pytest.mark.parametrize("own_loop", [True, False])
@pytest.mark.parametrize("overflow", ["wait", "drop_oldest"])
@pytest.mark.parametrize("writes", [True, False])
async def test_a_forked_child_cannot_use_a_queue_of_its_parent(writes: bool, overflow: str, own_loop: bool) -> None:
    async with hosted(writes, overflow=overflow, capacity=65536) as (_, queue):
        (other,) = await readers_of(queue, 1)
        writer, reader = (queue, other) if writes else (other, queue)
        await writer.put(b"first")
        await writer.put(b"second")
        assert await reader.get() == b"first"  # the second item was read ahead
        assert await in_child(lambda: writer_calls(writer), own_loop=own_loop) == REFUSED
        assert await in_child(lambda: reader_calls(reader), own_loop=own_loop) == REFUSED
        for number in range(3):
            await writer.put(bytes([number]) * 9000)
        assert await reader.get() == b"second"
        assert [len(item) for item in await reader.get_many()] == [9000] * 3
        await other.aclose()


async def test_a_forked_child_needs_no_lock_that_a_thread_of_its_parent_holds() -> None:
    async with hosted() as (_, queue):
        (reader,) = await readers_of(queue, 1)
        ends = queue._end, reader._end
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with ends[0]._lock, ends[0].waiters._lock, ends[1]._lock, ends[1].waiters._lock:
                held.set()
                over.wait(20)

        holding = asyncio.ensure_future(asyncio.to_thread(hold))
        await until(held.is_set)

        async def calls() -> list[str]:
            queue.statistics(), reader.statistics()
            return await writer_calls(queue) + await reader_calls(reader)

        try:
            assert await in_child(calls, own_loop=True) == REFUSED
        finally:
            over.set()
            await holding
        await reader.aclose()


async def test_a_forked_child_attaches_by_the_handle() -> None:
    async with hosted() as (_, queue):

        async def read() -> list[str]:
            async with await attach_queue(queue.handle) as reader:
                return [await reader.get()]

        child = asyncio.ensure_future(in_child(read, own_loop=True))
        async with asyncio.timeout(20):  # the child may fail before it attaches
            await queue.wait_readers(1)
        await queue.put("item")
        assert await child == {"item"}


async def test_many_writers_are_read_in_the_order_of_each() -> None:
    async with hosted(writes=False) as (_, queue):
        writers = await readers_of(queue, 3)

        async def write(number: int) -> None:
            async with writers[number] as writer:
                for k in range(200):
                    await writer.put((number, k))

        tasks = [asyncio.ensure_future(write(number)) for number in range(3)]
        got = [item async for item in queue]
        await asyncio.gather(*tasks)
        assert len(got) == 600
        for number in range(3):
            assert [k for n, k in got if n == number] == list(range(200))


async def test_a_late_reader_gets_the_items_from_now_on() -> None:
    async with hosted() as (_, queue):
        await queue.put(1)
        (reader,) = await readers_of(queue, 1)
        await queue.put(2)
        assert await reader.get() == 2
        await reader.aclose()


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_put_whose_caller_has_gone_is_done_all_the_same(how: str) -> None:
    """The item fits into the ring, but not into what is copied at once."""
    async with hosted(capacity=64 << 20) as (_, queue):
        (reader,) = await readers_of(queue, 1)
        item = [torch.full((1 << 20,), k, dtype=torch.uint8) for k in range(20)]
        if how == "cancelled":
            putting = asyncio.ensure_future(queue.put(item))
            await asyncio.sleep(0)
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
        else:
            with pytest.raises(TimeoutError, match="the item was not written to the ring within 1e-09 s"):
                await asyncio.to_thread(queue.put_sync, item, 1e-9)
        got = await reader.get()
        assert all(torch.equal(*pair) for pair in zip(got, item, strict=True))
        queue.put_nowait("next")
        assert await reader.get() == "next"
        await reader.aclose()


async def test_a_writer_waits_for_its_readers() -> None:
    async with hosted() as (_, queue):
        await queue.wait_readers(0)
        waiting = asyncio.ensure_future(queue.wait_readers(2))
        (first,) = await readers_of(queue, 1)
        cancelled = asyncio.ensure_future(queue.wait_readers(3))
        await asyncio.sleep(0)
        assert not waiting.done()
        cancelled.cancel()
        (second,) = await readers_of(queue, 1)
        await waiting
        with pytest.raises(RuntimeError, match="waiting for readers are for writers"):
            await first.wait_readers()
        with pytest.raises(ValueError, match="count must be an integer, and not negative, got -1"):
            await queue.wait_readers(-1)
        never = asyncio.ensure_future(queue.wait_readers(5))
        await asyncio.sleep(0)
        await queue.aclose()
        with pytest.raises(ClosedError):
            await never
        await first.aclose()
        await second.aclose()


async def test_a_put_waits_for_the_slowest_reader() -> None:
    async with hosted(capacity=4096) as (_, queue):
        fast, slow = await readers_of(queue, 2)
        count = 0
        with pytest.raises(asyncio.QueueFull):
            while True:
                queue.put_nowait(bytes(500))
                count += 1
        waiting = asyncio.ensure_future(queue.put(b"last"))
        other = asyncio.ensure_future(queue.put(bytes(900)))
        assert await fast.get_many(100) == [bytes(500)] * count
        assert not other.done()
        least, most = sorted(queue.statistics().behind.values())
        assert least < 500 * count < most
        assert await slow.get_many(100) == [bytes(500)] * count
        await asyncio.gather(waiting, other)
        for reader in (fast, slow):
            assert [await reader.get(), await reader.get()] == [b"last", bytes(900)]
            await reader.aclose()


async def test_a_slow_reader_loses_the_oldest_items_by_choice() -> None:
    async with hosted(capacity=4096, overflow="drop_oldest") as (_, queue):
        fast, slow = await readers_of(queue, 2)
        for k in range(100):
            await queue.put((k, bytes(400)))
            assert (await fast.get())[0] == k
        first = (await slow.get())[0]
        assert first > 50
        assert (slow.dropped, fast.dropped) == (first, 0)
        with pytest.raises(ValueError, match="item must fit into the ring of 4096 bytes where the oldest items are"):
            await queue.put(bytes(5000))
        await fast.aclose()
        await slow.aclose()


async def test_a_large_item_streams_through_a_small_ring() -> None:
    async with hosted(capacity=1 << 14) as (_, queue):
        (reader,) = await readers_of(queue, 1)
        tensor = torch.arange(1 << 18)
        with pytest.raises(ValueError, match="item must fit into the ring of 16384 bytes: use put"):
            queue.put_nowait(tensor)
        put = asyncio.ensure_future(queue.put(tensor))
        assert torch.equal(await reader.get(), tensor)
        await put
        await reader.aclose()


async def test_a_cancelled_put_is_put_and_a_cancelled_get_loses_nothing() -> None:
    async with hosted(capacity=1 << 14) as (_, queue):
        (reader,) = await readers_of(queue, 1)
        get = asyncio.ensure_future(reader.get())
        await asyncio.sleep(0)
        get.cancel()
        put = asyncio.ensure_future(queue.put(bytes(1 << 17)))
        await asyncio.sleep(0)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        after = asyncio.ensure_future(queue.put("after"))
        assert await reader.get() == bytes(1 << 17)
        assert await reader.get() == "after"
        await after
        await reader.aclose()


async def test_threads_put_and_get_while_the_loop_runs() -> None:
    async with hosted(capacity=4096) as (_, queue):
        (reader,) = await readers_of(queue, 1)

        def write() -> None:
            for k in range(300):
                queue.put_sync((k, bytes(300)), timeout=20)

        def read() -> list[int]:
            return [reader.get_sync(20)[0] for _ in range(300)]

        _, got = await asyncio.gather(asyncio.to_thread(write), asyncio.to_thread(read))
        assert got == list(range(300))
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(reader.get_sync, 0.01)
        with pytest.raises(WouldBlockError):
            reader.get_sync()
        with pytest.raises(WouldBlockError):
            queue.put_sync(1)
        with pytest.raises(asyncio.QueueEmpty):
            reader.get_nowait()
        await reader.aclose()


async def test_an_item_that_is_refused_does_not_end_the_queue() -> None:
    async with hosted() as (_, queue):
        reader = await attach_queue(queue.handle, expect=int, max_bytes=2000)
        for item in (1, "text", 2, bytes(3000), 3):
            await queue.put(item)
        assert await reader.get_many() == [1]
        with pytest.raises(PayloadTypeError, match=r"a int was expected, but process .* put a str"):
            await reader.get_many()
        assert await reader.get() == 2
        with pytest.raises(PayloadError, match="3000 bytes, but max_bytes is 2000"):
            reader.get_nowait()
        assert await reader.get() == 3
        with pytest.raises(TypeError, match="item cannot be sent"):
            await queue.put(object())
        with pytest.raises(ValueError, match="limit must be a positive integer, got 0"):
            await reader.get_many(0)
        await reader.aclose()


async def test_a_writer_that_fails_gives_its_items_and_then_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        async with hosted() as (_, queue):
            (reader,) = await readers_of(queue, 1)
            async with queue:
                await queue.put(1)
                1 / 0  # noqa: B018
    assert await reader.get() == 1
    for _ in range(2):
        with pytest.raises(QueueError, match="has left the queue by an exception"):
            await reader.get()
    await reader.aclose()


async def test_a_reader_that_leaves_holds_no_writer_back() -> None:
    async with hosted(capacity=4096) as (host, queue):
        readers = await readers_of(queue, 2)
        put = asyncio.ensure_future(queue.put(bytes(100_000)))
        await asyncio.sleep(0)
        for reader in readers:
            await reader.aclose()
            await reader.aclose()
        await put
        assert not host.end.targets
        with pytest.raises(ClosedError):
            await readers[0].get()
    with pytest.raises(ClosedError, match="the queue was closed here"):
        await queue.put(1)


async def test_the_writers_of_a_reader_that_leaves_get_an_error() -> None:
    async with hosted(writes=False) as (_, queue):
        (writer,) = await readers_of(queue, 1)
        await writer.put(1)
        await queue.aclose()

        async def put_until_refused() -> None:
            while True:
                await writer.put(bytes(1 << 20))
                await asyncio.sleep(0)

        with pytest.raises(ClosedError, match="has closed the queue"):
            await put_until_refused()
        await writer.aclose()


async def test_each_end_has_its_own_methods() -> None:
    async with hosted() as (_, queue):
        (reader,) = await readers_of(queue, 1)
        with pytest.raises(RuntimeError, match="writes to the queue: getting items is for readers"):
            await queue.get()
        with pytest.raises(RuntimeError, match="reads the queue: putting items and waiting"):
            await reader.put(1)
        assert (queue.role, reader.role) == ("writer", "reader")
        await queue.put(1)
        assert queue.statistics().items == 1
        assert copy.copy(queue) is queue
        with pytest.raises(TypeError, match="attach there by"):
            pickle.dumps(queue)
        assert repr(reader) == "<MessageQueue, reader>"
        await reader.aclose()


async def test_statistics_tell_the_readers_of_one_process_apart() -> None:
    async with hosted() as (_, queue):
        slow, fast, gone = await readers_of(queue, 3)
        await queue.put(bytes(1000))
        await fast.get()
        await gone.aclose()
        await until(lambda: len(queue.statistics().behind) == 2)
        (late,) = await readers_of(queue, 1)
        behind = queue.statistics().behind
        label = f"process {os.getpid()} on {host_name()}"
        assert behind == {label: slow.statistics().behind[label], f"{label} (2)": 0, f"{label} (3)": 0}
        assert behind[label] > 1000
        for reader in (slow, fast, late):
            await reader.aclose()


async def test_statistics_tell_the_writers_of_one_process_apart() -> None:
    async with hosted(writes=False, expect=int) as (_, queue):
        writers = await readers_of(queue, 2)
        await writers[1].put(bytes(1000))
        label = f"process {os.getpid()} on {host_name()}"
        behind = queue.statistics().behind
        assert behind[label] == 0
        assert behind[f"{label} (2)"] > 1000
        with pytest.raises(PayloadTypeError, match="put a bytes"):
            await queue.get()
        for writer in writers:
            await writer.aclose()


async def test_a_tight_loop_of_puts_lets_other_tasks_run() -> None:
    async with hosted() as (_, queue):
        ran = False

        async def other() -> None:
            nonlocal ran
            ran = True

        task = asyncio.ensure_future(other())
        for _ in range(1000):
            await queue.put(b"item")
        assert ran
        await task


async def test_an_idle_end_sleeps() -> None:
    async with hosted() as (_, queue):
        (reader,) = await readers_of(queue, 1)
        wakes: list[int] = []
        get = asyncio.ensure_future(reader.get())
        await asyncio.sleep(0)
        source = reader._end.sources[0]
        bell, wake = source.bell, source.bell.on_wake
        bell.on_wake = lambda: (wakes.append(1), wake())
        await queue.put(1)
        await queue.put(2)
        assert await get == 1
        assert await reader.get() == 2
        await until(lambda: True)
        assert len(wakes) == 1
        await reader.aclose()
