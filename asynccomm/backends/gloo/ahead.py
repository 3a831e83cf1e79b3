"""Collectives whose data are handed to gloo ahead of the frames of the other ranks.

That is safe if no rank can hand over anything else at that place. The collective that all ranks expect next has this
property, as programs repeat their calls: the expectation depends on nothing but the calls before, and a rank starts the
expected collective only when the frames of all calls before are here. Then these calls are the same on all ranks, so
the expectation is, too. A rank that calls something else waits for the frames, and these end the comm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, final

__all__ = ["REMEMBERED", "Ahead", "Expected"]

REMEMBERED: Final = 4096  # pairs of calls whose successors are known: more than a training step has


@final
class Expected:
    """The calls of one rank so far, by their headings.

    A heading describes a call completely, but for its number. The expectation is the successor of the last two calls
    when they were made the last time; the last call again, if they are new.
    """

    def __init__(self) -> None:
        self._successors: dict[tuple[bytes, bytes], bytes] = {}
        self._last = b"", b""
        self._moved: set[bytes] = set()

    def called(self, heading: bytes) -> bool:
        """Count a call, in the order of calls; returns whether it was expected."""
        last = self._last
        expected = self._successors.get(last, last[1])
        if expected != heading:
            if len(self._successors) >= REMEMBERED:  # at the same call on all ranks
                self._successors.clear()
            self._successors[last] = heading
        self._last = last[1], heading
        return expected == heading

    def moved(self, heading: bytes) -> bool:
        """Whether the frames of such a call were not enough before, so that gloo had to move data."""
        return heading in self._moved

    def moves(self, heading: bytes) -> None:
        """Note that the frames of a call are not enough."""
        if len(self._moved) >= REMEMBERED:
            self._moved.clear()
        self._moved.add(heading)


@final
class Ahead:
    """One collective that was started ahead of its frames: it is over when frames and data are here.

    Args:
        over: called when both are here, from any thread.
        fail: takes what goes wrong with the data.
    """

    def __init__(self, over: Callable[[], object], fail: Callable[[Exception], object]) -> None:
        self._over = over
        self._fail = fail
        self._lock = threading.Lock()
        self._half = False
        self._disputed = False

    def done(self) -> None:
        """The frames are here and equal, or the data are here."""
        with self._lock:
            both, self._half = self._half, True
        if both:
            self._over()

    def failed(self, exc: Exception) -> None:
        """The data will not come."""
        if not self._disputed:
            self._fail(exc)

    def disputed(self) -> None:
        """The frames differ, and the error that says so is being made: failed data follow from it."""
        self._disputed = True
