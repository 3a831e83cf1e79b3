"""Connecting a comm: the ranks meet at a store, open their control channel, and connect a backend."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from asynccomm.backends.base import Backend
from asynccomm.comm.connecting import connect_session
from asynccomm.comm.session import Session
from asynccomm.control.channel import ControlChannel
from asynccomm.control.transport.sockets import ListeningSockets
from asynccomm.core.mailbox import Mailbox
from asynccomm.errors import RendezvousError, StoreError
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions
from asynccomm.rendezvous.addresses import LEAST_SECONDS, exchange_addresses
from asynccomm.rendezvous.handshake import HandshakeResult, handshake, publish_epoch
from asynccomm.rendezvous.job import STORE_HOST_KEY, CommIdentity, Job, JobOrigin, NameReservation
from asynccomm.rendezvous.launchers import process_number
from asynccomm.rendezvous.spec import RendezvousSpec, StoreSession, connect_store

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
    origin = JobOrigin(place, group.rank, process_number(group.rank)) if origin is None else origin
    world = origin.world
    async with contextlib.AsyncExitStack() as unless_met:
        reservation = NameReservation(world, group.name)
        unless_met.callback(reservation.release)
        meeting, joined, sockets = await _join(place, group, requested, options, origin.number, limit, start)
        unless_met.push_async_callback(meeting.aclose)
        if sockets is not None:
            unless_met.callback(sockets.close)
        room = meeting.store.prefix(place.scope).prefix(group.name).prefix(joined.epoch)
        if meeting.hosted is not None:
            await room.set(STORE_HOST_KEY, str(group.rank))
        joined = await exchange_addresses(room, joined, sockets, group.rank, options.hints, start + limit)
        channel = None if sockets is None else await _open_channel(joined, sockets, start + limit)
        unless_met.pop_all()
    ranks = range(group.size)
    job = Job(world, group, room, meeting, channel, origin, joined.tokens.secret)
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
) -> tuple[StoreSession, HandshakeResult, ListeningSockets | None]:
    """Meet the other ranks; retry if the store closes meanwhile, since its host had closed an earlier comm there.

    Returns: also the sockets of the control channel; None: there is none.
    """
    sockets: ListeningSockets | None = None
    spent = 0.0
    loss = ""  # of a store that was reached
    with contextlib.ExitStack() as unless_joined:
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
            scope = meeting.store.prefix(place.scope)
            try:
                # first, so that the other ranks find it when they come
                epoch = await publish_epoch(scope, group.name) if group.rank == 0 else None
                if sockets is None and options.hints.get("control") != "off":
                    sockets = ListeningSockets(group.rank, place.run)
                    unless_joined.callback(sockets.close)
                joined = await handshake(
                    scope,
                    group.name,
                    group.rank,
                    group.size,
                    requested,
                    timeout,
                    ordering=options.ordering,
                    contact=None if sockets is None else sockets.contact,
                    number=number,
                    spent=spent,
                    epoch=epoch,
                )
            except BaseException as exc:
                await meeting.aclose()
                lost = type(exc) is StoreError and place.store is None and not place.hosting
                spent = time.monotonic() - start
                if not lost or spent > timeout:
                    raise
                loss = str(exc)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                unless_joined.pop_all()
                return meeting, joined, sockets


async def _open_channel(joined: HandshakeResult, sockets: ListeningSockets, deadline: float) -> ControlChannel | None:
    """Open the control channel of the ranks that have met."""
    left = max(LEAST_SECONDS, deadline - time.monotonic())
    return await ControlChannel.open(sockets.contact.rank, joined.contacts, joined.tokens, sockets, left)
