"""The versions that reach a server: received in the background, one after the other, and applied on the event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar, final

import torch
from torch import distributed as dist

from asynccomm.comm.comm import Comm, reason_of
from asynccomm.core.handles import Handle
from asynccomm.core.tasks import cancel, to_the_end
from asynccomm.errors import AsyncCommError, BrokenError, ClosedError, RendezvousError, describe_exception
from asynccomm.store.base import Store, within
from asynccomm.weights.conversation import (
    SERVER,
    TRAINER,
    Abandon,
    Begin,
    Connected,
    Conversation,
    FinishedError,
    LayoutOffer,
    TrainerLayouts,
)
from asynccomm.weights.errors import LayoutError, PushAbandonedError
from asynccomm.weights.layout import Weights
from asynccomm.weights.meeting import Meeting
from asynccomm.weights.plan import plan
from asynccomm.weights.staging import Staging
from asynccomm.weights.trainer_link import TrainerLink

__all__ = ["Site", "Update", "Updates"]

T = TypeVar("T")

REFUSAL_SECONDS: Final = 2.0  # for the trainers to read a layout that does not fit


@final
@dataclass(slots=True)
class Site:
    """A server's settings and state."""

    label: str
    store: Comm | Store | dist.Store | str | None
    name: str  #: of the publisher
    read: Callable[[], Weights]
    strict: bool
    in_place: bool
    device: torch.device
    timeout: float  #: seconds
    hints: Mapping[str, str] | None
    version: int = 0  #: in effect; 0: none
    occupied: bool = False  #: whether updates are open
    opened: int = 0  #: the number of updates that were opened; only the versions of the last ones can be applied


@final
class Update(Handle):
    """One version of the weights."""

    _instead = "it is for this process alone"

    def __init__(self, updates: Updates, version: int, info: Any, *, in_place: bool) -> None:
        """Not for users: see :meth:`Server.updates`."""
        self.version = version  #: as the trainers number it
        self.info = info  #: the JSON value that came with the push
        self._updates, self._in_place = updates, in_place
        self._wanted = asyncio.Event()  # in place: the version may arrive
        self._arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._applied = self._dropped = False

    def apply(self) -> None:
        """Put this version in effect, at once; idempotent.

        To be called where no request is being answered. A module's tensors change places with the copy in which the
        version has arrived, without copying; the values of a mapping, views and DTensors are copied into.

        Raises: RuntimeError: the iteration has gone on without it, the server has opened other updates, or it arrives
            in place and is not complete; ValueError: the server's state has other tensors than it had.
        """
        if self._dropped or not (self._applied or self._updates._is_latest()):
            raise RuntimeError(f"version {self.version} was not applied in its turn, and is no longer there")
        if not self._arrived.done():
            raise RuntimeError(f"version {self.version} arrives in place: await update.receive()")
        self._arrived.result()
        if not self._applied:
            self._updates._apply(self)
            self._applied = True

    async def receive(self) -> None:
        """With ``in_place``: let the version arrive in the weights; returns when it is complete and in effect.

        From the call until it returns, the weights are a mixture of versions: let no request read them. After an error
        they cannot be used, until a later version is complete.

        Raises: PushAbandonedError: the trainers have ended the push; the errors of the iteration.

        Cancelling abandons the wait; the version goes on arriving.
        """
        self._wanted.set()
        await asyncio.shield(self._arrived)

    def _end(self, error: BaseException | None) -> None:
        """The version is complete; with an ``error``: it never will be."""
        if error is None:
            self._arrived.set_result(None)
        else:
            self._arrived.set_exception(error if isinstance(error, Exception) else ClosedError("the updates were left"))
            self._arrived.exception()  # without ``receive`` there is no reader

    def _leave(self) -> None:
        """The iteration goes on. Raises: RuntimeError if the version still has to arrive in place."""
        if self._in_place and not self._wanted.is_set() and not self._arrived.done():
            raise RuntimeError(f"version {self.version} arrives in place: await update.receive() before the next one")
        self._dropped = not (self._applied or self._in_place)  # in place, it is in effect once it has arrived

    def __repr__(self) -> str:
        return f"<Update to version {self.version}>"


