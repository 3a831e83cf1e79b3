"""The operations of one rank on a comm: their numbers, their deadlines, and the limits of operations in flight.

Submitting happens under one lock: so calls may come from any thread, and the order of numbers is the order on the wire.
Afterwards the backend settles the Work, and ``deadlines`` reports a Work that is not settled in time.
"""

from __future__ import annotations

import abc
import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from asynccomm.backends.base import Backend
from asynccomm.batching.batches import Batch
from asynccomm.comm.reporter import Reporter
from asynccomm.core.callsite import call_site
from asynccomm.core.deadlines import Deadlines
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import UNNUMBERED, Driver, Work
from asynccomm.errors import AbortedError, AsyncCommError, BrokenError, StoreTimeoutError
from asynccomm.ops import Call, Op
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions, check_strings, seconds


class CommStatistics(NamedTuple):
    """A snapshot of one comm's traffic."""

    submitted: int  #: operations called so far
    in_flight: int  #: operations not settled yet
    bytes_in_flight: int  #: bytes of the operations in flight, each by its larger side (inputs or outputs)
    held: int = 0  #: operations in flight that were not sent: held by a scope, or not agreed on by the ranks
    batches: int = 0  #: batches of more than one operation sent so far
    waiting: int = 0  #: tasks that wait in ``ready()``
    waits: int = 0  #: calls of ``ready()`` that had to wait so far


class Observer(Protocol):
    """Is notified of the calls and the failure of a comm. Its methods must be quick, and not raise."""

    def called(self, call: Call, work: Work[Any]) -> object:
        """An operation of the backend was called. In the order of the calls, on the caller's thread."""

    def broke(self, error: BrokenError) -> object:
        """The comm has broken, and the other ranks were notified. From any thread."""


