"""What one task has called on one comm and what has not been sent yet."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any, final

from asynccomm.backends.base import Submission
from asynccomm.batching.plan import BatchLimiter
from asynccomm.core.work import Work


def current_owner() -> object:
    """Who is calling: the task that runs, or the thread where none does."""
    loop = asyncio._get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    return threading.get_ident() if task is None else task


@final
class DeferredQueue:
    """Operations that wait to be sent together. Used under the comm's lock, but for ``hurry`` and ``relieve``.

    It drives their Works: somebody who waits for one cannot wait for the end of the scope.

    Args:
        owner: whose it is, as ``current_owner`` gives it.
        meter: when it is full.
        send: called with this hold, has to ``take`` what is there and send it.
    """

    def __init__(self, owner: object, meter: BatchLimiter, send: Callable[[DeferredQueue], object]) -> None:
        self.owner = owner
        self.works: list[Work[Any]] = []  #: what the callers got, of all that was ever held
        self.items: list[Submission] = []
        self.depth = 1  #: scopes that are open
        self.due = math.inf  #: the earliest deadline that is watched
        self._before = 0  # how many there were before ``items``
        self._meter = meter
        self._limited = meter.limited
        self._send = send

    @property
    def count(self) -> int:
        """How many it has held, ever."""
        return self._before + len(self.items)

    def add(self, item: Submission) -> None:
        """Hold one more; what was there leaves first if this has no room beside it, and everything once it is full."""
        if not self._limited:
            self.items.append(item)
            return
        if not self._meter.admits(item.op):
            self._send(self)
        self.items.append(item)
        if self._meter.count(item.op):
            self._send(self)

    def take(self, since: int = 0) -> list[Submission]:
        """Give up what is held, or what of it came as number ``since`` and later."""
        keep = max(0, since - self._before)
        taken = self.items[keep:]
        del self.items[keep:]
        self._meter.clear()
        for item in self.items:
            self._meter.count(item.op)
        if not keep:
            self._before += len(taken)
        self.due = min([item.work.started + item.work.timeout for item in self.items], default=math.inf)
        return taken

    def send(self) -> None:
        """Send what is held, or say that this is not to be."""
        self._send(self)

    def hurry(self, work: Work[Any]) -> None:
        self._send(self)
        if (driver := work.driver) is not None and driver is not self:
            driver.hurry(work)

    def relieve(self, work: Work[Any]) -> None:
        self._send(self)
        if (driver := work.driver) is not None and driver is not self:
            driver.relieve(work)
