"""Waits for keys by any number of tasks, over a few connections with at most one outstanding WAIT on each.

The server can watch one set of keys per connection. The newest waiter of a connection owns its WAIT, and the server
wakes this owner; the other waiters are polled through ``present``, at growing intervals. When the owner is done or
cancelled, CANCEL_WAIT frees the connection for the next owner. A single waiter on a connection costs nothing while it
waits.

A new waiter shares a connection if all are busy. If the sharing lasts, the pool opens another connection and moves a
waiter to the new connection, so that idle ranks cost nothing; only beyond ``MOST_LINES`` do waiters share permanently.
Connections stay open until ``aclose``. A lost connection fails its waiters and is not used again; once all connections
are lost, every wait fails.

The pool verifies an answer with a CHECK: libuv's server also wakes waiters when a COMPARE_SET stored nothing. Callers
that read the keys at once can do without.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, final

from asynccomm.errors import ClosedError, StoreError, StoreTimeoutError
from asynccomm.store.base import within
from asynccomm.store.codec import Codec, Status

FIRST_POLL = 2e-3  # seconds between CHECKs for waiters that do not own the WAIT; grows to LAST_POLL
LAST_POLL = 50e-3
MOST_LINES = 8  # connections per client, lost ones included: a server has this many from every rank
OPEN_AFTER = 0.1  # seconds of sharing before the pool opens a connection: most waits are over by then


class ConnectionLike(Protocol):
    """The connection interface that the pool needs."""

    @property
    def codec(self) -> Codec: ...

    @property
    def error(self) -> StoreError | ClosedError | None:
        """The reason that the connection is unusable; None while the connection works."""

    def reply(self) -> asyncio.Future[Any]: ...

    def flush(self) -> None: ...

    async def close(self, error: StoreError | ClosedError) -> None: ...


@final
class _Waiter:
    def __init__(self, keys: Sequence[str], line: WaitConnection, verify: bool) -> None:
        self.keys = list(keys)
        self.verify = verify
        self.line = line  # the connection that serves this waiter; may change
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


@final
class WaitConnection:
    """Waits for keys over one connection.

    Args:
        line: a connection used only for waits.
        present: checks over another connection whether keys exist; returns the future of the answer.
    """

    def __init__(self, line: ConnectionLike, present: Callable[[Sequence[str]], asyncio.Future[bool]]) -> None:
        self._line = line
        self._present = present
        self._waiters: list[_Waiter] = []
        self._changed: asyncio.Future[None] | None = None  # done when the waiters change
        self._task: asyncio.Task[None] | None = None
        self._closed: ClosedError | None = None
        self._pause = FIRST_POLL
        self._poll_at = 0.0  # outlives the owners: a new waiter must not postpone the poll of the older ones

    async def wait(self, keys: Sequence[str], timeout: float, *, verify: bool = True) -> None:
        """As ``WaitPool.wait``."""
        if self._closed is not None:
            raise self._closed
        waiter = _Waiter(keys, self, verify)
        self._add(waiter)
        try:
            async with within(timeout):
                await waiter.future
        except TimeoutError:
            raise StoreTimeoutError(f"keys {list(keys)} did not all appear within {timeout:g} s") from None
        finally:
            waiter.line._remove(waiter)

    @property
    def waiting(self) -> int:
        """The number of waiters on this connection."""
        return len(self._waiters)

    @property
    def lost(self) -> bool:
        """Whether the connection is unusable."""
        return self._line.error is not None

    def hand_over(self, other: WaitConnection) -> None:
        """Move the longest-waiting waiter of this connection to ``other``."""
        waiter = self._waiters[0]
        self._remove(waiter)
        waiter.line = other
        other._add(waiter)

    def _add(self, waiter: _Waiter) -> None:
        self._waiters.append(waiter)
        self._change()
        self._pause = FIRST_POLL
        self._poll_at = min(self._poll_at, time.monotonic() + FIRST_POLL)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve(), name="asynccomm store waits")

    def _remove(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._change()

    def _change(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def aclose(self, error: ClosedError) -> None:
        """Fail all waiters with ``error`` and close the connection."""
        self._closed = error
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._fail(error)
        await self._line.close(error)

    def _fail(self, error: BaseException) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)

    async def _serve(self) -> None:
        try:
            while self._waiters:
                await self._serve_newest()
        except (StoreError, ClosedError) as exc:
            self._fail(exc)

    async def _serve_newest(self) -> None:
        """Let the newest waiter own the WAIT until the server answers or the set of waiters changes."""
        owner = self._waiters[-1]
        self._line.codec.wait(owner.keys)
        answer = self._line.reply()
        self._changed = change = asyncio.get_running_loop().create_future()

        def wake(_: object) -> None:
            if not change.done():
                change.set_result(None)

        answer.add_done_callback(wake)
        while not change.done():
            others = self._waiters[:-1]
            if not others:
                await change
                break
            await asyncio.wait([change], timeout=max(0.0, self._poll_at - time.monotonic()))
            if time.monotonic() >= self._poll_at:
                await self._settle_present(others)
                self._pause = min(1.5 * self._pause, LAST_POLL)
                self._poll_at = time.monotonic() + self._pause
        if not answer.done():
            self._line.codec.cancel_wait()
            self._line.flush()
        if await answer is Status.STOP_WAITING:
            if owner.verify:
                await self._settle_present([owner])
            else:
                self._settle(owner)

    async def _settle_present(self, waiters: list[_Waiter]) -> None:
        answers = [self._present(waiter.keys) for waiter in waiters]  # all sent before the first await
        for waiter, answer in zip(waiters, answers, strict=True):
            if await answer:
                self._settle(waiter)

    def _settle(self, waiter: _Waiter) -> None:
        if not waiter.future.done():
            waiter.future.set_result(None)
            if waiter in self._waiters:
                self._waiters.remove(waiter)


@final
class WaitPool:
    """Waits for keys over as many connections as needed, up to ``MOST_LINES``.

    Args:
        first: a connection used only for waits.
        connect: makes another such connection, in a single attempt.
        present: checks over another connection whether keys exist; returns the future of the answer.
    """

    def __init__(
        self,
        first: ConnectionLike,
        connect: Callable[[], Awaitable[ConnectionLike]],
        present: Callable[[Sequence[str]], asyncio.Future[bool]],
    ) -> None:
        self._lines = [WaitConnection(first, present)]
        self._connect = connect
        self._present = present
        self._opening: asyncio.Task[None] | None = None
        self._closed: ClosedError | None = None

    async def wait(self, keys: Sequence[str], timeout: float, *, verify: bool = True) -> None:
        """Return once all ``keys`` exist. Cancelling is safe. Raises: StoreTimeoutError, StoreError.

        Args:
            verify: False: the wait may also end while a key is missing, which the caller finds out.
        """
        if self._closed is not None:
            raise self._closed
        line = min(self._usable() or self._lines, key=lambda line: line.waiting)  # a lost connection raises its error
        if line.waiting and len(self._lines) < MOST_LINES and (self._opening is None or self._opening.done()):
            self._opening = asyncio.create_task(self._open_more(), name="asynccomm store lines")
        try:
            await line.wait(keys, timeout, verify=verify)
        finally:
            self._spread()

    async def aclose(self, error: ClosedError) -> None:
        """Fail all waiters with ``error`` and close the connections."""
        self._closed = error
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await asyncio.gather(*(line.aclose(error) for line in self._lines))

    def _usable(self) -> list[WaitConnection]:
        return [line for line in self._lines if not line.lost]

    async def _open_more(self) -> None:
        """Open connections, one after another, for as long as waiters share."""
        pause = OPEN_AFTER
        while len(self._lines) < MOST_LINES:
            await asyncio.sleep(pause)
            if all(line.waiting < 2 for line in self._usable()):
                break
            try:
                line = await self._connect()
            except (StoreError, OSError):  # waiters go on sharing
                pause *= 2
            else:
                self._lines.append(WaitConnection(line, self._present))
                self._spread()

    def _spread(self) -> None:
        """Move waiters from shared connections to free ones."""
        lines = self._usable() if self._closed is None else []
        for free in [line for line in lines if not line.waiting]:
            fullest = max(lines, key=lambda line: line.waiting)
            if fullest.waiting > 1:
                fullest.hand_over(free)
