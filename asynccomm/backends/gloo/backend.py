"""CPU collectives over TCP between any machines: by sockets of our own, and by torch's gloo.

The calling thread hands the data of a collective to a group (``collectives.py``), which only queues it: one that moves
it in C (``streams.py``), or one of gloo's. The rest runs in callbacks of the group's futures, on its thread: they also
divide, convert and copy back. An operation may become several of a group (``packing.py``): it is settled when all are
done. Operations that share memory wait for each other (``hazard_tracker.py``). Collectives of parcels consist of gloo's
messages (``payload_collectives.py``), for which a thread waits, as they have no future. Sends and receives use sockets
of their own (``p2p.py``).

There are two gloo groups, of one thread each: one for frames, and one for windows and small transfers. Where no sockets
of our own move the data, a third group moves long data: with torch's default of two threads it is faster by a tenth
from 16 MiB on, and up to two times slower for small collectives.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar, final

import anyio
import anyio.to_thread
from torch import distributed as dist

from asynccomm.backends.addresses import LOOPBACK, advice, choose_address, several_networks
from asynccomm.backends.base import (
    Backend,
    BackendContext,
    BackendWindow,
    ConnectionEndedError,
    DirectCalls,
    FastCalls,
    RankInfo,
    Submission,
)
from asynccomm.backends.gloo.collectives import GlooCollectives
from asynccomm.backends.gloo.direct_calls import CarriedCollectives
from asynccomm.backends.gloo.endpoint import Contact, Endpoint
from asynccomm.backends.gloo.frame_exchange import FrameExchange
from asynccomm.backends.gloo.goodbye import say_goodbye
from asynccomm.backends.gloo.groups import LARGE, TransferGroups
from asynccomm.backends.gloo.p2p import PointToPoint
from asynccomm.backends.gloo.payload_collectives import PayloadExchange
from asynccomm.backends.gloo.streams import MOST_RANKS, StreamGroup, StreamSockets, available
from asynccomm.backends.gloo.torch_gloo import GlooGroup, GlooGroups
from asynccomm.backends.gloo.windows import GlooWindow, WindowService
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.backends.windows import LocalPart, ServedPart
from asynccomm.core.background import in_background, reserve
from asynccomm.core.tasks import shielded
from asynccomm.core.work import Work
from asynccomm.errors import BackendError, BrokenError
from asynccomm.ops import WindowInfo
from asynccomm.options import whole_number
from asynccomm.store.torch_store import TorchStoreView

T = TypeVar("T", bound=BaseException)

_log = logging.getLogger("asynccomm")

GLOO_THREADS = 2  # threads for large collectives: torch's default
CONNECT_SECONDS = 30.0  # limit for connecting once all ranks are there; a process that gives up may not end before
GOODBYE_SECONDS = 0.2  # time for the other ranks to close, too
LINGER_SECONDS = 1.0  # time for the other ranks to receive the messages that were sent
CLOSE_SECONDS = 5.0  # time for threads to see the end of an aborted group; they are daemons, so a miss costs a thread
STREAM_CHANNELS = 1, 2  # of the endpoint: for small and for large transfers
NAMED = 3  # messages in a warning
CATCH_UP_SECONDS = 0.02  # time for gloo to deliver data that a rank sent before it failed
REPORT_SECONDS = 1.0  # for a thread that has read such data to report it; on a busy machine it may not run at once
END_SECONDS = (
    1.0  # time for gloo's own threads to end, and for those that connect other groups than the one that failed
)

_HINTS: Mapping[str, str] = {
    "hostname": "address of the network interface to use (default: that of GLOO_SOCKET_IFNAME, loopback if all ranks "
    "are on one host, else the one that leads to the store)",
    "interface": "name of the network interface to use",
    "streams": "1 to move long data in C over sockets of our own, where all ranks have the module in C; 0 to leave "
    "it to gloo (default 1)",
    "gloo_threads": f"gloo threads that run collectives of {LARGE >> 20} MiB and more (default {GLOO_THREADS})",
}


@final
class GlooBackend(Backend):
    """One rank of a gloo comm."""

    name = "gloo"
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    hints = _HINTS
    compares = True

    def __init__(self, context: BackendContext, gloos: GlooGroups) -> None:
        group = context.group
        self._gloos: GlooGroups | None = gloos
        self._rank = group.rank
        self._size = group.size
        self._on_error = context.on_error
        self._context = context
        self._windows: WindowService | None = None  # from the first window on
        name = f"asynccomm-gloo-{group.name}"
        self._name = group.name
        self._endpoint: Endpoint | None = None  # as in a comm of one rank
        self._frames = FrameExchange(group.rank, group.size)
        self._p2p = PointToPoint(group.rank, group.size, None, self._frames, context.on_error)
        self._parcel_lane = OrderedExecutor(f"{name}-parcels", 1)
        exchange = PayloadExchange(group.rank, group.size, self._parcel_lane, self._complete)
        #: for backends on top of this one
        self.collectives: GlooCollectives = GlooCollectives(
            gloos, name, group.rank, group.size, self._frames, exchange, self._failed, self._not_started
        )
        self._streams: list[StreamGroup] = []
        self._ending = threading.Lock()
        self._poisoned = False
        self._out_of_step = False  # a lane has not received all its data, and the comm is about to break

    @classmethod
    def check_hints(cls, hints: Mapping[str, str]) -> None:
        value = hints.get("gloo_threads", "1")
        if not whole_number(value):
            raise ValueError(f"hint 'gloo_threads' must be a positive integer, got {value!r}")
        if hints.get("streams", "1") not in ("0", "1"):
            raise ValueError(f"hint 'streams' must be 0 or 1, got {hints['streams']!r}")
        if "hostname" in hints and "interface" in hints:
            raise ValueError("hints 'hostname' and 'interface' exclude each other; give one")

    @classmethod
    async def connect(cls, context: BackendContext) -> Self:
        group, hints, members = context.group, context.hints, context.members
        reserve()
        address = await _address(context)
        # the caller enforces the timeout
        store = TorchStoreView(context.store.prefix("gloo"), asyncio.get_running_loop(), math.inf)

        def make(name: str, count: int) -> GlooGroup:
            try:
                return GlooGroup(
                    dist.PrefixStore(name, store),
                    group.rank,
                    group.size,
                    address=address,
                    threads=count,
                    timeout=min(context.timeout, CONNECT_SECONDS),
                )
            except RuntimeError as exc:
                host = members[group.rank].host
                error = f"gloo could not connect rank {group.rank} of comm {group.name!r} at {address} on host {host!r}"
                raise BackendError(f"{error}: {str(exc).strip()}{_unreachable(members)}") from _bare(exc)

        def made(threads: Mapping[str, int]) -> Awaitable[list[GlooGroup]]:
            # a separate thread limiter: these threads wait for store requests, which may need threads themselves
            limiter = anyio.CapacityLimiter(len(threads))
            making = [
                anyio.to_thread.run_sync(make, name, count, abandon_on_cancel=True, limiter=limiter)
                for name, count in threads.items()
            ]
            # threads may be waiting for the store, and the process cannot end before they do
            return _all_made(making, store.end)

        backend = cls(context, GlooGroups(*await made({"frames": 1, "small": 1})))
        try:
            if group.size > 1:
                await backend._open_messages(context, address)
                if not backend._streams:
                    backend._use_large(*await made({"large": int(hints.get("gloo_threads", GLOO_THREADS))}))
            await context.all_connected()
        except BaseException:
            await shielded(backend.aclose())
            raise
        return backend

    async def _open_messages(self, context: BackendContext, address: str) -> None:
        """Listen for messages, on the network that gloo uses, and learn where the other ranks do."""
        rank, size, store = self._rank, self._size, context.store
        try:
            streams = available() and size <= MOST_RANKS and context.hints.get("streams") != "0"
            endpoint = Endpoint(rank, size, address, f"asynccomm-gloo-{self._name}-messages", streams=streams)
        except OSError as exc:
            error = f"gloo could not connect rank {rank} of comm {self._name!r}: no port for messages: {exc}"
            raise BackendError(error) from exc
        self._endpoint = endpoint
        self._p2p = p2p = PointToPoint(rank, size, endpoint, self._frames, self._on_error)
        self._frames.open(endpoint)
        sockets = [StreamSockets(rank, size, endpoint, channel) for channel in STREAM_CHANNELS]
        await store.set(f"messages/{rank}", endpoint.contact.pack())
        contacts = await store.multi_get([f"messages/{peer}" for peer in range(size)], math.inf)
        listed = [Contact.unpack(contact) for contact in contacts]
        endpoint.start(listed, p2p.arrived, p2p.gone, p2p.settle, context.mailbox)
        if all(contact.streams for contact in listed):
            name = f"asynccomm-gloo-{self._name}-streams"
            self._streams = [StreamGroup(rank, size, each, name) for each in sockets]
            self.collectives.use(TransferGroups(*self._streams))

    def _use_large(self, large: GlooGroup) -> None:
        """Move long data by a group of gloo's, as there are no streams."""
        assert self._gloos is not None, "connected on a closed backend"
        self._gloos = self._gloos._replace(large=large)
        self.collectives.use(self._gloos.transfers)

    def submit(self, batch: Sequence[Submission]) -> None:
        assert self._gloos is not None, "submitted to a closed backend"
        for submission in batch:
            if submission.op.p2p:
                self._p2p.submit(submission)
        self.collectives.submit([submission for submission in batch if not submission.op.p2p])

    def fast_path(self, calls: DirectCalls) -> FastCalls | None:
        return CarriedCollectives(calls, self.collectives, self._broken) if self._frames.in_c else None

    def _broken(self, exc: BaseException) -> None:
        error = BackendError(f"gloo failed: {type(exc).__name__}: {exc}")
        error.__cause__ = exc
        self._on_error(error)

    def before_await(self, work: Work[Any]) -> None:
        self._p2p.spin(work)

    def before_block(self, work: Work[Any]) -> None:
        self.before_await(work)

    def withdraw(self, receive: Submission) -> None:
        """Drop a receive if it is still posted: another backend has taken its claim. From any thread."""
        self._p2p.withdraw(receive)

    def _complete(
        self, submission: Submission, steps: Sequence[Callable[[], object]], over: Callable[[], object] | None = None
    ) -> None:
        """Run the last steps of gloo's messages, which raise if they failed, and settle their submission. On a lane.

        Args:
            over: settles the submission; None: only its Work is settled.
        """
        if self._out_of_step:
            return  # it would receive data left by an earlier message
        try:
            for step in steps:
                step()
        except Exception as exc:
            self._out_of_step = True
            self._failed(submission, exc)
        else:
            if over is None:
                submission.work.settle(submission.error)
            else:
                over()

    def _not_started(self, submission: Submission, exc: Exception) -> None:
        error = BackendError(f"gloo could not start {submission.op}: {str(exc).strip()}")
        error.__cause__ = _bare(exc)
        self.collectives.end()
        self._on_error(error)  # fails the Work with the underlying cause, if there is one

    def _failed(self, submission: Submission, exc: Exception) -> None:
        self.collectives.end()
        if isinstance(exc, ConnectionEndedError):
            exc = ConnectionEndedError(exc.rank, exc.reason, str(submission.op))
        elif not isinstance(exc, BrokenError):
            error = BackendError(f"gloo failed in {submission.op}: {str(exc).strip()}")
            error.__cause__ = _bare(exc)
            exc = error
        self._on_error(_bare(exc))

    async def window(self, window: WindowInfo) -> BackendWindow:
        part = LocalPart(window, self._rank)
        return GlooWindow(await self.serve(window, part), window, part)

    async def serve(self, window: WindowInfo, part: ServedPart) -> WindowService:
        """Serve ``part`` as this rank's part of a window; returns once all ranks do. Collective, without a timeout."""
        assert self._gloos is not None, "made on a closed backend"
        if self._windows is None:
            self._windows = WindowService(
                self._gloos.small, self._context.group, f"asynccomm-gloo-{self._name}", self._on_error
            )
        service = self._windows
        service.serve(window.number, part)
        await replace(self._context, store=self._context.store.prefix(f"window {window.number}")).all_connected()
        return service

    def drain_before_failure(self) -> None:
        if self._endpoint is not None:
            self._endpoint.drain(CATCH_UP_SECONDS)
            self._frames.finish_reports(REPORT_SECONDS)
        self.collectives.drain_before_failure(CATCH_UP_SECONDS)
        if self._endpoint is not None:  # data may have arrived meanwhile
            self._endpoint.drain(CATCH_UP_SECONDS)

    async def aclose(self) -> None:
        if self._endpoint is not None:
            self._endpoint.detach()
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        if self._windows is not None and not self._windows.close():
            self.abort()
            self._windows.join(CLOSE_SECONDS)
        if self._gloos is not None and not self.collectives.ended:
            say_goodbye(self._gloos.frames, self._rank, self._size, GOODBYE_SECONDS)
        self.collectives.end()
        self._close_messages()
        self._parcel_lane.join(CLOSE_SECONDS)
        self._parcel_lane.end()
        for streams in self._streams:
            streams.close(CLOSE_SECONDS)
        if self._windows is not None:
            self._windows.end()
            self._windows = None
        self.collectives.close(CLOSE_SECONDS)
        gloos, self._gloos = _let_go(self._gloos), None
        # dropping the last reference ends gloo's threads, which takes 20 ms; one in fifty aborted groups has a thread
        # that nothing can wake
        ending = [in_background("asynccomm-gloo-end", group.clear) for group in gloos]
        until = time.monotonic() + END_SECONDS
        if not all(each.join(max(0.0, until - time.monotonic())) for each in ending):
            _log.warning("a thread of gloo is stuck in an operation that was aborted; it is left behind")

    def _close_messages(self) -> None:
        endpoint = self._endpoint
        if unreceived := self._p2p.unreceived():
            more = f" and {len(unreceived) - NAMED} more" if len(unreceived) > NAMED else ""
            messages = "; ".join(unreceived[:NAMED])
            _log.warning("comm %r was closed with messages that were not received: %s%s", self._name, messages, more)
        if endpoint is not None:
            if not self._poisoned:
                endpoint.leave(LINGER_SECONDS)
            endpoint.close()
            endpoint.join(CLOSE_SECONDS)
        self._p2p.drop()

    def close_at_exit(self) -> None:
        self.abort()
        self._close()

    def abort(self) -> None:
        self.collectives.end()
        if self._windows is not None:
            self._windows.abort()
        with self._ending:
            if self._poisoned or self._gloos is None:
                return
            self._poisoned = True
            if self._endpoint is not None:
                self._endpoint.close()
            self._p2p.drop()
            for streams in self._streams:
                streams.abort()
            for gloo in self._gloos.made:
                gloo.poison()


