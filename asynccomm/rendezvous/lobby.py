"""The lobby of a comm's name, in the store, in which processes wait to join the comm.

A newcomer enters with a generated name and answers liveness requests. The ranks that admit a newcomer leave an
invitation under its name, with the addresses of their control channel; the rest of the join runs over that channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
from collections.abc import Sequence
from typing import Any, Final, cast, final

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

    # -- for the comm -------------------------------------------------------------------------------------------------

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
        if await room.check([f"{name}/invitation"]):
            return ""
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

    # -- for a newcomer -----------------------------------------------------------------------------------------------

    async def enter(self) -> tuple[str, int]:
        """Enter the lobby; returns the newcomer's generated name and its number."""
        name = f"{host_name()}-{os.getpid()}-{secrets.token_hex(4)}"
        number = await self._room.add("count", 1)
        await self._room.set(f"name/{number}", name)
        return name, number

    async def invited(self, name: str, number: int) -> Invitation:
        """Wait without limit for an invitation. Cancelling is safe: the newcomer leaves the lobby."""
        answering = asyncio.ensure_future(self._answer(name))
        waiting = asyncio.ensure_future(self._room.get(f"{name}/invitation", math.inf))
        tasks: set[asyncio.Future[Any]] = {answering, waiting}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                answering.result()  # raises the error that ended it
            return cast(Invitation, loads(Invitation, await waiting))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(AsyncCommError, TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._room.delete(f"name/{number}")

    async def _answer(self, name: str) -> None:
        """Answer all liveness requests."""
        asked = 1
        while True:
            await self._room.wait([f"{name}/ask/{asked}"], math.inf)
            await self._room.set(f"{name}/here/{asked}", b"")
            asked += 1
