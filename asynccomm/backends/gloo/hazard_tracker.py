"""Collectives under way, and those that wait for their memory.

gloo runs operations side by side, and what is staged is read when it is started: so an operation whose memory
conflicts with one under way (it reads what that writes, or writes what that reads or writes) is started when that one
is over. What comes later waits behind it, as gloo's groups tell operations apart by their order.

A barrier waits for everything under way: once it is over, so are all collectives before it, on all ranks.

Ranks may wait for different ones, because their tensors lie differently: each waits only for earlier operations, and
the first that is not over anywhere waits for none.

Operations are started one at a time: gloo's count of them is not made for several threads. They are put in under the
comm's lock, which serves until something waits; from then on one thread starts what waits, that of an operation which
is over, and all that is put in waits, too.

Collectives of parcels read the tensors of their parcels, and write those outputs that the caller has given. Messages
stay outside: they are in no order with collectives, whatever memory they share with what is under way.
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
    """Starts collectives in order, each as soon as nothing under way conflicts with it.

    Args:
        start: hands a collective to gloo; calls its second argument when that is over, from any thread, unless it
            failed.
        fail: takes what goes wrong in starting one that has waited.
    """

    def __init__(
        self,
        start: Callable[[Submission, Callable[[], object]], object],
        fail: Callable[[Submission, Exception], object],
    ) -> None:
        self._start = start
        self._fail = fail
        self._lock = threading.Lock()  # held for moments only: nothing is started or settled under it
        self._resting = threading.Condition(self._lock)
        self._waiting: deque[_TrackedOp] = deque()
        self._starting = False  # a thread starts what waits
        self._ended = False
        self._count = 0  # under way
        self._unsettled = 0  # put in, and not settled yet
        self._alone: _TrackedOp | None = None  # under way when nothing else was: its memory is looked at once there is
        self._accesses = AccessSet()  # of those under way

    def submit(self, submission: Submission) -> None:
        """Start ``submission``, or keep it. Under the comm's lock. Raises: what ``start`` raises."""
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

    def end(self) -> None:
        """The comm is broken, which fails what waits: start nothing any more. From any thread, more than once."""
        with self._lock:
            self._ended = True
            self._resting.notify_all()
            self._waiting.clear()
            self._alone = None

    def catch_up(self, timeout: float) -> bool:
        """Block until all that was put in is settled; False if that took longer than ``timeout`` seconds."""
        with self._lock:
            return self._resting.wait_for(lambda: self._ended or not self._unsettled, timeout)

    def join(self, timeout: float) -> bool:
        """After ``end``: block until nothing is being started; False if that took longer than ``timeout`` seconds."""
        with self._lock:
            return self._resting.wait_for(lambda: not self._starting, timeout)

    def _over(self, flight: _TrackedOp) -> None:
        with self._lock:
            self._leave(flight)
            go_on = bool(self._waiting) and not self._starting
            self._starting |= go_on
        # free before it is settled, or who goes on at once would wait; and settled before others are started, which
        # may take long
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
        """The first that waits, if it need not any longer."""
        with self._lock:
            if self._waiting and self._enter(self._waiting[0]):
                return self._waiting.popleft()
            self._starting = False
            self._resting.notify_all()
            return None

    def _enter(self, flight: _TrackedOp) -> bool:
        """Count ``flight`` as under way, unless it conflicts with what is."""
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
    """A collective, and its memory once that was looked at."""

    __slots__ = ("_looked", "reads", "submission", "writes")

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.reads: list[Region] = []  #: what it reads and does not write
        self.writes: list[Region] = []
        self._looked = False

    def look(self) -> None:
        """Find out its memory."""
        if self._looked:
            return
        self._looked = True
        self.reads, self.writes = accesses(self.submission)
