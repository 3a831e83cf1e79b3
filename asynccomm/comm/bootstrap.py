"""Connecting a comm: the ranks meet at a store, open their control channel, and connect a backend."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial

from asynccomm.backends.base import Backend
from asynccomm.comm.connecting import connect_session
from asynccomm.comm.session import Session
from asynccomm.comm.wire_errors import encode_error
from asynccomm.control.channel import ControlChannel
from asynccomm.control.transport.schema import JsonObject
from asynccomm.control.transport.sockets import ListeningSockets
from asynccomm.core.hosts import host_name
from asynccomm.core.mailbox import Mailbox
from asynccomm.errors import AbortedError, RendezvousError, StoreError, describe_exception
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions
from asynccomm.rendezvous.addresses import LEAST_SECONDS, exchange_addresses
from asynccomm.rendezvous.channel_meeting import SOON_SECONDS, ChannelMeeting
from asynccomm.rendezvous.handshake import HandshakeResult, handshake, met, publish_epoch
from asynccomm.rendezvous.job import (
    STORE_HOST_KEY,
    CommIdentity,
    Job,
    JobOrigin,
    NameReservation,
    announce_departure,
    comm_key,
)
from asynccomm.rendezvous.launchers import process_number
from asynccomm.rendezvous.shared_channels import ChannelLease, ChannelPlace
from asynccomm.rendezvous.spec import RendezvousSpec, StoreSession, connect_store
from asynccomm.store.base import Store, path_of
from asynccomm.store.routes import network_id

RETRY_SECONDS = 0.05  # between attempts of a rank that lost its store to reach a new one


async def bootstrap(
    place: RendezvousSpec,
    group: CommInfo,
    requested: str,
    backends: Mapping[str, type[Backend]],
    options: CommOptions,
    *,
    origin: JobOrigin | None = None,
    parent_ranks: Sequence[int] | None = None,
    limit: float | None = None,
) -> Session:
    """Meet the other ranks at ``place``, and connect the first of ``backends`` that suits. Cancelling is safe.

    Args:
        requested: name of the backend, the same on all ranks.
        origin: the rendezvous of the first in a series of comms that replace each other; None: this comm is the first.
        parent_ranks: the ranks' numbers in the comm that this one replaces.
        limit: seconds; None: ``options.timeout``.

    Raises: the errors of awaiting ``new_comm``.
    """
    start = time.monotonic()
    limit = options.timeout if limit is None else limit
    # a comm that replaces another one has a channel of its own: the ranks that it left out may go on with the old one
    shares = origin is None and options.hints.get("control") != "off"
    origin = JobOrigin(place, group.rank, process_number(group.rank)) if origin is None else origin
    world = origin.world
    async with contextlib.AsyncExitStack() as unless_met:
        reservation = NameReservation(world, group.name)
        unless_met.callback(reservation.release)
        meeting, joined, sockets, lease = await _join(
            place, group, requested, options, origin.number, limit, start, shares, unless_met
        )
        room = meeting.store.prefix(place.scope).prefix(group.name).prefix(joined.epoch)
        if meeting.hosted is not None:
            await room.set(STORE_HOST_KEY, str(group.rank))
        met_as = joined.members
        joined = await exchange_addresses(room, joined, sockets, group.rank, options.hints, start + limit)
        if sockets is not None:
            channel = await _open_channel(joined, sockets, start + limit)
            where = _where(place, meeting) if shares else None
            lease = None if channel is None else ChannelLease.of_new(channel, where, met_as)
        unless_met.pop_all()
    ranks = range(group.size)
    job = Job(world, group, room, meeting, lease, origin, joined.tokens.secret)
    identity = CommIdentity(
        job, reservation, room, joined.members, ranks if parent_ranks is None else parent_ranks, ranks
    )
    session = Session(group, options, Mailbox(asyncio.get_running_loop()), identity)
    await connect_session(session, backends, max(LEAST_SECONDS, start + limit - time.monotonic()))
    return session


async def _join(
    place: RendezvousSpec,
    group: CommInfo,
    requested: str,
    options: CommOptions,
    number: int,
    timeout: float,
    start: float,
    shares: bool,
    unless_met: contextlib.AsyncExitStack,
) -> tuple[StoreSession, HandshakeResult, ListeningSockets | None, ChannelLease | None]:
    """Meet the other ranks; retry if the store closes meanwhile, since its host had closed an earlier comm there.

    Args:
        shares: whether the comm may use a control channel that the ranks have already.
        unless_met: undoes the steps so far, if a later one fails.

    Returns: also the sockets of a new control channel, and the lease of a channel that the ranks share.
    """
    sockets: ListeningSockets | None = None
    beside: ChannelMeeting | None = None
    spent = 0.0
    loss = ""  # of a store that was reached

    async def meet_at(scope: Store) -> HandshakeResult:
        nonlocal sockets
        # first, so that the other ranks find it when they come
        epoch = await publish_epoch(scope, group.name) if group.rank == 0 else None
        if sockets is None and options.hints.get("control") != "off":
            sockets = ListeningSockets(group.rank, place.run)
            unless_met.callback(sockets.close)
        return await handshake(
            scope,
            group.name,
            group.rank,
            group.size,
            requested,
            timeout,
            ordering=options.ordering,
            contact=None if sockets is None else sockets.contact,
            number=number,
            spent=time.monotonic() - start,
            epoch=epoch,
            beside=None if beside is None or beside.called_off else beside,
        )

    while True:
        try:
            meeting = await connect_store(place, max(0.0, timeout - spent))
        except RendezvousError as exc:
            if not loss:
                raise
            raise RendezvousError(
                f"comm {group.name!r}: the ranks did not meet within {timeout:g} s; the store was lost meanwhile: "
                f"{loss} (this is rank {group.rank})"
            ) from exc
        unless_met.push_async_callback(meeting.aclose)
        scope = meeting.store.prefix(place.scope)
        try:
            if beside is None and shares and (where := _where(place, meeting)) is not None:
                lease = ChannelLease.of_open(where, group.rank, group.size)
                if lease is not None:
                    room = scope.prefix(group.name)
                    beside = _come(lease, room, {"backend": requested, "ordering": options.ordering})
                    unless_met.push_async_exit(partial(_give_up, beside, room, group.rank))
            if beside is None:
                return meeting, await meet_at(scope), sockets, None
            joined = await beside.or_else(partial(meet_at, scope), min(SOON_SECONDS, timeout / 4))
            if joined is not None:
                await beside.give_up(_abort_item(group.rank, "the ranks have met by the store"))
                return meeting, joined, sockets, None
            if sockets is not None:
                sockets.close()
            return meeting, met(beside, group.name), None, beside.lease
        except StoreError as exc:
            lost = type(exc) is StoreError and place.store is None and not place.hosting
            spent = time.monotonic() - start
            if not lost or spent > timeout:
                raise
            loss = str(exc)
            await meeting.aclose()
            await asyncio.sleep(RETRY_SECONDS)


def _where(place: RendezvousSpec, meeting: StoreSession) -> ChannelPlace | None:
    """Where comms have to be made to share a channel with this one; None: none can."""
    return ChannelPlace(place.run, meeting.address, host_name(), network_id()) if meeting.address else None


def _come(lease: ChannelLease, room: Store, terms: JsonObject) -> ChannelMeeting:
    """Come to the meeting over a channel for the comm that has its keys under ``room``."""

    def tell(epoch: str, error: JsonObject) -> None:
        lease.channel.broadcast(comm_key(room.prefix(epoch)), error)

    return ChannelMeeting(lease, path_of(room), terms, tell)


async def _give_up(
    beside: ChannelMeeting, room: Store, rank: int, _: object, exc: BaseException | None, __: object
) -> None:
    """Take no further part in the meeting if ``exc`` ends this rank's attempt to connect."""
    if exc is not None:
        await beside.give_up(_abort_item(rank, f"could not connect: {describe_exception(exc)}"))
        if beside.begin is not None:  # the rank that hosts the store waits for those that have met
            await announce_departure(room.prefix(beside.begin.epoch))


def _abort_item(rank: int, reason: str) -> JsonObject:
    return {"rank": rank, **encode_error(AbortedError(rank, reason))}


async def _open_channel(joined: HandshakeResult, sockets: ListeningSockets, deadline: float) -> ControlChannel | None:
    """Open the control channel of the ranks that have met."""
    left = max(LEAST_SECONDS, deadline - time.monotonic())
    return await ControlChannel.open(sockets.contact.rank, joined.contacts, joined.tokens, sockets, left)
