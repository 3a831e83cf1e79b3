"""Who is last, and who is next, of several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import final

from asynccomm.errors import AsyncCommError


@final
class Latch:
    """Calls ``end`` with the first error, if any, when it has been called ``count`` times. From any thread."""

    def __init__(self, count: int, end: Callable[..., object]) -> None:
        self._left = count
        self.end = end
        self._error: AsyncCommError | None = None
        self._lock = threading.Lock()

    def __call__(self, error: AsyncCommError | None) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            over = self._left == 0
        if over:
            self.end(self._error)


@final
class Ticket:
    """Of one thing to do."""

    def __init__(self, line: Hashable) -> None:
        self.line = line
        self.go: Callable[[], object] | None = None  #: once it may be done


@final
class Sequencer:
    """Has things done in the order in which they were announced, within a line. From any thread.

    Backends place what comes in order, but may tell of the ends of operations in another.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[Ticket]] = {}
        self._lock = threading.Lock()

    def announce(self, line: Hashable) -> Ticket:
        turn = Ticket(line)
        with self._lock:
            self._lines.setdefault(line, deque()).append(turn)
        return turn

    def ready(self, turn: Ticket, go: Callable[[], object]) -> None:
        """Call ``go``, which must not wait, when it is its turn."""
        with self._lock:
            turn.go = go
            turns = self._lines[turn.line]
            while turns and (first := turns[0].go) is not None:
                turns.popleft()
                first()
            if not turns:
                del self._lines[turn.line]
