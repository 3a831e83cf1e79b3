"""How a newcomer comes into a comm: it waits in the lobby, and takes part in the agreement once it is invited."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from asynccomm.assembly import assemble
from asynccomm.backends.registry import load_backend
from asynccomm.checks import Group
from asynccomm.control.ballots import Decision
from asynccomm.control.guest import Guest
from asynccomm.errors import RendezvousError
from asynccomm.family import Origin
from asynccomm.newcomers import Lobby
from asynccomm.options import CommOptions
from asynccomm.regrouping import CONNECT_SECONDS, go_on, scope_of
from asynccomm.session import Session
from asynccomm.store.base import within
from asynccomm.store.rendezvous import Place, meet

__all__ = ["come_in"]


async def come_in(
    place: Place, name: str, device: torch.device, asked: str, allowed: Sequence[str], options: CommOptions
) -> Session:
    """Wait for an invitation to comm ``name``, and follow it.

    Args:
        place: where its ranks met.
        asked, allowed: the backend that was asked for, and those that it may be.

    Raises: what ``join_comm`` raises from awaiting.
    """
    start = time.monotonic()
    limit = options.timeout
    meeting = await meet(place, limit)
    try:
        lobby = Lobby(meeting.store.prefix(place.scope), name)
        try:
            async with within(limit):
                me, number = await lobby.enter()
                invitation = await lobby.invited(me, number)
        except TimeoutError:
            raise RendezvousError(f"nobody took this process into comm {name!r} within {limit:g} s") from None
    finally:
        await meeting.aclose()
    if invitation.backend not in allowed and asked != "auto":
        raise RendezvousError(f"comm {name!r} uses backend {invitation.backend!r}, and {asked!r} was asked for here")
    backends = {invitation.backend: load_backend(invitation.backend, device)}
    theirs = replace(options, ordering=invitation.ordering)

    async def form(decision: Decision) -> Session:
        rank, size = decision.members.index(me), len(decision.members)
        return await assemble(
            replace(place, rank=rank, size=size, scope=scope_of(place, decision)),
            Group(name, rank, size, device),
            invitation.backend,
            backends,
            theirs,
            origin=Origin(place, -number),  # no rank of those who met first
            parent_ranks=[who if isinstance(who, int) else -1 for who in decision.members],
            limit=min(limit, CONNECT_SECONDS),
        )

    guest = Guest(me, invitation.key, invitation.ranks, invitation.contacts, invitation.tokens)
    try:
        return await go_on(guest, None, max(1.0, start + limit - time.monotonic()), form, name)
    finally:
        guest.close()
