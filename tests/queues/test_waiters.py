"""Waits of tasks and threads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynccomm import WouldBlockError
from asynccomm.queues.waiters import Waiters
from tests.waiting import until


async def test_a_wait_ends_with_the_first_result() -> None:
    results: list[int | None] = [None, None, 7]
    waiters = Waiters(lambda: True)
    task = asyncio.ensure_future(waiters.wait(lambda: results.pop(0)))
    for left in (2, 1):
        await until(lambda left=left: len(results) == left)
        waiters.wake()
    assert await task == 7


async def test_a_wait_does_not_sleep_if_arming_finds_something() -> None:
    results: list[int | None] = [None, 7]
    assert await Waiters(lambda: False).wait(lambda: results.pop(0)) == 7


async def test_a_cancelled_wait_makes_no_further_attempt() -> None:
    attempts: list[int] = []
    waiters = Waiters(lambda: True)
    task = asyncio.ensure_future(waiters.wait(lambda: attempts.append(1)))
    await until(lambda: attempts)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    waiters.wake()
    assert len(attempts) == 1


@pytest.mark.parametrize("armed", [True, False])
async def test_an_abandoned_wait_is_reported_to_the_loop(armed: bool) -> None:
    abandoned: list[int] = []
    waiters = Waiters(lambda: armed, lambda: abandoned.append(1))
    task = asyncio.ensure_future(waiters.wait(lambda: None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: len(abandoned) == 1)
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(waiters.block, lambda: None, 0.001, "no room")
    await until(lambda: len(abandoned) == 2)


def test_a_wait_that_is_collected_after_its_loop_raises_nothing() -> None:
    async def begin() -> Any:
        waiting = Waiters(lambda: True, lambda: None).wait(lambda: None)
        waiting.send(None)
        return waiting

    asyncio.run(begin()).close()


async def test_a_thread_is_woken_and_has_a_time_limit() -> None:
    results: list[int | None] = [None, 7]
    waiters = Waiters(lambda: True)
    task = asyncio.ensure_future(asyncio.to_thread(waiters.block, lambda: results.pop(0), 20.0, "no item came"))
    await until(lambda: len(results) == 1)
    await until(lambda: waiters.wake() or task.done())
    assert await task == 7
    with pytest.raises(TimeoutError, match=r"^no item came within 0\.01 s$"):
        await asyncio.to_thread(waiters.block, lambda: None, 0.01, "no item came")


async def test_a_thread_with_a_running_loop_must_not_block() -> None:
    with pytest.raises(WouldBlockError, match="await a queue of that loop"):
        Waiters(lambda: True).block(lambda: 1, 1.0, "no item came")


def test_another_loop_cannot_wait() -> None:
    async def make() -> Waiters:
        return Waiters(lambda: True)

    waiters = asyncio.run(make())
    with pytest.raises(RuntimeError, match="belongs to the event loop"):
        asyncio.run(waiters.wait(lambda: None))
