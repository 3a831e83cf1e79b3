"""Ranks that share a control channel meet over it for their next comm, without the store.

The store is the way to meet for all others. A rank that has a channel comes to the meeting there, and after a short
while says hello in the store, too: another rank may have no channel, or another one. The hello names the meeting, and
where all hellos name the same one, rank 0 does not answer them, as the meeting over the channel is about to begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, final

from asynccomm.control.messages import MeetingBegin
from asynccomm.control.transport.connection import Tokens
from asynccomm.control.transport.schema import JsonObject
from asynccomm.rendezvous.shared_channels import ChannelLease
from asynccomm.store.base import within

T = TypeVar("T")

SOON_SECONDS: Final = 0.005  # for the other ranks to come; after it, this rank says hello in the store


@final
class _Arrival:
    """The arrival of this rank, on the control thread. It outlives a meeting that is dropped together with its loop.

    Args:
        lease, name, tell: of the meeting.
        notify: called with the outcome.
    """

    def __init__(
        self,
        lease: ChannelLease,
        name: str,
        tell: Callable[[str, JsonObject], object],
        notify: Callable[[MeetingBegin | None], object],
    ) -> None:
        self._lease = lease
        self._name = name
        self._tell = tell
        self._notify = notify
        self._answered = False
        self._begin: MeetingBegin | None = None
        self._error: JsonObject | None = None  # why this rank gave up

    def come(self, terms: JsonObject) -> None:
        """Come to the meeting."""
        meetings = self._lease.channel.meetings
        if not self._lease.channel.call(lambda: meetings.come(self._name, terms, self._on_outcome)):
            self._on_outcome(None)

    def _on_outcome(self, begin: MeetingBegin | None) -> None:
        self._answered, self._begin = True, begin
        if self._error is not None or begin is None:
            self._end()
        self._notify(begin)

    def give_up(self, error: JsonObject) -> None:
        """See ``ChannelMeeting.give_up``."""
        if not self._lease.channel.call(lambda: self._withdraw(error)):
            self._lease.end()

    def _withdraw(self, error: JsonObject) -> None:
        first, self._error = self._error is None, error
        if self._answered:
            self._end()
        elif first:
            self._lease.channel.meetings.withdraw(self._name)

    def _end(self) -> None:
        """End the lease; before, tell this rank's error to the others if they count on it."""
        if self._begin is not None and self._error is not None:
            self._tell(self._begin.epoch, self._error)
        self._lease.end()


@final
class ChannelMeeting:
    """This rank's attempt to meet the others. Made and used on one loop.

    Args:
        lease: of the channel; ended where the meeting does not take place.
        name: the same for all ranks that are to meet.
        terms: equal on all ranks, else the meeting begins with their difference.
        tell: called with an epoch and an error message for the others, if this rank gave up after a meeting began; on
            the control thread.
        dropped: the message if the attempt is dropped, as by the end of its loop.
    """

    def __init__(
        self,
        lease: ChannelLease,
        name: str,
        terms: JsonObject,
        tell: Callable[[str, JsonObject], object],
        dropped: JsonObject,
    ) -> None:
        self.lease = lease
        self.key: str = _digest(f"{lease.key}/{name}")  #: the same for all ranks that come to this meeting
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[MeetingBegin | None] = self._loop.create_future()
        notify = weakref.WeakMethod(self._on_outcome)
        self._arrival = _Arrival(lease, name, tell, lambda begin: (call := notify()) and call(begin))
        self._drop = weakref.finalize(self, self._arrival.give_up, dropped)
        self._drop.atexit = False
        self._arrival.come(terms)

    def _on_outcome(self, begin: MeetingBegin | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._outcome.set_result, begin)

    def keep_lease(self) -> None:
        """Leave the lease to the comm that has come about."""
        self._drop.detach()

    def give_up(self, error: JsonObject) -> None:
        """Withdraw, or if the meeting has begun, tell the others ``error``. Idempotent; does not wait."""
        self._drop.detach()
        self._arrival.give_up(error)

    async def answer(self) -> MeetingBegin | None:
        """Wait for the outcome, also after giving up: then no other rank can meet this attempt any more."""
        return await asyncio.shield(self._outcome)

    def absent(self) -> set[int]:
        """At rank 0: see ``Meetings.absent``."""
        return self.lease.channel.meetings.absent(self._name)

    @property
    def begin(self) -> MeetingBegin | None:
        """None: the meeting has not begun."""
        return self._outcome.result() if self._outcome.done() else None

    @property
    def called_off(self) -> bool:
        """Whether it is certain that the meeting does not take place."""
        return self._outcome.done() and self._outcome.result() is None

    async def failed(self, limit: float) -> bool:
        """Wait until it is certain that the meeting does not take place; where it begins, until cancelled.

        Returns: False after ``limit`` seconds.
        """
        with contextlib.suppress(TimeoutError):
            async with within(limit):
                if await asyncio.shield(self._outcome) is not None:
                    await self._loop.create_future()
                return True
        return False

    async def or_else(self, other: Callable[[], Coroutine[Any, Any, T]], soon: float = SOON_SECONDS) -> T | None:
        """Wait for the meeting, and after ``soon`` seconds, or once it has failed, also for ``other``.

        Returns: None: the meeting has begun, and ``other`` was cancelled; else the result of ``other``, or its error.
        """
        await asyncio.wait([self._outcome], timeout=soon)
        if self.begin is not None:
            return None
        otherwise = asyncio.create_task(other())
        waited: list[asyncio.Future[Any]] = [otherwise]
        try:
            if not self._outcome.done():
                await asyncio.wait([*waited, self._outcome], return_when=asyncio.FIRST_COMPLETED)
            if self.begin is None:
                await asyncio.wait(waited)
        finally:
            otherwise.cancel()
            await asyncio.wait(waited)
            lost = otherwise.cancelled() or otherwise.exception() is not None
        return None if lost and self.begin is not None else otherwise.result()

    def tokens(self, epoch: str) -> Tokens:
        """Tokens for the comm, which follow from those of the channel."""
        return Tokens(*(_derived(self.lease.channel.tokens.secret, f"{use}/{epoch}") for use in ("ask", "answer")))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _derived(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()[:32]