@final
class Updates(Handle, AsyncIterator[Update]):
    """An async iterator of versions, in rising order; made by :meth:`Server.updates`.

    A version that is complete waits until the iteration comes to it; if a later one comes first, only that is given.
    The iteration ends when the trainers close their publisher.
    """

    _instead = "make it in each process"

    def __init__(self, site: Site, automatic: bool) -> None:
        """Not for users: see :meth:`Server.updates`."""
        self._site, self._automatic = site, automatic
        self._number = 0
        self._resources = AsyncExitStack()
        self._process = os.getpid()
        self._links: list[TrainerLink] = []  # of the first trainer, then of the others
        self._next: Update | None = None  # not given yet
        self._given: Update | None = None
        self._reason = ""  # of a failure that ends the updates
        self._failure: Exception | None = None
        self._running: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._free = asyncio.Event()  # the copy may be written
        self._free.set()
        self._receiving = False

    @property
    def receiving(self) -> bool:
        """Whether weights are arriving now."""
        return self._receiving

    async def __aenter__(self) -> Self:
        """Join the trainers. Late servers get the newest version next, if the trainers retain it.

        Raises:
            LayoutError: the weights do not fit those of the trainers.
            StoreError, BackendError, TimeoutError: the trainers did not come in time, or cannot be reached.

        Cancelling is safe.
        """
        site = self._site
        if self._running is not None:
            raise RuntimeError("these updates were entered before; call server.updates() again")
        if site.occupied:
            raise RuntimeError(f"server {site.label!r} has open updates; leave them before it opens others")
        site.occupied = True
        async with AsyncExitStack() as stack:
            stack.callback(setattr, site, "occupied", False)
            meeting = await Meeting.open(site.store, site.name, "auto", site.device, site.timeout, site.hints)
            stack.push_async_callback(meeting.aclose)
            self._staging = Staging(site.read, in_place=site.in_place)
            stack.push_async_callback(self._close_links)
            found = await meeting.find()
            while not await self._joined(found):
                found = await meeting.find(found.publisher + 1)
            site.opened = self._number = site.opened + 1
            self._running = asyncio.create_task(self._run(self._links[0].talk))
            stack.push_async_callback(cancel, self._running)
            self._resources = stack.pop_all()
        return self

    async def _joined(self, meeting: Meeting) -> bool:
        """Join a publisher. Returns whether this succeeded before it closed, or a newer one opened."""
        joining = asyncio.ensure_future(self._join(meeting))
        passed = asyncio.ensure_future(meeting.passed())
        joined = False
        try:
            await asyncio.wait([joining, passed], return_when=asyncio.FIRST_COMPLETED)
            over = not joining.done()
            if over:
                await cancel(joining)
            if over and joining.cancelled():
                passed.result()  # the store may be lost
                return False
            error = joining.exception()
            if isinstance(error, FinishedError):
                return False
            if isinstance(error, (BrokenError, RendezvousError)) and (over or await meeting.closed()):
                return False
            joining.result()
            joined = True
            return True
        finally:
            for task in (joining, passed):
                task.cancel()
            await asyncio.gather(joining, passed, return_exceptions=True)  # their errors count as read
            if not joined:
                await self._close_links()

    async def _join(self, meeting: Meeting) -> None:
        site, layout = self._site, self._staging.layout
        number = await meeting.enter()
        lead = await self._meet(meeting, 0, number)
        try:
            async with within(site.timeout):
                welcome = await lead.hear(TrainerLayouts)
            lead.say(LayoutOffer(site.label, layout, site.strict))
            plans = plan(welcome.trainers, layout, site.label, strict=site.strict)
        except BaseException as exc:
            # a cancellation, also as the publisher closes, shortens the wait; the error stays the same
            if isinstance(exc, LayoutError):  # the first trainer finds the same, and ends the exchange
                with suppress(AsyncCommError, FinishedError, TimeoutError, asyncio.CancelledError):
                    async with asyncio.timeout(REFUSAL_SECONDS):
                        await lead.hear(Begin)
            with suppress(asyncio.CancelledError):
                await to_the_end(lead.abort(describe_exception(exc)))
            raise
        self._links.append(TrainerLink(meeting, 0, lead, plans[0], welcome.bucket_bytes))

        async def connect(trainer: int) -> None:
            talk = await self._meet(meeting, trainer, number)
            self._links.append(TrainerLink(meeting, trainer, talk, plans[trainer], welcome.bucket_bytes))

        needed = [trainer for trainer, transfers in enumerate(plans) if trainer and transfers]
        await _all([asyncio.ensure_future(connect(trainer)) for trainer in needed])
        lead.say(Connected())

    async def _meet(self, meeting: Meeting, trainer: int, number: int) -> Conversation:
        """The conversation of server ``number`` with a trainer. Raises: RendezvousError, BackendError."""
        began, limit = time.monotonic(), self._site.timeout
        try:
            comm = await meeting.pair(trainer, number, SERVER)
        except RendezvousError as exc:
            if time.monotonic() - began < limit:  # the trainer is there, and has refused
                raise
            missing = f"trainer {trainer} of publisher" if trainer else "publisher"
            raise RendezvousError(
                f"{missing} {self._site.name!r} did not answer within {limit:g} s; it may be lost"
            ) from exc
        return Conversation(comm, TRAINER, f"trainer {trainer}")

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the trainers, which go on without this server. The weights stay at the version in effect.

        A forked child leaves nothing.
        """
        if self._process != os.getpid():
            return
        if exc is not None:
            self._reason = reason_of(exc)
        await self._resources.aclose()

    async def _close_links(self) -> None:
        await asyncio.gather(*(link.aclose(self._reason) for link in self._links))
        self._links.clear()

    # -- the versions -------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        """The next version; the last one is dropped if it was not applied. Cancelling is safe.

        Raises: PeerLostError, AbortedError, CollectiveTimeoutError: a trainer was lost; PayloadError: a message of a
            trainer cannot be read; ValueError: the server's state has other tensors than it had.
        """
        if self._running is None:
            raise RuntimeError("these updates are not open: use `async with`")
        if self._given is not None:
            self._given._leave()
            if self._given._dropped:  # else the next version may be in the copy by now
                self._free.set()
            self._given = None
        while self._next is None:
            if self._running.done():
                if self._failure is not None:
                    raise self._failure
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        self._given, self._next = self._next, None
        return self._given

    async def _run(self, lead: Conversation) -> None:
        """Receive versions until the trainers end."""
        try:
            while True:
                await self._free.wait()
                if self._automatic or not self._site.in_place:  # else the program says when
                    self._get_ready()
                begin = await lead.hear(Begin)
                await self._arrive(Update(self, begin.version, begin.info, in_place=self._site.in_place), begin.job)
        except FinishedError:
            pass
        except Exception as exc:
            self._failure, self._reason = exc, describe_exception(exc)
        finally:
            asyncio.get_running_loop().call_soon(self._news.set)  # once this task is done

    async def _arrive(self, update: Update, job: int) -> None:
        try:
            if self._site.in_place and not self._automatic:
                self._give(update)
                await update._wanted.wait()
                self._get_ready()
            self._receiving = True
            tensors, layout = self._staging.tensors, self._staging.layout
            endings = await _all([asyncio.ensure_future(link.receive(job, tensors, layout)) for link in self._links])
        except BaseException as exc:
            update._end(exc)
            raise
        finally:
            self._receiving = False
        reasons = [ending.reason for ending in endings if isinstance(ending, Abandon)]
        if reasons:
            update._end(PushAbandonedError(update.version, reasons[0]))
            return
        update._end(None)
        if self._site.in_place or self._automatic:
            update.apply()
        else:
            self._free.clear()
        if self._automatic or not self._site.in_place:
            self._give(update)

    def _is_latest(self) -> bool:
        return self._site.opened == self._number

    def _get_ready(self) -> None:
        for link in self._links:
            link.get_ready()

    def _give(self, update: Update) -> None:
        self._next = update
        self._news.set()

    def _apply(self, update: Update) -> None:
        if not self._site.in_place:
            self._staging.apply()
        self._site.version = update.version
        self._free.set()

    def __repr__(self) -> str:
        return f"<Updates of server {self._site.label!r}, version {self._site.version} in effect>"


async def _all(tasks: Sequence[asyncio.Future[T]]) -> list[T]:
    """The results of ``tasks``; after an error or a cancellation all of them have ended."""
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
