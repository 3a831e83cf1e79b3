"""Collectives under way, those of parcels and those of NCCL alone, and the ones that wait for their memory.

One stream orders NCCL's collectives among each other. Collectives of parcels meet on the host first and move on streams
of their own, so no stream orders them. If one of two conflicting operations (one writes what the other reads or writes)
is made of parcels, the later one therefore starts when the earlier one is over on this rank.

All later collectives, barriers and estimates wait behind a waiting operation, whatever their memory. So a rank makes
its calls of NCCL and of the side channel in the order of issue, and the memory of its tensors changes only their time.
Ranks may wait for different operations: each waits only for earlier ones, and the first operation that is not over
everywhere waits for none. Messages stay outside, as they have no order with collectives.

While no parcels are under way, a collective of NCCL alone is noted and nothing more; its memory is looked at only once
parcels come.
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
        start: starts them; is told this entry, and whether it has waited: then it runs on a thread of the lanes.
        batch: whose memory counts: none for a barrier or an estimate.
        flight: of collectives of NCCL alone; None: ``batch`` are parcels.
        drop: is called instead of ``start`` when the comm has ended.
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
        self.batch = batch
        self.flight = flight
        self.drop = drop
        self.looked = False
        self.reads: list[Region] = []
        self.writes: list[Region] = []

    def look(self) -> None:
        """Find out the memory."""
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
    """Starts operations in order, each as soon as no conflicting one is under way.

    Args:
        lanes: whose threads start what has waited.
        fail: takes an entry and what has gone wrong in starting it after a wait.
    """

    def __init__(self, lanes: OrderedExecutor, fail: Callable[[Entry, Exception], object]) -> None:
        self._lanes = lanes
        self._fail = fail
        self._lock = threading.Lock()  # held for moments only: nothing is started under it
        #: no parcels are under way and nothing waits, so a collective of NCCL alone may be started once it is noted
        self.quiet = True
        self._waiting: deque[Entry] = deque()
        self._starting = False  # a lane starts entries that have waited
        self._ended = False
        self._parcels: dict[Entry, None] = {}  # under way
        self._of_parcels = AccessSet()
        # NCCL's own that are under way. Used without the lock, one atomic step at a time: they come and go all the time
        self._collectives: dict[StreamPosition, Sequence[Submission]] = {}
        # and their memory, as far as it was looked at; some may have passed since
        self._known: dict[StreamPosition, tuple[list[Region], list[Region]]] = {}
        self._of_collectives = AccessSet()

    @property
    def waiting(self) -> bool:
        """Whether an entry waits, or is being started after that."""
        return bool(self._waiting) or self._starting

    def parcels(self) -> list[Submission]:
        """Those under way."""
        return [submission for entry in list(self._parcels) for submission in entry.batch]

    # -- under the comm's lock ----------------------------------------------------------------------------------------

    def note(self, flight: StreamPosition, batch: Sequence[Submission]) -> None:
        """Collectives of NCCL alone are about to be started. Only while ``quiet``."""
        self._collectives[flight] = batch

    def submit(self, entry: Entry) -> bool:
        """Start ``entry``, or keep it until it may start; whether it was started. Raises: what ``start`` raises."""
        with self._lock:
            ended = self._ended
            if not ended:
                self._waiting.append(entry)  # before its memory is compared: a collective that passes looks here then
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
        """Collectives of NCCL alone are over."""
        self._collectives.pop(flight, None)
        if self._waiting:
            with self._lock:
                self._go_on()

    def over(self, entry: Entry) -> None:
        """``entry`` is over, and its memory free; or it could not be started."""
        if entry.flight is not None:
            self.passed(entry.flight)
            return
        with self._lock:
            if entry in self._parcels:
                del self._parcels[entry]
                self._of_parcels.remove(entry.reads, entry.writes)
            self._go_on()

    def end(self) -> None:
        """The comm is broken, which fails what waits: start nothing any more. From any thread, more than once."""
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
        """Have a lane start what needs not wait any longer."""
        if self._waiting and not self._starting:
            self._starting = True
            self._lanes.put("waiting", self._start_waiting)
        self._look_around()

    def _look_around(self) -> None:
        self.quiet = not (self._parcels or self._waiting or self._starting or self._ended)

    def _enter(self, entry: Entry) -> bool:
        """Count ``entry`` as under way, unless it conflicts with what is."""
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
                self.end()  # an operation that is left out would put all later ones out of step with the other ranks
                self._fail(entry, exc)

    def _next(self) -> Entry | None:
        """The first that waits, if it need not any longer."""
        with self._lock:
            if self._waiting and self._enter(self._waiting[0]):
                return self._waiting.popleft()
            self._starting = False
            self._look_around()
            return None
