"""Making a comm: check the arguments, meet the other ranks, connect the backend; or join an existing comm."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import SupportsIndex

import torch
from torch import distributed as dist

from asynccomm.backends.base import Backend, device_of, own_hints
from asynccomm.backends.registry import candidates, load_backend
from asynccomm.comm.bootstrap import bootstrap
from asynccomm.comm.comm import Comm
from asynccomm.comm.membership import await_commit, run_prefix
from asynccomm.comm.pending import PendingComm
from asynccomm.comm.session import Session
from asynccomm.control.membership.joiner import Joiner
from asynccomm.control.membership.messages import View
from asynccomm.control.timing import CONNECT_SECONDS
from asynccomm.errors import RendezvousError
from asynccomm.ops.validation import CommInfo
from asynccomm.options import DEFAULT_TIMEOUT, MAX_BYTES, MAX_OPS, CommOptions, check_hints, check_name, seconds
from asynccomm.rendezvous.job import JobOrigin
from asynccomm.rendezvous.lobby import Invitation, Lobby
from asynccomm.rendezvous.spec import RendezvousSpec, connect_store, resolve_spec
from asynccomm.store.base import Store, within
from asynccomm.store.memory import MemoryStore

LAST_SECONDS = 1.0  # the least time to join, for a process invited just before its timeout


def new_comm(
    backend: str = "auto",
    device: str | torch.device = "cpu",
    *,
    name: str = "main",
    timeout: float | timedelta | None = None,
    store: Store | dist.Store | str | None = None,
    rank: SupportsIndex | None = None,
    size: SupportsIndex | None = None,
    alone: bool = False,
    hints: Mapping[str, str] | None = None,
    abort_process_on_timeout_or_error: bool = False,
    high_priority_stream: bool = False,
    ordering: str = "program",
    max_ops: int = MAX_OPS,
    max_bytes: int = MAX_BYTES,
) -> PendingComm[Comm]:
    """Make a comm of all ranks; ``await`` it, or better ``async with`` it. Collective: all ranks call it.

    ::

        async with asynccomm.new_comm(name="main") as comm:
            await comm.all_reduce(tensor)

    Args:
        backend: a name from :func:`asynccomm.backend_names`, or ``"auto"``: on the CPU shared memory where all ranks
            can map it, else that of each host with gloo between hosts, else gloo.
        device: the device of the tensors.
        name: the same on all ranks, and unique among the open comms of this process.
        timeout: seconds or a timedelta (default 600), for connecting and then for each operation without a timeout of
            its own; ``math.inf``: no limit.
        store: the store for the rendezvous: None for the environment that launchers set (``env://``),
            ``tcp://host:port``, ``file:///path``, an asynccomm store, or any ``torch.distributed.Store``.
        rank, size: this process's rank and the number of ranks; None: from the store's URL, or RANK and WORLD_SIZE.
        alone: a comm of this process only, without a launcher or another process; its collectives copy. ``store``,
            ``rank`` and ``size`` are not given then. A script that may also run without a launcher says
            ``alone="RANK" not in os.environ``.
        hints: strings for the backend (with ``"auto"``, for all that may be chosen); unknown hints are logged and
            ignored.
        abort_process_on_timeout_or_error: end the process (SIGABRT) when the comm breaks, instead of only raising.
        high_priority_stream: CUDA only: communicate on a stream of high priority.
        ordering: ``"program"``: all ranks call the same collectives in the same order. ``"agreed"``: in any order, so
            that many tasks can share the comm: collectives with the same ``tag=`` belong together; under one tag (or
            without a tag) they match in the order of each rank's calls. All ranks announce their calls to rank 0, and
            run the collectives that every rank has called, in one order, in batches. The cost is about the time of two
            messages for all collectives called at once.
        max_ops, max_bytes: limits of operations and bytes in flight, above which ``await comm.ready()`` waits.

    Raises:
        ValueError, TypeError: at the call, naming the argument or environment variable.
        RendezvousError: from awaiting: missing ranks, a port in use, or ranks with different settings.
        BackendError: from awaiting: the transport could not connect.

    Cancelling the await is safe, also by ``asyncio.timeout``.
    """
    check_name(name)
    where, backends, checked = choice(backend, device, hints)
    options = CommOptions(
        timeout=seconds("timeout", timeout, DEFAULT_TIMEOUT),
        hints=checked,
        abort_process_on_timeout_or_error=abort_process_on_timeout_or_error,
        high_priority_stream=high_priority_stream,
        ordering=ordering,
        max_ops=max_ops,
        max_bytes=max_bytes,
    )
    if alone and any(each is not None for each in (store, rank, size)):
        raise ValueError(f"alone=True excludes store, rank and size, got {store!r}, {rank!r} and {size!r}")
    place = resolve_spec(MemoryStore(), 0, 1) if alone else resolve_spec(store, rank, size)
    group = CommInfo(name, place.rank, place.size, where)

    async def connect() -> Comm:
        session = await bootstrap(place, group, backend, backends, options)
        return Comm(session, session.backend_name)

    return PendingComm(connect)


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


def choice(
    backend: str, device: str | torch.device, hints: Mapping[str, str] | None
) -> tuple[torch.device, dict[str, type[Backend]], dict[str, str]]:
    """The device, the backends that may be used on it, and the hints that these backends know.

    Raises: ValueError, TypeError naming the argument.
    """
    where = device_of(device)
    backends = {candidate: load_backend(candidate, where) for candidate in candidates(backend, where)}
    known = {key: text for each in backends.values() for key, text in each.hints.items()}
    checked = check_hints(hints, known, backend)
    for each in backends.values():
        each.check_hints(own_hints(each, checked))
    return where, backends, checked


async def join_existing(
    place: RendezvousSpec, name: str, device: torch.device, requested: str, allowed: Sequence[str], options: CommOptions
) -> Session:
    """Wait in the lobby for an invitation to comm ``name``, and take part in the agreement of its ranks.

    Args:
        place: the rendezvous of the comm's ranks.
        requested, allowed: the name of the backend, and the backends that satisfy the request.

    Raises: the errors of awaiting ``join_comm``.
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
            raise RendezvousError(f"no rank of comm {name!r} has added this process within {limit:g} s") from None
    finally:
        await meeting.aclose()
    here, homes = socket.gethostname(), sorted({contact.host for contact in invitation.contacts})
    if here not in homes and not any(contact.port for contact in invitation.contacts):
        raise RendezvousError(
            f"comm {name!r} has all its ranks on host {homes[0]!r}, and only processes there can join it; "
            f"this is {here!r}"
        )
    joiner = Joiner(me, invitation.key, invitation.ranks, invitation.contacts, invitation.tokens)
    try:
        backends = _backends(invitation, name, device, requested, allowed)
    except BaseException:
        joiner.withdraw()  # the ranks wait for the invited process
        raise
    theirs = replace(options, ordering=invitation.ordering)
    ranks = {job: rank for rank, job in enumerate(invitation.ranks)}

    async def form(decision: View) -> Session:
        rank, size = decision.members.index(me), len(decision.members)
        return await bootstrap(
            replace(place, rank=rank, size=size, scope=run_prefix(place, decision)),
            CommInfo(name, rank, size, device),
            " or ".join(backends),
            backends,
            theirs,
            origin=JobOrigin(place, -number),  # negative: not a rank of the first rendezvous
            parent_ranks=[ranks[member] if isinstance(member, int) else -1 for member in decision.members],
            limit=min(limit, CONNECT_SECONDS),
        )

    try:
        async with within(max(LAST_SECONDS, left())):
            return await await_commit(joiner, None, math.inf, form, name)
    except TimeoutError:
        raise RendezvousError(
            f"comm {name!r} has invited this process, but did not connect within {limit:g} s"
        ) from None
    finally:
        joiner.close()


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
