"""The side channel goes on while the event loop is blocked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asynccomm import Work
from asynccomm.backends.nccl.overdue import OVERDUE_SECONDS, OverdueWorks
from asynccomm.core.mailbox import Mailbox
from asynccomm.ops import Barrier

from .conftest import World

LIMIT = 30.0  # seconds


class Asked:
    """Keeps the checks."""

    def __init__(self) -> None:
        self.checks: list[Callable[[], bool]] = []

    def ask(self, check: Callable[[], bool], *, every: float, first: float) -> None:
        assert every == first == OVERDUE_SECONDS
        self.checks.append(check)


class Driver:
    def __init__(self) -> None:
        self.completed: list[Work[Any]] = []

    def before_block(self, work: Work[Any]) -> None:
        self.completed.append(work)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_only_old_works_are_completed() -> None:
    poller, driver, clock = Asked(), Driver(), Clock()
    overdue = OverdueWorks(poller, clock=clock)  # type: ignore[arg-type]
    mailbox = Mailbox(asyncio.get_running_loop())
    old, over, settled, new = (
        Work(Barrier(), number, mailbox, value=None, timeout=1.0, on_settled=lambda _: None) for number in range(4)
    )
    for work in (old, over, settled):
        overdue.add(work, driver)
    assert len(poller.checks) == 1, "one check for all"
    overdue.remove(over)
    settled.settle()
    clock.now = OVERDUE_SECONDS / 2
    overdue.add(new, driver)
    clock.now = OVERDUE_SECONDS
    (check,) = poller.checks
    assert check(), "one is left"
    assert driver.completed == [old]
    clock.now = 2 * OVERDUE_SECONDS
    assert not check()
    assert driver.completed == [old, new], "each once"
    overdue.add(old, driver)
    assert len(poller.checks) == 2
    old.settle()
    new.settle()


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
