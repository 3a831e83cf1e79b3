"""Memory ordering between processes, from Python.

A rank publishes data by writing the data and then a word; the reader reads the word and then the data. Words are
aligned, and CPython stores and loads a word with one instruction, so words are never torn. Their order is not given:

- x86 keeps stores in order and loads in order (TSO), so publishing needs no fence there. ARM and others keep neither.
- No machine keeps a store and a later load of another word in order. A sleeper that sets its word and then checks for
  publications, and a publisher that publishes and then checks for sleepers, can both miss each other, unless each side
  has a full fence between its two steps.

CPython offers no fence, but releasing and re-acquiring a lock is a full fence: earlier accesses cannot pass the
release, later accesses cannot pass the acquire, and both are atomic operations on one variable, which stay in order
with each other. (An acquire followed by a release would not be a fence: accesses on both sides could move into the
section in between.) On x86 the locked instruction in the pair drains the store buffer.
"""

from __future__ import annotations

import platform
import threading
from typing import final

_STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")


@final
class Fence:
    """A memory fence for one thread at a time; threads that share a fence must guard it by a lock."""

    __slots__ = ("_acquire", "_release")

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._acquire = lock.acquire
        self._release = lock.release

    def full(self) -> None:
        """Order all earlier loads and stores before all later ones, as seen by every process."""
        self._release()
        self._acquire()

    def order(self) -> None:
        """Order later stores behind earlier stores, and later loads behind earlier loads."""
        if not _STORES_IN_ORDER:
            self.full()
