"""The one door from any thread to the event loop.

Threads (transports, completion pollers) ``post`` callables; the loop runs them in order. However many are posted
before the loop gets to them, the loop is woken once. What is posted on the loop's own thread runs at once.

The order of the two steps on each side makes it lossless without a lock: ``post`` appends first and looks at ``_rung``
second; ``_drain`` clears ``_rung`` first and empties the deque second. Either ``_drain`` still sees the item or
``post`` still sees the cleared flag and rings again. (Single attribute and deque operations are atomic in CPython,
with the GIL and in the free-threaded build.)

It also keeps the pace: awaiting finished Works never suspends, so a tight loop of fast collectives would starve every
other task. :meth:`must_yield` says when such a streak has lasted long enough.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

STREAK_AWAITS = 64  # finished Works awaited in a row before one await yields to the loop
STREAK_SECONDS = 1e-3  # the same as time: large collectives that finish inside the call are slower than that

_log = logging.getLogger("asynccomm")


class Mailbox:
    """Runs what other threads post on one event loop."""

    __slots__ = ("_awaits", "_inbox", "_rung", "_since", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._inbox: deque[Callable[[], object]] = deque()
        self._rung = False
        self._awaits = 0
        self._since = 0.0

    def post(self, call: Callable[[], object]) -> None:
        """Have ``call`` run on the loop: now if this is the loop's thread, soon otherwise.

        From any thread. A closed loop has nobody left to tell: dropped.
        """
        if asyncio._get_running_loop() is self.loop:
            self._run(call)
            return
        self._inbox.append(call)
        if not self._rung:
            self._rung = True
            try:
                self.loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                if not self.loop.is_closed():
                    raise
                _log.debug("the event loop is closed; %d completions dropped", len(self._inbox))
                self._inbox.clear()
                self._rung = False

    def _drain(self) -> None:
        self._rung = False
        inbox = self._inbox
        for _ in range(len(inbox)):  # what arrives meanwhile has rung again: other callbacks get their turn first
            self._run(inbox.popleft())

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.loop.call_exception_handler({"message": "error in a completion callback", "exception": exc})

    def should_yield(self) -> bool:
        """Count one await that did not suspend; True when it is time to let other tasks run."""
        now = time.monotonic()
        if self._awaits == 0:
            self._since = now
        self._awaits += 1
        if self._awaits < STREAK_AWAITS and now - self._since < STREAK_SECONDS:
            return False
        self._awaits = 0
        return True

    def reset_streak(self) -> None:
        """Note that an await did suspend: a streak, if any, is over."""
        self._awaits = 0
