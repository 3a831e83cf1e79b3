"""The handle to one operation in flight.

A Work is pending, then done, with a value or with an error, permanently. The backend settles a Work from the thread
that detects the completion.

There is no cancel(). The peers have entered the operation, and one rank backing out would hang them. Cancelling a task
that awaits a Work ends only that wait; ``comm.abort()`` stops operations.

Settling and waiting race without a lock (``outcome.py``). Futures and callbacks belong to the loop, so the settler only
posts a wake-up to the mailbox, and only if a waiter is registered.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import os
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, final

import torch

from asynccomm.core import outcome
from asynccomm.core.callsite import show
from asynccomm.core.handles import Handle
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.outcome import Outcome
from asynccomm.core.state import WorkState
from asynccomm.core.thread_event import ThreadEvent
from asynccomm.errors import AsyncCommError, WouldBlockError
from asynccomm.ops import Op
from asynccomm.options import seconds

UNNUMBERED = -1  # number of a Work before submission
HOPS = 3  # turns of the loop from a Work's end until the tasks that await it have gone on
GRACE = 2.0  # seconds past the deadline that wait() leaves to the loop to find the missing ranks

T = TypeVar("T")
_finishing = threading.RLock()  # held while a result is decoded; any waiting thread may decode


class Driver(Protocol):
    """A backend's interface for progress on behalf of a waiter."""

    def before_await(self, work: Work[Any]) -> None:
        """Settle ``work`` now if this takes no longer than a wake-up would: a task on the loop is about to suspend."""

    def before_block(self, work: Work[Any]) -> None:
        """Stop relying on the loop for ``work``: a thread is about to block, possibly the loop's own."""


@final
class Orphaned:
    """The driver of the parent's operations in a forked child.

    Args:
        error: raised by waits.
    """

    def __init__(self, error: AsyncCommError) -> None:
        self._error = error

    def before_await(self, work: Work[Any]) -> None:
        """Raises: the error."""
        raise type(self._error)(*self._error.args)  # a new one, as each has a traceback

    before_block = before_await


