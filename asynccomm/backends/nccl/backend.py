"""GPU collectives by NCCL.

The collectives of a comm share one NCCL communicator and one stream (``collective_stream``). Messages, parcels and
barriers use a side channel on the host (``side_channel``, ``p2p``). Payloads from device to device use separate
communicators and streams (``transfers``), which follow the callers' streams and not the stream of the collectives.
Where collectives of parcels share memory with other collectives, the host keeps their order (``hazard_tracker``).
Messages have no order with collectives: a caller must await an operation before it sends or receives a message in the
same memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from hashlib import sha1
from typing import Any, ClassVar, Final, Self, TypeVar
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread
from torch import Tensor

from asynccomm.backends.base import Backend, BackendContext, BackendWindow, DirectCalls, FastCalls, Submission
from asynccomm.backends.latch import Latch
from asynccomm.backends.nccl import call_streams, cuda_settings
from asynccomm.backends.nccl.collective_stream import CollectiveStream, is_collective
from asynccomm.backends.nccl.communicator import END_SECONDS, end_all
from asynccomm.backends.nccl.device import DeviceStream, Event
from asynccomm.backends.nccl.direct_calls import DirectCollectives
from asynccomm.backends.nccl.hazard_tracker import Entry
from asynccomm.backends.nccl.hints import HINTS, check, config_of
from asynccomm.backends.nccl.p2p import PointToPoint
from asynccomm.backends.nccl.registrations import Registrations
from asynccomm.backends.nccl.shared import DeviceRuntime
from asynccomm.backends.nccl.side_channel import SideChannel
from asynccomm.backends.nccl.stream_order import StreamPosition
from asynccomm.backends.nccl.transfers import Transfers
from asynccomm.backends.nccl.windows import NcclWindow
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.core.background import BackgroundCall, in_background, reserve
from asynccomm.core.tasks import shielded, shielded_acquire
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError
from asynccomm.ops import Barrier, Call, Parcels, PeerOp, TensorOp, WindowInfo

LOOK_SECONDS: Final = 0.1  # between two checks of a communicator for errors, while an operation takes long
QUIET_SECONDS: Final = 1.0  # for threads to return from aborted calls
LANES: Final = 16  # threads that receive payloads; 4 more per rank may wait for NCCL to connect, in both directions

T = TypeVar("T")

_log = logging.getLogger("asynccomm")


class NcclBackend(Backend):
    """One rank of an NCCL comm."""

    name = "nccl"
    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
    hints = HINTS

    def __init__(self, context: BackendContext, platform: DeviceRuntime, side: SideChannel, unique_id: bytes) -> None:
        group = context.group
        self._context = context
        self._platform, self._side = platform, side
        self._device, self._poller = device, poller = platform.device, platform.poller
        self._config = config = config_of(context)
        # a positive int64
        self.uid: int = int.from_bytes(sha1(unique_id, usedforsecurity=False).digest()[:8], "big") >> 1
        self._lanes = OrderedExecutor(f"asynccomm-nccl-{group.name}", LANES + 4 * group.size)
        self._high_priority = context.high_priority_stream
        self._streams: list[DeviceStream] = []
        self._collectives = CollectiveStream(context, platform, config, unique_id, self._lanes, self._new_stream())
        self._in_flight = self._collectives.in_flight
        self._transfers = Transfers(
            group.rank,
            group.size,
            platform.nccl,
            config,
            device,
            side,
            poller,
            self._lanes,
            self._new_stream,
            context.on_error,
        )
        self._messenger = PointToPoint(
            group.rank,
            group.size,
            device,
            self._new_stream,
            side,
            self._transfers,
            poller,
            self._lanes,
            context.on_error,
        )
        stream = self._collectives.communicator.stream.handle
        self._check = poller.ask(self._collectives.is_well, every=LOOK_SECONDS, stream=stream)
        self._driven: WeakKeyDictionary[Work[Any], Work[None]] = WeakKeyDictionary()  # -> Work on the side channel
        self._windows: list[NcclWindow] = []
        self._registrations = Registrations(platform.nccl, self._collectives.in_order)
        self._ending_lock = threading.Lock()
        self._ending: BackgroundCall | None = None

    # -- connecting ---------------------------------------------------------------------------------------------------

    @classmethod
    def check_hints(cls, hints: Mapping[str, str]) -> None:
        check(hints)

    @classmethod
    def _platform_for(cls, context: BackendContext) -> DeviceRuntime:
        return DeviceRuntime.of(context.group.device)

    @classmethod
    async def connect(cls, context: BackendContext) -> Self:
        reserve()
        finding = anyio.to_thread.run_sync(cls._platform_for, context)
        platform = await shielded_acquire(finding, DeviceRuntime.leave)
        side = None
        try:
            # all have found their GPU and NCCL: an init that waits for a rank without them never ends
            await replace(context, store=context.store.prefix("ready")).all_connected()
            if context.group.rank == 0:
                unique_id = await anyio.to_thread.run_sync(platform.nccl.unique_id)
                await context.store.set("unique_id", unique_id)
            else:
                unique_id = await context.store.get("unique_id", context.timeout)
            within = replace(context, store=context.store.prefix("side"))
            side = await SideChannel.connect(within, context.hints.get("side", "auto"), platform.poller)
            backend = cls(context, platform, side, unique_id)
        except BaseException:
            await shielded(_leave(platform, side))
            raise
        try:
            if context.hints.get("connect") != "lazy":
                await backend._collectives.connect()
        except BaseException:
            backend.abort()
            await shielded(backend.aclose())
            raise
        return backend

    def _new_stream(self) -> DeviceStream:
        stream = self._device.new_stream(high_priority=self._high_priority)
        self._streams.append(stream)
        return stream

    # -- submitting ---------------------------------------------------------------------------------------------------

    def submit(self, batch: Sequence[Submission]) -> None:
        if not self._side.any_source:
            for submission in batch:  # before the first send
                if isinstance(submission.op, PeerOp) and submission.op.peer is None:
                    raise ValueError(
                        f"backend 'nccl' with {self._side.name!r} on the host cannot receive from any source; "
                        f"name one: src="
                    )
        if self._device.capturing():
            self._collectives.capture(batch)
            return
        together = [submission for submission in batch if is_collective(submission)]
        others = [submission for submission in batch if not is_collective(submission)]
        # look up all streams before the first operation starts: this may raise
        before = call_streams.streams(self._device, together) if together else []
        alone = [call_streams.stream(self._device, submission) for submission in others]
        if together:
            self._collectives.begin(together, before)
        for submission, stream in zip(others, alone, strict=True):
            self._tell(submission, stream)

    def fast_path(self, calls: DirectCalls) -> FastCalls:
        return DirectCollectives(calls, self._collectives, self._device, self._collectives.broken)

    def call_context(self) -> call_streams.CallStream:
        return call_streams.note(self._device)

    def _tell(self, submission: Submission, stream: DeviceStream) -> None:
        """Start an operation that begins on the side channel. It follows ``stream``."""
        op, work = submission.op, submission.work
        if isinstance(op, Barrier):
            self._in_flight.submit(Entry(lambda *_: self._bar(op, work)))
        elif isinstance(op, Parcels):
            start = partial(self._exchange, submission, op, stream, stream.record())
            self._in_flight.submit(Entry(start, (submission,)))
        else:
            flight = StreamPosition(self._device, immediate=False)
            if isinstance(op, TensorOp):
                work.order = flight
            self._driven[work] = self._messenger.submit(submission, stream, flight)

    def _bar(self, op: Barrier, work: Work[Any]) -> None:
        # done once all ranks have called the barrier and this rank's earlier collectives are done, as in other backends
        both = Latch(2, partial(self._passed_barrier, op, work))
        self._collectives.after_all(both)
        self._driven[work] = self._side.submit(Call(op, (), (), None), both)

    def _passed_barrier(self, op: Barrier, work: Work[Any], error: AsyncCommError | None) -> None:
        """Settle a barrier, behind the puts to this rank that the others had fenced."""
        windows = [window for window in self._windows if not window.ended]
        if error is not None or not windows:
            work.settle(error)
            return
        shown = Latch(len(windows), work.settle)
        for window in windows:
            window.show(op, shown)

    def _exchange(
        self, submission: Submission, op: Parcels, stream: DeviceStream, called: Event, entry: Entry, late: bool
    ) -> None:
        if not late:
            self._device.release(called)
        over = partial(self._in_flight.over, entry)
        driver = self._messenger.collective(submission, op, stream, over, called if late else None)
        self._driven[submission.work] = driver

    def estimate(self, batch: Sequence[Submission]) -> Future[float]:
        return self._collectives.estimate(batch)

    def before_await(self, work: Work[Any]) -> None:
        driver = self._driven.get(work)
        if driver is not None:
            self._side.before_await(driver)
        elif not self._collectives.waiting and not self._device.capturing():
            with self._device.looking():
                self._poller.before_await(self._collectives.communicator.stream.handle, until=work.done)

    def before_block(self, work: Work[Any]) -> None:
        driver = self._driven.get(work)
        if driver is not None:
            self._side.before_block(driver)
        elif not self._in_flight.quiet:  # ``work`` may wait for these parcels; work on a lane needs no event loop
            for submission in self._in_flight.parcels():
                if (driver := self._driven.get(submission.work)) is not None:
                    self._side.before_block(driver)

    def advice(self) -> Sequence[str]:
        return cuda_settings.advice(os.environ)

    async def window(self, window: WindowInfo) -> BackendWindow:
        made = await NcclWindow.connect(self._context, window, self._platform, self._side, self._config)
        self._windows = [each for each in self._windows if not each.ended or not each.join(0.0)]
        self._windows.append(made)
        return made

    # -- registered tensors -------------------------------------------------------------------------------------------

    async def register(self, tensor: Tensor) -> None:
        await self._registrations.add(tensor)

    async def deregister(self, tensor: Tensor) -> None:
        mailbox = self._context.mailbox
        passed: asyncio.Future[None] = mailbox.loop.create_future()

        def tell() -> None:
            if not passed.done():
                passed.set_result(None)

        self._collectives.after_all(lambda _: mailbox.post(tell))
        await passed
        await self._registrations.remove(tensor)

    # -- closing ------------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        for window in self._windows:
            window.close()
        await self._side.aclose()
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        self._check.cancel()
        patience = QUIET_SECONDS
        with self._ending_lock:
            if self._ending is None:
                patience = END_SECONDS
                if self._lanes.join(patience):
                    self._registrations.end(self._collectives.communicator)
                self._ending = self._end(abort=False)
        ended = self._ending.join(END_SECONDS)
        windows_ended = [window.join(patience) for window in self._windows]
        quiet = self._lanes.join(patience)  # a lane may be in an init that waits for a lost rank
        self._lanes.end()
        if ended and quiet and all(windows_ended):
            for stream in self._streams:
                self._device.end_stream(stream)
        else:
            _log.warning(
                "NCCL is stuck with a communicator that has ended; the thread that waits for it is left behind"
            )
        self._platform.leave()

    def _end(self, *, abort: bool) -> BackgroundCall:
        communicators = [self._collectives.communicator, *self._transfers.stop()]
        if abort:  # with those of the windows: they end together
            communicators += [window.stream.communicator for window in self._windows]
        end = partial(end_all, self._platform.nccl, self._device, communicators, abort=abort)
        ending = in_background("asynccomm-nccl-end", end)
        self._collectives.ended = True
        return ending

    def abort(self) -> None:
        self._in_flight.end()
        with self._ending_lock:  # not that of the collectives: its holder may be stuck in NCCL
            if self._ending is not None:
                return
            self._ending = self._end(abort=True)
        for window in self._windows:
            window.abort()
        self._side.abort()

    def close_at_exit(self) -> None:
        self.abort()
        self._side.close_at_exit()
        if self._ending is not None:
            self._ending.join(END_SECONDS)


async def _leave(platform: DeviceRuntime, side: SideChannel | None) -> None:
    if side is not None:
        side.abort()
        await side.aclose()
    await anyio.to_thread.run_sync(platform.leave)
