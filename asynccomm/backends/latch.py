"""Detection of the last of several events, which may come from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from asynccomm.errors import AsyncCommError


@final
class Latch:
    """Calls ``end`` with the first error, if any, at its own ``count``-th call. Callable from any thread.

    Then it drops ``end``, which often belongs to the object that has the latch: that would live until the next
    collection of garbage.
    """

    def __init__(self, count: int, end: Callable[..., object]) -> None:
        self._left = count
        self._end: Callable[..., object] | None = end
        self._error: AsyncCommError | None = None
        self._lock = threading.Lock()

    def __call__(self, error: AsyncCommError | None = None) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            end = None
            if self._left == 0:
                end, self._end = self._end, None
        if end is not None:
            end(self._error)
