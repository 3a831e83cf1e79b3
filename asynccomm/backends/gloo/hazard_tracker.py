"""Collectives in flight, and collectives that wait for their memory.

gloo runs operations in parallel, and staging reads an operation's memory when it is started. An operation that
conflicts with an operation in flight (it reads memory that the other writes, or writes memory that the other reads or
writes) is therefore started when that operation is over. Later operations wait behind it, because gloo identifies a
group's operations by their order.

A barrier waits for all operations in flight: when it is over, so are all earlier collectives, on all ranks.

Ranks may wait for different operations, because their tensors lie differently. No deadlock follows: each operation
waits only for earlier ones, so the first unfinished operation of all ranks waits for none.

Operations are started one at a time, because gloo's operation counter is not thread-safe. ``submit`` is called under
the comm's lock, which is enough until an operation waits. From then on a single thread, that of an operation which is
over, starts the waiting operations, and every submitted operation joins them.

Collectives of parcels read the tensors of their parcels, and write the outputs that the caller has given.
Point-to-point messages are not tracked: they have no order with collectives, whatever memory they share with operations
in flight.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import final

from asynccomm.backends.base import Submission
from asynccomm.backends.hazards import accesses
from asynccomm.backends.regions import AccessSet, Region
from asynccomm.ops import Barrier


@final
class HazardTracker:
    """Starts collectives in order, each as soon as it conflicts with no collective in flight.

    Args:
        start: hands a collective to gloo; calls its second argument when the collective is over, from any thread,
            unless it failed.
        fail: called with an exception from starting a collective that has waited.
    """

    def __init__(
        self,
        start: Callable[[Submission, Callable[[], object]], object],
        fail: Callable[[Submission, Exception], object],
    ) -> None:
        self._start = start
        self._fail = fail
        self._lock = threading.Lock()  # held only briefly: no operation is started or settled under it
        self._resting = threading.Condition(self._lock)
        self._waiting: deque[_TrackedOp] = deque()
        self._starting = False  # a thread is starting waiting operations
        self._ended = False
        self._count = 0  # number in flight
        self._unsettled = 0  # number submitted and not settled
        # the only operation in flight; its memory is computed when a second operation is submitted
        self._alone: _TrackedOp | None = None
        self._accesses = AccessSet()  # the memory of the operations in flight

    def submit(self, submission: Submission) -> None:
        """Start ``submission``, or queue it. Under the comm's lock. Raises: the error of ``start``."""
        flight = _TrackedOp(submission)
        with self._lock:
            if self._ended:
                return
            self._unsettled += 1
            if self._waiting or self._starting or not self._enter(flight):
                self._waiting.append(flight)
                return
        try:
            self._start(submission, partial(self._over, flight))
        except BaseException:
            with self._lock:
                self._leave(flight)
                self._unsettled -= 1
            raise

    @property
    def holds_back(self) -> bool:
        """Whether an operation that is submitted now has to queue behind others. Under the comm's lock."""
        return bool(self._waiting) or self._starting

    @property
    def idle(self) -> bool:
        """Whether no operation is in flight or waits. Under the comm's lock."""
        return not (self._count or self._waiting or self._starting or self._ended)

    def enter_alone(self, submission: Submission) -> Callable[[], object]:
        """Count a started operation as in flight, while no other is; the caller calls the result at its end.

        Under the comm's lock, since ``idle``.
        """
        flight = _TrackedOp(submission)
        with self._lock:
            self._alone = flight
            self._count += 1
            self._unsettled += 1
        return partial(self._over, flight)

    def end(self) -> None:
        """Start no more operations: the broken comm fails the waiting ones. From any thread, more than once."""
        with self._lock:
            self._ended = True
            self._resting.notify_all()
            self._waiting.clear()
            self._alone = None

    def drain_before_failure(self, timeout: float) -> bool:
        """Block until all submitted operations are settled; False if that took longer than ``timeout`` seconds."""
        with self._lock:
            return self._resting.wait_for(lambda: self._ended or not self._unsettled, timeout)

    def join(self, timeout: float) -> bool:
        """After ``end``: block until no operation is being started; False after more than ``timeout`` seconds."""
        with self._lock:
            return self._resting.wait_for(lambda: not self._starting, timeout)

    def _over(self, flight: _TrackedOp) -> None:
        with self._lock:
            self._leave(flight)
            go_on = bool(self._waiting) and not self._starting
            self._starting |= go_on
        # The memory is released before the Work is settled, so that a caller that continues at once need not wait; the
        # Work is settled before waiting operations are started, which may take long.
        try:
            flight.submission.work.settle(flight.submission.error)
        finally:
            with self._lock:
                self._unsettled -= 1
                self._resting.notify_all()
            if go_on:
                self._start_waiting()

    def _start_waiting(self) -> None:
        while (flight := self._next()) is not None:
            try:
                self._start(flight.submission, partial(self._over, flight))
            except Exception as exc:
                self._fail(flight.submission, exc)

    def _next(self) -> _TrackedOp | None:
        """Remove and return the first waiting operation, if it conflicts with no operation in flight."""
        with self._lock:
            if self._waiting and self._enter(self._waiting[0]):
                return self._waiting.popleft()
            self._starting = False
            self._resting.notify_all()
            return None

    def _enter(self, flight: _TrackedOp) -> bool:
        """Count ``flight`` as in flight, unless it conflicts with an operation in flight."""
        if not self._count:
            self._alone = flight
        else:
            if self._alone is not None:
                self._occupy(self._alone)
                self._alone = None
            if self._conflicts(flight):
                return False
            self._occupy(flight)
        self._count += 1
        return True

    def _conflicts(self, flight: _TrackedOp) -> bool:
        if isinstance(flight.submission.op, Barrier):
            return True
        flight.look()
        return self._accesses.conflicts(flight.reads, flight.writes)

    def _occupy(self, flight: _TrackedOp) -> None:
        flight.look()
        self._accesses.add(flight.reads, flight.writes)

    def _leave(self, flight: _TrackedOp) -> None:
        self._count -= 1
        if self._alone is flight:
            self._alone = None
        elif not self._ended:
            self._accesses.remove(flight.reads, flight.writes)


@final
class _TrackedOp:
    """A collective, and its memory once computed."""

    __slots__ = ("_looked", "reads", "submission", "writes")

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.reads: list[Region] = []  #: memory that it reads and does not write
        self.writes: list[Region] = []
        self._looked = False

    def look(self) -> None:
        """Compute its memory."""
        if self._looked:
            return
        self._looked = True
        self.reads, self.writes = accesses(self.submission)
