"""Connecting a comm: the ranks meet at a store, open their control channel, and connect a backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from asynccomm.backends.base import Backend
from asynccomm.comm.connecting import connect_session
from asynccomm.comm.joining import Joining
from asynccomm.comm.session import Session
from asynccomm.control.channel import ControlChannel
from asynccomm.control.transport.sockets import ListeningSockets
from asynccomm.core.mailbox import Mailbox
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions
from asynccomm.rendezvous.addresses import LEAST_SECONDS, exchange_addresses
from asynccomm.rendezvous.handshake import HandshakeResult
from asynccomm.rendezvous.job import STORE_HOST_KEY, CommIdentity, Job, JobOrigin, NameReservation
from asynccomm.rendezvous.launchers import process_number
from asynccomm.rendezvous.shared_channels import ChannelLease
from asynccomm.rendezvous.spec import RendezvousSpec


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
    # a comm that replaces another one has a channel of its own: the ranks that it left out may go on with the old one
    shares = origin is None and options.hints.get("control") != "off"
    limit = options.timeout if limit is None else limit
    origin = JobOrigin(place, group.rank, process_number(group.rank)) if origin is None else origin
    reservation = NameReservation(origin.world, group.name)
    joining = Joining(place, group, requested, options, number=origin.number, shares=shares, limit=limit)
    try:
        joined = await joining.meet()
        meeting, room, sockets = joining.meeting, joining.room(joined.epoch), joining.sockets
        if meeting.hosted is not None:
            await room.set(STORE_HOST_KEY, str(group.rank))
        members = joined.members
        joined = await exchange_addresses(room, joined, sockets, group.rank, options.hints, joining.deadline)
        lease = joining.lease
        if sockets is not None:
            channel = await _open_channel(joined, sockets, joining.deadline)
            lease = None if channel is None else ChannelLease.of_new(channel, joining.channel_place, members)
    except BaseException as exc:
        reservation.release()
        await joining.abandon(exc)
        raise
    joining.succeed()
    ranks = range(group.size)
    job = Job(origin.world, group, room, meeting, lease, origin, joined.tokens.secret)
    identity = CommIdentity(
        job, reservation, room, joined.members, ranks if parent_ranks is None else parent_ranks, ranks
    )
    session = Session(group, options, Mailbox(asyncio.get_running_loop()), identity)
    await connect_session(session, backends, max(LEAST_SECONDS, joining.deadline - time.monotonic()))
    return session


async def _open_channel(joined: HandshakeResult, sockets: ListeningSockets, deadline: float) -> ControlChannel | None:
    """Open the control channel of the ranks that have met."""
    left = max(LEAST_SECONDS, deadline - time.monotonic())
    return await ControlChannel.open(sockets.contact.rank, joined.contacts, joined.tokens, sockets, left)
