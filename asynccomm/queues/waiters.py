"""Tasks and threads that wait for the other side of a queue."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar, final

from asynccomm.core.state import Streak
from asynccomm.core.thread_event import ThreadEvent
from asynccomm.errors import AsyncCommError, WouldBlockError

T = TypeVar("T")


@final
class Waiters:
    """The waiting tasks and threads of one end, on the loop of the end.

    Args:
        attempt: one try to make progress; None: it has to wait.
        arm: asks the other side for a wake-up; False: there is something to do already.
        abandoned: called on the loop after a wait that ended without a result: it was cancelled, or its time was over.
    """

    def __init__(self, arm: Callable[[], bool], abandoned: Callable[[], object] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.streak = Streak()
        self._arm = arm
        self._abandoned = abandoned
        self._waiting: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._error: AsyncCommError | None = None  # in a forked child

    def wake(self) -> None:
        """Wake all. On the loop."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for each in waiting:
            each()

    def wake_soon(self) -> None:
        """Wake all. From any thread."""
        if self._waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no task goes on
                self.loop.call_soon_threadsafe(self.wake)

    async def wait(self, attempt: Callable[[], T | None]) -> T:
        """The first result of ``attempt``. Cancelling is safe. Raises the errors of ``attempt``."""
        if self._error is not None:
            raise self._error
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("the queue belongs to the event loop that it was made on, not to the running one")
        while (result := attempt()) is None:
            self.streak.reset_streak()
            future: asyncio.Future[None] = self.loop.create_future()
            waiter = _setter(future)
            self._add(waiter)
            try:
                if self._arm():
                    await future
                else:
                    await asyncio.sleep(0)
            except BaseException:
                self._abandon()
                raise
            finally:
                self._remove(waiter)
        return result

    def release(self) -> None:
        """Drop the callbacks, as all further attempts raise: no cycle of references then holds the end."""
        self._arm, self._abandoned = _again, None

    def detach_in_child(self, error: AsyncCommError) -> None:
        """Raise ``error`` from all waits in a forked child, on any loop."""
        self._error = error
        self._lock, self._waiting = threading.Lock(), []  # a thread of the parent may have held the old lock
        self.streak.reset_streak()  # a yield would run the tasks of the parent before the error

    def _add(self, waiter: Callable[[], object]) -> None:
        with self._lock:
            self._waiting.append(waiter)

    def _remove(self, waiter: Callable[[], object]) -> None:
        with self._lock:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def block(self, attempt: Callable[[], T | None], timeout: float, late: str) -> T:
        """As :meth:`wait`, on a thread without a running loop, while the loop runs in another thread.

        Faces call the methods by other names, so that no error names a method.

        Args:
            late: text of the TimeoutError, followed by the time.

        Raises: WouldBlockError; TimeoutError after ``timeout`` seconds.
        """
        if asyncio._get_running_loop() is not None:
            raise WouldBlockError("the call would block the event loop of this thread: await a queue of that loop")
        end = time.monotonic() + timeout
        while (result := attempt()) is None:
            event = ThreadEvent()
            self._add(event.set)
            try:
                if not self._arm():
                    event.set()
                left = end - time.monotonic()
                if left <= 0 or not event.wait(left):
                    raise TimeoutError(f"{late} within {timeout:g} s")
            except BaseException:
                self._remove(event.set)
                self._abandon()
                raise
        return result

    def _abandon(self) -> None:
        """From any thread."""
        abandoned = self._abandoned  # which ``release`` may set to None meanwhile
        if abandoned is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(abandoned)


def _again() -> bool:
    return False


def _setter(future: asyncio.Future[None]) -> Callable[[], object]:
    def wake() -> None:
        if not future.done():
            future.set_result(None)

    return wake
