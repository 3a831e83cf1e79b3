"""The fingerprints of what is issued, on their way to the root; and what the root does about a difference.

A rank looks at what its comms have issued now and then, as long as there is something, and not at all while there is
nothing: to issue a collective costs no more than a look at a flag.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, final

from asynccomm.control.fingerprints import FingerprintTables, Mismatch
from asynccomm.control.requests import ANSWER_SECONDS, Requests
from asynccomm.control.router import ALL, ROOT, Router
from asynccomm.control.subscribers import Subscribers
from asynccomm.control.transport.framing import ControlMessage
from asynccomm.control.transport.thread import ControlThread

PRINT_SECONDS: Final = 0.05  # between looks at what was issued, while something is
PRINTS: Final = 4096  # in one message
QUIET_LOOKS: Final = 4  # looks without anything new, after which they end


@final
class MismatchDetector:
    """Those of one rank. On the control thread, except for :meth:`issued`.

    Args:
        router: carries them.
        members: have issued what they are of.
        requests: ask two ranks that differ.
        begin: starts a task, which is cancelled when the channel ends.
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
        self._looking = False
        self._quiet = 0  # looks
        self._closed = False

    def issued(self) -> None:
        """Something was. From any thread; costs next to nothing."""
        if not self._looking:
            self._looking = True
            self._thread.call(self._look)

    def _look(self) -> None:
        """Send what was issued to the root, and look again soon as long as there is something."""
        if self._closed:
            return
        self._quiet = 0 if self._send() else self._quiet + 1
        if self._quiet < QUIET_LOOKS:
            self._thread.loop.call_later(PRINT_SECONDS, self._look)
            return
        self._quiet = 0
        self._looking = False
        if self._send():  # came before the flag was down, so nobody has called
            self.issued()

    def _send(self) -> bool:
        """Returns whether there were any."""
        found = False
        for key, size, fingerprints in self._members.fingerprints():
            for first in range(0, len(fingerprints), PRINTS):
                found = True
                self._router.send(ROOT, "prints", comm=key, size=size, prints=fingerprints[first : first + PRINTS])
        return found

    def hear(self, message: ControlMessage) -> None:
        """At the root: a rank has sent its own. Raises: ValueError for what are none."""
        key = message.get("comm")
        found = self._tables.take(key, message["from"], message.get("size"), message.get("prints"))
        if found is not None:
            assert isinstance(key, str)
            self._begin(self._report(key, found))

    async def _report(self, key: str, found: Mismatch) -> None:
        """Ask the two ranks what they have issued, and tell all."""
        sides = [found.rank, found.other]
        said = await self._requests.gather(key, sides, {"what": "explain", "seq": found.seq}, ANSWER_SECONDS)
        item = {"kind": "differs", "seq": found.seq, "jobs": sides, "sides": [said.get(side, {}) for side in sides]}
        self._router.send(ALL, "news", comm=key, item=item)
        self._members.tell(key, self._router.rank, item)

    def forget(self, key: str) -> None:
        """The comm has ended somewhere."""
        self._tables.forget(key)

    def close(self) -> None:
        """Look no more."""
        self._closed = True
