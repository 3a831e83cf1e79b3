"""How a newcomer comes into a comm: it waits in the lobby, and takes part in the agreement once it is invited."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from asynccomm.backends.base import Backend
from asynccomm.backends.registry import load_backend
from asynccomm.comm.bootstrap import bootstrap
from asynccomm.comm.membership import CONNECT_SECONDS, await_commit, run_prefix
from asynccomm.comm.session import Session
from asynccomm.control.membership.joiner import Joiner
from asynccomm.control.membership.messages import View
from asynccomm.errors import RendezvousError
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions
from asynccomm.rendezvous.job import JobOrigin
from asynccomm.rendezvous.lobby import Lobby
from asynccomm.rendezvous.spec import RendezvousSpec, connect_store
from asynccomm.store.base import within

LAST_SECONDS = 1.0  # to come in, for one that is invited in the last moment


async def join_existing(
    place: RendezvousSpec, name: str, device: torch.device, asked: str, allowed: Sequence[str], options: CommOptions
) -> Session:
    """Wait for an invitation to comm ``name``, and follow it.

    Args:
        place: where its ranks met.
        asked, allowed: the backend that was asked for, and those that it may be.

    Raises: what ``join_comm`` raises from awaiting.
    """
    start = time.monotonic()
    limit = options.timeout

    def left() -> float:
        return max(0.0, start + limit - time.monotonic())

    meeting = await connect_store(place, limit)
    try:
        lobby = Lobby(meeting.store.prefix(place.scope), name)
        try:
            async with within(left()):
                me, number = await lobby.enter()
                invitation = await lobby.invited(me, number)
        except TimeoutError:
            raise RendezvousError(f"nobody took this process into comm {name!r} within {limit:g} s") from None
    finally:
        await meeting.aclose()
    joiner = Joiner(me, invitation.key, invitation.ranks, invitation.contacts, invitation.tokens)
    try:
        backends = _backends(invitation.backend, name, device, asked, allowed)
    except BaseException:
        joiner.give_up()  # they have invited it, and wait
        raise
    theirs = replace(options, ordering=invitation.ordering)
    ranks = {job: rank for rank, job in enumerate(invitation.ranks)}

    async def form(decision: View) -> Session:
        rank, size = decision.members.index(me), len(decision.members)
        return await bootstrap(
            replace(place, rank=rank, size=size, scope=run_prefix(place, decision)),
            CommInfo(name, rank, size, device),
            invitation.backend,
            backends,
            theirs,
            origin=JobOrigin(place, -number),  # no rank of those who met first
            parent_ranks=[ranks[who] if isinstance(who, int) else -1 for who in decision.members],
            limit=min(limit, CONNECT_SECONDS),
        )

    try:
        async with within(max(LAST_SECONDS, left())):
            return await await_commit(joiner, None, math.inf, form, name)
    except TimeoutError:
        raise RendezvousError(f"comm {name!r} has invited this process, and not gone on within {limit:g} s") from None
    finally:
        joiner.close()


def _backends(
    name: str, comm: str, device: torch.device, asked: str, allowed: Sequence[str]
) -> dict[str, type[Backend]]:
    """The one of that ``name``, which the comm uses. Raises: RendezvousError: it is not for this process."""
    if name not in allowed and asked != "auto":
        raise RendezvousError(f"comm {comm!r} uses backend {name!r}, and {asked!r} was asked for here")
    try:
        return {name: load_backend(name, device)}
    except ValueError as exc:
        raise RendezvousError(f"comm {comm!r} uses backend {name!r}, which cannot be used here: {exc}") from exc
