"""Meeting the other ranks of a new comm: over the control channel that the ranks have already, or else at the store."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Final, final

from asynccomm.comm.wire_errors import encode_error
from asynccomm.control.transport.schema import JsonObject
from asynccomm.control.transport.sockets import ListeningSockets
from asynccomm.core.hosts import host_name
from asynccomm.core.tasks import detach
from asynccomm.errors import AbortedError, RendezvousError, StoreError, describe_exception
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions
from asynccomm.rendezvous.addresses import LEAST_SECONDS, abandon_exchange
from asynccomm.rendezvous.channel_meeting import SOON_SECONDS, ChannelMeeting
from asynccomm.rendezvous.handshake import HandshakeResult, handshake, met, publish_epoch
from asynccomm.rendezvous.job import announce_departure, comm_key
from asynccomm.rendezvous.shared_channels import ChannelLease, ChannelPlace
from asynccomm.rendezvous.spec import RendezvousSpec, StoreSession, connect_store
from asynccomm.store.base import Store, path_of
from asynccomm.store.routes import network_id

RETRY_SECONDS: Final = 0.05  # between attempts of a rank that lost its store to reach a new one
ABANDON_SECONDS: Final = 0.5  # for the other ranks to hear of an attempt that is abandoned


@final
class Joining:
    """One attempt of this rank to meet the others, which :meth:`abandon` undoes.

    Args:
        requested: name of the backend, the same on all ranks.
        number: of this process, see ``launchers.process_number``.
        shares: whether the comm shares a control channel with others.
        limit: seconds from now on.
    """

    def __init__(
        self,
        place: RendezvousSpec,
        group: CommInfo,
        requested: str,
        options: CommOptions,
        *,
        number: int,
        shares: bool,
        limit: float,
    ) -> None:
        self._started = time.monotonic()
        self.deadline: float = self._started + limit  #: on the monotonic clock
        self.sockets: ListeningSockets | None = None  #: of a new control channel
        self.lease: ChannelLease | None = None  #: of the channel over which the ranks have met
        self._place = place
        self._group = group
        self._requested = requested
        self._options = options
        self._number = number
        self._shares = shares
        self._limit = limit
        self._meeting: StoreSession | None = None
        self._beside: ChannelMeeting | None = None

    @property
    def meeting(self) -> StoreSession:
        """The connected store."""
        assert self._meeting is not None
        return self._meeting

    @property
    def channel_place(self) -> ChannelPlace | None:
        """Where other comms have to be made to share a channel with this one; None: none can."""
        address = self.meeting.address if self._shares else ""
        return ChannelPlace(self._place.run, address, host_name(), network_id()) if address else None

    def room(self, epoch: str) -> Store:
        """The comm's own store prefix."""
        return self._rooms.prefix(epoch)

    @property
    def _rooms(self) -> Store:
        return self.meeting.store.prefix(self._place.scope).prefix(self._group.name)

    async def meet(self) -> HandshakeResult:
        """Meet the other ranks; retry if the store closes meanwhile, since its host had closed an earlier comm there.

        Raises: RendezvousError, StoreError.
        """
        place, limit, group = self._place, self._limit, self._group
        loss = ""  # of a store that was reached
        while True:
            try:
                self._meeting = await connect_store(
                    place, max(LEAST_SECONDS, self.deadline - time.monotonic()) if loss else limit
                )
            except RendezvousError as exc:
                if not loss:
                    raise
                raise RendezvousError(
                    f"comm {group.name!r}: the ranks did not meet within {limit:g} s; the store was lost meanwhile: "
                    f"{loss} (this is rank {group.rank})"
                ) from exc
            try:
                return await self._meet_either_way()
            except StoreError as exc:
                lost = type(exc) is StoreError and place.store is None and not place.hosting
                if not lost or time.monotonic() > self.deadline:
                    raise
                loss = str(exc)
                await self._meeting.aclose()
                await asyncio.sleep(RETRY_SECONDS)

    async def _meet_either_way(self) -> HandshakeResult:
        beside = self._beside = self._beside or self._come()
        if beside is None:
            return await self._meet_at_store()
        joined = await beside.or_else(self._meet_at_store, min(SOON_SECONDS, self._limit / 4))
        if joined is not None:
            self._beside = None
            beside.give_up(self._error("the ranks have met at the store"))
            return joined
        if self.sockets is not None:
            self.sockets.close()
            self.sockets = None
        joined = met(beside, self._group.name)
        self.lease = beside.lease
        return joined

    def _come(self) -> ChannelMeeting | None:
        """Come to the meeting over a channel that the ranks may have; None: this rank has none."""
        group, place = self._group, self.channel_place
        lease = None if place is None else ChannelLease.of_open(place, group.rank, group.size)
        if lease is None:
            return None
        terms = {"backend": self._requested, "ordering": self._options.ordering}
        dropped = self._error("could not connect: its event loop has ended")
        path = path_of(self._rooms)
        return ChannelMeeting(lease, path, terms, partial(_tell, lease, path), dropped)

    async def _meet_at_store(self) -> HandshakeResult:
        group, options, beside = self._group, self._options, self._beside
        scope = self.meeting.store.prefix(self._place.scope)
        # first, so that the other ranks find it when they come
        epoch = await publish_epoch(scope, group.name) if group.rank == 0 else None
        if self.sockets is None and options.hints.get("control") != "off":
            self.sockets = ListeningSockets(group.rank, self._place.run)
        return await handshake(
            scope,
            group.name,
            group.rank,
            group.size,
            self._requested,
            self._limit,
            ordering=options.ordering,
            contact=None if self.sockets is None else self.sockets.contact,
            number=self._number,
            spent=time.monotonic() - self._started,
            epoch=epoch,
            beside=None if beside is None or beside.called_off else beside,
        )

    def succeed(self) -> None:
        """End the attempt: the comm has its resources from now on."""
        if self._beside is not None:
            self._beside.keep_lease()

    async def abandon(self, reason: BaseException) -> None:
        """Undo all steps, and tell the other ranks that count on this one. A cancellation interrupts the wait alone."""
        if self.sockets is not None:
            self.sockets.close()
        if isinstance(reason, GeneratorExit):
            return  # dropped together with its loop, where nothing can be awaited
        leaving = detach(asyncio.ensure_future(self._leave(reason)))
        await asyncio.wait([leaving], timeout=ABANDON_SECONDS)

    async def _leave(self, reason: BaseException) -> None:
        try:
            if self._beside is not None:
                self._beside.give_up(self._error(f"could not connect: {describe_exception(reason)}"))
                begin = await self._beside.answer()
                if begin is not None:  # the others may wait for this rank at the store
                    room = self.room(begin.epoch)
                    await abandon_exchange(room, self._beside.lease.members, self._group.rank)
                    await announce_departure(room)
        finally:
            if self._meeting is not None:
                await self._meeting.aclose()

    def _error(self, reason: str) -> JsonObject:
        rank = self._group.rank
        return {"rank": rank, **encode_error(AbortedError(rank, reason))}


def _tell(lease: ChannelLease, path: str, epoch: str, error: JsonObject) -> None:
    """Send ``error`` to the ranks that have met for the comm with ``epoch``.

    Args:
        path: of the store prefix; the store itself would keep a pending attempt alive after the end of its loop.
    """
    lease.channel.broadcast(comm_key(f"{path}/{epoch}"), error)
