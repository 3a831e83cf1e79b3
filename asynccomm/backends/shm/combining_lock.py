"""The lock that decides which thread drives the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final


@final
class CombiningLock:
    """A lock; its holder also serves the threads that find it taken (flat combining, Hendler et al., SPAA 2010).

    A thread that fails to take the lock leaves a request and returns. The holder rechecks for requests after it has
    released the lock, so no request is lost. The lock refers to no function of its owner: a cycle would keep the owner
    alive until the next garbage collection.
    """

    def __init__(self) -> None:
        self.requested: bool = False  #: a request has arrived since the holder last checked
        self._lock = threading.Lock()
        self.acquire = self._lock.acquire
        self.release = self._lock.release
        self.locked = self._lock.locked

    def run(
        self, allowed: Callable[[], bool], serve: Callable[..., None], release: Callable[[], None], *args: Any
    ) -> bool:
        """Serve a request on this thread, or leave it to the thread that holds the lock; returns whether it ran here.

        Args:
            allowed: whether requests may be served now; if not, the request stays.
            serve: called with ``args``, with the lock held.
            release: called in the end, also after an exception; it must release the lock, and may act before and after.
        """
        self.requested = True
        ran = False
        while self.requested and allowed() and self.acquire(blocking=False):
            try:
                self.requested = False
                serve(*args)
            finally:
                release()
            ran = True
        return ran
