"""The lobby of a comm's name, in the store, in which processes wait to join the comm.

A newcomer enters with a generated name and answers liveness requests. The ranks that admit a newcomer leave an
invitation under its name, with the addresses of their control channel; the rest of the join runs over that channel.
The newcomer leaves the lobby when it connects, and not before, because the ranks may reject the call that invited it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Final, cast, final

from asynccomm.control.transport.connection import Tokens
from asynccomm.control.transport.schema import Message, dumps, loads
from asynccomm.control.transport.topology import RankAddress
from asynccomm.core.hosts import host_name
from asynccomm.errors import AsyncCommError, StoreTimeoutError
from asynccomm.store.base import Store

ANSWER_SECONDS: Final = 0.5  # seconds for a newcomer to answer a liveness request
LEAVE_SECONDS: Final = 1.0  # seconds for the store to remove a newcomer that leaves


@final
class Invitation(Message, frozen=True):
    """A newcomer's description of the comm to join."""

    key: str  #: of the comm in the control channel
    ranks: list[int]  #: ranks of the comm's members in the job
    contacts: list[RankAddress]  #: of the job's ranks
    tokens: Tokens
    backend: str  #: the backend in use
    backends: list[str]  #: those from which the ranks choose the next one, in the order to try them
    ordering: str


@final
class Lobby:
    """The lobby of one comm's name.

    Args:
        scope: the store prefix of the run.
        name: of the comm.
    """

    def __init__(self, scope: Store, name: str) -> None:
        self._room = scope.prefix(name).prefix("lobby")

    async def waiting(self) -> list[str]:
        """The names of waiting newcomers, in order of arrival. Raises: StoreError."""
        count = await self._room.add("count", 0)
        found = await asyncio.gather(*(self._look(number) for number in range(1, count + 1)))
        return [name for name in found if name]

    async def _look(self, number: int) -> str:
        """The name of the newcomer with that number; empty if the newcomer does not wait any more."""
        room = self._room
        if not await room.check([f"name/{number}"]):
            return ""  # the newcomer has left, or has not yet written its name
        name = (await room.get(f"name/{number}", ANSWER_SECONDS)).decode()
        asked = await room.add(f"{name}/asked", 1)
        await room.set(f"{name}/ask/{asked}", b"")
        with contextlib.suppress(StoreTimeoutError):
            await room.wait([f"{name}/here/{asked}"], ANSWER_SECONDS)
            await asyncio.gather(room.delete(f"{name}/ask/{asked}"), room.delete(f"{name}/here/{asked}"))
            return name
        return ""

    async def invite(self, names: Sequence[str], invitation: Invitation) -> None:
        """Invite newcomers. Repeated invitations are harmless. Raises: StoreError."""
        text = dumps(invitation)
        for name in names:
            await self._room.set(f"{name}/invitation", text)
        await self._room.check([])  # a round trip: the invitations are in the store

    @contextlib.asynccontextmanager
    async def enter(self) -> AsyncIterator[Newcomer]:
        """Wait in the lobby under a generated name, until the context ends or the newcomer leaves."""
        name = f"{host_name()}-{os.getpid()}-{secrets.token_hex(4)}"
        number = await self._room.add("count", 1)
        await self._room.set(f"name/{number}", name)
        newcomer = Newcomer(self._room, name, number)
        try:
            yield newcomer
        finally:
            await newcomer.leave()


@final
class Newcomer:
    """This process in a lobby, where it answers liveness requests.

    Args:
        room: of the lobby.
        name: generated.
        number: in order of arrival.
    """

    def __init__(self, room: Store, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self._room = room
        self._answering: asyncio.Task[None] | None = asyncio.ensure_future(self._answer())
        self._left = False

    async def invited(self) -> Invitation:
        """Wait without limit for an invitation. Cancelling is safe."""
        assert self._answering is not None
        waiting = asyncio.ensure_future(self._room.get(f"{self.name}/invitation", math.inf))
        try:
            await asyncio.wait([self._answering, waiting], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                self._answering.result()  # raises the error that ended it
            return cast(Invitation, loads(Invitation, await waiting))
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def leave(self) -> None:
        """Leave the lobby. Idempotent."""
        answering, self._answering = self._answering, None
        if answering is not None:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        if self._left:
            return
        with contextlib.suppress(AsyncCommError, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._room.delete(f"name/{self.number}")
        self._left = True  # not if this was cancelled

    async def _answer(self) -> None:
        """Answer all liveness requests."""
        asked = 1
        while True:
            await self._room.wait([f"{self.name}/ask/{asked}"], math.inf)
            await self._room.set(f"{self.name}/here/{asked}", b"")
            asked += 1
