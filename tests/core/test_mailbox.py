"""The door from threads to the loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from asynccomm.core.mailbox import Mailbox


class CountingLoop:
    """The running loop, with its wake-ups counted."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.rung = 0

    def call_soon_threadsafe(self, call: Callable[[], object]) -> object:
        self.rung += 1
        return self._loop.call_soon_threadsafe(call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


async def test_posts_of_two_threads_arrive_complete_and_in_order() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    each = 20_000
    received: list[tuple[int, int]] = []
    complete = asyncio.Event()

    def receive(item: tuple[int, int]) -> None:
        received.append(item)
        if len(received) == 2 * each:
            complete.set()

    def send(thread: int) -> None:
        for i in range(each):
            mailbox.post(lambda i=i: receive((thread, i)))

    threads = [threading.Thread(target=send, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(30):
        await complete.wait()
    for thread in threads:
        thread.join()
    for n in range(2):
        assert [i for thread, i in received if thread == n] == list(range(each))


async def test_a_batch_rings_once() -> None:
    loop = CountingLoop()
    mailbox = Mailbox(loop)  # type: ignore[arg-type]
    received: list[int] = []
    for batch in range(1, 4):
        for i in range(100):
            mailbox.post(lambda i=i: received.append(i))
        assert loop.rung == batch
        await asyncio.sleep(0)
        assert received == list(range(100)) * batch


async def test_what_a_callback_posts_comes_in_the_next_turn() -> None:
    loop = CountingLoop()
    mailbox = Mailbox(loop)  # type: ignore[arg-type]
    received: list[str] = []

    def first() -> None:
        mailbox.post(lambda: received.append("posted by first"))
        asyncio.get_running_loop().call_soon(received.append, "scheduled by first")
        received.append("first")

    mailbox.post(first)
    mailbox.post(lambda: received.append("second"))
    await asyncio.sleep(0)
    assert received == ["first", "second"]
    await asyncio.sleep(0)
    assert sorted(received[2:]) == ["posted by first", "scheduled by first"]
    assert loop.rung == 2


async def test_an_error_is_reported_and_the_rest_still_runs() -> None:
    loop = asyncio.get_running_loop()
    reports: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda loop, context: reports.append(context))
    mailbox = Mailbox(loop)
    received: list[int] = []
    error = ValueError("broken callback")

    def fail() -> None:
        raise error

    def cancelled() -> None:
        raise asyncio.CancelledError

    for call in (lambda: received.append(1), fail, lambda: received.append(2), cancelled, lambda: received.append(3)):
        mailbox.post(call)
    await asyncio.sleep(0)
    assert received == [1, 2, 3]
    assert [type(report["exception"]) for report in reports] == [ValueError, asyncio.CancelledError]
    assert reports[0]["exception"] is error
    assert "callback" in reports[0]["message"]


def test_keyboard_interrupt_ends_the_loop_and_loses_nothing() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    received: list[int] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    mailbox.post(interrupt)
    mailbox.post(lambda: received.append(1))
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    mailbox.post(lambda: received.append(2))
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert received == [1, 2]


def test_a_closed_loop_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    received: list[int] = []
    for i in range(3):
        mailbox.post(lambda i=i: received.append(i))
    assert received == []


class Held:
    """Something that a callback holds on to."""

    def __call__(self) -> None:
        raise AssertionError("there is no loop to run this")


def test_a_closed_loop_keeps_nothing_alive() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    held = [Held() for _ in range(3)]
    references = [weakref.ref(item) for item in held]
    while held:
        mailbox.post(held.pop())
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


async def test_another_runtime_error_comes_out() -> None:
    class Strange(CountingLoop):
        def call_soon_threadsafe(self, call: Callable[[], object]) -> object:
            raise RuntimeError("non-thread-safe operation")

    with pytest.raises(RuntimeError, match="non-thread-safe"):
        Mailbox(Strange()).post(lambda: None)  # type: ignore[arg-type]
