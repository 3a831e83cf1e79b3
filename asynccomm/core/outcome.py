"""An outcome: pending, then done, with a value or an error, permanently. Settled by any thread, awaited by tasks.

Settling and waiting race without a lock, by the order of two steps on each side. A waiter first registers (appends a
future, a callback, a listener), then checks ``_done``; the settler first sets ``_done``, then checks for registrations.
At least one side sees the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Generator
from types import TracebackType
from typing import Any


class Outcome:
    """Base of classes that are settled once and awaited by any number of tasks.

    A subclass decides the outcome under :data:`deciding`, sets ``_done`` last, and then wakes the waiters.
    """

    __slots__ = ()
    _value: Any
    _error: BaseException | None
    _traceback: TracebackType | None
    _done: bool
    _waiters: list[asyncio.Future[None]]

    def _suspend(self, loop: asyncio.AbstractEventLoop) -> Generator[Any, None, None]:
        """Suspend a task of ``loop`` until the outcome is decided."""
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        if not self._done:
            try:
                yield from waiter
            finally:
                if not self._done:  # cancelled: the future has no waiter any more
                    with contextlib.suppress(ValueError):  # decided just now
                        self._waiters.remove(waiter)

    def _result(self) -> Any:
        if self._error is not None:
            # restore the traceback of the failure: each raise would otherwise grow it for all waiters
            raise self._error.with_traceback(self._traceback)
        return self._value


def wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # else cancelled
        waiter.set_result(None)


deciding = threading.Lock()  # held for two assignments; one for all outcomes, because a lock each would cost more


def _renew_lock() -> None:
    global deciding
    deciding = threading.Lock()  # threads missing in the child may have held it


os.register_at_fork(after_in_child=_renew_lock)