async def _address(context: BackendContext) -> str:
    """The address of the interface to use. Raises: BackendError."""
    rank, members = context.group.rank, context.members
    if len({member.host for member in members}) > 1 and not context.hints.keys() & {"hostname", "interface"}:
        return members[rank].address or LOOPBACK  # chosen when the ranks met
    choice = await anyio.to_thread.run_sync(
        choose_address, context.hints, os.environ, rank, members, abandon_on_cancel=True
    )
    return choice.address


async def _all_made(
    making: Sequence[Coroutine[Any, Any, GlooGroup]], on_failure: Callable[[], object]
) -> list[GlooGroup]:
    """The groups. If one cannot be made, ``on_failure`` is called, and the threads of the others get time to end."""
    tasks = [asyncio.ensure_future(each) for each in making]
    try:
        return await asyncio.gather(*tasks)
    except BaseException as exc:
        on_failure()
        if not isinstance(exc, asyncio.CancelledError):
            await asyncio.wait(tasks, timeout=END_SECONDS)
        raise
    finally:
        for task in tasks:
            task.cancel()


def _unreachable(members: Sequence[RankInfo]) -> str:
    """The end of an error of connecting, if the address may be the cause."""
    return f"; if the other hosts cannot reach that address, {advice()}" if several_networks(members) else ""


def _let_go(gloos: GlooGroups | None) -> list[list[GlooGroup]]:
    """The groups without their messages in flight, each in a list that can drop it."""
    made = [] if gloos is None else gloos.made
    for gloo in made:
        gloo.let_go()
    return [[gloo] for gloo in made]


def _bare(exc: T) -> T:
    """``exc`` without its frames: they hold the groups, which would end on the thread that drops the exception."""
    exc.__traceback__ = None
    return exc
