"""Memory ordering between processes, from Python.

A rank publishes data by writing it and then a word that says so; another reads the word and then the data. Words are
aligned, and CPython stores and loads each with one instruction, so they are never torn. Order is another matter:

- x86 keeps stores in order and loads in order (TSO), so publishing needs nothing there. ARM and others keep neither.
- No machine keeps a store and a later load of another word in order. "I go to sleep" and then "has anything come?",
  against "here is something" and then "is anybody asleep?", may both miss unless each side has a full fence between.

CPython has no fence to call, but a lock is one when it is released and taken again: the release cannot be passed by
what came before it, the acquire not by what comes after, and the two are atomic operations on one variable, which
stay in order with each other. (An acquire followed by a release would not do: both neighbours could move into the
section between.) On x86 the locked instruction in it empties the store buffer.
"""

from __future__ import annotations

import platform
import threading
from typing import final

_STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")


@final
class Fence:
    """The fences of one thread at a time: whoever shares one must hold a lock of his own around its use."""

    __slots__ = ("_acquire", "_release")

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._acquire = lock.acquire
        self._release = lock.release

    def full(self) -> None:
        """Everything before is seen by all before anything after."""
        self._release()
        self._acquire()

    def order(self) -> None:
        """Stores stay behind earlier stores, and loads behind earlier loads."""
        if not _STORES_IN_ORDER:
            self.full()
