"""Joining a comm that others have made: wait in its lobby for an invitation, and take part in the agreement."""

from __future__ import annotations

import math
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Final

import torch
from torch import distributed as dist

from asynccomm.backends.base import Backend
from asynccomm.backends.registry import load_backend
from asynccomm.comm.bootstrap import bootstrap
from asynccomm.comm.comm import Comm
from asynccomm.comm.membership import await_commit, run_prefix
from asynccomm.comm.new_comm import choice
from asynccomm.comm.pending import PendingComm
from asynccomm.comm.session import Session
from asynccomm.control.membership.joiner import Joiner
from asynccomm.control.membership.messages import View
from asynccomm.control.timing import CONNECT_SECONDS
from asynccomm.core.hosts import host_name
from asynccomm.errors import RendezvousError
from asynccomm.ops.validation import CommInfo
from asynccomm.options import DEFAULT_TIMEOUT, MAX_BYTES, MAX_OPS, CommOptions, check_name, seconds
from asynccomm.rendezvous.job import JobOrigin
from asynccomm.rendezvous.launchers import process_number
from asynccomm.rendezvous.lobby import Invitation, Lobby, Newcomer
from asynccomm.rendezvous.spec import RendezvousSpec, connect_store, resolve_spec
from asynccomm.store.base import Store, within

LAST_SECONDS: Final = 1.0  # the least time to join, for a process invited just before its timeout


def join_comm(
    backend: str = "auto",
    device: str | torch.device = "cpu",
    *,
    name: str = "main",
    timeout: float | timedelta | None = None,
    store: Store | dist.Store | str | None = None,
    hints: Mapping[str, str] | None = None,
    abort_process_on_timeout_or_error: bool = False,
    high_priority_stream: bool = False,
    max_ops: int = MAX_OPS,
    max_bytes: int = MAX_BYTES,
) -> PendingComm[Comm]:
    """Join an existing comm when its ranks invite this process; ``await`` it, or better ``async with`` it.

    The ranks of the comm see this process in ``comm.newcomers()``, and add it by ``comm.reconfigure(...)``. The result
    is the comm that goes on in place of theirs, with this process among its ranks.

    Args:
        backend: ``"auto"``: the backend of the comm.
        name: the name of the comm.
        timeout: seconds or a timedelta (default 600), for joining and then for each operation.
        store: the store where the comm's ranks met, see ``new_comm``; it must be alive. RANK and WORLD_SIZE are not
            used, but TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT must have the values of those ranks, if their
            launcher has set them.
        device, hints, abort_process_on_timeout_or_error, high_priority_stream, max_ops, max_bytes: see ``new_comm``.

    Raises:
        ValueError, TypeError: at the call, naming the argument or environment variable.
        RendezvousError: from awaiting: no rank has added this process in time, the store is missing, or the comm uses
            another backend.
        LeftOutError: from awaiting: this process was invited, and then the ranks went on without it.
        BackendError: from awaiting: the transport could not connect.

    Cancelling the await is safe.
    """
    check_name(name)
    where, backends, checked = choice(backend, device, hints)
    if checked.get("control") == "off":
        raise ValueError("hint 'control' must be 'on' for join_comm, got 'off'")
    options = CommOptions(
        timeout=seconds("timeout", timeout, DEFAULT_TIMEOUT),
        hints=checked,
        abort_process_on_timeout_or_error=abort_process_on_timeout_or_error,
        high_priority_stream=high_priority_stream,
        max_ops=max_ops,
        max_bytes=max_bytes,
    )
    place = resolve_spec(store, 1, 2)  # not rank 0, which would host the store; the real rank comes with the decision

    async def connect() -> Comm:
        session = await join_existing(place, name, where, backend, list(backends), options)
        return Comm(session, session.backend_name)

    return PendingComm(connect)


async def join_existing(
    place: RendezvousSpec, name: str, device: torch.device, requested: str, allowed: Sequence[str], options: CommOptions
) -> Session:
    """Wait in the lobby for an invitation to comm ``name``, and take part in the agreement of its ranks.

    Args:
        place: the rendezvous of the comm's ranks.
        requested, allowed: the name of the backend, and the backends that satisfy the request.

    Raises: the errors of awaiting ``join_comm``.
    """
    limit = options.timeout
    until = time.monotonic() + limit
    async with _invited(place, name, limit) as (newcomer, invitation):
        joiner = Joiner(newcomer.name, invitation.key, invitation.ranks, invitation.contacts, invitation.tokens)
        try:
            backends = _backends(invitation, name, device, requested, allowed)
        except BaseException:
            joiner.withdraw()  # the ranks wait for the invited process
            raise
        theirs = replace(options, ordering=invitation.ordering)
        ranks = {job: rank for rank, job in enumerate(invitation.ranks)}

        async def form(decision: View) -> Session:
            await newcomer.leave()  # before the ranks of the next comm look for newcomers
            rank, size = decision.members.index(newcomer.name), len(decision.members)
            return await bootstrap(
                replace(place, rank=rank, size=size, scope=run_prefix(place, decision)),
                CommInfo(name, rank, size, device),
                " or ".join(backends),
                backends,
                theirs,
                # negative: not a rank of the first rendezvous
                origin=JobOrigin(place, -newcomer.number, process_number(os.getpid())),
                parent_ranks=[ranks[member] if isinstance(member, int) else -1 for member in decision.members],
                limit=min(limit, CONNECT_SECONDS),
            )

        try:
            async with within(max(LAST_SECONDS, until - time.monotonic())):
                return await await_commit(joiner, None, math.inf, form, name)
        except TimeoutError:
            raise RendezvousError(
                f"comm {name!r} has invited this process, but did not connect within {limit:g} s"
            ) from None
        finally:
            joiner.close()


@asynccontextmanager
async def _invited(place: RendezvousSpec, name: str, limit: float) -> AsyncIterator[tuple[Newcomer, Invitation]]:
    """This process in the lobby of comm ``name``, which it leaves at the latest at the end, and the ranks' invitation.

    Raises: RendezvousError: there is none within ``limit`` seconds, or it cannot be followed from this host.
    """
    until = time.monotonic() + limit
    async with AsyncExitStack() as stack:
        meeting = await connect_store(place, limit)
        stack.push_async_callback(meeting.aclose)
        lobby = Lobby(meeting.store.prefix(place.scope), name)
        try:
            async with within(max(0.0, until - time.monotonic())):
                newcomer = await stack.enter_async_context(lobby.enter())
                invitation = await newcomer.invited()
        except TimeoutError:
            raise RendezvousError(f"no rank of comm {name!r} has added this process within {limit:g} s") from None
        here, homes = host_name(), sorted({contact.host for contact in invitation.contacts})
        if here not in homes and not any(contact.port for contact in invitation.contacts):
            raise RendezvousError(
                f"comm {name!r} has all its ranks on host {homes[0]!r}, and only processes there can join it; "
                f"this is {here!r}"
            )
        yield newcomer, invitation


def _backends(
    invitation: Invitation, comm: str, device: torch.device, requested: str, allowed: Sequence[str]
) -> dict[str, type[Backend]]:
    """The backends that comm ``comm`` may use. Raises: RendezvousError if this process cannot use them."""
    name = invitation.backend
    if name not in allowed and requested != "auto":
        raise RendezvousError(f"comm {comm!r} uses backend {name!r}, but this process requests {requested!r}")
    try:
        return {each: load_backend(each, device) for each in invitation.backends}
    except ValueError as exc:
        raise RendezvousError(f"comm {comm!r} uses backend {name!r}, which cannot be used here: {exc}") from exc
