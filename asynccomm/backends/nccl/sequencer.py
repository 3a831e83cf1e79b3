"""Things that are ready in any order, and are done in one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import final


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
