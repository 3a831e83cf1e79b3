"""Making a comm: check the arguments, meet the other ranks, connect the backend."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import SupportsIndex

import torch
from torch import distributed as dist

from asynccomm.backends.base import Backend, device_of, own_hints
from asynccomm.backends.registry import candidates, load_backend
from asynccomm.comm.bootstrap import bootstrap
from asynccomm.comm.comm import Comm
from asynccomm.comm.pending import PendingComm
from asynccomm.ops.validation import CommInfo
from asynccomm.options import (
    DEFAULT_TIMEOUT,
    MAX_BYTES,
    MAX_OPS,
    CommOptions,
    check_bool,
    check_hints,
    check_name,
    seconds,
)
from asynccomm.rendezvous.spec import resolve_spec
from asynccomm.store.base import Store
from asynccomm.store.memory import MemoryStore


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
            ``tcp://host:port``, ``file:///path``, an asynccomm store, or any ``torch.distributed.Store`` (of a
            TCPStore, the server is used, over connections of our own).
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
    check_bool("alone", alone)
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


def choice(
    backend: str, device: str | torch.device, hints: Mapping[str, str] | None
) -> tuple[torch.device, dict[str, type[Backend]], dict[str, str]]:
    """The device, the backends that may be used on it, and the hints that these backends know.

    Raises: ValueError, TypeError naming the argument.
    """
    where = device_of(device)
    backends = {candidate: load_backend(candidate, where) for candidate in candidates(backend, where)}
    checked: dict[str, str] = {}
    if hints is not None:
        known = {key: text for each in backends.values() for key, text in each.hints.items()}
        checked = check_hints(hints, known, backend)
    for each in backends.values():
        each.check_hints(own_hints(each, checked))
    return where, backends, checked
