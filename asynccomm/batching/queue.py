"""The operations that one task has called on one comm and that are not submitted yet."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any, final

from asynccomm.backends.base import FastCalls, HeldCall, Submission
from asynccomm.batching.plan import BatchLimiter
from asynccomm.core.state import HeldCalls
from asynccomm.core.work import Work


def current_owner() -> object:
    """The identity of the caller: the running task, or the thread if no task runs."""
    loop = asyncio._get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    return threading.get_ident() if task is None else task


@final
class DeferredQueue(HeldCalls):
    """Operations waiting to be submitted together.

    Used under the comm's lock, except for ``before_await`` and ``before_block``.

    The queue is the driver of its Works: a task that awaits one of them inside the scope must not wait for the scope's
    end.

    Args:
        owner: the queue's owner, from ``current_owner``.
        meter: the limits of a batch.
        send: called with this queue; has to ``take`` the operations and submit them.
    """

    def __init__(self, owner: object, meter: BatchLimiter, send: Callable[[DeferredQueue], object]) -> None:
        super().__init__()
        self.owner = owner
        self.works: list[Work[Any]] = []  #: the Works returned to callers, of all operations ever added
        self.items: list[Submission | HeldCall] = []
        self.depth = 1  #: number of open scopes
        self.fast: FastCalls | None = None  #: the backend's fast path, which may hold operations
        self.due: float = math.inf  #: the earliest deadline of the waiting operations
        self._before = 0  # number of operations taken so far
        self._meter = meter
        self._limited = meter.limited
        self._send = send

    @property
    def count(self) -> int:
        """The number of operations ever added."""
        return self._before + len(self.items)

    def add(self, item: Submission) -> None:
        """Add an operation; submit the waiting ones first if it exceeds the limits, and all once the queue is full."""
        if not self._limited:
            self.items.append(item)
            return
        if not self._meter.admits(item.op):
            self._send(self)
        self.items.append(item)
        if self._meter.count(item.op):
            self._send(self)

    def take(self, since: int = 0) -> list[Submission | HeldCall]:
        """Remove and return the waiting operations, or those added as number ``since`` and later."""
        keep = max(0, since - self._before)
        taken, self.items = self.items[keep:], self.items[:keep]
        self._meter.clear()
        for item in self.items:
            self._meter.count(item.op)
        if not keep:
            self._before += len(taken)
        self.due = min([item.work.started + item.work.timeout for item in self.items], default=math.inf)
        return taken

    def send(self) -> None:
        """Submit the waiting operations, or raise if that is impossible."""
        self._send(self)

    def before_await(self, work: Work[Any]) -> None:
        self._send(self)
        if (driver := work.driver) is not None and driver is not self:
            driver.before_await(work)

    def before_block(self, work: Work[Any]) -> None:
        self._send(self)
        if (driver := work.driver) is not None and driver is not self:
            driver.before_block(work)
