"""An event that one thread waits for, where signals may arrive."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Final, final

SIGNAL_SECONDS: Final = 1.0  # of one wait for a lock: a signal just before the wait does not interrupt it


@final
class ThreadEvent:
    """An event that other threads set, and that one thread waits for.

    An exception of a signal's handler, such as KeyboardInterrupt, may end a wait at any place, and the event is still
    whole. ``threading.Event`` takes and releases locks in Python code, where such an exception becomes a RuntimeError.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_set = False

    def is_set(self) -> bool:
        """Whether the event was set."""
        return self._is_set

    def set(self) -> None:
        """Set the event, for good. Idempotent. From any thread."""
        self._is_set = True  # before the release: the waiting thread may be interrupted as it has just taken the lock
        with contextlib.suppress(RuntimeError):  # it was released before
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Block until the event is set; False if it is not set within ``seconds``, which may be infinite."""
        end = time.monotonic() + seconds
        while not self._is_set and (left := end - time.monotonic()) > 0:
            self._lock.acquire(timeout=min(left, SIGNAL_SECONDS))
        return self._is_set
