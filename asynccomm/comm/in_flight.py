"""The operations of one rank on a comm that are not settled: their Works, bytes, deadlines, limits and statistics."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, final

from asynccomm.backends.base import Submission
from asynccomm.batching.queue import DeferredQueue
from asynccomm.core.callsite import show
from asynccomm.core.deadlines import Deadlines
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.state import CallCounts
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.errors import CollectiveTimeoutError
from asynccomm.observe.lateness import Lateness
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions

RECORDED: Final = 256


class Measured(Protocol):
    """The metrics of a comm."""

    @property
    def lateness(self) -> Lateness: ...

    def text(self, statistics: CommStatistics, /) -> str:
        """The metrics in Prometheus' format, with the gauges of ``statistics``."""


class CommStatistics(NamedTuple):
    """A snapshot of one comm's traffic."""

    submitted: int  #: operations called so far
    in_flight: int  #: operations not settled yet
    bytes_in_flight: int  #: bytes of the operations in flight, each by its larger side (inputs or outputs)
    held: int = 0  #: operations in flight that were not sent: held by a scope, or not agreed on by the ranks
    batches: int = 0  #: batches of more than one operation sent so far
    waiting: int = 0  #: tasks that wait in ``ready()``
    waits: int = 0  #: calls of ``ready()`` that had to wait so far
    measured: Measured | None = None  #: the comm's metrics; None without the hint ``metrics``

    @property
    def lateness(self) -> Lateness:
        """Which rank came last to collectives, and by how much. Raises: RuntimeError without the hint ``metrics``."""
        return self._measured().lateness

    def prometheus(self) -> str:
        """The metrics in Prometheus' text format. Raises: RuntimeError without the hint ``metrics``."""
        return self._measured().text(self)

    def _measured(self) -> Measured:
        if self.measured is None:
            raise RuntimeError(
                "the comm has no metrics: make it with hints={'metrics': 'on'}, or set ASYNCCOMM_METRICS"
            )
        return self.measured


