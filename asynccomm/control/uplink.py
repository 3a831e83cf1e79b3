"""Connects a rank to the rank above it, which changes as ranks go, and detects ranks that do not listen any more.

A rank that refuses connections has gone, or does not listen yet; it counts as lost only after ``REFUSED_SECONDS``. A
rank on a host that cannot be reached counts as lost after ``REACH_SECONDS``. A rank that is stopped has its connections
accepted by the system, and does not answer: it counts as lost after ``SILENT_SECONDS``, if this rank asks to go on
without ranks. The root also checks the ranks that should be connected to it and are not: no other rank may have seen
them go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, final

from asynccomm.control.router import FENCED, SILENT, Router
from asynccomm.control.timing import HEARTBEAT_SECONDS, REACH_SECONDS, SILENT_SECONDS
from asynccomm.control.transport.connection import Connection, Tokens, connect, listens
from asynccomm.control.transport.schema import JsonObject

RETRY_SECONDS: Final = 0.02  # between attempts to reach the rank above
REFUSED_SECONDS: Final = 0.2  # after which a rank that does not listen, without news of its leave, counts as lost
NOT_THERE: Final = "it does not listen any more"
UNREACHED: Final = "its host cannot be reached"


@final
class Uplink:
    """Keeps one rank connected to the rank above. Runs on the control thread.

    Args:
        router: of the rank.
        tokens: of the job.
        begin: starts a task, which the channel cancels when it ends.
        received, ended: callbacks of each connection, see :class:`connection.Connection`.
        attached: called after the router has a new connection.
        asking: whether this rank waits for an agreement, which goes on without silent ranks.
    """

    def __init__(
        self,
        router: Router,
        tokens: Tokens,
        begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        received: Callable[[Connection, JsonObject], object],
        ended: Callable[[Connection, str], object],
        attached: Callable[[], object],
        asking: Callable[[], bool],
    ) -> None:
        self._router = router
        self._tokens = tokens
        self._begin = begin
        self._received = received
        self._ended = ended
        self._attached = attached
        self._asking = asking
        self._connecting: asyncio.Task[None] | None = None
        self._search: asyncio.Task[None] | None = None
        self._unreached: dict[int, float] = {}  # by absent rank, the time of the first attempt without an answer
        self._closed = False

    def connect(self) -> None:
        """Connect to the rank above, unless already connected or connecting."""
        if self._closed or self._router.up is not None or self._router.above is None or self._connecting is not None:
            return
        self._connecting = self._begin(self._connect_above())
        self._connecting.add_done_callback(self._on_connected)

    async def wait_connected(self, timeout: float) -> bool:
        """Connect to the rank above, and wait. Returns whether connecting took at most ``timeout`` seconds."""
        self.connect()
        if self._connecting is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._connecting), timeout)
            except TimeoutError:
                return False
        return True

    def _on_connected(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self.connect()  # the rank above may have changed meanwhile

    async def _connect_above(self) -> None:
        router, now = self._router, asyncio.get_running_loop().time
        tried = now()
        refused: dict[int, float] = {}  # by rank, the time of its first refusal
        while (above := router.above) is not None and router.up is None:
            try:
                link = await self._reach(above)
            except PermissionError as exc:
                if exc.strerror == FENCED:
                    router.declare_lost(above, FENCED)
                    tried = now()
                    continue
                router.fence(exc.strerror or "")  # the others have declared this rank lost
                return
            except OSError as exc:
                if not isinstance(exc, ConnectionRefusedError):
                    refused.pop(above, None)
                    if now() - tried > REACH_SECONDS:
                        router.declare_lost(above, f"it cannot be reached: {exc}")
                        tried = now()
                elif now() - refused.setdefault(above, now()) > REFUSED_SECONDS:
                    router.declare_lost(above, NOT_THERE)
                    continue
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if link is None:
                tried = now()
                continue
            if above in router.gone:
                link.close()
                continue
            router.attach(above, link)
            self._attached()

    async def _reach(self, above: int) -> Connection | None:
        """Connect to ``above``; None: it is not above this rank any more, perhaps because it was silent for too long.

        Raises: as ``connect``.
        """
        router, loop = self._router, asyncio.get_running_loop()
        contact, local = router.topology.contacts[above], self._same_host(above)
        silent = 0.0  # seconds, not by a clock: this rank itself may have been stopped meanwhile
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal silent, timer
            silent += HEARTBEAT_SECONDS
            if silent >= SILENT_SECONDS and self._asking():
                router.declare_lost(above, SILENT.format(silent))
            if router.above == above:
                timer = loop.call_later(HEARTBEAT_SECONDS, look)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(HEARTBEAT_SECONDS, look)
        try:
            async with asyncio.timeout(None) as limit:
                return await connect(
                    contact,
                    local,
                    self._tokens,
                    router.rank,
                    self._received,
                    self._ended,
                    lambda: router.loss_message(above),
                )
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        finally:
            timer.cancel()

    def check_absent(self) -> None:
        """At the root: check whether the absent ranks still listen."""
        if self._router.absent and not self._closed and (self._search is None or self._search.done()):
            self._search = self._begin(self._probe_absent())

    async def _probe_absent(self) -> None:
        router, now = self._router, asyncio.get_running_loop().time
        refused: dict[int, float] = {}  # by rank, the time of its first refusal
        while True:
            absent, began = router.absent, now()
            self._unreached = {rank: since for rank, since in self._unreached.items() if rank in absent}
            answers = await asyncio.gather(
                *(listens(router.topology.contacts[rank], self._same_host(rank)) for rank in absent)
            )
            for rank, answer in zip(absent, answers, strict=True):
                if answer is not False:
                    refused.pop(rank, None)
                if answer is not None:
                    self._unreached.pop(rank, None)
                if rank not in router.absent:
                    continue
                if answer is False and now() - refused.setdefault(rank, now()) > REFUSED_SECONDS:
                    router.declare_lost(rank, NOT_THERE)
                elif answer is None and now() - self._unreached.setdefault(rank, began) >= REACH_SECONDS:
                    router.declare_lost(rank, UNREACHED)
            if not refused.keys() & set(router.absent):
                return  # listening ranks will connect; the next heartbeat checks again
            await asyncio.sleep(RETRY_SECONDS)

    def _same_host(self, rank: int) -> bool:
        contacts = self._router.topology.contacts
        return contacts[rank].host == contacts[self._router.rank].host

    def close(self) -> None:
        """Start no more attempts; the channel cancels the tasks it started."""
        self._closed = True
