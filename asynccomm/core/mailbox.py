"""The single path from any thread to the event loop.

Threads (transports, completion pollers) ``post`` callables, and the loop runs them in order. Any number of posts before
the loop runs wakes the loop once. A callable posted on the loop's own thread runs at once.

The order of the two steps on each side makes the mailbox lossless without a lock: ``post`` first appends and then
checks ``_rung``; ``_drain`` first clears ``_rung`` and then empties the deque. Either ``_drain`` still sees the item,
or ``post`` sees the cleared flag and wakes the loop again. (Single attribute and deque operations are atomic in
CPython, with the GIL and in the free-threaded build.)

The mailbox also counts the streak of awaits that do not suspend, as those of finished Works: a tight loop of fast
collectives would starve all other tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from asynccomm.core.state import Streak

_log = logging.getLogger("asynccomm")


class Mailbox(Streak):
    """Runs callables from other threads on one event loop."""

    __slots__ = ("_inbox", "_rung")
    loop: asyncio.AbstractEventLoop

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self._inbox: deque[Callable[[], object]] = deque()
        self._rung = False

    def post(self, call: Callable[[], object]) -> None:
        """Run ``call`` on the loop: at once on the loop's own thread, else in a later loop iteration.

        From any thread. The call is dropped if the loop is closed.
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
        for _ in range(len(inbox)):  # newer items have woken the loop again: other callbacks run first
            self._run(inbox.popleft())

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.loop.call_exception_handler({"message": "error in a completion callback", "exception": exc})
