"""Calls of coroutine functions from threads without a loop, on the loop of a comm.

A call costs one hand-over to the loop's thread and one back. The calling thread waits for a lock, which Ctrl-C
interrupts: the coroutine is then cancelled.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar, final

from asynccomm.blocking.loop_thread import lease, loop_of, loops, on_a_thread
from asynccomm.comm.session import handle_dump_signal
from asynccomm.core.thread_event import ThreadEvent
from asynccomm.core.work import Work
from asynccomm.errors import ClosedError, WouldBlockError

T = TypeVar("T")


def run_on(loop: asyncio.AbstractEventLoop, function: Callable[[], Awaitable[T]]) -> T:
    """Call and await ``function()`` on ``loop``, which runs in another thread; block this thread meanwhile.

    Raises: the error of the call, also SystemExit, which does not end the loop; WouldBlockError on a thread with a
    running loop; RuntimeError if ``loop`` is closed. An exception that interrupts the waiting thread
    (KeyboardInterrupt) cancels the call, and is raised when the call has ended.
    """
    refuse_on_a_loop()
    return _Call(loop, function).result()


def refuse_on_a_loop() -> None:
    """Raise WouldBlockError on a thread with a running loop."""
    if asyncio._get_running_loop() is not None:
        raise WouldBlockError("a blocking call would block the event loop of this thread: use a comm of that loop")


def settled(work: Work[T]) -> Any:
    """The output of ``work``: on a thread without a loop by blocking, else an awaitable of it, for any loop."""
    return work.wait() if asyncio._get_running_loop() is None else awaited(work)


def made(loop: asyncio.AbstractEventLoop, function: Callable[[], Awaitable[T]]) -> Any:
    """The result of ``await function()`` on ``loop``: on a thread without a loop by blocking, else an awaitable of it.

    The awaitable is for any running loop. Cancelling it cancels the call.
    """
    running = asyncio._get_running_loop()
    if running is None:
        return run_on(loop, function)
    return function() if running is loop else _elsewhere(loop, function)


async def awaited(work: Work[T]) -> T:
    """Await ``work`` on the running loop, also if its comm belongs to another loop. Cancelling abandons the wait."""
    loop = asyncio.get_running_loop()
    if loop is work._mailbox.loop:
        return await work
    if not work.done():
        work.check_process()
        arrived = loop.create_future()

        def arrive() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def news() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrive)

        work._send()
        work.listen(news)
        await arrived
    elif work._mailbox.should_yield():
        await asyncio.sleep(0)
    return work.result()


async def _elsewhere(loop: asyncio.AbstractEventLoop, function: Callable[[], Awaitable[T]]) -> T:
    async def called() -> T:
        return await function()

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), loop))


@final
class _Call(Generic[T]):
    """One call of a coroutine function on the loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], Awaitable[T]]) -> None:
        self._loop = loop
        self._function: Callable[[], Awaitable[T]] | None = function
        self._ended = ThreadEvent()
        self._task: asyncio.Task[None] | None = None
        self._outcome: list[T] = []
        self._error: BaseException | None = None

    def result(self) -> T:
        try:
            self._loop.call_soon_threadsafe(self._start)
            self._ended.wait(math.inf)
        except BaseException:
            self._loop.call_soon_threadsafe(self._cancel)
            self._ended.wait(math.inf)
            self._outcome.clear()  # a comm that is not returned is to end, and the traceback has this frame
            raise
        try:
            if self._error is not None:
                raise self._error
            return self._outcome.pop()
        finally:
            self._error = None  # the error's traceback has this frame

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._end)  # a task that is cancelled before its first step has run nothing

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._end()  # the thread was interrupted before it could have the call started

    async def _run(self) -> None:
        assert self._function is not None
        try:
            self._outcome.append(await self._function())
        except BaseException as exc:
            self._error = exc  # raised in the calling thread: SystemExit is to end the program, not the loop
        finally:
            self._end()

    def _end(self, _: object = None) -> None:
        if self._ended.is_set():
            return
        if not self._outcome and self._error is None:
            self._error = asyncio.CancelledError()
        self._function = None  # the loop keeps this call for a moment longer, and is not to keep the caller's objects
        self._ended.set()


@final
class Portal:
    """A hold on the event loop that runs in a thread. The loop ends with the last hold, or with the process.

    Args:
        loop: the loop itself, for a caller that may be on its thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._process: Final = os.getpid()
        self.held: bool = True  #: whether this hold is in force
        handle_dump_signal()  # here, as the loop's thread cannot install a handler
        portal = lease() if loop is None else loops().__enter__()
        try:
            self.loop: Final = loop_of(portal) if loop is None else loop
        except BaseException:
            loops().__exit__(None, None, None)
            raise

    @property
    def in_child(self) -> bool:
        """Whether this process is a forked child of the one that has the loop."""
        return self._process != os.getpid()

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """``run_on`` this loop.

        Raises: ClosedError in a forked child, where the loop's thread is missing, or if the loop ends meanwhile.
        """
        self.check()
        try:
            return run_on(self.loop, function)
        except asyncio.CancelledError:
            if self.held:
                raise
            raise ClosedError("this comm was closed by another thread during the call") from None

    def leave_soon(self, function: Callable[[], Awaitable[object]]) -> None:
        """Begin ``function()`` on this loop without waiting, and give up the hold at its end."""
        if self.in_child:
            return

        async def called() -> None:
            await function()

        ended = asyncio.run_coroutine_threadsafe(called(), self.loop)
        ended.add_done_callback(lambda _: on_a_thread(self.release))  # the callback runs on the loop's thread

    def check(self) -> None:
        """Raise ClosedError if the loop has ended, or is in the parent of this process."""
        if self.in_child:
            raise ClosedError("this comm belongs to the parent process: a forked child cannot use it")
        if not self.held:
            raise ClosedError("this comm is closed")

    def release(self) -> None:
        """Give up the hold. Idempotent; does nothing in a forked child."""
        held, self.held = self.held, False
        if held and not self.in_child:
            loops().__exit__(None, None, None)
