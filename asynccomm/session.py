"""One rank's part in a comm: what it has submitted, and how it ends. The engine room of :class:`asynccomm.Comm`.

Submitting happens under one lock: so calls may come from any thread, and the order of numbers is the order on the wire.
What follows happens elsewhere: the backend settles the Work, ``deadlines`` notices if it does not, ``bulletin`` tells
the other ranks.

States: open, then closed or broken, for good. Broken means: what was pending has failed with one error, the peers have
been told why, and later calls raise that error again. What breaks a session: an operation past its deadline, a
transport error, ``abort`` here or on another rank.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, final

from torch import Tensor

from asynccomm.backends.base import Backend, BackendContext, Submission, UnsuitableError, own_hints
from asynccomm.bulletin import Bulletin
from asynccomm.checks import Group
from asynccomm.deadlines import Deadlines
from asynccomm.errors import (
    AbortedError,
    AsyncCommError,
    BackendError,
    BrokenError,
    ClosedError,
    CollectiveTimeoutError,
    PeerLostError,
)
from asynccomm.mailbox import Mailbox
from asynccomm.news import error_of, news_of
from asynccomm.ops import Call, Recv, Send
from asynccomm.options import CommOptions, seconds
from asynccomm.store.base import Store, within
from asynccomm.work import Work

__all__ = ["CommStatistics", "Session"]

TELL_SECONDS = 2.0  # for the store to take the news of an abort; the peers learn from the transport otherwise
LOST_SECONDS = 0.03  # to look for the reason why a rank is gone; all are to know within 0.1 that it is
EXPLAIN_SECONDS = 1.0  # the same for other errors of the transport
ROLL_CALL_SECONDS = 0.5  # for peers to say what they have issued, once an operation is past its deadline

_log = logging.getLogger("asynccomm")
_alive: weakref.WeakSet[Session] = weakref.WeakSet()  # only to disown them in a forked child


class CommStatistics(NamedTuple):
    """A snapshot of one comm's traffic."""

    submitted: int  #: operations called so far
    in_flight: int  #: operations not settled yet
    bytes_in_flight: int  #: bytes of the larger side (inputs or outputs) of those