class InFlight(abc.ABC):
    """Counts operations, hands them to the backend, and watches their deadlines.

    The subclass :class:`~asynccomm.comm.submission.Submitter` takes calls; its subclass ``Session`` ends the comm.

    Args:
        group, options: the comm's public attributes.
        mailbox: the mailbox of the comm's loop.
    """

    def __init__(self, group: CommInfo, options: CommOptions, mailbox: Mailbox) -> None:
        self.group = group
        self.options = options
        self.mailbox = mailbox
        self.backend: Backend | None = None  #: None until connected, and in a forked child
        self.error: AsyncCommError | None = None  #: the error that later calls raise
        self.reporter: Reporter | None = None  #: keeps the last calls for the other ranks; None: no control channel
        self.observer: Observer | None = None  #: notified of calls and of the error that breaks the comm
        self._lock = threading.RLock()  # held while submitting, so that calls have one order
        # bytes by operation. Used without _lock, one atomic step of the dict at a time: a backend may settle another
        # rank's operation inside submit(), while a thread that waits for the backend holds that rank's _lock
        self._pending: dict[Work[Any], int] = {}
        self._limit = options.timeout  # seconds for an operation without a time limit of its own
        self._extended = math.inf  # time of the last extend_timeout() still in force; inf: none is
        self._collectives = 0
        self._p2p = 0
        self._aside = 0  # operations that do not use the backend
        self._called = 0  # operations of all kinds
        self._batches = self._waiting = self._waits = 0
        self._changed: list[asyncio.Future[None]] = []  # waiters for an operation to settle
        self._deadlines = Deadlines(mailbox, weak_callback(self._expired))

    def statistics(self) -> CommStatistics:
        """Counts of operations submitted, in flight and held, at this time."""
        pending = [(work, nbytes) for work, nbytes in self._pending.copy().items() if not work.done()]  # see pending()
        return CommStatistics(
            self._called,
            len(pending),
            sum([nbytes for _, nbytes in pending]),
            sum([work.seq == UNNUMBERED for work, _ in pending]),
            self._batches,
            self._waiting,
            self._waits,
        )

    def _work(
        self,
        call: Call,
        limit: float,
        driver: Driver | None,
        seq: int = UNNUMBERED,
        *,
        settled: Callable[[Work[Any]], object] | None = None,
    ) -> Work[Any]:
        work: Work[Any] = Work(
            call.op,
            seq,
            self.mailbox,
            value=call.result,
            finish=call.finish,
            timeout=limit,
            on_settled=self._settled if settled is None else settled,
            on_overdue=self._overdue,
            driver=driver,
        )
        if self.reporter is not None:
            work.site = call_site()
        return work

    def _hand_on(self, batch: Batch) -> None:
        """Number a batch and submit it to the backend. Under the lock."""
        backend = self.backend
        assert backend is not None
        numbers = [self._collectives, self._p2p]
        for item in batch.items:
            work = item.work
            p2p = work.op.p2p
            work.seq = numbers[p2p]
            numbers[p2p] += 1
        for fused in batch.fused_ops:
            fused.prepare(backend)
        try:
            backend.submit([fused.submission for fused in batch.fused_ops])
        except BaseException:
            for item in batch.items:
                item.work.seq = UNNUMBERED
            raise
        self._collectives, self._p2p = numbers
        self._batches += len(batch.items) > 1
        if self.reporter is not None:
            together = sum([not item.op.p2p for item in batch.items])
            for item in batch.items:
                self.reporter.issued(item.work, together)
                if not item.op.p2p:
                    together = 0  # reported with the first
        self._check_late([item.work for item in batch.items])
        for fused in batch.fused_ops:
            fused.sent()
            if not fused.submission.work.done():
                self._deadlines.add(fused.most_urgent)
        for whole in dict.fromkeys([item.whole for item in batch.items if item.whole is not None]):
            whole.sent()

    def submit_aside(
        self, op: Op, steps: Callable[[Work[Any]], Coroutine[Any, Any, None]], timeout: float | timedelta | None
    ) -> Work[Any]:
        """Run ``steps`` on the loop, for an operation outside the backend and all sequences. From any thread.

        Args:
            steps: a coroutine function whose end, or an AsyncCommError, settles the operation. It enforces the time
                limit itself.
        """
        limit = self._checked(timeout, None)
        with self._lock:
            self.check_open()
            work: Work[Any] = Work(
                op, self._aside, self.mailbox, value=None, timeout=limit, on_settled=self._settled, on_overdue=_late
            )
            self._aside += 1
            self._called += 1
            self._pending[work] = 0
        self._check_late([work])
        self.mailbox.post(lambda: self._begin(self._run_aside(work, steps)))
        return work

    async def _run_aside(self, work: Work[Any], steps: Callable[[Work[Any]], Coroutine[Any, Any, None]]) -> None:
        if work.done():
            return  # the comm broke
        task = asyncio.current_task()
        assert task is not None
        work.add_done_callback(lambda _: task.cancel())
        error: AsyncCommError | None = AbortedError(self.group.rank, f"{work.op} was cut off")
        try:
            await steps(work)
            error = None
        except AsyncCommError as exc:
            error = exc
        finally:
            work.settle(error)

    def _checked(self, timeout: float | timedelta | None, hints: Mapping[str, str] | None) -> float:
        """Check ``timeout``, ``hints`` and the calling thread; returns the time limit in seconds."""
        if hints is not None:
            check_strings(hints)
        self.check_loop()
        return self._limit if timeout is None else seconds("timeout", timeout, 0.0)

    def set_timeout(self, timeout: float) -> None:
        """Give later operations ``timeout`` seconds. From any thread."""
        with self._lock:
            self.options = replace(self.options, timeout=timeout)
            self._limit, self._extended = timeout, math.inf

    def extend_timeout(self, extra: float) -> None:
        """Give later operations ``extra`` more seconds, until the first of them is done. From any thread."""
        with self._lock:
            self._limit = self._limit + extra
            self._extended = time.monotonic()

    def _check_late(self, works: Sequence[Work[Any]]) -> None:
        """Settle ``works``, now pending, if the comm broke meanwhile: the failure may have missed them."""
        error = self.error
        if isinstance(error, BrokenError):
            for work in works:
                work.settle(error)

    @property
    def counts(self) -> tuple[int, int]:
        """Collectives and point-to-point operations issued so far."""
        return self._collectives, self._p2p

    def pending(self) -> list[Work[Any]]:
        """The Works that are not done, oldest first. From any thread."""
        # the thread that settles a Work removes it only after it is done, when the caller may have gone on already
        works = [work for work in self._pending.copy() if not work.done()]
        return sorted(works, key=attrgetter("started"))

    def _settled(self, work: Work[Any]) -> None:
        self._pending.pop(work, None)
        if work.started > self._extended:
            self._limit, self._extended = self.options.timeout, math.inf
        if self._changed:
            self.mailbox.post(self._wake)

    def _wake(self) -> None:
        changed, self._changed = self._changed, []
        for waiter in changed:
            if not waiter.done():
                waiter.set_result(None)

    async def ready(self) -> None:
        """Wait until the operations in flight are below the limits. Raises: ClosedError, BrokenError."""
        self.check_loop()
        self.check_open()
        if not self._crowded():
            if self._much():
                await asyncio.sleep(0)  # the ranks can agree on held operations only when the loop runs
            return
        self._waits += 1
        self._waiting += 1
        try:
            while self._crowded():
                waiter = self._hear_of_settling()
                if self._crowded():  # checked again after registering the waiter: see Work
                    await waiter
                self.check_open()
        finally:
            self._waiting -= 1

    def _crowded(self) -> bool:
        """Whether the operations in flight exceed the limits, without held ones, which only their scope can send."""
        if not self._much():
            return False
        sent = [nbytes for work, nbytes in list(self._pending.items()) if work.seq != UNNUMBERED]
        return len(sent) >= self.options.max_ops or sum(sent) >= self.options.max_bytes

    def _much(self) -> bool:
        """Whether the operations in flight, held ones included, exceed the limits."""
        options = self.options
        return len(self._pending) >= options.max_ops or sum(list(self._pending.values())) >= options.max_bytes

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
            again = type(error)(*error.args)  # a new error: the pending Works raise the first
            raise again from error

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Break the comm and notify the peers; does nothing once broken or closed. From any thread."""

    @abc.abstractmethod
    def _overdue(self, work: Work[Any]) -> None:
        """Called when a thread has waited for ``work`` past its deadline, so the loop must be blocked."""

    @abc.abstractmethod
    def _expired(self, work: Work[Any]) -> None:
        """Called when ``work`` is past its deadline. On the loop."""

    @abc.abstractmethod
    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run ``coroutine`` in a task that closing waits for. On the loop."""


def _late(work: Work[Any]) -> None:
    """Settle ``work`` when a thread has waited for it past its deadline, so the loop must be blocked."""
    work.settle(StoreTimeoutError(f"{work.op} was not done within {work.timeout:g} s: the event loop is blocked"))


def weak_callback(method: Callable[[Any], object]) -> Callable[[Any], None]:
    """A callback that calls ``method`` without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        target = reference()
        if target is not None:
            target(argument)

    return call
