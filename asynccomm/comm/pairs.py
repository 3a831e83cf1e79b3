"""Comms of two processes that meet by name at a store, for pools: a lost member breaks its own pairs and no other comm.

A comm breaks as a whole when it loses a rank. In a pool, where one process exchanges messages with many, each member
therefore gets a comm of its own with that process; members may come and go, and need no number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import torch
from torch import distributed as dist

from asynccomm.comm.bootstrap import bootstrap
from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import choice
from asynccomm.comm.pending import PendingComm
from asynccomm.ops.validation import CommInfo
from asynccomm.options import DEFAULT_TIMEOUT, CommOptions, check_name, seconds
from asynccomm.rendezvous.job import JobOrigin, NameInUseError
from asynccomm.rendezvous.launchers import process_number
from asynccomm.rendezvous.spec import RendezvousSpec, resolve_spec
from asynccomm.store.base import Store

SCOPE = "asynccomm/run"  # of keys that no launcher's run is part of: processes of several launchers may meet


def pair_comm(
    me: str,
    peer: str,
    backend: str = "auto",
    device: str | torch.device = "cpu",
    *,
    store: Comm | Store | dist.Store | str | None = None,
    timeout: float | timedelta | None = None,
    hints: Mapping[str, str] | None = None,
) -> PendingComm[Comm]:
    """Make a comm with one other process; ``await`` it, or better ``async with`` it. The other process does so, too.

    ::

        async with asynccomm.pair_comm("trainer", "server 3", store=store) as pair:
            await pair.send(tensor, 1)

    The loss of a process breaks the pairs that it is in, and no others. A pair may be made again, with a process that
    has taken the place of a lost one; the old pair must be closed before.

    Args:
        me, peer: the names of this process and of the other one, different, and unique among the users of the store.
            In the order of strings, the first name is rank 0, the other one rank 1.
        store: a store that both processes reach, see ``new_comm``; no process of a pair hosts it, so the store must be
            there. A comm: its store.
        backend, device, timeout, hints: see ``new_comm``.

    Raises: as ``new_comm``.

    Cancelling the await is safe.
    """
    check_name(me, "me")
    check_name(peer, "peer")
    if me == peer:
        raise ValueError(f"peer must be another process than me, got {peer!r} for both")
    place = meeting_place(store)
    options = CommOptions(timeout=seconds("timeout", timeout, DEFAULT_TIMEOUT))
    first, second = sorted((me, peer))
    name, rank = f"pair/{_quoted(first)}/{_quoted(second)}", 0 if me == first else 1
    pending = meet(place, name, rank, 2, backend, device, options, hints)

    async def connect() -> Comm:
        try:
            return await pending
        except NameInUseError:
            raise ValueError(
                f"me and peer must be of no open pair of this process, got {me!r} and {peer!r}: close that pair before"
            ) from None

    return PendingComm(connect)


def _quoted(name: str) -> str:
    """``name`` without slashes, which would make other pairs of names the same key."""
    return name.replace("%", "%25").replace("/", "%2F")


def meeting_place(store: Comm | Store | dist.Store | str | None) -> RendezvousSpec:
    """A rendezvous at ``store``, beside those of launchers' runs. Raises: TypeError, ValueError."""
    if isinstance(store, Comm):
        origin = store._session.identity.job.origin
        assert origin is not None
        return replace(origin.place, scope=SCOPE, hosting=False)
    return replace(resolve_spec(store, 1, 2), scope=SCOPE)  # not rank 0, which would host the store


def meet(
    place: RendezvousSpec,
    name: str,
    rank: int,
    size: int,
    backend: str,
    device: str | torch.device,
    options: CommOptions,
    hints: Mapping[str, str] | None = None,
) -> PendingComm[Comm]:
    """A comm at ``place``, as ``new_comm`` makes one."""
    where, backends, checked = choice(backend, device, hints)
    group = CommInfo(name, rank, size, where)
    here = replace(place, rank=rank, size=size)

    async def connect() -> Comm:
        session = await bootstrap(
            here,
            group,
            backend,
            backends,
            replace(options, hints=checked),
            origin=JobOrigin(here, rank, process_number(os.getpid())),  # a pair says nothing of all processes
        )
        return Comm(session, session.backend_name)

    return PendingComm(connect)
