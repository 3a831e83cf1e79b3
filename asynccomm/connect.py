"""Making a comm: check the arguments, meet the other ranks, connect the backend."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator, Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, SupportsIndex, final
from weakref import WeakValueDictionary

import torch
from torch import distributed as dist

from asynccomm.backends.base import Backend, BackendContext, Member, device_of, own_hints
from asynccomm.backends.registry import candidates, load_backend
from asynccomm.checks import Group
from asynccomm.comm import Comm
from asynccomm.errors import AsyncCommError, StoreError
from asynccomm.join import join
from asynccomm.mailbox import Mailbox
from asynccomm.options import DEFAULT_TIMEOUT, MAX_BYTES, MAX_OPS, CommOptions, check_hints, seconds
from asynccomm.session import Session
from asynccomm.store.base import Store, within
from asynccomm.store.rendezvous import Meeting, Place, find_place, meet

__all__ = ["Connecting", "new_comm"]

RETRY_SECONDS = 0.05  # until a rank whose store went away under it looks for the new one
LEAVE_SECONDS = 10.0  # the rank that hosts the store stays for the others this long after it has closed its comm

_log = logging.getLogger("asynccomm")
_names: WeakValueDictionary[tuple[object, int, str], object] = WeakValueDictionary()  # in use, by world and rank


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
    max_ops: int = MAX_OPS,
    max_bytes: int = MAX_BYTES,
) -> Connecting:
    """Make a comm of all ranks; ``await`` it, or better ``async with`` it. Collective: all ranks do so.

    ::

        async with asynccomm.new_comm(name="main") as comm:
            await comm.all_reduce(tensor)

    Args:
        backend: a name from :func:`asynccomm.backend_names`, or ``"auto"``: on the CPU shared memory where all ranks
            can map it, else gloo.
        device: where the tensors live.
        name: the same on all ranks, and unique among the open comms of this process.
        timeout: seconds or a timedelta (default 600), for connecting and then for each operation that brings no own.
        store: where to meet: None for the environment that launchers set (``env://``), ``tcp://host:port``,
            ``file:///path``, one of our stores, or any ``torch.distributed.Store``.
        rank, size: who this is; None: from the store's URL, or RANK and WORLD_SIZE.
        hints: strings for the backend (with ``"auto"``, for those that may be chosen); unknown ones are logged and
            ignored.
        abort_process_on_timeout_or_error: end the process (SIGABRT) when the comm breaks, instead of only raising.
        high_priority_stream: CUDA only: communicate on a stream of high priority.
        max_ops, max_bytes: what may be in flight before ``await comm.ready()`` waits.

    Raises:
        ValueError, TypeError: at the call, naming the argument or environment variable.
        RendezvousError: from awaiting: nobody there, port in use, or ranks that do not fit together.
        BackendError: from awaiting: the transport could not connect.

    Cancelling the await is safe, also by ``asyncio.timeout``.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a non-empty str, got {name!r}")
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
        max_ops=max_ops,
        max_bytes=max_bytes,
    )
    place = find_place(store, rank, size)
    return Connecting(place, Group(name, place.rank, place.size, where), backend, backends, options)


@final
class Connecting:
    """A comm to be: ``await`` it, or enter it with ``async with``."""

    def __init__(
        self, place: Place, group: Group, asked: str, backends: Mapping[str, type[Backend]], options: CommOptions
    ) -> None:
        self._place = place
        self._group = group
        self._asked = asked
        self._backends = backends
        self._options = options
        self._comm: Comm | None = None

    def __await__(self) -> Generator[Any, None, Comm]:
        return self._connect().__await__()

    async def __aenter__(self) -> Comm:
        self._comm = await self._connect()
        return self._comm

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._comm is not None
        await self._comm.__aexit__(kind, exc, traceback)

    async def _connect(self) -> Comm:
        group, place, options = self._group, self._place, self._options
        key = (place.world, group.rank, group.name)
        if key in _names:
            raise ValueError(f"name {group.name!r} is in use by an open comm of this process: take another or close it")
        _names[key] = self
        start = time.monotonic()
        async with AsyncExitStack() as resources:
            resources.callback(_names.pop, key, None)
            meeting, epoch, members = await self._join(start)
            resources.push_async_callback(meeting.aclose)
            room = meeting.store.prefix(place.scope).prefix(group.name).prefix(epoch)
            resources.push_async_callback(_leave, room, group, meeting)
            mailbox = Mailbox(asyncio.get_running_loop())
            session = Session(group, options, mailbox, room, resources.pop_all())
            backend_name = await session.connect(
                self._backends,
                BackendContext(
                    group=group,
                    members=members,
                    store=room,
                    mailbox=mailbox,
                    timeout=max(0.1, start + options.timeout - time.monotonic()),
                    on_error=session.transport_failed,
                    hints=options.hints,
                ),
            )
            comm = Comm(session, backend_name)
            _names[key] = comm
            return comm

    async def _join(self, start: float) -> tuple[Meeting, str, list[Member]]:
        """Meet the others; again if that was at a store on its way out, whose host had closed an earlier comm there."""
        group, place, timeout = self._group, self._place, self._options.timeout
        spent = 0.0
        while True:
            meeting = await meet(place, max(0.0, timeout - spent))
            scope = meeting.store.prefix(place.scope)
            try:
                epoch, members = await join(
                    scope, group.name, group.rank, group.size, self._asked, timeout, spent=spent
                )
            except BaseException as exc:
                await meeting.aclose()
                lost = type(exc) is StoreError and meeting.owned and not place.hosting
                spent = time.monotonic() - start
                if not lost or spent > timeout:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return meeting, epoch, members


async def _leave(room: Store, group: Group, meeting: Meeting) -> None:
    """Say that this rank is done; the host of the store waits for the others, who may still need it."""
    try:
        async with within(LEAVE_SECONDS):
            gone = await room.add("gone", 1)
            if meeting.hosted is not None:
                while gone < group.size:
                    await asyncio.sleep(0.01)
                    gone = await room.add("gone", 0)
    except TimeoutError:
        _log.warning("comm %r: not all ranks have closed within %g s; the store ends now", group.name, LEAVE_SECONDS)
    except AsyncCommError as exc:
        _log.debug("comm %r: the store was gone before this rank left: %s", group.name, exc)
