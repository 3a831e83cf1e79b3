"""Operation deadlines: one heap and at most one timer for a whole comm, at any number of operations in flight."""

from __future__ import annotations

import heapq
import math
import threading
import time
import weakref
from asyncio import TimerHandle
from collections.abc import Callable
from typing import Any

from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work

SLACK = 64  # settled entries tolerated in the heap before it is rebuilt


class Deadlines:
    """Calls ``expired(work)`` on the loop for a Work that is pending past its ``timeout``.

    Args:
        mailbox: of the loop that owns the timer.
        expired: breaks the comm, or finds that the Work has ended by itself and calls ``look``: no other Work expires
            until then.
    """

    def __init__(self, mailbox: Mailbox, expired: Callable[[Work[Any]], object]) -> None:
        self._mailbox = mailbox
        self._expired = expired
        # weak references: a finished Work must not be kept, with its output, until it reaches the top
        self._heap: list[tuple[float, int, weakref.ref[Work[Any]]]] = []
        self._count = 0
        self._rebuild_at = SLACK
        self._timer: TimerHandle | None = None
        self._armed = math.inf  # the timer's time, also while the request to set it is on its way to the loop
        self._closed = False
        self._lock = threading.Lock()

    def add(self, work: Work[Any]) -> None:
        """Watch ``work``. From any thread."""
        if work.timeout == math.inf:
            return
        when = work.started + work.timeout
        with self._lock:
            heap = self._heap
            while heap and not _pending(heap[0][2]):
                heapq.heappop(heap)
            self._count += 1
            heapq.heappush(heap, (when, self._count, weakref.ref(work)))
            if len(heap) > self._rebuild_at:  # a pending entry at the top keeps settled ones in the heap
                heap[:] = [entry for entry in heap if _pending(entry[2])]
                heapq.heapify(heap)
                self._rebuild_at = 2 * len(heap) + SLACK
            if when >= self._armed:
                return
            self._armed = when
        self._mailbox.post(self._arm)

    def close(self) -> None:
        """Drop all deadlines. On the loop."""
        with self._lock:
            self._closed = True
            self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Call ``expired`` for the Work that is late, or set the timer for the next one. On the loop."""
        late: Work[Any] | None = None
        with self._lock:
            heap = self._heap
            while heap and not _pending(heap[0][2]):
                heapq.heappop(heap)
            self._armed = heap[0][0] if heap else math.inf
            if self._armed <= time.monotonic() and (late := heapq.heappop(heap)[2]()) is not None:
                self._armed = -math.inf  # no timer until the next look
        if late is not None:
            self._expired(late)
        else:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            if self._closed or not math.isfinite(self._armed):
                return
            delay = self._armed - time.monotonic()
        self._timer = self._mailbox.loop.call_later(max(0.0, delay), self.look)


def _pending(reference: weakref.ref[Work[Any]]) -> bool:
    work = reference()  # the backend keeps a pending Work alive
    return work is not None and not work.done()
