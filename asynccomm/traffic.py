"""What one rank has submitted on a comm: its numbers, what is in flight, and how much of that there may be.

Submitting happens under one lock: so calls may come from any thread, and the order of numbers is the order on the wire.
What follows happens elsewhere: the backend settles the Work, ``deadlines`` notices if it does not.
"""

from __future__ import annotations

import abc
import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, final

import torch

from asynccomm.backends.base import Backend, Submission
from asynccomm.checks import Group
from asynccomm.deadlines import Deadlines
from asynccomm.errors import AbortedError, AsyncCommError, StoreTimeoutError
from asynccomm.mailbox import Mailbox
from asynccomm.ops import Call, Op, Together
from asynccomm.options import CommOptions, check_strings, seconds
from asynccomm.work import Order, Work

__all__ = ["CommStatistics", "Traffic", "weakly"]


class CommStatistics(NamedTuple):
    """A snapshot of one comm's traffic."""

    submitted: int  #: operations called so far
    in_flight: int  #: operations not settled yet
    bytes_in_flight: int  #: bytes of the larger side (inputs or outputs) of those


class Traffic(abc.ABC):
    """Submits and counts. What ends a comm is for :class:`~asynccomm.session.Session`.

    Args:
        group, options: as the comm shows them.
        mailbox: of the comm's loop.
    """

    def __init__(self, group: Group, options: CommOptions, mailbox: Mailbox) -> None:
        self.group = group
        self.options = options
        self.mailbox = mailbox
        self.backend: Backend | None = None  #: None until connected, and in a forked child
        self.error: AsyncCommError | None = None  #: why there are no more calls
        self._lock = threading.RLock()  # held while submitting, so that order is one
        # bytes by operation. Used without _lock, one atomic step of the dict at a time: a backend may settle another
        # rank's operation inside submit(), with that one's _lock held by a thread that waits for the backend
        self._pending: dict[Work[Any], int] = {}
        self._collectives = 0
        self._p2p = 0
        self._aside = 0  # operations that are no backend's
        self._changed: list[asyncio.Future[None]] = []  # who waits for something to settle
        self._deadlines = Deadlines(mailbox, weakly(self._expired))

    def statistics(self) -> CommStatistics:
        """How much is going on."""
        pending = list(self._pending.values())
        return CommStatistics(self._collectives + self._p2p + self._aside, len(pending), sum(pending))

    def submit(self, call: Call, timeout: float | timedelta | None, hints: Mapping[str, str] | None) -> Work[Any]:
        """Number ``call`` and hand it on. From any thread."""
        limit = self._checked(timeout, hints)
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
                finish=call.finish,
                timeout=limit,
                on_settled=self._settled,
                on_overdue=self._overdue,
                driver=backend,
            )
            submission = Submission(call, work)
            self._pending[work] = submission.nbytes
            try:
                backend.submit((submission,))
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

    def submit_together(
        self, calls: Sequence[Call], result: Any, timeout: float | timedelta | None, hints: Mapping[str, str] | None
    ) -> Work[Any]:
        """Number ``calls`` and hand them on as one batch; the Work of ``result`` is done when all are. From any thread.

        The Work carries the number of the first.
        """
        limit = self._checked(timeout, hints)
        works: list[Work[Any]] = []
        left = list(range(len(calls)))  # several threads may take one each: whoever gets 0 is the last

        def settled(work: Work[Any]) -> None:
            self._settled(work)
            if left.pop() == 0:
                errors = [part.surrender() for part in works]
                if any(part.captured for part in works):
                    together.capture()
                    return
                together.settle(next((error for error in errors if error is not None), None))

        with self._lock:
            self.check_open()
            backend = self.backend
            assert backend is not None
            numbers = [self._collectives, self._p2p]
            for call in calls:
                seq = numbers[call.op.p2p]
                numbers[call.op.p2p] += 1
                works.append(
                    Work(
                        call.op,
                        seq,
                        self.mailbox,
                        value=None,
                        timeout=limit,
                        on_settled=settled,
                        on_overdue=self._overdue,
                        driver=backend,
                    )
                )
            together: Work[Any] = Work(
                Together(tuple([call.op for call in calls])),
                works[0].seq,
                self.mailbox,
                value=result,
                timeout=limit,
                on_settled=_nothing,
                driver=_Drivers(backend, works),
            )
            batch = [Submission(call, work) for call, work in zip(calls, works, strict=True)]
            for submission in batch:
                self._pending[submission.work] = submission.nbytes
            try:
                backend.submit(batch)
            except BaseException:
                for work in works:
                    self._pending.pop(work, None)
                raise
            self._collectives, self._p2p = numbers
        orders = [work.order for work in works]
        if all(orders):
            together.order = _Orders([order for order in orders if order is not None])
        for work in works:
            if not work.done():
                self._deadlines.add(work)
        return together

    def submit_aside(
        self, op: Op, steps: Callable[[Work[Any]], Coroutine[Any, Any, None]], timeout: float | timedelta | None
    ) -> Work[Any]:
        """Have the loop run ``steps``, for an operation that is no backend's and in no sequence. From any thread.

        Args:
            steps: settle the operation by their end, or by an error of ours. They see to the time limit themselves.
        """
        limit = self._checked(timeout, None)
        with self._lock:
            self.check_open()
            work: Work[Any] = Work(
                op, self._aside, self.mailbox, value=None, timeout=limit, on_settled=self._settled, on_overdue=_late
            )
            self._aside += 1
            self._pending[work] = 0
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
        """The time limit in seconds, when ``hints`` and the calling thread are all right, too."""
        if hints is not None:
            check_strings(hints)
        self.check_loop()
        return self.options.timeout if timeout is None else seconds("timeout", timeout, 0.0)

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

    @abc.abstractmethod
    def _overdue(self, work: Work[Any]) -> None:
        """A thread has waited for ``work`` for longer than the loop, which must be blocked, should have let it."""

    @abc.abstractmethod
    def _expired(self, work: Work[Any]) -> None:
        """``work`` is past its deadline. On the loop."""

    @abc.abstractmethod
    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it in a task, which closing waits for. On the loop."""


@final
class _Drivers:
    """Moves several operations on, for somebody who waits for all of them."""

    def __init__(self, backend: Backend, works: Sequence[Work[Any]]) -> None:
        self._backend = backend
        self._works = works

    def hurry(self, work: Work[Any]) -> None:
        for part in self._works:
            if not part.done():
                self._backend.hurry(part)

    def relieve(self, work: Work[Any]) -> None:
        for part in self._works:
            if not part.done():
                self._backend.relieve(part)


@final
class _Orders:
    """The place of several operations in the streams of a GPU."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self._orders = orders
        self.prompt = all(order.prompt for order in orders)

    @property
    def issued(self) -> bool:
        return all(order.issued for order in self._orders)

    def listen(self, listener: Callable[[], object]) -> None:
        def one_more() -> None:
            if self.issued:
                listener()

        for order in self._orders:
            order.listen(one_more)

    def order(self, stream: torch.cuda.Stream | None) -> None:
        for order in self._orders:
            order.order(stream)


def _late(work: Work[Any]) -> None:
    """A thread has waited for ``work`` for longer than the loop, which must be blocked, should have let it."""
    work.settle(StoreTimeoutError(f"{work.op} was not done within {work.timeout:g} s: the event loop is blocked"))


def _nothing(work: Work[Any]) -> None:
    pass


def weakly(method: Callable[[Any], object]) -> Callable[[Any], None]:
    """``method``, without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        target = reference()
        if target is not None:
            target(argument)

    return call
