"""The order of collectives that share memory: parcel collectives and NCCL's own collectives.

One stream orders NCCL's own collectives among each other. Parcel collectives exchange headers on the host first and run
on other streams, so no stream orders them. Two operations conflict if one of them writes memory that the other reads or
writes. If either of two conflicting operations is a parcel collective, the later one starts when the earlier one is
complete on this rank.

All later collectives, barriers and estimates wait behind a waiting operation, whatever their memory. So a rank makes
its calls of NCCL and of the side channel in the order of submission, and the memory of the tensors changes only the
timing. There is no deadlock though ranks may wait for different operations: each operation waits only for earlier ones,
and the first operation that is not complete on all ranks waits for none. Messages are not tracked, as they have no
order with collectives.

While no parcel collective is in flight, an NCCL collective is only recorded; its memory regions are computed once a
parcel collective arrives.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from asynccomm.backends.base import Submission
from asynccomm.backends.hazards import accesses
from asynccomm.backends.nccl.stream_order import StreamPosition
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.backends.regions import AccessSet, Region


@final
class Entry:
    """Operations that start together.

    Args:
        start: starts the operations; receives this entry, and whether the entry has waited: then it runs on a lane's
            thread.
        batch: the submissions whose memory counts; empty for a barrier or an estimate.
        flight: stream position of NCCL's own collectives; None: ``batch`` are parcel collectives.
        drop: called instead of ``start`` when the comm has ended.
    """

    __slots__ = ("batch", "drop", "flight", "looked", "reads", "start", "writes")

    def __init__(
        self,
        start: Callable[[Entry, bool], object],
        batch: Sequence[Submission] = (),
        flight: StreamPosition | None = None,
        drop: Callable[[], object] | None = None,
    ) -> None:
        self.start = start
        self.batch: Sequence[Submission] = batch
        self.flight: StreamPosition | None = flight
        self.drop = drop
        self.looked: bool = False
        self.reads: list[Region] = []
        self.writes: list[Region] = []

    def look(self) -> None:
        """Compute the memory regions, once."""
        if self.looked:
            return
        self.looked = True
        self.reads, self.writes = _accesses(self.batch)


def _accesses(batch: Sequence[Submission]) -> tuple[list[Region], list[Region]]:
    reads: list[Region] = []
    writes: list[Region] = []
    for submission in batch:
        read, written = accesses(submission)
        reads += read
        writes += written
    return reads, writes


@final
class HazardTracker:
    """Starts operations in order, each as soon as no conflicting operation is in flight.

    Args:
        lanes: run the start of operations that have waited.
        fail: called with an entry that failed to start after waiting, and the error.
    """

    def __init__(self, lanes: OrderedExecutor, fail: Callable[[Entry, Exception], object]) -> None:
        self._lanes = lanes
        self._fail = fail
        self._lock = threading.Lock()  # for bookkeeping only: no operation starts under it
        #: no parcel collective is in flight and no entry waits, so an NCCL collective may start after ``note``
        self.quiet: bool = True
        self._waiting: deque[Entry] = deque()
        self._starting = False  # a lane is starting entries that have waited
        self._ended = False
        self._parcels: dict[Entry, None] = {}  # in flight
        self._of_parcels = AccessSet()
        # NCCL collectives in flight. Used without the lock, one atomic step at a time: on the path of every collective
        self._collectives: dict[StreamPosition, Sequence[Submission]] = {}
        # their memory regions, as far as computed; some of these collectives may have passed since
        self._known: dict[StreamPosition, tuple[list[Region], list[Region]]] = {}
        self._of_collectives = AccessSet()

    @property
    def waiting(self) -> bool:
        """Whether an entry waits, or is starting after a wait."""
        return bool(self._waiting) or self._starting

    def parcels(self) -> list[Submission]:
        """The parcel collectives in flight."""
        return [submission for entry in list(self._parcels) for submission in entry.batch]

    # -- under the comm's lock ----------------------------------------------------------------------------------------

    def note(self, flight: StreamPosition, batch: Sequence[Submission]) -> None:
        """Record NCCL collectives that are about to start. Only while ``quiet``."""
        self._collectives[flight] = batch

    def submit(self, entry: Entry) -> bool:
        """Start ``entry``, or queue it until it may start; returns whether it was started.

        Raises: the exceptions of ``start``.
        """
        with self._lock:
            ended = self._ended
            if not ended:
                self._waiting.append(entry)  # before the comparison: a collective passing after it must see the entry
                if len(self._waiting) > 1 or self._starting or not self._enter(entry):
                    self.quiet = False
                    return False
                self._waiting.pop()
        if ended:
            if entry.drop is not None:
                entry.drop()
            return False
        try:
            entry.start(entry, False)
        except BaseException:
            self.over(entry)
            raise
        return True

    # -- from any thread ----------------------------------------------------------------------------------------------

    def passed(self, flight: StreamPosition) -> None:
        """Retire NCCL collectives that are complete."""
        self._collectives.pop(flight, None)
        if self._waiting:
            with self._lock:
                self._go_on()

    def over(self, entry: Entry) -> None:
        """Retire ``entry``, which is complete or failed to start: its memory is free."""
        if entry.flight is not None:
            self.passed(entry.flight)
            return
        with self._lock:
            if entry in self._parcels:
                del self._parcels[entry]
                self._of_parcels.remove(entry.reads, entry.writes)
            self._go_on()

    def end(self) -> None:
        """Drop waiting entries, whose Works the broken comm fails; start no more. From any thread, more than once."""
        with self._lock:
            self._ended = True
            self.quiet = False
            dropped = list(self._waiting)
            self._waiting.clear()
        for entry in dropped:
            if entry.drop is not None:
                entry.drop()

    # -- with the lock held -------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Have a lane start the waiting entries that have no conflict any more."""
        if self._waiting and not self._starting:
            self._starting = True
            self._lanes.put("waiting", self._start_waiting)
        self._look_around()

    def _look_around(self) -> None:
        self.quiet = not (self._parcels or self._waiting or self._starting or self._ended)

    def _enter(self, entry: Entry) -> bool:
        """Record ``entry`` as in flight, unless it conflicts with an operation in flight."""
        if not entry.batch:
            return True
        if entry.flight is not None:
            if self._parcels:
                entry.look()
                if self._of_parcels.conflicts(entry.reads, entry.writes):
                    return False
            self._collectives[entry.flight] = entry.batch
            return True
        entry.look()
        if self._of_parcels.conflicts(entry.reads, entry.writes) or self._meets_collectives(entry):
            return False
        self._parcels[entry] = None
        self._of_parcels.add(entry.reads, entry.writes)
        self.quiet = False
        return True

    def _meets_collectives(self, entry: Entry) -> bool:
        under_way = self._collectives.copy()
        for flight in [flight for flight in self._known if flight not in under_way]:
            self._of_collectives.remove(*self._known.pop(flight))
        for flight, batch in under_way.items():
            if flight not in self._known:
                self._known[flight] = memory = _accesses(batch)
                self._of_collectives.add(*memory)
        return self._of_collectives.conflicts(entry.reads, entry.writes)

    # -- on a lane ----------------------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        while (entry := self._next()) is not None:
            try:
                entry.start(entry, True)
            except Exception as exc:
                self.end()  # a skipped operation would put all later ones out of step with the other ranks
                self._fail(entry, exc)

    def _next(self) -> Entry | None:
        """The first waiting entry, removed from the queue, if it has no conflict any more."""
        with self._lock:
            if self._waiting and self._enter(self._waiting[0]):
                return self._waiting.popleft()
            self._starting = False
            self._look_around()
            return None
