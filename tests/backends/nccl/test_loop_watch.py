"""The side channel goes on while the event loop is blocked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asynccomm import Work
from asynccomm.backends.nccl.loop_watch import CHECK_SECONDS, LoopWatch
from asynccomm.core.mailbox import Mailbox
from asynccomm.errors import ClosedError
from asynccomm.ops import Barrier

from .conftest import World

LIMIT = 30.0  # seconds


class Asked:
    """Keeps the checks; ``look`` makes them on a thread as the poller does."""

    closed = False

    def __init__(self) -> None:
        self.checks: list[Callable[[], bool]] = []

    def ask(self, check: Callable[[], bool], *, every: float, first: float) -> None:
        assert every == first == CHECK_SECONDS
        if self.closed:
            raise ClosedError("closed")
        self.checks.append(check)

    def look(self) -> None:
        def look() -> None:
            self.checks[:] = [check for check in self.checks if check()]

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()


class Driver:
    def __init__(self) -> None:
        self.completed: list[Work[Any]] = []

    def before_await(self, work: Work[Any]) -> None:
        raise AssertionError

    def before_block(self, work: Work[Any]) -> None:
        self.completed.append(work)
        raise ZeroDivisionError  # which must not stop the others


def works_of(count: int) -> list[Work[Any]]:
    mailbox = Mailbox(asyncio.get_running_loop())
    return [
        Work(Barrier(), number, mailbox, value=None, timeout=1.0, on_settled=lambda _: None) for number in range(count)
    ]


async def test_works_are_completed_while_the_loop_does_not_run(caplog: pytest.LogCaptureFixture) -> None:
    poller, driver = Asked(), Driver()
    watch = LoopWatch(poller, Mailbox(asyncio.get_running_loop()))  # type: ignore[arg-type]
    one, other, over, settled = works = works_of(4)
    for work in works:
        watch.add(work, driver)
    assert len(poller.checks) == 1, "one check for all"
    watch.remove(over)
    settled.settle()
    for _ in range(3):
        poller.look()
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)  # the loop runs
    assert not driver.completed
    poller.look()
    poller.look()
    assert driver.completed == [one, other]
    assert "could not complete barrier() without the event loop" in caplog.text
    assert not poller.checks, "none is left"
    watch.add(one, driver)
    assert len(poller.checks) == 1
    one.settle()
    other.settle()


async def test_a_work_that_ends_while_it_is_added_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    poller = Asked()
    watch = LoopWatch(poller, Mailbox(asyncio.get_running_loop()))  # type: ignore[arg-type]
    over, late = works_of(2)
    over.settle()
    watch.add(over, Driver())
    assert not poller.checks
    ended = iter([False, True])
    monkeypatch.setattr(Work, "done", lambda work: next(ended))  # ``remove`` was called in between
    watch.add(late, Driver())
    monkeypatch.undo()
    poller.look()
    assert not poller.checks, "nothing is left to watch"
    late.settle()


async def test_a_closed_poller_checks_nothing() -> None:
    poller = Asked()
    poller.closed = True
    watch = LoopWatch(poller, Mailbox(asyncio.get_running_loop()))  # type: ignore[arg-type]
    (work,) = works_of(1)
    watch.add(work, Driver())
    work.settle()


@pytest.mark.parametrize("what", ["all_gather_v", "send"])
async def test_payloads_move_while_the_loop_is_blocked(world: World, what: str) -> None:
    """As a program does that reads a value from the device: its kernel may stand behind the transfer."""
    async with world(2, hints={"side": "shm"}) as (first, second):
        works: list[Work[Any]]
        if what == "send":
            received = torch.zeros(7)
            works = [second.recv(received, 0), first.send(torch.ones(7), 1)]
        else:
            works = [comm.all_gather_v(None, torch.ones(7)) for comm in (first, second)]
        end = time.monotonic() + LIMIT
        while not all(work.done() for work in works) and time.monotonic() < end:
            time.sleep(1e-3)
        done = [work.done() for work in works]
        await asyncio.gather(*works)
        assert done == [True, True]
