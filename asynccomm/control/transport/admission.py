"""The admission of connections to a rank's listening sockets: one policy, which does no I/O.

Any process on the host can connect. A connection is unauthenticated until its hello has been accepted: at most
``UNAUTHENTICATED`` of them are open at once, beside those of the expected ranks, and each has ``HELLO_SECONDS``. A
further connection closes the oldest. Both limits close a connection without a reply, so that a rank connects again: a
flood delays ranks, and keeps none out. On a local socket, the other process must belong to the same user.

The first refusal is logged at once, and the refusals by reason when the listening ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Final, Generic, TypeVar, final

UNAUTHENTICATED: Final = 64  # connections at once, beside one for each expected rank
HELLO_SECONDS: Final = 5.0  # for a new connection to send its hello
REASONS: Final = 16  # distinct reasons that are counted

OTHER_USER: Final = "of another user"
WRONG_TOKEN: Final = "with a wrong token"
LATE: Final = "without a hello in time"
CROWDED: Final = "too many at once"

C = TypeVar("C")
_log = logging.getLogger("asynccomm")


@final
class Admission(Generic[C]):
    """The unauthenticated connections of one listener, and the count of its refusals.

    Args:
        owner: the listener, in the log.
        close: closes a refused connection, for the given reason.
        expected: ranks that may connect at the same time.
        read: reads the data that have arrived on a connection, before a limit closes it.
    """

    def __init__(
        self,
        owner: str,
        close: Callable[[C, str], object],
        expected: int = 0,
        read: Callable[[C], object] = lambda connection: None,
    ) -> None:
        self.waiting: dict[C, asyncio.TimerHandle] = {}  #: the unauthenticated connections, oldest first
        self.refused: Counter[str] = Counter()  #: refused connections, by reason
        self._owner = owner
        self._close = close
        self._read = read
        self._expected = expected

    def add(self, connection: C, user: int | None) -> None:
        """Wait for the hello of a new connection of ``user`` (None: unknown), or refuse the connection."""
        if user not in (None, os.geteuid()):
            self.refuse(connection, OTHER_USER)
            return
        while len(self.waiting) >= UNAUTHENTICATED + self._expected:
            self.drop_oldest()
        self.waiting[connection] = asyncio.get_running_loop().call_later(HELLO_SECONDS, self._drop, connection, LATE)

    def remove(self, connection: C) -> bool:
        """Stop waiting for the hello of a connection. Returns False if the connection was refused before."""
        timer = self.waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def refuse(self, connection: C, reason: str) -> None:
        """Close a connection, and count the refusal."""
        self.remove(connection)
        self.count(reason)
        self._close(connection, reason)

    def count(self, reason: str) -> None:
        """Count a refused connection, which has closed."""
        if not self.refused:
            _log.warning("%s refused a connection: %s; others are only counted", self._owner, reason)
        self.refused[reason if reason in self.refused or len(self.refused) < REASONS else "for other reasons"] += 1

    def drop_oldest(self) -> None:
        """Close the oldest unauthenticated connection, unless its hello has arrived."""
        self._drop(next(iter(self.waiting)), CROWDED)

    def _drop(self, connection: C, reason: str) -> None:
        self._read(connection)
        if connection in self.waiting:
            self.refuse(connection, reason)

    def log_refusals(self) -> None:
        """Log the number of refusals, once, unless the first was the only one."""
        total = self.refused.total()
        if total > 1:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.items())
            _log.warning("%s refused %d connections: %s", self._owner, total, reasons)
        self.refused.clear()
