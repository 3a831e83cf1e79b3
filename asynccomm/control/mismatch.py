"""Sends the fingerprints of issued collectives to the root, and reports the mismatches that the root finds.

A rank polls its comms every ``POLL_SECONDS`` while they issue collectives, and not at all otherwise: issuing a
collective costs only the check of a flag.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, final

from asynccomm.control.fingerprints import FingerprintMismatch, FingerprintTables
from asynccomm.control.messages import ALL, ROOT, IssuedCollectives, News
from asynccomm.control.requests import Requests
from asynccomm.control.router import Router
from asynccomm.control.subscribers import Subscribers
from asynccomm.control.timing import ANSWER_SECONDS
from asynccomm.control.transport.thread import ControlThread

POLL_SECONDS: Final = 0.05  # between two polls
BATCH_FINGERPRINTS: Final = 4096  # fingerprints in one message
QUIET_POLLS: Final = 4  # polls without new fingerprints, after which polling stops


@final
class MismatchDetector:
    """The mismatch detection of one rank. Runs on the control thread, except for :meth:`start_polling`.

    Args:
        router: carries the fingerprints.
        members: the comms that issue collectives.
        requests: asks two ranks with a mismatch for their operations.
        begin: starts a task, which the channel cancels when it ends.
    """

    def __init__(
        self,
        thread: ControlThread,
        router: Router,
        members: Subscribers,
        requests: Requests,
        begin: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._thread = thread
        self._router = router
        self._members = members
        self._requests = requests
        self._begin = begin
        self._tables = FingerprintTables()
        self._polling = False
        self._quiet = 0  # polls in a row without new fingerprints
        self._closed = False

    def start_polling(self) -> None:
        """Start polling for new fingerprints. Thread-safe; costs the check of a flag."""
        if not self._polling:
            self._polling = True
            self._thread.call(self._poll)

    def _poll(self) -> None:
        """Send new fingerprints to the root; poll again after ``POLL_SECONDS`` while there are any."""
        if self._closed:
            return
        self._quiet = 0 if self._send() else self._quiet + 1
        if self._quiet < QUIET_POLLS:
            self._thread.loop.call_later(POLL_SECONDS, self._poll)
            return
        self._quiet = 0
        self._polling = False
        if self._send():  # issued while the flag was still set: their calls did nothing
            self.start_polling()

    def _send(self) -> bool:
        """Send new fingerprints. Returns whether there were any."""
        found = False
        for key, size, fingerprints in self._members.take_fingerprints():
            for first in range(0, len(fingerprints), BATCH_FINGERPRINTS):
                found = True
                self._router.send(
                    ROOT, IssuedCollectives(key, size, list(fingerprints[first : first + BATCH_FINGERPRINTS]))
                )
        return found

    def on_issued(self, rank: int, message: IssuedCollectives) -> None:
        """At the root: compare the fingerprints of a rank."""
        found = self._tables.take(message.comm, rank, message.size, message.fingerprints)
        if found is not None:
            self._begin(self._report(message.comm, found))

    async def _report(self, key: str, found: FingerprintMismatch) -> None:
        """Ask the two ranks for their operations, and send the mismatch to all ranks."""
        sides = [found.rank, found.other]
        said = await self._requests.gather(key, sides, {"what": "explain", "seq": found.seq}, ANSWER_SECONDS)
        item = {"kind": "differs", "seq": found.seq, "jobs": sides, "sides": [said.get(side, {}) for side in sides]}
        self._router.send(ALL, News(key, item))
        self._members.deliver(key, self._router.rank, item)

    def forget(self, key: str) -> None:
        """Drop the fingerprints of comm ``key``, which some rank has closed."""
        self._tables.forget(key)

    def close(self) -> None:
        """Stop polling."""
        self._closed = True
