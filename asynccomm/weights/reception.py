"""Admitting servers to a publisher: the first trainer welcomes them, and the other trainers connect with them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

from asynccomm.control.transport.schema import MessageError
from asynccomm.core.tasks import cancel, to_the_end
from asynccomm.errors import AsyncCommError, describe_exception
from asynccomm.store.base import within
from asynccomm.weights.conversation import (
    SERVER,
    TRAINER,
    Connected,
    Conversation,
    FinishedError,
    LayoutOffer,
    TrainerLayouts,
)
from asynccomm.weights.dispatch import ServerLink
from asynccomm.weights.errors import LayoutError
from asynccomm.weights.layout import Layout
from asynccomm.weights.meeting import Meeting
from asynccomm.weights.orders import Admit
from asynccomm.weights.plan import plan

_log = logging.getLogger("asynccomm")


@final
class Reception:
    """The servers of one trainer.

    Args:
        meeting: the publisher's place in the store.
        rank: of this trainer.
        layouts: of all trainers.
        bucket_bytes: the limit of a message.
        seconds: for each step of a server.
    """

    def __init__(
        self, meeting: Meeting, rank: int, layouts: Sequence[Layout], bucket_bytes: int, seconds: float
    ) -> None:
        self._meeting, self._rank, self._layouts = meeting, rank, layouts
        self._bucket_bytes, self._seconds = bucket_bytes, seconds
        self._connecting: dict[int, asyncio.Task[ServerLink | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._labels: dict[int, str] = {}  # of the admitted servers
        self._given_up: list[int] = []  # on the first trainer: servers lost after the order to connect with them
        self.reason = ""  #: of a failure that ends the publisher; empty: it ends in order
        self.refused: dict[str, LayoutError] = {}  #: by label
        self.connected: dict[int, ServerLink] = {}  #: on the first trainer: by number, also before they are admitted

    # -- on the first trainer -----------------------------------------------------------------------------------------

    async def greet(self, order: Callable[[Admit], object], news: Callable[[int | LayoutError], object]) -> None:
        """Welcome servers, as long as the store is there.

        Args:
            order: called with each server that the other trainers are to connect with.
            news: called with the number of each server that is connected, and the error of each that does not fit.
        """
        number = 1
        while True:
            try:
                await self._meeting.newcomer(number)
            except AsyncCommError as exc:
                _log.warning("publisher %r accepts no more servers: %s", self._meeting.name, exc)
                return
            task = asyncio.create_task(self._welcome(number, order, news))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            number += 1

    async def _welcome(
        self, number: int, order: Callable[[Admit], object], news: Callable[[int | LayoutError], object]
    ) -> None:
        label, talk = f"server {number}", None
        try:
            async with within(self._seconds):
                talk = Conversation(await self._meeting.pair(0, number, TRAINER), SERVER, label)
                talk.say(TrainerLayouts(list(self._layouts), self._bucket_bytes))
                offer = await talk.hear(LayoutOffer)
                label = talk.label = offer.label
                transfers = plan(self._layouts, offer.layout, label, strict=offer.strict)[0]
                member = ServerLink(number, talk, transfers, self._bucket_bytes)
                self._connecting[number] = _completed(member)
                order(Admit(number, label, offer.layout, offer.strict))
                await talk.hear(Connected)
            self.connected[number] = member
        except BaseException as exc:
            if number in self._connecting:
                self._given_up.append(number)
            closes = isinstance(exc, asyncio.CancelledError)  # only then is a welcome cancelled
            if talk is not None:
                with suppress(AsyncCommError):
                    await _end(talk, self.reason if closes else describe_exception(exc))
            if not isinstance(exc, (AsyncCommError, FinishedError, MessageError, TimeoutError)):
                raise
            _log.warning("%s could not join the trainers: %s: %s", label, type(exc).__name__, exc)
            if isinstance(exc, LayoutError):
                self.refused[label] = exc
                news(exc)
        else:
            news(number)

    def admitted(self) -> list[int]:
        """The numbers of the connected servers that all trainers may send to.

        A server may have connected while the order to admit it still waits behind a push.
        """
        return [number for number in self.connected if number in self._labels]

    def gone(self) -> list[int]:
        """Take the admitted servers that have ended the exchange out of the list.

        Returns: their numbers, and those of servers that the other trainers connect with in vain.
        """
        found = [number for number in self.admitted() if self.connected[number].talk.ended is not None]
        for number in found:
            del self.connected[number]
        given_up = [number for number in self._given_up if number in self._labels]
        self._given_up = [number for number in self._given_up if number not in self._labels]
        return found + given_up

    def present(self) -> tuple[str, ...]:
        """The labels of the connected servers."""
        return tuple(member.label for member in self.connected.values() if member.talk.ended is None)

    # -- on all trainers ----------------------------------------------------------------------------------------------

    def admit(self, order: Admit) -> None:
        """Start to connect with a server, unless this trainer has done so."""
        self._labels[order.number] = order.label
        if order.number not in self._connecting:
            self._connecting[order.number] = asyncio.create_task(self._connect(order))

    async def _connect(self, order: Admit) -> ServerLink | None:
        transfers = plan(self._layouts, order.layout, order.label, strict=order.strict)[self._rank]
        if not transfers:
            return None
        comm = await self._meeting.pair(self._rank, order.number, TRAINER)
        return ServerLink(order.number, Conversation(comm, SERVER, order.label), transfers, self._bucket_bytes)

    async def members(self, numbers: Sequence[int]) -> tuple[list[ServerLink], dict[int, str]]:
        """The servers ``numbers`` that get weights from this trainer, and the reasons for those not connected."""
        found: list[ServerLink] = []
        lost: dict[int, str] = {}
        for number in numbers:
            task = self._connecting.get(number)
            if task is None:
                lost[number] = "it was not admitted"
                continue
            try:
                member = await asyncio.shield(task)
            except (AsyncCommError, TimeoutError) as exc:
                lost[number] = f"{type(exc).__name__}: {exc}"
            else:
                if member is not None:
                    found.append(member)
        return found, lost

    def labels(self, numbers: Sequence[int]) -> dict[int, str]:
        """The labels of servers by number."""
        return {number: self._labels[number] for number in numbers}

    async def drop(self, number: int, reason: str) -> None:
        """End the exchange with a server, which may be lost."""
        self.connected.pop(number, None)
        self._labels.pop(number, None)
        task = self._connecting.pop(number, None)
        member = await _result(task)
        if member is not None:
            await member.talk.abort(reason)

    async def aclose(self) -> None:
        """End the exchange with all servers, also if the caller is cancelled meanwhile."""
        await to_the_end(self._end_all())

    async def _end_all(self) -> None:
        welcoming = list(self._tasks)
        for task in welcoming:
            task.cancel()
        await asyncio.gather(*welcoming, return_exceptions=True)
        members = [await _result(task) for task in self._connecting.values()]
        await asyncio.gather(*(_end(member.talk, self.reason) for member in members if member is not None))
        self._connecting.clear()
        self.connected.clear()


async def _end(talk: Conversation, reason: str) -> None:
    """End the exchange with a server in order; with a ``reason``: by that error."""
    await (talk.abort(reason) if reason else talk.aclose())


async def _result(task: asyncio.Task[ServerLink | None] | None) -> ServerLink | None:
    """The member that ``task`` connects, if it has connected by now."""
    if task is None:
        return None
    await cancel(task)
    return None if task.cancelled() or task.exception() is not None else task.result()


def _completed(member: ServerLink) -> asyncio.Task[ServerLink | None]:
    async def give() -> ServerLink | None:
        return member

    return asyncio.create_task(give())
