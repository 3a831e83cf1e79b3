"""Where processes wait to be taken into a comm: the lobby of its name, in the store.

A newcomer enters with a name of its own, and answers those who ask whether it is still there. The ranks that want it
leave an invitation under its name, which says where their control channel is; the rest is agreed on there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self, final

from asynccomm.control.transport.connection import Tokens
from asynccomm.control.transport.topology import RankAddress
from asynccomm.errors import AsyncCommError, StoreTimeoutError
from asynccomm.store.base import Store

ANSWER_SECONDS: Final = 0.5  # for a newcomer to say that it is still there
LEAVE_SECONDS: Final = 1.0  # for the store to take that it is not any more


@final
class Invitation(NamedTuple):
    """What a newcomer must know of a comm."""

    key: str  #: in the control channel
    ranks: list[int]  #: as the job calls them
    contacts: list[RankAddress]  #: of the job
    tokens: Tokens
    backend: str
    ordering: str

    def as_json(self) -> str:
        data = self._asdict()
        data["contacts"] = [contact.as_json() for contact in self.contacts]
        data["tokens"] = [self.tokens.ask, self.tokens.answer]
        return json.dumps(data)

    @classmethod
    def of_json(cls, text: bytes) -> Self:
        data = json.loads(text)
        contacts = [RankAddress.of_json(contact) for contact in data.pop("contacts")]
        return cls(**{**data, "contacts": contacts, "tokens": Tokens(*data["tokens"])})


@final
class Lobby:
    """The lobby of one comm's name.

    Args:
        scope: keys of the run.
        name: of the comm.
    """

    def __init__(self, scope: Store, name: str) -> None:
        self._room = scope.prefix(name).prefix("lobby")

    # -- for the comm -------------------------------------------------------------------------------------------------

    async def waiting(self) -> list[str]:
        """The names of those who wait, in the order of their coming. Raises: StoreError."""
        count = await self._room.add("count", 0)
        found = await asyncio.gather(*(self._look(number) for number in range(1, count + 1)))
        return [name for name in found if name]

    async def _look(self, number: int) -> str:
        """Who has that number; empty if it does not wait any more."""
        room = self._room
        if not await room.check([f"name/{number}"]):
            return ""  # it has left, or is about to come
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
        """Invite newcomers; more than once does no harm. Raises: StoreError."""
        text = invitation.as_json()
        for name in names:
            await self._room.set(f"{name}/invitation", text)
        await self._room.check([])  # a reply: the server has it

    # -- for a newcomer -----------------------------------------------------------------------------------------------

    async def enter(self) -> tuple[str, int]:
        """Come in; returns the name and number here."""
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        number = await self._room.add("count", 1)
        await self._room.set(f"name/{number}", name)
        return name, number

    async def invited(self, name: str, number: int) -> Invitation:
        """Wait to be invited, without a limit. Cancelling is safe: it leaves the lobby."""
        answering = asyncio.ensure_future(self._answer(name))
        waiting = asyncio.ensure_future(self._room.get(f"{name}/invitation", math.inf))
        tasks: set[asyncio.Future[Any]] = {answering, waiting}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                answering.result()  # raises why it has ended
            return Invitation.of_json(await waiting)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(AsyncCommError, TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._room.delete(f"name/{number}")

    async def _answer(self, name: str) -> None:
        """Say to all who ask that this one is here."""
        asked = 1
        while True:
            await self._room.wait([f"{name}/ask/{asked}"], math.inf)
            await self._room.set(f"{name}/here/{asked}", b"")
            asked += 1
