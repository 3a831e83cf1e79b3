"""Outcomes: settled once, awaited by many; a waiter registers first, and looks then."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Generator
from typing import Any

import pytest

from asynccomm.core import outcome as module
from asynccomm.core.outcome import Outcome, wake


class Settled(Outcome):
    """Settled by the test."""

    def __init__(self, value: Any) -> None:
        self._value, self._error, self._traceback, self._done = value, None, None, False
        self._waiters = []

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self._suspend(asyncio.get_running_loop())
        return self._result()

    def settle(self, error: Exception | None = None) -> None:
        with module.deciding:
            self._error = error
            self._traceback = None if error is None else error.__traceback__
            self._done = True
        for waiter in self._waiters:
            wake(waiter)


async def outcome(awaited: Settled) -> Any:
    return await awaited


async def test_all_tasks_get_the_value() -> None:
    awaited = Settled("value")
    tasks = [asyncio.create_task(outcome(awaited)) for _ in range(3)]
    await asyncio.sleep(0)
    awaited.settle()
    assert await asyncio.gather(*tasks) == ["value"] * 3
    assert await awaited == "value"


async def test_an_error_keeps_its_traceback() -> None:
    awaited = Settled(None)
    try:
        raise OSError("broken")
    except OSError as exc:
        awaited.settle(exc)
    lengths = set()
    for _ in range(3):
        with pytest.raises(OSError, match="broken") as caught:
            await awaited
        lengths.add(len(traceback.extract_tb(caught.tb)))
    assert len(lengths) == 1


async def test_a_cancelled_task_leaves_no_waiter() -> None:
    awaited = Settled(None)
    task = asyncio.create_task(outcome(awaited))
    await asyncio.sleep(0)
    assert len(awaited._waiters) == 1
    task.cancel()
    await asyncio.wait([task])
    assert awaited._waiters == []
    awaited.settle()


async def test_a_waiter_that_was_taken_already_is_not_missed() -> None:
    awaited = Settled(None)
    task = asyncio.create_task(outcome(awaited))
    await asyncio.sleep(0)
    awaited._waiters = []  # a thread that settles it has taken the list, and has not set ``_done`` as this task sees it
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_settling_while_a_task_registers_is_seen() -> None:
    class Settling(list[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            awaited.settle()

    awaited = Settled("value")
    awaited._waiters = Settling()
    assert await awaited == "value"
