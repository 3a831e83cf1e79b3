"""A sequencer for events that happen in any order and are processed in a fixed order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import final


@final
class Ticket:
    """The place of one event in the order of its line."""

    def __init__(self, line: Hashable) -> None:
        self.line = line
        self.go: Callable[[], object] | None = None  #: callback; None until ``ready``


@final
class Sequencer:
    """Calls callbacks in the order of ``announce``, within a line. From any thread.

    Backends allocate memory for payloads in the order of sending, but may report the ends of operations in another
    order.
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
        """Call ``go``, which must not block, after the callbacks of all earlier tickets of the line."""
        with self._lock:
            turn.go = go
            turns = self._lines[turn.line]
            while turns and (first := turns[0].go) is not None:
                turns.popleft()
                first()
            if not turns:
                del self._lines[turn.line]
