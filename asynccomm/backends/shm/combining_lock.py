"""Policies of the engine: which thread drives (:class:`CombiningLock`), when to spin (:class:`SpinPolicy`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, final

MOST_SKIPPED: Final = 64  # limit of waits in a row without a spin, after spinning has failed


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


@final
class SpinPolicy:
    """Whether a wait should begin with a spin: after failed spins, exponentially more waits sleep at once."""

    def __init__(self) -> None:
        self._to_skip = 0  # waits without a spin, between two spins
        self._skipped = 0

    def should_spin(self) -> bool:
        """Whether the wait that begins now should spin; the result of the spin is then to be recorded."""
        if self._skipped < self._to_skip:
            self._skipped += 1
            return False
        self._skipped = 0
        return True

    def record(self, found: bool) -> None:
        """Note whether a spin has found its operation done."""
        self._to_skip = 0 if found else min(2 * self._to_skip + 1, MOST_SKIPPED)