class StreamOrder(Protocol):
    """The position of an operation in the streams of a GPU."""

    @property
    def issued(self) -> bool:
        """Whether a stream can be ordered after the operation now."""

    @property
    def immediate(self) -> bool:
        """Whether the operation is issued without prior work on the loop."""

    def listen(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` once the operation is issued, from any thread; possibly at once, possibly twice."""

    def order(self, stream: torch.cuda.Stream | None) -> None:
        """Order ``stream``, or else the current stream, after the operation, once the operation is issued."""


@final
class Work(Handle, WorkState, Outcome, Generic[T]):
    """One submitted operation; ``await`` it for its output.

    Awaiting returns once the host may read the output. Any number of tasks may await, any number of times; all get the
    same value or the same error. Awaiting a finished Work does not suspend, except that after 64 such awaits in a row,
    or 1 ms, an await yields to the loop. Cancelling an await is always safe and leaves the operation running.

    A Work may be dropped: the operation goes on, and the comm keeps its tensors alive until the operation has really
    finished. An error that was never retrieved is then reported once, to the loop's exception handler.
    """

    _instead = "await it here, and send its output there"
    __slots__ = ("__weakref__",)
    _error: AsyncCommError | None
    driver: Driver | None
    finished: float | None  #: time of settling, on the clock of ``started``; None while pending
    order: StreamOrder | None

    if TYPE_CHECKING:

        def __await__(self) -> Generator[Any, None, T]: ...

    def __init__(
        self,
        op: Op,
        seq: int,
        mailbox: Mailbox,
        *,
        value: Any,
        timeout: float,
        finish: Callable[[Any], Any] | None = None,
        on_settled: Callable[[Work[Any]], object],
        on_overdue: Callable[[Work[Any]], object] | None = None,
        driver: Driver | None = None,
    ) -> None:
        WorkState.__init__(self)
        self.op: Op = op  #: the submitted operation; holds no tensors
        #: its number on the comm: collectives count from 0, point-to-point apart; -1 while held back
        self.seq = seq
        self.timeout = timeout  #: seconds from the call until the comm counts as broken
        self.started: float = time.monotonic()  #: time of the call, on the ``time.monotonic`` clock
        self._mailbox = mailbox
        self._value = value
        self._finish = finish  # makes the output from the value, at the first read; then dropped
        self.driver = driver  #: makes progress for waiters; for backends. Dropped once done, as is ``_on_overdue``
        self._on_overdue = on_overdue
        self._on_settled = on_settled  # dropped once called: it holds the comm

    # -- state --------------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the operation has ended, with a value or an error."""
        return self._done

    def is_completed(self) -> bool:
        """Torch's name for :meth:`done`."""
        return self._done

    def result(self) -> T:
        """The output, without waiting. Raises the operation's error, or ``asyncio.InvalidStateError`` while pending."""
        if not self._done:
            raise asyncio.InvalidStateError(f"{self!r} is not done")
        return self._outcome()

    def exception(self) -> BaseException | None:
        """The operation's error or None, without waiting. Raises ``asyncio.InvalidStateError`` while pending."""
        if not self._done:
            raise asyncio.InvalidStateError(f"{self!r} is not done")
        if self._finish is not None:
            self._make_output()  # an object that cannot be decoded is an error, too
        if self._error is not None:
            self._error.observed = True
        return self._error

    def cancelled(self) -> bool:
        """False: only the tasks that await an operation can be cancelled. ``asyncio.wait`` asks."""
        return False

    @property
    def duration(self) -> float | None:
        """Seconds from the call to completion; None while pending."""
        return None if self.finished is None else self.finished - self.started

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self) -> Generator[Any, None, T]:
        mailbox = self._mailbox
        loop = self._own_loop()
        driver = self.driver
        if driver is not None:
            driver.before_await(self)
            driver = None  # a kept traceback of a cancelled await would keep the backend's memory
        if self._done:
            if mailbox.should_yield():
                yield
            return self._outcome()
        mailbox.reset_streak()
        yield from self._suspend(loop)
        return self._outcome()

    def check_process(self) -> None:
        """Raise ClosedError for a pending operation of the parent, in a forked child: there it never ends."""
        if isinstance(self.driver, Orphaned):
            self.driver.before_await(self)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """The comm's loop, which must be the running one; in a forked child, which runs none, raises ClosedError."""
        if asyncio._get_running_loop() is not self._mailbox.loop:
            self.check_process()
            asyncio.get_running_loop()  # raises where there is none
            raise RuntimeError(f"{self!r} belongs to the event loop its comm was made on, not to the running one")
        return self._mailbox.loop

    def wait(self, timeout: float | timedelta | None = None) -> T:
        """Wait for the operation as its device does, and return its output.

        On a GPU, the current stream waits, and the host does not: see :meth:`wait_stream`. Operations outside of the
        streams (objects, dicts, barriers, uneven tensors of sizes unknown) wait as on the CPU.

        On the CPU, block the calling thread until the operation is done. On a thread with a running event loop this
        raises ``WouldBlockError``, whether or not the operation is finished: use ``await`` there. With agreed ordering
        the comm's loop must be running in another thread, because the ranks agree on the order there.

        Args:
            timeout: seconds to wait at most, None for no limit of its own. Passing the limit raises the builtin
                ``TimeoutError`` and ends only this wait; the operation keeps its own deadline.
        """
        limit = math.inf if timeout is None else seconds("timeout", timeout, 0.0)
        self._send()
        if self.order is not None:
            return self._follow(self.order, None, limit)
        if asyncio._get_running_loop() is not None:
            raise WouldBlockError(f"wait() would block the event loop of this thread: use `await` on {self!r}")
        self._block(limit)
        return self._outcome()

    def _block(self, limit: float, issued: StreamOrder | None = None) -> None:
        """Block until the operation is done, or until it is issued in a stream if ``issued`` is given."""
        end = time.monotonic() + limit
        driver = self.driver
        if driver is not None:
            driver.before_block(self)
            driver = None  # as in _wait
        if self._done:
            return
        event = ThreadEvent()
        self._listeners.append(event.set)
        if issued is not None:
            issued.listen(event.set)
        due = self.started + self.timeout + GRACE
        while not (self._done or (issued is not None and issued.issued)):
            now = time.monotonic()
            if now >= end:
                with outcome.deciding:
                    if not self._done:  # else the settler may be iterating over the list
                        self._listeners.remove(event.set)
                        raise TimeoutError(f"{self!r} was not done within {limit:g} s; it goes on")
            elif now >= due:
                due = math.inf
                if (overdue := self._on_overdue) is not None:
                    overdue(self)  # the loop, which checks the deadlines, is not running
            else:
                event.wait(min(end, due) - now)

    def wait_stream(self, stream: torch.cuda.Stream | None = None) -> None:
        """Order ``stream`` (default: the current one) after the operation, without waiting on the host. GPU only.

        A collective is usually in its stream when the call has returned. NCCL may have to connect for the first
        collective of a kind; ``wait_stream`` then blocks until NCCL has connected. A send or receive must first match
        its other end, and a collective on memory in use by objects, dicts or uneven tensors in flight must wait for
        these. Waits of the latter two kinds raise ``WouldBlockError`` on a thread with a running event loop: use
        :meth:`ordered` there.

        Raises: RuntimeError if the operation has no position in a stream; the operation's error if it has failed
        already.
        """
        self._send()
        order = self.order
        if order is None:
            raise RuntimeError(
                f"wait_stream() orders CUDA streams, but {self!r} runs on the CPU: use `await` or wait()"
            )
        self._follow(order, stream, math.inf)

    async def ordered(self, stream: torch.cuda.Stream | None = None) -> T:
        """Order ``stream`` (default: the current one) after the operation, and return the output for use on the GPU.

        The host may not read the output yet. The call suspends only until the operation is in its own stream. For an
        operation without a stream (on the CPU), the same as ``await``. Cancelling is safe.
        """
        self._send()
        order = self.order
        if order is None:
            return await self
        loop = self._own_loop()
        if not order.issued and not self._done:
            waiter: asyncio.Future[None] = loop.create_future()
            wake = partial(outcome.wake, waiter)
            order.listen(lambda: self._mailbox.post(wake))
            self.add_done_callback(lambda _: wake())
            self._mailbox.reset_streak()
            await waiter
        elif self._mailbox.should_yield():
            await asyncio.sleep(0)
        return self._follow(order, stream, math.inf)

    def _send(self) -> None:
        """Submit the operation if a scope holds it back: a held-back operation has no position in a stream."""
        if self.seq == UNNUMBERED and (driver := self.driver) is not None:
            if asyncio._get_running_loop() is None:
                driver.before_block(self)
            else:
                driver.before_await(self)

    def _follow(self, order: StreamOrder, stream: torch.cuda.Stream | None, limit: float) -> T:
        """Order ``stream`` after the operation; returns the output."""
        if not order.issued and not self._done:
            if not order.immediate and asyncio._get_running_loop() is not None:
                raise WouldBlockError(f"{self!r} must wait for other ranks first: use `await work.ordered()`")
            self._block(limit, order)
        if self._error is not None:
            return self._outcome()
        order.order(stream)
        finish = self._finish
        if finish is None:
            return self._value  # type: ignore[no-any-return]
        with torch.cuda.stream(stream):  # None: the current one. Not kept: the host may not read it yet
            return finish(self._value)  # type: ignore[no-any-return]

    def add_done_callback(self, fn: Callable[[Work[T]], object], *, context: contextvars.Context | None = None) -> None:
        """Have the loop call ``fn(work)`` after the operation is done, or soon if done already. From any thread."""
        self._callbacks.append((fn, contextvars.copy_context() if context is None else context))
        if self._done:
            self._mailbox.post(self._wake)

    def listen(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` once the operation is done, on the settling thread; for a done operation, at once.

        From any thread. The listener may be called twice, and must be quick and not raise; use ``add_done_callback``
        for other callbacks.
        """
        self._listeners.append(listener)
        if self._done:
            listener()

    def remove_done_callback(self, fn: Callable[[Work[T]], object]) -> int:
        """Remove all callbacks equal to ``fn``; returns their number."""
        found = [entry for entry in self._callbacks if entry[0] == fn]
        for entry in found:  # one by one: another thread may be appending
            self._callbacks.remove(entry)
        return len(found)

    # -- for backends -------------------------------------------------------------------------------------------------

    def settle(self, error: AsyncCommError | None = None) -> bool:
        """Complete the operation, with its value or with ``error``; from any thread. For backends.

        Returns whether this call decided the outcome: an operation fails early when its comm breaks, and its backend
        settles it again later.
        """
        value = None  # dropped outside of the lock: a destructor may run any code
        with outcome.deciding:
            if self._done:
                return False
            self._error = error
            if error is not None:
                value, self._value = self._value, None
                self._finish = None
                self._traceback = error.__traceback__
            self.finished = time.monotonic()
            self.driver = self._on_overdue = None
            self._done = True
        del value
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()
        on_settled, self._on_settled = self._on_settled, None
        assert on_settled is not None
        on_settled(self)
        if self._waiters or self._callbacks:
            self._mailbox.post(self._wake)
        return True

    def capture(self) -> None:
        """Settle an operation that became part of a CUDA graph: it is done whenever the graph has run. For backends."""
        self.captured = True
        self.settle()

    def take_error(self) -> AsyncCommError | None:
        """Take the error of a settled operation to pass it on; this Work does not report the error any more."""
        error, self._error = self._error, None
        return error

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            outcome.wake(waiter)
        while self._callbacks:  # always the same list: another thread may be appending
            fn, context = self._callbacks.pop(0)
            self._mailbox.loop.call_soon(fn, self, context=context)

    def _outcome(self) -> T:
        if self._finish is not None:
            self._make_output()
        if self._error is not None:
            self._error.observed = True
            self._result()
        if self.captured:
            raise RuntimeError(
                f"{self!r} is part of a CUDA graph: it runs when that is replayed; use wait() or wait_stream() while "
                f"capturing, and wait for the replay"
            )
        return self._value  # type: ignore[no-any-return]

    def _make_output(self) -> None:
        """Make the output from the value of an operation that is done, unless another thread has; or set the error."""
        with _finishing:
            if (finish := self._finish) is None or self.captured:  # the value of a captured one is not there yet
                return
            try:
                self._value = finish(self._value)
            except AsyncCommError as exc:
                self._error, self._value = exc.with_traceback(None), None  # the frames would keep this Work
            self._finish = None

    def __repr__(self) -> str:
        if not self._done:
            state = "pending" if self.seq >= 0 else "held back"
        elif self._error is None:
            state = "captured" if self.captured else "done"
        else:
            state = f"failed: {type(self._error).__name__}"
        number = f"#{self.seq} " if self.seq >= 0 else ""
        return f"<Work {number}{self.op} {state}>"

    def _report_unretrieved(self) -> None:
        error = self._error
        if error is None or error.observed:
            return
        report = {
            "message": f"{self!r}: the error was never retrieved",
            "exception": error,
            "call_site": show(self.site),
        }
        loop = self._mailbox.loop
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(_report, loop, report, HOPS)


def _report(loop: asyncio.AbstractEventLoop, report: dict[str, Any], hops: int) -> None:
    """Report an error, unless a task gets it within some turns of the loop: tasks await other Works that it failed."""
    error = report["exception"]
    if error.observed:
        return
    if hops:
        loop.call_soon(_report, loop, report, hops - 1)
        return
    error.observed = True  # a broken comm fails all its Works with one error: report it once
    loop.call_exception_handler(report)


def _renew_lock() -> None:
    global _finishing
    _finishing = threading.RLock()  # threads missing in the child may have held it


os.register_at_fork(after_in_child=_renew_lock)