@final
class Session:
    """Submits, watches, and ends.

    Args:
        group, options: as the comm shows them.
        mailbox: of the comm's loop.
        store: keys of this comm alone.
        resources: closed when the session has ended.
    """

    def __init__(
        self, group: Group, options: CommOptions, mailbox: Mailbox, store: Store, resources: AsyncExitStack
    ) -> None:
        self.group = group
        self.options = options
        self.mailbox = mailbox
        self.backend: Backend | None = None  #: None until connected, and in a forked child
        self.error: AsyncCommError | None = None  #: why there are no more calls
        self._resources = resources
        self._lock = threading.RLock()  # held while submitting, so that order is one
        # bytes by operation. Used without _lock, one atomic step of the dict at a time: a backend may settle another
        # rank's operation inside submit(), with that one's _lock held by a thread that waits for the backend
        self._pending: dict[Work[Any], int] = {}
        self._collectives = 0
        self._p2p = 0
        self._changed: list[asyncio.Future[None]] = []  # who waits for something to settle
        self._ending: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        # others hold these for long; they must not keep a forgotten comm alive
        self.transport_failed = _weakly(self._transport_failed)  #: for the backend: hears of transport errors
        self._deadlines = Deadlines(mailbox, _weakly(self._expired))
        self._bulletin = Bulletin(store, group.rank, _weakly(self._heard))
        _alive.add(self)

    async def connect(self, backends: Mapping[str, type[Backend]], context: BackendContext) -> str:
        """Connect the first of ``backends`` that suits and begin to take calls; any other failure ends the session.

        Args:
            backends: by name, in the order to try them.
            context: with everybody's hints and keys, of which each backend gets its own.

        Returns: the name of the one that connected.
        """
        name, last = "", list(backends)[-1]
        try:
            async with within(context.timeout):
                for name, backend in backends.items():
                    hints = own_hints(backend, context.hints)
                    try:
                        self.backend = await backend.connect(
                            replace(context, store=context.store.prefix(name), hints=hints)
                        )
                    except UnsuitableError as exc:
                        if name == last:
                            raise
                        _log.info("backend %r does not suit, so another is tried: %s", name, exc)
                    else:
                        break
        except BaseException as exc:
            # the others are still connecting: what they wait for will not come
            self.abort(f"could not connect: {type(exc).__name__}: {exc}")
            await self.aclose()
            if isinstance(exc, TimeoutError) and not isinstance(exc, AsyncCommError):
                raise BackendError(
                    f"{name} did not connect rank {self.group.rank} of comm {self.group.name!r} "
                    f"within {self.options.timeout:g} s"
                ) from exc
            raise
        assert self.backend is not None
        self._resources.push_async_callback(self.backend.aclose)
        self.options = replace(self.options, hints=hints)
        return name

    def statistics(self) -> CommStatistics:
        """How much is going on."""
        pending = list(self._pending.values())
        return CommStatistics(self._collectives + self._p2p, len(pending), sum(pending))

    @property
    def closed(self) -> bool:
        """Whether ``aclose`` was called."""
        return self._closing is not None

    @property
    def ended(self) -> bool:
        """Whether closing has come to its end."""
        return self._closing is not None and self._closing.done() and not self._closing.cancelled()

    # -- submitting ---------------------------------------------------------------------------------------------------

    def submit(self, call: Call, timeout: float | timedelta | None, hints: Mapping[str, str] | None) -> Work[Any]:
        """Number ``call`` and hand it on. From any thread."""
        limit = self.options.timeout if timeout is None else seconds("timeout", timeout, 0.0)
        if hints is not None and not isinstance(hints, Mapping):
            raise TypeError(f"hints must be a mapping of strings to strings, got {hints!r}")
        self.check_loop()
        op = call.op
        with self._lock:
            self.check_open()
            backend = self.backend
            assert backend is not None
            seq = self._p2p if op.p2p else self._collectives
            work: Work[Any] = Work(
                op,
                seq,
                self.mailbox,
                value=call.result,
                timeout=limit,
                on_settled=self._settled,
                on_overdue=self._overdue,
                driver=backend,
            )
            self._pending[work] = max(_nbytes(call.inputs), _nbytes(call.outputs))
            try:
                backend.submit((Submission(call, work),))
            except BaseException:
                self._settled(work)
                raise
            if op.p2p:
                self._p2p += 1
            else:
                self._collectives += 1
        if not work.done():
            self._deadlines.add(work)
        return work

    def _settled(self, work: Work[Any]) -> None:
        self._pending.pop(work, None)
        if self._changed:
            self.mailbox.post(self._wake)

    def _wake(self) -> None:
        changed, self._changed = self._changed, []
        for waiter in changed:
            if not waiter.done():
                waiter.set_result(None)

    async def ready(self) -> None:
        """Wait until less is in flight than the options allow. Raises: ClosedError, BrokenError."""
        self.check_loop()
        self.check_open()
        while self._crowded():
            waiter = self._hear_of_settling()
            if self._crowded():  # looked at after leaving word: see Work
                await waiter
            self.check_open()

    def _crowded(self) -> bool:
        now = self.statistics()
        return now.in_flight >= self.options.max_ops or now.bytes_in_flight >= self.options.max_bytes

    def _hear_of_settling(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = self.mailbox.loop.create_future()
        self._changed.append(waiter)
        return waiter

    def check_loop(self) -> None:
        running = asyncio._get_running_loop()
        if running is not None and running is not self.mailbox.loop:
            raise RuntimeError(
                f"comm {self.group.name!r} belongs to another event loop than the running one; a comm is used on the "
                f"loop it was made on, and from threads that run none"
            )

    def check_open(self) -> None:
        error = self.error
        if error is not None:
            again = type(error)(*error.args)  # a fresh one: the first is what the pending Works raise
            raise again from error

    # -- ending -------------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Break, and tell the peers; does nothing once broken or closed. From any thread."""
        self._fail(AbortedError(self.group.rank, reason), tell=True)

    async def aclose(self) -> None:
        """Take no more calls, wait for what is in flight, free everything. Idempotent. Cancelling it aborts."""
        self.check_loop()
        if self._closing is None:  # a task of its own: cleaning up goes on when the caller is cancelled
            closed = ClosedError(f"comm {self.group.name!r} is closed")
            with self._lock:
                self.error = self.error or closed
            self._closing = self.mailbox.loop.create_task(self._close(closed), name="asynccomm close")
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self.abort("closing was cancelled")
            raise

    async def _close(self, closed: ClosedError) -> None:
        while self._pending:
            waiter = self._hear_of_settling()
            if self._pending:
                await waiter
        await asyncio.sleep(0)  # an abort from another thread may just be on its way through the mailbox
        while self._ending:
            await asyncio.wait(set(self._ending))
        self._deadlines.close()
        await self._bulletin.aclose()
        await self._resources.aclose()
        self.error = closed

    def forget(self) -> None:
        """End without telling anybody why: the comm was dropped unclosed. From any thread, at any time."""
        self._abort_backend()
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self.mailbox.loop.call_soon_threadsafe(lambda: self._begin(self._let_go()))

    async def _let_go(self) -> None:
        dropped = AbortedError(self.group.rank, f"comm {self.group.name!r} was dropped unclosed")
        self.error = self.error or dropped
        for work in list(self._pending):
            work.settle(dropped)
        self._deadlines.close()
        await self._bulletin.aclose()
        await self._resources.aclose()

    def disown(self) -> None:
        """Refuse everything: this is a forked child, where neither threads nor connections are ours."""
        self._lock = threading.RLock()  # threads that are not in the child may have held the old ones
        self.error = ClosedError(f"comm {self.group.name!r} was made before this process was forked; make a new one")
        self.backend = None

    def _fail(self, error: BrokenError, *, tell: bool) -> bool:
        """Become broken by ``error``, unless it has ended otherwise; from any thread."""
        with self._lock:
            draining = isinstance(self.error, ClosedError) and self._pending
            if self.error is not None and not draining:
                return False
            self.error = error
        for work in list(self._pending):
            work.settle(error)
        if self.mailbox.loop.is_closed():
            self._abort_backend()
        else:
            self.mailbox.post(lambda: self._begin(self._end(error, tell=tell)))
        return True

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self.mailbox.loop.create_task(coroutine)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, error: BrokenError, *, tell: bool) -> None:
        """Tell the peers why before the transport goes, so that they hear of the cause and not of a lost connection."""
        self._deadlines.close()
        try:
            if tell:
                with contextlib.suppress(TimeoutError, AsyncCommError):
                    async with asyncio.timeout(TELL_SECONDS):
                        await self._bulletin.post(**news_of(error))
        finally:
            self._abort_backend()
        if self.options.abort_process_on_timeout_or_error and not isinstance(error, AbortedError):
            _log.critical("ending the process: %s", error)
            os.abort()

    def _abort_backend(self) -> None:
        if self.backend is not None:
            self.backend.abort()

    # -- what others tell us ------------------------------------------------------------------------------------------

    def _transport_failed(self, error: BrokenError) -> None:
        """From any thread."""
        # the loop may be blocked, by somebody who waits for just what failed
        late = threading.Timer(2 * _explain_seconds(error), lambda: self._fail(error, tell=True))
        self.mailbox.post(lambda: self._begin(self._explain(error, late)))
        if asyncio._get_running_loop() is not self.mailbox.loop:
            late.daemon = True
            with contextlib.suppress(RuntimeError):  # there may be too many threads
                late.start()

    async def _explain(self, error: BrokenError, late: threading.Timer) -> None:
        """Find out whether the transport failed because a rank gave up, and break with what is behind it."""
        if isinstance(error, (BackendError, PeerLostError)):
            with contextlib.suppress(TimeoutError, AsyncCommError):
                async with asyncio.timeout(_explain_seconds(error)):
                    for item in await self._bulletin.look():
                        self._heard(item)
        self._fail(error, tell=True)
        late.cancel()

    def _heard(self, item: dict[str, Any]) -> None:
        error = error_of(item)
        if error is None:
            self._begin(self._answer(item["number"]))  # a roll call
        elif not (isinstance(error, PeerLostError) and error.rank == self.group.rank):
            self._fail(error, tell=False)

    async def _answer(self, number: int) -> None:
        with contextlib.suppress(TimeoutError, AsyncCommError):
            async with asyncio.timeout(TELL_SECONDS):
                await self._bulletin.reply(number, collectives=self._collectives)

    def _expired(self, work: Work[Any]) -> None:
        self._begin(self._expire(work))

    def _overdue(self, work: Work[Any]) -> None:
        """A thread has waited for ``work`` for longer than the loop, which must be blocked, should have let it."""
        self._fail(self._timeout_of(work, ()), tell=True)

    def _timeout_of(self, work: Work[Any], missing: tuple[int, ...]) -> CollectiveTimeoutError:
        elapsed = time.monotonic() - work.started
        group = self.group
        return CollectiveTimeoutError(work.op, work.seq, group.name, group.rank, elapsed, work.timeout, missing)

    async def _expire(self, work: Work[Any]) -> None:
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        missing = others
        if isinstance(work.op, (Send, Recv)):
            if work.op.peer is not None:
                missing = [work.op.peer]
        elif others:
            missing = []
            with contextlib.suppress(TimeoutError, AsyncCommError):
                async with asyncio.timeout(2 * ROLL_CALL_SECONDS):  # the store itself may be what hangs
                    number = await self._bulletin.post(kind="roll call")
                    said = await self._bulletin.replies(number, others, ROLL_CALL_SECONDS)
                missing = [r for r in others if r not in said or said[r]["collectives"] <= work.seq]
        if work.done():
            return  # it came in during the roll call
        self._fail(self._timeout_of(work, tuple(missing)), tell=True)


def _nbytes(tensors: tuple[Tensor, ...]) -> int:
    if len(tensors) == 1:
        return tensors[0].nbytes
    return sum([tensor.nbytes for tensor in tensors])


def _explain_seconds(error: BrokenError) -> float:
    """How long to look for what is behind ``error``."""
    return LOST_SECONDS if isinstance(error, PeerLostError) else EXPLAIN_SECONDS


def _weakly(method: Callable[[Any], object]) -> Callable[[Any], None]:
    """``method``, without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        target = reference()
        if target is not None:
            target(argument)

    return call


def _abandon_all() -> None:
    """At exit. A transport whose threads run into the end of the interpreter would take the process down with it."""
    for session in list(_alive):
        if session.backend is None or session.ended:
            continue
        if not session.closed:
            warnings.warn(f"comm {session.group.name!r} was still open when the process ended", ResourceWarning, 1)
        session.backend.abandon()


def _disown_all() -> None:
    for session in list(_alive):
        session.disown()


os.register_at_fork(after_in_child=_disown_all)
atexit.register(_abandon_all)
