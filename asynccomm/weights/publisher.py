"""The trainers' side: a publisher pushes versions of weights to servers, which come and go."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, final

from torch import distributed as dist

from asynccomm.comm.comm import Comm, check_comm, reason_of
from asynccomm.comm.new_comm import choice
from asynccomm.comm.pairs import meeting_place
from asynccomm.control.transport.schema import dumps, loads
from asynccomm.core.handles import Handle
from asynccomm.core.tasks import cancel
from asynccomm.errors import ClosedError, RendezvousError
from asynccomm.ops.validation import CommInfo
from asynccomm.options import DEFAULT_TIMEOUT, check_bool, check_name, seconds
from asynccomm.store.base import Store, within
from asynccomm.weights.crew import FIRST, Crew, PushResult
from asynccomm.weights.dispatch import Dispatch
from asynccomm.weights.errors import LayoutError
from asynccomm.weights.layout import Region, Rename, Shard, Slice, State, Weights, collect
from asynccomm.weights.meeting import Meeting
from asynccomm.weights.orders import End, Start
from asynccomm.weights.reception import Reception

__all__ = ["Publisher"]

MOST_BUCKET_MB: Final = 1 << 20
BUCKET_MB: Final = 8.0  # larger messages are not faster on a CPU, and each pair holds several


@final
class Publisher(Handle):
    """Pushes weights from the ranks of a comm, the trainers, to servers; use it with ``async with``.

    ::

        async with weights.Publisher(comm, model, servers=2) as publisher:
            ...
            await publisher.push()

    Collective: all trainers enter it, call ``push`` equally often, and leave it.

    Args:
        comm: of the trainers. The publisher makes a comm of its own from it; ``comm`` stays free for other operations.
        state: a module, for all parameters and buffers in its ``state_dict()``, or a mapping of names to tensors: the
            part of this trainer. The part of a DTensor follows from its placements; other tensors are whole, unless
            ``shards`` names their parts. The tensors are read anew at each push.
        name: distinguishes the publishers that share a store.
        servers: the number of servers for which entering waits. More may come later.
        store: the store where servers come, see :func:`asynccomm.pair_comm`; None: that of ``comm``.
        shards: the parts of plain tensors that are not whole, by names in ``state``.
        rename: gives the name that trainers and servers share, for a name in ``state``; None leaves the tensor out.
        retain: keep a copy of this trainer's part of the newest version, for servers that come between pushes. Without
            the copy, such servers wait for the next push.
        bucket_mb: the limit of a message, in units of 2**20 bytes. Each trainer holds up to four messages for each
            server, and so does the server.
        broadcast: send once to servers that want the same of a trainer, in place of once for each.
        backend: of the comms with the servers; None: ``"auto"``, or ``"loopback"`` if that is the backend of ``comm``.
        timeout: seconds or a timedelta that a server may take for each step (connecting, getting ready for a version,
            receiving it) before it counts as lost; None: 600.
        hints: for the backend.

    Raises: TypeError, ValueError naming the argument.
    """

    _instead = "make one on each trainer"

    def __init__(
        self,
        comm: Comm,
        state: State,
        *,
        name: str = "weights",
        servers: int = 0,
        store: Store | dist.Store | str | None = None,
        shards: Mapping[str, Shard | Region] | None = None,
        rename: Rename | None = None,
        retain: bool = True,
        bucket_mb: float = BUCKET_MB,
        broadcast: bool = True,
        backend: str | None = None,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> None:
        check_comm(comm)
        check_name(name)
        if isinstance(servers, bool) or not isinstance(servers, int) or servers < 0:
            raise ValueError(f"servers must be a number of servers, 0 or more, got {servers!r}")
        number = isinstance(bucket_mb, (int, float)) and not isinstance(bucket_mb, bool)
        if not number or not 0 < bucket_mb <= MOST_BUCKET_MB:
            raise ValueError(f"bucket_mb must be a positive number up to {MOST_BUCKET_MB}, got {bucket_mb!r}")
        self._comm, self._state, self._name, self._expected = comm, state, name, servers
        check_bool("retain", retain)
        check_bool("broadcast", broadcast)
        self._store: Comm | Store | dist.Store | str = comm if store is None else store
        meeting_place(self._store)
        self._shards, self._rename, self._retain, self._broadcast = shards, rename, retain, broadcast
        self._bucket_bytes = max(1, int(bucket_mb * (1 << 20)))
        self._backend = ("loopback" if comm.backend == "loopback" else "auto") if backend is None else backend
        choice(self._backend, comm.device, hints)
        self._timeout = seconds("timeout", timeout, DEFAULT_TIMEOUT)
        self._hints = hints
        self._own = CommInfo(comm.name, comm.rank, comm.size, comm.device)
        self._layout = self._read().layout
        self._crew: Crew | None = None
        self._reception: Reception | None = None
        self._group: Comm | None = None
        self._resources = AsyncExitStack()
        self._process = os.getpid()

    def _read(self) -> Weights:
        return collect(self._state, self._own, shards=self._shards, rename=self._rename)

    @property
    def version(self) -> int:
        """The newest version that was pushed; 0: none."""
        return 0 if self._crew is None else self._crew.version

    @property
    def servers(self) -> tuple[str, ...]:
        """On rank 0: the labels of the connected servers. On other ranks: empty."""
        return () if self._reception is None else self._reception.present()

    @property
    def refused(self) -> Mapping[str, LayoutError]:
        """On rank 0: the errors of servers with weights that did not fit, by label. On other ranks: empty."""
        return {} if self._reception is None else dict(self._reception.refused)

    async def __aenter__(self) -> Self:
        """Open the publisher, and wait for ``servers`` servers.

        Raises:
            LayoutError: the weights of a server do not fit (on ranks other than 0 an AbortedError with its text).
            RendezvousError: the servers did not come in time; the store cannot be reached.
        """
        if self._crew is not None:
            raise RuntimeError("this publisher was entered before; make a new one")
        async with AsyncExitStack() as stack:
            group = self._group = await stack.enter_async_context(self._comm.dup(f"publisher {self._name}"))
            meeting = await Meeting.open(
                self._store, self._name, self._backend, self._comm.device, self._timeout, self._hints
            )
            stack.push_async_callback(meeting.aclose)
            texts: Any = await group.all_gather_object(dumps(self._layout))
            number: Any = await group.broadcast_object(await meeting.register() if group.rank == FIRST else None, FIRST)
            meeting = meeting.of(number)
            layouts = [loads(dict[str, Slice], text) for text in texts]
            self._reception = Reception(meeting, group.rank, layouts, self._bucket_bytes, self._timeout)
            stack.push_async_callback(self._reception.aclose)
            dispatch = Dispatch(meeting, group.rank, self._timeout, shared=self._broadcast)
            stack.push_async_callback(dispatch.aclose)
            self._crew = Crew(group, self._reception, dispatch, self._read, self._layout, retain=self._retain)
            stack.push_async_callback(self._end, self._crew)
            if self._crew.first:
                stack.push_async_callback(meeting.close)
                await meeting.accept()
                greeting = asyncio.create_task(self._reception.greet(self._crew.order, self._on_news))
                stack.push_async_callback(cancel, greeting)
                if not self._expected:
                    self._crew.order(Start())
            try:
                await self._wait_started(self._crew)
            except BaseException as exc:
                self._reception.reason = reason_of(exc)
                raise
            self._resources = stack.pop_all()
        return self

    async def _wait_started(self, crew: Crew) -> None:
        try:
            async with within(self._timeout if crew.first else math.inf):  # the first trainer ends the others' wait
                await asyncio.shield(crew.started)
        except TimeoutError:
            raise RendezvousError(
                f"publisher {self._name!r}: {len(self.servers)} of {self._expected} servers came within "
                f"{self._timeout:g} s"
            ) from None

    def _on_news(self, news: int | LayoutError) -> None:
        """On the first trainer: a server is connected, or was refused."""
        assert self._crew is not None
        if isinstance(news, LayoutError):
            self._crew.refuse(news)
            return
        self._crew.order(news)
        if len(self.servers) == self._expected:
            self._crew.order(Start())

    async def push(self, version: int | None = None, *, info: object = None) -> PushResult:
        """Send the weights to all connected servers. Collective: all trainers call it.

        Returns once each server has the version, or is lost; each server then takes the version up by itself. The
        tensors must not change meanwhile.

        Args:
            version: above the last one; the same on all trainers. None: the last one plus 1.
            info: a JSON value for the servers, for which a tuple is a list; that of rank 0 counts.

        Raises:
            ValueError, TypeError: wrong ``version`` or ``info``; the state has other tensors than it had at first.
            PushAbandonedError: another trainer cancelled the push, or could not take part.
            ClosedError, BrokenError: the publisher is not open; a trainer was lost.

        Cancelling is safe: the servers stay at the version before, and the tensors may change once the cancellation is
        over. A cancellation after this trainer has sent everything is too late for that; ``version`` tells. Once a
        trainer has begun to send, its copy for late servers is overwritten: they then wait for the next push.
        """
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise TypeError(f"version must be an integer, got {version!r}")
        try:
            sent = loads(Any, dumps(info))  # ``info`` itself may change before a late server gets it
            plain = _is_json(info)
        except (TypeError, ValueError, RecursionError) as exc:
            raise TypeError(f"info must be a JSON value, got {info!r}: {exc}") from None
        if not plain:
            raise TypeError(f"info must be a JSON value, with strings for keys, got {info!r}")
        if self._crew is None:
            raise ClosedError("the publisher is not open: use `async with`")
        request = self._crew.push(version, sent)
        try:
            return await asyncio.shield(request.result)
        except asyncio.CancelledError:
            request.stop()
            while not request.released.is_set():
                try:
                    await request.released.wait()
                except asyncio.CancelledError:
                    continue
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the publisher: the updates of its servers end. An exception also ends it on the other trainers.

        Cancelling is safe: the servers are told all the same. A forked child closes nothing.
        """
        if self._process != os.getpid():
            return
        if exc is not None and self._group is not None:
            self._group.abort(reason_of(exc))
            assert self._reception is not None
            self._reception.reason = reason_of(exc)
        await self._resources.aclose()

    async def _end(self, crew: Crew) -> None:
        """Let all trainers carry out the orders that were given, and end."""
        if not crew.started.done() or crew.started.exception() is not None:
            crew.running.cancel()
        elif crew.first:
            crew.order(End())
        await asyncio.wait([crew.running])


def _is_json(value: object) -> bool:
    """Whether JSON carries ``value`` as it is, but for tuples."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, int, float))
