"""GPU collectives by NCCL.

The collectives of a comm share one NCCL communicator and one stream. A batch of operations is lowered to calls
(``lowering``), which go to NCCL as one group between two events. The stream follows the work that the callers had
queued on their current streams at the calls (``call_streams``); a caller's stream follows it on ``Work.wait_stream``.
The poller (``poller``) detects that the second event has passed; until then the submissions keep their tensors.
Batches, including the copies before and after their calls, therefore take effect one after the other, also on the same
memory.

Messages, parcels and barriers use a side channel on the host (``side_channel``, ``p2p``). Payloads from device to
device use separate communicators and streams (``transfers``), which follow the callers' streams and not the stream of
the collectives. Where collectives of parcels share memory with other collectives, the host keeps their order
(``hazard_tracker``). Messages have no order with collectives: a caller must await an operation before it sends or
receives a message in the same memory.

During a stream capture, operations on tensors are queued on the captured stream itself, and become part of its graph.
Estimates of duration come from NCCL groups that do not run (``estimates``).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from hashlib import sha1
from typing import Any, ClassVar, Final, Self, TypeVar
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread
from torch import Tensor

from asynccomm.backends.base import Backend, BackendContext, BackendWindow, Submission
from asynccomm.backends.latch import Latch
from asynccomm.backends.nccl import call_streams, estimates
from asynccomm.backends.nccl.api import CommHandle
from asynccomm.backends.nccl.communicator import END_SECONDS, Communicator, end_all
from asynccomm.backends.nccl.device import DeviceStream, Event
from asynccomm.backends.nccl.hazard_tracker import Entry, HazardTracker
from asynccomm.backends.nccl.hints import HINTS, check, config_of
from asynccomm.backends.nccl.lowering import lower
from asynccomm.backends.nccl.p2p import PointToPoint
from asynccomm.backends.nccl.plan import Capabilities, LoweredBatch, Step
from asynccomm.backends.nccl.registrations import Registrations
from asynccomm.backends.nccl.shared import DeviceRuntime
from asynccomm.backends.nccl.side_channel import SideChannel
from asynccomm.backends.nccl.stream_order import StreamPosition
from asynccomm.backends.nccl.transfers import Transfers
from asynccomm.backends.nccl.windows import NcclWindow
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.core.tasks import shielded, shielded_acquire
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, BackendError, BrokenError
from asynccomm.ops import Barrier, Call, GroupedOp, Op, Parcels, PeerOp, TensorOp, WindowInfo

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
        self._rank, self._size = group.rank, group.size
        self._context, self._on_error = context, context.on_error
        self._platform, self._side = platform, side
        self._device, self._poller = device, poller = platform.device, platform.poller
        dtypes = frozenset([dtype for dtype in platform.nccl.dtypes if device.reduces(dtype)])
        self._ability = Capabilities(dtypes, platform.nccl.native)
        self._config = config = config_of(context)
        self._unique_id = unique_id
        # a positive int64
        self.uid: int = int.from_bytes(sha1(unique_id, usedforsecurity=False).digest()[:8], "big") >> 1
        self._lanes = OrderedExecutor(f"asynccomm-nccl-{group.name}", LANES + 4 * group.size)
        self._high_priority = context.high_priority_stream
        self._streams: list[DeviceStream] = []
        self._communicator = Communicator(platform.nccl, device, self._new_stream())
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
        self._in_flight = HazardTracker(self._lanes, self._not_begun)
        self._lock = threading.Lock()  # held while a batch is put in the stream, or in the queue for the stream
        self._connected = False
        self._last: StreamPosition | None = None  # the position of the latest batch
        self._waiting = 0  # batches queued for a lane, because NCCL may have to connect for one of them
        self._question = poller.ask(self._all_is_well, every=LOOK_SECONDS, stream=self._communicator.stream.handle)
        self._driven: WeakKeyDictionary[Work[Any], Work[None]] = WeakKeyDictionary()  # -> Work on the side channel
        self._windows: list[NcclWindow] = []
        self._registrations = Registrations(platform.nccl, self._in_order)
        self._wreck: list[object] = []  # batches whose start failed half-way: their memory is kept as long as the comm
        self._ending_lock = threading.Lock()
        self._ending: threading.Thread | None = None

    # -- connecting ---------------------------------------------------------------------------------------------------

    @classmethod
    def check_hints(cls, hints: Mapping[str, str]) -> None:
        check(hints)

    @classmethod
    def _platform_for(cls, context: BackendContext) -> DeviceRuntime:
        return DeviceRuntime.of(context.group.device)

    @classmethod
    async def connect(cls, context: BackendContext) -> Self:
        finding = anyio.to_thread.run_sync(cls._platform_for, context)
        platform = await shielded_acquire(finding, DeviceRuntime.leave)
        side = None
        try:
            await _all_have_one(context)
            if context.group.rank == 0:
                unique_id = await anyio.to_thread.run_sync(platform.nccl.unique_id)
                await context.store.set("unique_id", unique_id)
            else:
                unique_id = await context.store.get("unique_id", context.timeout)
            within = replace(context, store=context.store.prefix("side"))
            side = await SideChannel.connect(within, context.hints.get("side", "auto"))
            backend = cls(context, platform, side, unique_id)
        except BaseException:
            await shielded(_leave(platform, side))
            raise
        try:
            if context.hints.get("connect") != "lazy":
                # on a lane: nothing ends an init that blocks, and daemon threads do not delay the process's exit
                await backend._lanes.run("collectives", backend._connect, context.mailbox)
        except BaseException:
            backend.abort()
            await shielded(backend.aclose())
            raise
        return backend

    def _new_stream(self) -> DeviceStream:
        stream = self._device.new_stream(high_priority=self._high_priority)
        self._streams.append(stream)
        return stream

    def _connect(self) -> None:
        """Connect the communicator. Blocks until all ranks have done so. Raises: BackendError."""
        self._communicator.open(self._size, self._rank, self._unique_id, self._config)
        self._connected = True

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
            self._capture(batch)
            return
        together = [submission for submission in batch if _is_collective(submission)]
        others = [submission for submission in batch if not _is_collective(submission)]
        # look up all streams before the first operation starts: this may raise
        before = call_streams.streams(self._device, together) if together else []
        alone = [call_streams.stream(self._device, submission) for submission in others]
        if together:
            self._begin(together, before)
        for submission, stream in zip(others, alone, strict=True):
            self._tell(submission, stream)

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
        self._after_all(both)
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

    def _after_all(self, done: Callable[[BrokenError | None], object]) -> None:
        """Call ``done`` once all earlier collectives have passed."""
        with self._lock:
            if self._last is None or self._last.over:
                done(None)
            elif self._waiting:
                self._lanes.put("collectives", partial(self._mark, done))
            else:
                self._mark(done)

    def _mark(self, done: Callable[[BrokenError | None], object]) -> None:
        stream = self._communicator.stream
        event = stream.record()

        def passed(error: BrokenError | None) -> None:
            self._device.release(event)
            done(error)

        self._poller.watch(stream.handle, event, passed)

    def _lowered(self, batch: Sequence[Submission], stream: DeviceStream) -> LoweredBatch:
        plan = LoweredBatch(self._rank, self._size, self._ability, partial(self._device.empty, stream=stream))
        for submission in batch:
            lower(submission, plan)
        return plan

    def _now(self, plan: LoweredBatch) -> bool:
        """Whether ``plan`` is next, and can be issued without waiting for other ranks. With the lock held."""
        return not self._waiting and self._connected and self._communicator.knows(plan.calls)

    def _begin(self, batch: Sequence[Submission], before: Sequence[DeviceStream]) -> None:
        """Issue collectives as one group, unless their memory is in use by parcels in flight."""
        flight = StreamPosition(self._device)
        plan = self._lowered(batch, self._communicator.stream)
        ready = [stream.record() for stream in before]
        for submission in batch:
            submission.work.order = flight
        if self._in_flight.quiet:  # fast path of the usual case
            self._in_flight.note(flight, batch)
            self._start(batch, plan, ready, flight)
        else:
            entry = Entry(lambda *_: self._start(batch, plan, ready, flight), batch, flight)
            flight.immediate = self._in_flight.submit(entry)

    def _start(
        self, batch: Sequence[Submission], plan: LoweredBatch, ready: Sequence[Event], flight: StreamPosition
    ) -> None:
        """Issue the batch, or queue it for a lane if issuing it could wait for other ranks."""
        with self._lock:
            self._last = flight
            if self._now(plan):
                self._issue(batch, plan, ready, flight, known=True)
            else:
                self._waiting += 1
                self._lanes.put("collectives", partial(self._issue_later, batch, plan, ready, flight))

    def _issue_later(
        self, batch: Sequence[Submission], plan: LoweredBatch, ready: Sequence[Event], flight: StreamPosition
    ) -> None:
        """Issue the batch on a lane."""
        try:
            if self._ending is not None:
                return  # the Works have failed
            if not self._connected:
                self._connect()
            self._issue(batch, plan, ready, flight, known=self._communicator.knows(plan.calls))
        except BrokenError as exc:
            self._on_error(exc)
        finally:
            with self._lock:
                self._waiting -= 1

    def _issue(
        self,
        batch: Sequence[Submission],
        plan: LoweredBatch,
        ready: Sequence[Event],
        flight: StreamPosition,
        *,
        known: bool,
    ) -> None:
        stream = self._communicator.stream
        for event in ready:
            stream.wait(event)
            self._device.release(event)
        try:
            self._queue(plan, stream, known=known)
        except Exception as exc:  # torch may lack memory or a kernel
            self._wreck.append((batch, plan))  # parts of the batch may be in flight
            if not isinstance(exc, BrokenError):
                exc = _not_started(_all_of(batch), exc)
            self._on_error(exc)  # fails the Works, and so all listeners of ``flight``
            return
        event = stream.record()
        flight.issue(event)
        self._poller.watch(stream.handle, event, partial(self._passed, batch, plan, flight))

    def _queue(self, plan: LoweredBatch, stream: DeviceStream, *, known: bool) -> None:
        _run(plan.before, stream)
        if plan.calls:
            self._communicator.issue(plan.calls, stream=stream, known=known)
        _run(plan.after, stream)

    def _passed(
        self, batch: Sequence[Submission], plan: LoweredBatch, flight: StreamPosition, error: BrokenError | None
    ) -> None:  # the callback keeps ``plan`` and its memory until now
        flight.pass_()
        self._in_flight.passed(flight)
        if error is not None:
            self._on_error(error)
            return
        for submission in batch:
            submission.work.settle()

    def _capture(self, batch: Sequence[Submission]) -> None:
        """Make operations part of the graph that captures the current stream."""
        for submission in batch:
            if not isinstance(submission.op, TensorOp) and not _is_collective(submission):
                raise RuntimeError(f"{submission.op} cannot become part of a CUDA graph: it needs the host")
            if isinstance(submission.op, PeerOp) and submission.op.peer == self._rank and len(batch) == 1:
                raise RuntimeError(f"{submission.op} to oneself can be captured in a batch only: NCCL needs both ends")
        if not self._connected or self._waiting:
            raise RuntimeError(
                "NCCL is not connected yet: run a collective on this comm, and await it, before capturing"
            )
        if self._in_flight.waiting:
            raise RuntimeError("collectives wait for memory that others still use: await them before capturing")
        stream = self._device.current_stream()
        before = call_streams.streams(self._device, batch)
        plan = self._lowered(batch, stream)
        for other in before:
            if other.handle != stream.handle:
                stream.wait(other.record(captured=True))
        self._queue(plan, stream, known=self._communicator.knows(plan.calls))
        flight = StreamPosition(self._device)
        flight.issue(stream.record(captured=True), captured=True)
        for submission in batch:
            submission.work.order = flight
            submission.work.capture()

    def estimate(self, batch: Sequence[Submission]) -> Future[float]:
        for submission in batch:
            if not _is_collective(submission):
                raise ValueError(f"nccl cannot estimate how long {submission.op} takes: it begins on the host")
        estimates.check_comm(self._platform.nccl, self._config, self._size)
        if self._device.capturing():
            raise RuntimeError("how long operations take cannot be estimated while a CUDA graph is captured")
        future: Future[float] = Future()
        future.set_running_or_notify_cancel()  # not cancellable: other ranks may be waiting in the estimate
        plan = self._lowered(batch, self._communicator.stream)
        estimates.check_calls(plan.calls)
        ended = partial(future.set_exception, BackendError("the comm has ended"))
        self._in_flight.submit(Entry(lambda *_: self._estimate_in_order(plan, future), drop=ended))
        return future

    def _estimate_in_order(self, plan: LoweredBatch, future: Future[float]) -> None:
        with self._lock:
            if self._now(plan):
                self._estimate(plan, future, known=True)
            else:
                self._waiting += 1
                self._lanes.put("collectives", partial(self._estimate_later, plan, future))

    def _estimate_later(self, plan: LoweredBatch, future: Future[float]) -> None:
        """Make the estimate on a lane."""
        try:
            self._estimate(plan, future, known=False)
        finally:
            with self._lock:
                self._waiting -= 1

    def _estimate(self, plan: LoweredBatch, future: Future[float], *, known: bool) -> None:
        try:
            if self._ending is not None:
                raise BackendError("the comm has ended")
            if not self._connected:
                self._connect()
            future.set_result(estimates.estimate(plan.calls, self._communicator, known=known))
        except Exception as exc:
            if isinstance(exc, BrokenError):
                self._on_error(exc)
            future.set_exception(exc)

    def _all_is_well(self) -> bool:
        """Check the communicator for transport errors; returns whether to check again. On the poller's thread."""
        if self._ending is not None:
            return False
        try:
            if self._connected and not self._waiting:
                self._communicator.ready()
        except BrokenError as exc:
            if self._ending is None:
                self._on_error(exc)
            return False
        return True

    def before_await(self, work: Work[Any]) -> None:
        driver = self._driven.get(work)
        if driver is not None:
            self._side.before_await(driver)
        elif not self._waiting and not self._device.capturing():
            with self._device.looking():
                self._poller.before_await(self._communicator.stream.handle, until=work.done)

    def before_block(self, work: Work[Any]) -> None:
        driver = self._driven.get(work)
        if driver is not None:
            self._side.before_block(driver)
        elif not self._in_flight.quiet:  # ``work`` may wait for these parcels; work on a lane needs no event loop
            for submission in self._in_flight.parcels():
                if (driver := self._driven.get(submission.work)) is not None:
                    self._side.before_block(driver)

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

        self._after_all(lambda _: mailbox.post(tell))
        await passed
        await self._registrations.remove(tensor)

    async def _in_order(self, call: Callable[[CommHandle, int], T]) -> T:
        """Make a call of NCCL that waits for no other rank, in the order of the collectives."""

        def job() -> T:
            try:
                return self._communicator.run(call)
            finally:
                with self._lock:
                    self._waiting -= 1

        with self._lock:
            if not self._connected:
                raise RuntimeError(
                    "NCCL is not connected yet: run a collective on this comm, and await it, before registering"
                )
            self._waiting += 1
        return await self._lanes.run("collectives", job, self._context.mailbox)

    # -- closing ------------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        for window in self._windows:
            window.close()
        await self._side.aclose()
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        self._question.cancel()
        patience = QUIET_SECONDS
        with self._ending_lock:
            if self._ending is None:
                patience = END_SECONDS
                if self._lanes.join(patience):
                    self._registrations.end(self._communicator)
                self._ending = self._end(abort=False)
        self._ending.join(END_SECONDS)
        windows_ended = [window.join(patience) for window in self._windows]
        quiet = self._lanes.join(patience)  # a lane may be in an init that waits for a lost rank
        self._lanes.end()
        if quiet and all(windows_ended) and not self._ending.is_alive():
            for stream in self._streams:
                self._device.end_stream(stream)
        else:
            _log.warning(
                "NCCL is stuck with a communicator that has ended; the thread that waits for it is left behind"
            )
        self._platform.leave()

    def _end(self, *, abort: bool) -> threading.Thread:
        communicators = [self._communicator, *self._transfers.stop()]
        if abort:  # with those of the windows: they end together
            communicators += [window.stream.communicator for window in self._windows]
        return end_all(self._platform.nccl, self._device, communicators, abort=abort)

    def _not_begun(self, entry: Entry, exc: Exception) -> None:
        """Break the comm: a collective failed to start after waiting for its memory."""
        op = _all_of(entry.batch) if entry.batch else Barrier()
        self._on_error(exc if isinstance(exc, BrokenError) else _not_started(op, exc))

    def abort(self) -> None:
        self._in_flight.end()
        with self._ending_lock:  # not ``_lock``: its holder may be stuck in NCCL
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


async def _all_have_one(context: BackendContext) -> None:
    """Wait until all ranks have found their GPU and NCCL: an init that waits for a rank without them never ends."""
    await context.store.set(f"ready/{context.group.rank}", b"1")
    await context.store.wait([f"ready/{rank}" for rank in range(context.group.size)], context.timeout)


async def _leave(platform: DeviceRuntime, side: SideChannel | None) -> None:
    if side is not None:
        side.abort()
        await side.aclose()
    await anyio.to_thread.run_sync(platform.leave)


def _run(steps: Sequence[Step], stream: DeviceStream) -> None:
    for step in steps:
        try:
            stream.run(step)
        except Exception as exc:
            raise _not_started(step.op, exc) from exc


def _all_of(batch: Sequence[Submission]) -> Op:
    return batch[0].op if len(batch) == 1 else GroupedOp(tuple([submission.op for submission in batch]))


def _not_started(op: Op, exc: Exception) -> BackendError:
    error = BackendError(f"nccl could not start {op}: {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error


def _is_collective(submission: Submission) -> bool:
    """Whether NCCL alone runs the operation, without the side channel."""
    op = submission.op
    return (isinstance(op, TensorOp) and not op.p2p) or op.kind == "all_to_all"
