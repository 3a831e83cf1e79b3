"""The place in the store where the trainers of a publisher and its servers meet.

Keys, under the publisher's name::

    publishers             the number of publishers so far: a publisher that is started again gets the next one
    <p>/open               settings of publisher p, from when it accepts servers; in the end, that it has closed
    <p>/servers            the number of servers that have asked to join publisher p
    <p>/server/<n>         exists when server n waits for its welcome
    <p>/pair/<t>/<n>       the rendezvous of the comm of trainer t and server n
    <p>/fan/<t>/<k>        the rendezvous of a comm of trainer t and several servers
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Self, final

import torch
from torch import distributed as dist

from asynccomm.comm.comm import Comm
from asynccomm.comm.pairs import meet, meeting_place
from asynccomm.comm.pending import PendingComm
from asynccomm.control.timing import CONNECT_SECONDS
from asynccomm.control.transport.schema import Message, dumps, loads
from asynccomm.errors import AsyncCommError, BrokenError, StoreTimeoutError
from asynccomm.options import CommOptions, check_name
from asynccomm.rendezvous.spec import RendezvousSpec, StoreSession, connect_store
from asynccomm.store.base import Store, answered

__all__ = ["Meeting", "PublisherSettings"]

LOOK_SECONDS: Final = 2.0  # between looks for publishers and servers that took a number, and have not written their key
CLOSE_SECONDS: Final = 2.0  # for the store to answer when a publisher closes, or its mark is looked at


@final
class PublisherSettings(Message, frozen=True):
    """The settings of a publisher that its servers need."""

    backend: str
    closed: bool = False  #: whether it accepts no more servers


@final
@dataclass(frozen=True, slots=True)
class Meeting:
    """One publisher's place in the store."""

    session: StoreSession
    name: str
    place: RendezvousSpec  #: of this name
    backend: str
    device: torch.device
    timeout: float  #: seconds, of the comms
    hints: Mapping[str, str] | None
    publisher: int = 0  #: 0: not known yet

    @classmethod
    async def open(
        cls,
        store: Comm | Store | dist.Store | str | None,
        name: str,
        backend: str,
        device: torch.device,
        timeout: float,
        hints: Mapping[str, str] | None,
    ) -> Self:
        """Connect to the store. Cancelling is safe. Raises: ValueError, TypeError, RendezvousError."""
        check_name(name)
        place = meeting_place(store)
        session = await connect_store(place, timeout)
        here = replace(place, store=session.store, path=None, scope=f"asynccomm/run/weights/{name}")
        return cls(session, name, here, backend, device, timeout, hints)

    @property
    def _room(self) -> Store:
        return self.session.store.prefix(self.place.scope)

    # -- for trainers -------------------------------------------------------------------------------------------------

    async def register(self) -> int:
        """A number for a new publisher."""
        return await self._room.add("publishers", 1)

    def of(self, publisher: int) -> Self:
        """The place of this publisher."""
        return replace(self, publisher=publisher)

    async def accept(self) -> None:
        """Let servers find the publisher."""
        await self._room.set(f"{self.publisher}/open", dumps(PublisherSettings(self.backend)))

    async def close(self) -> None:
        """Let servers pass the publisher over, if the store answers."""
        with suppress(AsyncCommError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._room.set(f"{self.publisher}/open", dumps(PublisherSettings(self.backend, closed=True)))

    async def newcomer(self, number: int) -> None:
        """Wait until server ``number`` has asked to join. It may be lost by then."""
        room = self._room.prefix(str(self.publisher))
        while True:
            with suppress(StoreTimeoutError):
                return await room.wait([f"server/{number}"], LOOK_SECONDS)
            if await room.add("servers", 0) >= number:
                return  # slow, or lost before it wrote its key: only the rendezvous of their comm tells

    # -- for servers --------------------------------------------------------------------------------------------------

    async def find(self, least: int = 1) -> Self:
        """Wait for the newest publisher that is open, with the number ``least`` or a higher one.

        Raises: StoreTimeoutError.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            number = max(least, await answered(self._room.add("publishers", 0), deadline, "store"))
            left = max(0.0, deadline - time.monotonic())
            try:  # a publisher may be lost before it opens, and another one take its place
                text = await self._room.get(f"{number}/open", min(left, LOOK_SECONDS))
            except StoreTimeoutError:
                if left <= LOOK_SECONDS:
                    raise StoreTimeoutError(f"no publisher {self.name!r} came within {self.timeout:g} s") from None
            else:
                settings = loads(PublisherSettings, text)
                if not settings.closed:
                    return replace(self, publisher=number, backend=settings.backend)
                least = number + 1

    async def passed(self) -> None:
        """Wait until this publisher has closed, or a newer one opens: this one may be lost, with its keys left."""
        look = replace(self, timeout=LOOK_SECONDS)
        while not await self.closed():
            with suppress(StoreTimeoutError):
                await look.find(self.publisher + 1)
                return

    async def closed(self) -> bool:
        """Whether this publisher has closed, if the store says so soon."""
        try:
            text = await self._room.get(f"{self.publisher}/open", CLOSE_SECONDS)
        except AsyncCommError:
            return False
        settings: PublisherSettings = loads(PublisherSettings, text)
        return settings.closed

    async def enter(self) -> int:
        """Ask to join the publisher; returns this server's number. Raises: StoreTimeoutError."""
        room, deadline = self._room.prefix(str(self.publisher)), time.monotonic() + self.timeout
        number = await answered(room.add("servers", 1), deadline, "store")
        await answered(room.set(f"server/{number}", b""), deadline, "store")
        return number

    # -- for both -----------------------------------------------------------------------------------------------------

    def pair(self, trainer: int, server: int, rank: int) -> PendingComm[Comm]:
        """The comm of a trainer and a server."""
        return self._meet(f"pair/{trainer}/{server}", rank, 2, self.timeout)

    async def fan(
        self, trainer: int, key: int, rank: int, size: int, ends: Sequence[Coroutine[Any, Any, object]], reason: str
    ) -> Comm:
        """Make a comm of a trainer and several servers, until one of ``ends`` ends. Cancelling is safe.

        Raises: RendezvousError, BackendError; BrokenError with ``reason`` after an end.
        """
        making = asyncio.ensure_future(self._fan(trainer, key, rank, size))
        waiting = [asyncio.ensure_future(end) for end in ends]
        try:
            await asyncio.wait([making, *waiting], return_when=asyncio.FIRST_COMPLETED)
            if not making.done():
                raise BrokenError(reason)
            return making.result()
        finally:
            for task in (making, *waiting):
                task.cancel()
            await asyncio.gather(making, *waiting, return_exceptions=True)

    async def _fan(self, trainer: int, key: int, rank: int, size: int) -> Comm:
        comm = await self._meet(f"fan/{trainer}/{key}", rank, size, min(CONNECT_SECONDS, self.timeout))
        comm.set_timeout(self.timeout)
        return comm

    def _meet(self, name: str, rank: int, size: int, limit: float) -> PendingComm[Comm]:
        place = replace(self.place, scope=f"{self.place.scope}/{self.publisher}")
        whole = f"{self.name}/{self.publisher}/{name}"
        return meet(place, whole, rank, size, self.backend, self.device, CommOptions(timeout=limit), self.hints)

    async def aclose(self) -> None:
        """Disconnect from the store."""
        await self.session.aclose()
