"""A newcomer's connection to the job that it is to become part of: to its root, and to the next one if that dies."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Final, final

from asynccomm.control.ballots import Again, Committed, LeftOut, Order, Over, Refused, Who
from asynccomm.control.candidate import Candidate
from asynccomm.control.frames import Message
from asynccomm.control.links import Connection, Tokens, connect
from asynccomm.control.roster import Contact
from asynccomm.control.thread import ControlThread, control_thread

__all__ = ["Guest"]

RETRY_SECONDS: Final = 0.05  # until another round through the ranks, when none of them is the root
LINGER_SECONDS: Final = 30.0  # for the others to learn what was agreed on with this one


@final
class Guest:
    """One newcomer, as a participant in the agreement of one comm. See ``elections.Elections`` for the methods.

    Args:
        name: of the newcomer.
        key: of the comm.
        ranks: of the comm, as the job calls them.
        contacts, tokens: of the job.
    """

    def __init__(self, name: str, key: str, ranks: Sequence[int], contacts: Sequence[Contact], tokens: Tokens) -> None:
        self._name = name
        self._key = key
        self._ranks = list(ranks)
        self._contacts = sorted((c for c in contacts if c.listens), key=lambda contact: contact.rank)
        self._tokens = tokens
        self._thread: ControlThread = control_thread()
        self._candidate = Candidate(name, ranks)
        self._hear: Callable[[Order], object] = _nothing
        self._ended_here = False
        self._link: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._lost: asyncio.Event | None = None
        self._over: asyncio.Event | None = None

    def ask(self, proposal: Sequence[Who] | None, wait: float, hear: Callable[[Order], object]) -> None:
        """Want in. From any thread."""

        def ask() -> None:
            self._hear = hear
            self._candidate.ask(proposal, wait)
            if self._task is None:
                self._lost, self._over = asyncio.Event(), asyncio.Event()
                self._task = self._thread.loop.create_task(self._stay())
            self._report()

        self._thread.call(ask)

    def prepared(self, decision: str) -> None:
        """The members of a decision are connected. From any thread."""

        def prepared() -> None:
            self._candidate.prepared(decision)
            self._report()

        self._thread.call(prepared)

    def failed(self, decision: str, why: str) -> None:
        """They could not be. From any thread."""

        def failed() -> None:
            self._candidate.failed(decision, why)
            self._report()

        self._thread.call(failed)

    def give_up(self) -> None:
        """Leave. From any thread."""
        self._thread.call(self._end)

    def close(self) -> None:
        """Leave, once nobody needs this one any more. From any thread."""
        self._thread.call(lambda: self._thread.loop.create_task(self._linger()))

    async def _linger(self) -> None:
        if self._ended_here:
            return
        assert self._over is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self._over.wait()
        self._end()

    def _end(self) -> None:
        if self._ended_here:
            return
        self._ended_here = True
        if self._task is not None:
            self._task.cancel()
        if self._link is not None:
            self._link.close()
        self._thread.loop.call_later(0.0, self._thread.release)

    async def _stay(self) -> None:
        """Keep connected to whoever is the root."""
        assert self._lost is not None
        host = socket.gethostname()
        while True:
            for contact in self._contacts:
                try:
                    self._link = await connect(
                        contact, contact.host == host, self._tokens, self._name, self._received, self._ended
                    )
                except OSError:
                    continue
                self._report()
                await self._lost.wait()
                self._lost.clear()
                break
            await asyncio.sleep(RETRY_SECONDS)

    def _report(self) -> None:
        report = self._candidate.report()
        if self._link is not None and report is not None:
            self._link.send({"comm": self._key, "ranks": self._ranks, "report": report})

    def _received(self, connection: Connection, message: Message) -> None:
        order = self._candidate.hear(message.get("order"))
        if isinstance(order, (Again, Committed, Refused, LeftOut)):
            self._report()
        if order is not None:
            self._hear(order)
        if isinstance(order, (Over, LeftOut)):
            assert self._over is not None
            self._over.set()

    def _ended(self, connection: Connection, how: str) -> None:
        self._link = None
        if self._lost is not None:
            self._lost.set()


def _nothing(order: Order) -> None:
    pass