@final
class InFlight:
    """The operations that are not settled. ``Submitter`` adds them to ``works``; settling removes them.

    Args:
        options: the time limit of operations, and the limits of ``ready``.
        mailbox: the mailbox of the comm's loop.
        on_expired: called on the loop with the first Work that is past its deadline.
    """

    def __init__(self, options: CommOptions, mailbox: Mailbox, on_expired: Callable[[Work[Any]], object]) -> None:
        # Used without a lock, one atomic step of the dict at a time: a backend may settle another rank's operation
        # inside submit(), while a thread that waits for the backend holds that rank's lock
        self.works: dict[Work[Any], int] = {}  #: bytes by operation; without calls that the fast path holds for a scope
        self.queues: dict[object, DeferredQueue] = {}  #: by the task or thread that is in a scope
        self.deadlines: Deadlines = Deadlines(mailbox, on_expired)
        self.timeout: float = options.timeout  #: the comm's time limit, in seconds
        self.counts: CallCounts = CallCounts()
        self.counts.limit = options.timeout
        #: number of last calls that the comm records; few, so that their memory stays in the cache
        self.recorded: int = int(options.hints.get("recorder", RECORDED))
        #: the ends of operations with a Work of the ordinary path: whether a message, number, time, type of the error
        self.ended: deque[tuple[bool, int, float | None, str]] = deque(maxlen=self.recorded)
        self.measured: Measured | None = None  #: for the statistics
        self.batches = 0  #: for the statistics
        self._mailbox = mailbox
        self._max_ops, self._max_bytes = options.max_ops, options.max_bytes
        self._extended = math.inf  # time of the last extend_timeout() still in force; inf: none is
        self._waiting = self._waits = 0
        self.waiters: list[asyncio.Future[None]] = []  #: for an operation to settle

    def settled(self, work: Work[Any]) -> None:
        """Remove ``work``, which is settled. From any thread."""
        self.works.pop(work, None)
        error = work._error  # exception() would mark the error as retrieved
        self.ended.append((work.op.p2p, work.seq, work.finished, "" if error is None else type(error).__name__))
        if work.started > self._extended:
            self.set_timeout(self.timeout)
        self.wake()

    def all(self) -> dict[Work[Any], int]:
        """The bytes by operation, held ones included. From any thread."""
        held = {
            item.work: item.nbytes
            for queue in list(self.queues.values())
            for item in queue.items.copy()
            if not isinstance(item, Submission)
        }
        return {**self.works, **held}

    def wake(self) -> None:
        """Have the tasks that wait for operations to settle look again. From any thread."""
        if self.waiters:
            self._mailbox.post(self._wake)

    def _wake(self) -> None:
        waiters = self.waiters.copy()
        self.waiters.clear()  # always the same list, which the fast path looks at
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def pending(self) -> list[Work[Any]]:
        """The Works that are not done, oldest first. From any thread."""
        # the thread that settles a Work removes it only after it is done, when the caller may have gone on already
        return sorted([work for work in self.all() if not work.done()], key=attrgetter("started"))

    def statistics(self) -> CommStatistics:
        """Counts of operations submitted, in flight and held, at this time."""
        pending = [(work, nbytes) for work, nbytes in self.all().items() if not work.done()]  # see pending()
        return CommStatistics(
            self.counts.submitted,
            len(pending),
            sum([nbytes for _, nbytes in pending]),
            sum([work.seq == UNNUMBERED for work, _ in pending]),
            self.batches,
            self._waiting,
            self._waits,
            self.measured,
        )

    def set_timeout(self, timeout: float) -> None:
        """Give later operations ``timeout`` seconds."""
        self.timeout = self.counts.limit = timeout
        if self._extended != math.inf:
            self._extended = math.inf
            self.counts.detours -= 1

    def extend_timeout(self, extra: float) -> None:
        """Give later operations ``extra`` more seconds, until the first of them is done."""
        self.counts.limit += extra
        now = time.monotonic()
        if self._extended == math.inf:  # no call from here on: another thread may settle an operation
            self.counts.detours += 1  # the first operation to be done ends the extension
        self._extended = now

    async def ready(self, check_open: Callable[[], object]) -> float:
        """Wait until the operations that were sent are below the limits; ``check_open`` raises to end the wait.

        Returns: the seconds of the wait; 0: there was none.
        """

        def crowded() -> bool:
            check_open()
            return self._crowded()

        if not crowded():
            # the ranks can agree on held operations only when the loop runs
            if self._much() or self._mailbox.should_yield():
                await asyncio.sleep(0)
            return 0.0
        began = time.monotonic()
        self._waits += 1
        self._waiting += 1
        try:
            await self.wait_while(crowded)
        finally:
            self._waiting -= 1
        return time.monotonic() - began

    async def wait_while(self, condition: Callable[[], bool]) -> None:
        """Wait while ``condition()`` holds; it is evaluated whenever an operation has settled. On the loop."""
        while condition():
            waiter: asyncio.Future[None] = self._mailbox.loop.create_future()
            self.waiters.append(waiter)
            if condition():  # again, as an operation may have settled before the waiter was there
                await waiter

    def _crowded(self) -> bool:
        """Whether the operations in flight exceed the limits, without held ones, which only their scope can send."""
        if not self._much():
            return False
        sent = [nbytes for work, nbytes in self.all().items() if work.seq != UNNUMBERED]
        return len(sent) >= self._max_ops or sum(sent) >= self._max_bytes

    def _much(self) -> bool:
        """Whether the operations in flight, held ones included, exceed the limits."""
        works = self.all()
        return len(works) >= self._max_ops or sum(works.values()) >= self._max_bytes


class RollCall(NamedTuple):
    """The ranks that have not issued an operation, the ranks that have, and the activity of the former."""

    missing: Sequence[int] = ()
    arrived: Sequence[int] = ()
    doing: Sequence[str] = ()


def timeout_error(group: CommInfo, work: Work[Any], found: RollCall) -> CollectiveTimeoutError:
    """The error of ``work``, which is past its deadline."""
    return CollectiveTimeoutError(
        work.op,
        work.seq,
        group.name,
        group.rank,
        time.monotonic() - work.started,
        work.timeout,
        tuple(found.missing),
        tuple(found.arrived),
        tuple(found.doing),
        show(work.site),
    )
