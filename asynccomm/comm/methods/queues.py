"""Queues between the ranks of a comm, to which other processes may attach."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, SupportsIndex, Unpack, final

import anyio.to_thread

from asynccomm.backends.addresses import choose_address
from asynccomm.comm.methods.base import CommBase
from asynccomm.comm.methods.groups import distinct
from asynccomm.comm.pending import PendingComm
from asynccomm.core.tasks import detach
from asynccomm.errors import AsyncCommError, BackendError, BrokenError
from asynccomm.ops.validation import check_rank
from asynccomm.options import check_name, seconds
from asynccomm.queues.meeting import QueueHost, attach
from asynccomm.queues.options import QueueArguments, QueueHandle, QueueOptions
from asynccomm.queues.queue import MessageQueue
from asynccomm.queues.terms import CAUSE_SECONDS, STORE_SECONDS, Decision, QueueMeeting, QueueTerms
from asynccomm.store.base import within

Ranks = Sequence[SupportsIndex]


@final
class _CommWatch:
    """Ends a wait when the comm ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ended: asyncio.Future[AsyncCommError] = loop.create_future()

    def comm_ended(self, error: AsyncCommError) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: AsyncCommError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


class Queues(CommBase):
    """Queues between the ranks of a comm."""

    def queue(
        self,
        writer: SupportsIndex | None = None,
        readers: Ranks | None = None,
        *,
        reader: SupportsIndex | None = None,
        writers: Ranks | None = None,
        name: str = "queue",
        timeout: float | timedelta | None = None,
        **arguments: Unpack[QueueArguments],
    ) -> PendingComm[MessageQueue]:
        """Make a queue from one writer to all or some readers, or from many writers to one reader.

        ::

            async with comm.queue(writer=0) as queue:
                if comm.rank == 0:
                    await queue.put({"step": 1})
                else:
                    async for item in queue: ...

        ``await`` it, or better ``async with`` it, on all ranks that take part, with the same arguments; each rank has
        a ``timeout``, ``expect``, ``weights_only``, ``max_bytes`` and ``busy_poll`` of its own, and ``address`` is that
        of the writer, or of the single reader. Each reader gets every item, in order. A single reader gets the items of
        each writer in order. The queue does not use the backend, and is not part of the sequence of collectives.

        Args:
            writer: the only writer; rank 0 unless ``reader`` is given.
            readers: ranks that read; None: all others.
            reader: the only reader, in place of ``writer``.
            writers: ranks that write; None: all others.
            name: tells queues with the same ranks apart that tasks make in different orders.
            timeout: seconds to wait for the ranks; None: the comm's time limit.
            arguments: ``capacity``, bytes of the ring (8 MiB). ``overflow="drop_oldest"``: a writer never waits, and a
                slow reader loses the oldest items, which its ``dropped`` counts. ``on_lost="continue"``: go on without
                lost ends. ``address``: listen on TCP at this interface, so that ends on other hosts can attach; where
                the ranks are on several hosts, the default is the interface of the comm.
                ``expect``, ``weights_only`` and ``max_bytes``: as in ``recv_object``, for each item.
                ``busy_poll``: seconds in which a reader polls for the next item before it sleeps. The item comes
                sooner; a core is busy meanwhile, and the other tasks of the loop run between looks of 50 us.

        Raises: TypeError, ValueError at the call, naming the argument; from awaiting: ValueError on all ranks if their
            ``writer``, ``reader``, ``capacity``, ``overflow`` or ``on_lost`` differ; BackendError, which names the
            ranks that did not come or the rank that gave up, or on all ranks the ``address`` that cannot be used;
            ClosedError, BrokenError.

        Cancelling the await is safe; the other ranks get a BackendError, unless all have attached before. A queue is
        identified by its ranks, ``name`` and the number of earlier queues with both. A call that fails on one rank
        fails on all of them, also on a rank that calls later, so they meet again at their next calls.
        """
        if writer is not None and reader is not None:
            raise ValueError(f"reader must be None if there is one writer, got reader={reader!r}, writer={writer!r}")
        one, many = ("writer", "readers") if reader is None else ("reader", "writers")
        if (writers if reader is None else readers) is not None:
            other = "writers" if reader is None else "readers"
            raise ValueError(
                f"{other} must be None if there is one {one}, got {writers if reader is None else readers!r}"
            )
        host = check_rank(self._group, one, (0 if writer is None else writer) if reader is None else reader)
        chosen = readers if reader is None else writers
        members = [r for r in range(self.size) if r != host] if chosen is None else distinct(self._group, many, chosen)
        if host in members:
            raise ValueError(f"{many} must not have the {one}, {host}, got {list(members)!r}")
        if self.rank != host and self.rank not in members:
            raise ValueError(f"{many} must have this rank, {self.rank}, got {list(members)!r}")
        check_name(name)
        options = QueueOptions(**arguments)
        limit = seconds("timeout", timeout, self.options.timeout)
        self._submitter.check_open()
        ranks = sorted([host, *members])
        room = self._session.identity.child_prefix(f"queue {name}", ranks)  # one place, also if the arguments differ
        terms = QueueTerms(
            writer=host if reader is None else None,
            reader=None if reader is None else host,
            capacity=int(options.capacity),
            overflow=options.overflow,
            on_lost=options.on_lost,
        )

        async def connect() -> MessageQueue:
            self._submitter.check_loop()
            self._submitter.check_open()
            meeting = QueueMeeting(room, self.rank, ranks, terms)
            with ExitStack() as unless_made:
                try:
                    if self.rank == host:
                        queue = await self._host(reader is None, options, members, meeting, limit, unless_made)
                    else:
                        queue = await self._member(options, meeting, limit, unless_made)
                except (Exception, asyncio.CancelledError) as exc:  # other ones end the loop
                    reason = "it was cancelled" if isinstance(exc, asyncio.CancelledError) else str(exc)
                    self._session.spawn(self._give_up(meeting, reason, unless_made.pop_all()))
                    raise
                unless_made.pop_all()
            self._session.spawn(self._leave_meeting(meeting))
            self._session.dependents.add(queue)
            return queue

        return PendingComm(connect)

    async def _host(
        self,
        writes: bool,
        options: QueueOptions,
        members: Sequence[int],
        meeting: QueueMeeting,
        limit: float,
        unless_made: ExitStack,
    ) -> MessageQueue:
        try:
            async with within(limit):
                host, handle = await self._open(writes, options, members)
        except TimeoutError as exc:
            raise BackendError(f"the queue could not be made within {limit:g} s") from exc
        queue = host.queue(handle)
        unless_made.callback(queue.leave, failed=True)
        await self._decided(meeting.terms, lambda: meeting.offer(queue.handle), limit)
        await self._decided(meeting.queue, meeting.attached, limit)
        return queue

    async def _member(
        self, options: QueueOptions, meeting: QueueMeeting, limit: float, unless_made: ExitStack
    ) -> MessageQueue:
        handle = QueueHandle.parse(await self._decided(meeting.terms, meeting.offer, limit))
        attaching = asyncio.ensure_future(attach(handle, options, self.rank, self.name))
        unless_made.callback(attaching.add_done_callback, _leave)

        async def attached() -> None:
            await attaching
            await meeting.attached()

        await self._decided(meeting.queue, attached, limit)
        return attaching.result()

    async def _decided(self, decision: Decision, coming: Callable[[], Awaitable[None]], limit: float) -> str:
        """The result of ``decision``, to which this rank comes by ``coming``.

        Raises: BackendError: ranks are missing, or gave up; ValueError: the terms differ.
        """
        reaching = asyncio.ensure_future(decision.reached(coming))
        try:
            if await self._done_within(limit, reaching):
                return reaching.result()
        finally:
            reaching.cancel()
        return await decision.late(limit)

    async def _give_up(self, meeting: QueueMeeting, reason: str, end: ExitStack) -> None:
        """Publish the reason, and then leave the queue: the ranks for which the connection ends look for the reason."""
        with end:
            if isinstance(self._session.error, BrokenError):
                await asyncio.sleep(CAUSE_SECONDS)  # for the other ranks to get that error by their comms
            await self._leave_meeting(meeting, reason)

    async def _leave_meeting(self, meeting: QueueMeeting, reason: str | None = None) -> None:
        """Leave it; closing the comm waits for this, but only for a short time if the store does not answer."""
        leaving = detach(asyncio.ensure_future(meeting.leave(reason)))
        await asyncio.wait([leaving], timeout=STORE_SECONDS)

    async def _open(self, writes: bool, options: QueueOptions, members: Sequence[int]) -> tuple[QueueHost, QueueHandle]:
        """Raises: BackendError."""
        if not options.address:
            options = replace(options, address=await self._address_for([self.rank, *members]))
        with ExitStack() as unless_open:
            try:
                host = QueueHost(writes, options, self.rank, self.name, members)
                unless_open.callback(host.close)
                handle = await host.open()
            except (OSError, ValueError, TypeError) as exc:  # the latter two for strings that are no addresses
                where = f" at address {options.address!r}" if options.address else ""
                reason = isinstance(exc, OSError) and exc.strerror
                raise BackendError(f"the queue cannot be made{where}: {reason or exc}") from exc
            unless_open.pop_all()
            return host, handle

    async def _address_for(self, ranks: Sequence[int]) -> str:
        """The address at which ``ranks`` reach this one; "" if all are on this host. Raises: BackendError."""
        members = self._session.identity.members
        if len({members[rank].host for rank in ranks}) == 1:
            return ""
        chosen = await anyio.to_thread.run_sync(  # names may be resolved
            choose_address, self.options.hints, os.environ, self.rank, members, abandon_on_cancel=True
        )
        return chosen.address

    async def _done_within(self, limit: float, future: asyncio.Future[Any]) -> bool:
        """Wait for ``future``, up to ``limit`` seconds. Raises: the error of the comm, if that ends before."""
        watch = _CommWatch(self.loop)
        self._session.dependents.add(watch)
        self._submitter.check_open()
        either: list[asyncio.Future[Any]] = [future, watch.ended]
        timeout = None if limit == math.inf else limit
        done, _ = await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if done == {watch.ended}:
            raise watch.ended.result()
        return bool(done)


def _leave(attaching: asyncio.Future[MessageQueue]) -> None:
    if not attaching.cancelled() and attaching.exception() is None:
        attaching.result().leave(failed=True)
