"""Making a comm: check the arguments, meet the other ranks, connect the backend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import SupportsIndex

import torch
from torch import distributed as dist

from asynccomm.backends.base import Backend, device_of, own_hints
from asynccomm.backends.registry import candidates, load_backend
from asynccomm.checks import Group
from asynccomm.comm import Comm
from asynccomm.connecting import Connecting
from asynccomm.control.channel import Channel, Doors
from asynccomm.control.roster import Contact
from asynccomm.errors import StoreError
from asynccomm.family import Claim, Family, Seat
from asynccomm.join import Joined, join
from asynccomm.mailbox import Mailbox
from asynccomm.options import DEFAULT_TIMEOUT, MAX_BYTES, MAX_OPS, CommOptions, check_hints, check_name, seconds
from asynccomm.session import Session
from asynccomm.store.base import Store
from asynccomm.store.rendezvous import Meeting, Place, find_place, meet

__all__ = ["new_comm"]

RETRY_SECONDS = 0.05  # until a rank whose store went away under it looks for the new one


def new_comm(
    backend: str = "auto",
    device: str | torch.device = "cpu",
    *,
    name: str = "main",
    timeout: float | timedelta | None = None,
    store: Store | dist.Store | str | None = None,
    rank: SupportsIndex | None = None,
    size: SupportsIndex | None = None,
    hints: Mapping[str, str] | None = None,
    abort_process_on_timeout_or_error: bool = False,
    high_priority_stream: bool = False,
    ordering: str = "program",
    max_ops: int = MAX_OPS,
    max_bytes: int = MAX_BYTES,
) -> Connecting[Comm]:
    """Make a comm of all ranks; ``await`` it, or better ``async with`` it. Collective: all ranks do so.

    ::

        async with asynccomm.new_comm(name="main") as comm:
            await comm.all_reduce(tensor)

    Args:
        backend: a name from :func:`asynccomm.backend_names`, or ``"auto"``: on the CPU shared memory where all ranks
            can map it, else gloo.
        device: where the tensors live.
        name: the same on all ranks, and unique among the open comms of this process.
        timeout: seconds or a timedelta (default 600), for connecting and then for each operation that brings no own;
            ``math.inf``: no limit.
        store: where to meet: None for the environment that launchers set (``env://``), ``tcp://host:port``,
            ``file:///path``, one of our stores, or any ``torch.distributed.Store``.
        rank, size: who this is; None: from the store's URL, or RANK and WORLD_SIZE.
        hints: strings for the backend (with ``"auto"``, for those that may be chosen); unknown ones are logged and
            ignored.
        abort_process_on_timeout_or_error: end the process (SIGABRT) when the comm breaks, instead of only raising.
        high_priority_stream: CUDA only: communicate on a stream of high priority.
        ordering: ``"program"``: all ranks call the same collectives in the same order. ``"agreed"``: in any order, so
            that many tasks can share the comm: collectives with the same ``tag=`` belong together, those under one tag
            (or none) in the order of each rank's calls. Rank 0 hears what every rank has called, and all ranks then run
            what all have called, in one order, in batches. Costs about two messages' time for what is called at once.
        max_ops, max_bytes: what may be in flight before ``await comm.ready()`` waits.

    Raises:
        ValueError, TypeError: at the call, naming the argument or environment variable.
        RendezvousError: from awaiting: nobody there, port in use, or ranks that do not fit together.
        BackendError: from awaiting: the transport could not connect.

    Cancelling the await is safe, also by ``asyncio.timeout``.
    """
    check_name(name)
    where = device_of(device)
    backends = {candidate: load_backend(candidate, where) for candidate in candidates(backend, where)}
    checked = check_hints(hints, {key: text for b in backends.values() for key, text in b.hints.items()}, backend)
    for backend_class in backends.values():
        backend_class.check_hints(own_hints(backend_class, checked))
    options = CommOptions(
        timeout=seconds("timeout", timeout, DEFAULT_TIMEOUT),
        hints=checked,
        abort_process_on_timeout_or_error=abort_process_on_timeout_or_error,
        high_priority_stream=high_priority_stream,
        ordering=ordering,
        max_ops=max_ops,
        max_bytes=max_bytes,
    )
    place = find_place(store, rank, size)
    group = Group(name, place.rank, place.size, where)
    return Connecting(lambda: _connect(place, group, backend, backends, options))


async def _connect(
    place: Place, group: Group, asked: str, backends: Mapping[str, type[Backend]], options: CommOptions
) -> Comm:
    start = time.monotonic()
    world = place.world, group.rank
    async with contextlib.AsyncExitStack() as unless_met:
        claim = Claim(world, group.name)
        unless_met.callback(claim.release)
        doors = None
        if options.hints.get("control") != "off":
            doors = Doors(group.rank, place.run)
            unless_met.callback(doors.close)
        meeting, joined = await _join(place, group, asked, options, doors, start)
        unless_met.push_async_callback(meeting.aclose)
        room = meeting.store.prefix(place.scope).prefix(group.name).prefix(joined.epoch)
        channel = None if doors is None else await _open_channel(place, room, joined, doors)
        unless_met.pop_all()
    ranks = range(group.size)
    seat = Seat(Family(world, group, room, meeting, channel), claim, room, joined.members, ranks, ranks)
    session = Session(group, options, Mailbox(asyncio.get_running_loop()), seat)
    await session.connect(backends, max(0.1, start + options.timeout - time.monotonic()))
    return Comm(session, session.backend_name)


async def _join(
    place: Place, group: Group, asked: str, options: CommOptions, doors: Doors | None, start: float
) -> tuple[Meeting, Joined]:
    """Meet the others; again if that was at a store on its way out, whose host had closed an earlier comm there."""
    timeout, ordering = options.timeout, options.ordering
    contact = None if doors is None else doors.contact
    spent = 0.0
    while True:
        meeting = await meet(place, max(0.0, timeout - spent))
        scope = meeting.store.prefix(place.scope)
        try:
            joined = await join(
                scope,
                group.name,
                group.rank,
                group.size,
                asked,
                timeout,
                ordering=ordering,
                contact=contact,
                spent=spent,
            )
        except BaseException as exc:
            await meeting.aclose()
            lost = type(exc) is StoreError and meeting.owned and not place.hosting
            spent = time.monotonic() - start
            if not lost or spent > timeout:
                raise
            await asyncio.sleep(RETRY_SECONDS)
        else:
            return meeting, joined


async def _open_channel(place: Place, room: Store, joined: Joined, doors: Doors) -> Channel | None:
    """The control channel of the ranks that have met."""
    contacts = joined.contacts
    if len({member.host for member in joined.members}) > 1:
        doors.open_tcp(_address_towards(place.host))
        await room.set(f"control/{doors.contact.rank}", json.dumps(doors.contact.as_json()))
        said = await room.multi_get([f"control/{contact.rank}" for contact in contacts])
        contacts = [Contact.of_json(json.loads(text)) for text in said]
    return await Channel.open(doors.contact.rank, contacts, joined.tokens, doors)


def _address_towards(host: str) -> str:
    """The address of the interface by which ``host`` is reached, where the others reach this one, too."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host or socket.gethostname(), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(address)  # sends nothing
            return str(sock.getsockname()[0])
    return "127.0.0.1"
