"""The collectives of one rank that NCCL runs: one after the other, on one stream of one communicator.

A batch of operations is lowered to calls (``lowering``), which go to NCCL as one group between two events. The stream
follows the work that the callers had queued on their current streams at the calls (``call_streams``); a caller's stream
follows it on ``Work.wait_stream``. The poller (``poller``) detects that the second event has passed; until then the
submissions keep their tensors. Batches, including the copies before and after their calls, therefore take effect one
after the other, also on the same memory.

A repeated call of the usual kind skips the lowering (``direct_calls``).

A batch is issued in the call if NCCL has connected for all of its calls, and otherwise on a lane, since NCCL may then
wait for other ranks; all later batches follow on this lane.

During a stream capture, operations on tensors are queued on the captured stream itself, and become part of its graph.
Estimates of duration come from NCCL groups that do not run (``estimates``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NoReturn, TypeVar, final

from asynccomm.backends.base import BackendContext, Submission
from asynccomm.backends.nccl import call_streams, estimates
from asynccomm.backends.nccl.api import CommHandle, Config
from asynccomm.backends.nccl.communicator import Communicator, DirectCall
from asynccomm.backends.nccl.device import DeviceStream, Event
from asynccomm.backends.nccl.hazard_tracker import Entry, HazardTracker
from asynccomm.backends.nccl.lowering import lower
from asynccomm.backends.nccl.plan import Capabilities, LoweredBatch, Step
from asynccomm.backends.nccl.shared import DeviceRuntime
from asynccomm.backends.nccl.stream_order import StreamPosition
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.core.work import Work
from asynccomm.errors import BackendError, BrokenError
from asynccomm.ops import Barrier, GroupedOp, Op, PeerOp, TensorOp

LANE: Final = "collectives"  # of the calls that may wait for other ranks

T = TypeVar("T")


@final
class CollectiveStream:
    """The collectives of one rank, in their order.

    Args:
        unique_id: of the communicator.
        lanes: run calls that may wait for other ranks.
        stream: of the collectives.
    """

    def __init__(
        self,
        context: BackendContext,
        platform: DeviceRuntime,
        config: Config,
        unique_id: bytes,
        lanes: OrderedExecutor,
        stream: DeviceStream,
    ) -> None:
        self._rank, self._size = context.group.rank, context.group.size
        self._mailbox, self._on_error = context.mailbox, context.on_error
        self._nccl, self._device, self._poller = platform.nccl, platform.device, platform.poller
        dtypes = frozenset([dtype for dtype in platform.nccl.dtypes if platform.device.reduces(dtype)])
        self._ability = Capabilities(dtypes, platform.nccl.native)
        self._config, self._unique_id = config, unique_id
        self._lanes = lanes
        self.communicator: Communicator = Communicator(platform.nccl, platform.device, stream)
        self.in_flight: HazardTracker = HazardTracker(lanes, self._not_begun)
        self.waiting = 0  #: batches queued for a lane, because NCCL may have to connect for one of them
        self.ended = False  #: whether the communicator was closed or aborted
        self._lock = threading.Lock()  # held while a batch is put in the stream, or in the queue for the stream
        self._connected = False
        self._last: StreamPosition | None = None  # the position of the latest batch
        self._wreck: list[object] = []  # batches that failed in the middle: their memory is kept as long as the comm

    def _connect(self) -> None:
        """Connect the communicator. Blocks until all ranks have done so. Raises: BackendError."""
        self.communicator.open(self._size, self._rank, self._unique_id, self._config)
        self._connected = True

    async def connect(self) -> None:
        """Connect the communicator. Collective. Raises: BackendError."""
        # on a lane: nothing ends an init that blocks, and daemon threads do not delay the process's exit
        await self._lanes.run(LANE, self._connect, self._mailbox)

    def is_well(self) -> bool:
        """Check the communicator for transport errors; returns whether to check again. On the poller's thread."""
        if self.ended:
            return False
        try:
            if self._connected and not self.waiting:
                self.communicator.ready()
        except BrokenError as exc:
            if not self.ended:
                self._on_error(exc)
            return False
        return True

    # -- issuing -------------------------------------------------------------------------------------------------------

    def begin(self, batch: Sequence[Submission], before: Sequence[DeviceStream]) -> None:
        """Issue collectives as one group, unless their memory is in use by parcels in flight."""
        flight = StreamPosition(self._device)
        plan = self._lowered(batch, self.communicator.stream)
        ready = [stream.record() for stream in before]
        for submission in batch:
            submission.work.order = flight
        if self.in_flight.quiet:  # fast path of the usual case
            self.in_flight.note(flight, batch)
            self._start(batch, plan, ready, flight)
        else:
            entry = Entry(lambda *_: self._start(batch, plan, ready, flight), batch, flight)
            flight.immediate = self.in_flight.submit(entry)

    def direct_call(self, submission: Submission, source: int, target: int) -> DirectCall | None:
        """The call of a collective from address to address that can begin by :meth:`begin_direct`; None: it cannot."""
        plan = LoweredBatch(self._rank, self._size, self._ability, _no_memory)
        try:
            lower(submission, plan)
        except _NeedsMemoryError:
            return None
        if plan.before or plan.after:
            return None
        return self.communicator.direct_call(plan.calls, source, target)

    def begin_direct(
        self, direct: DirectCall, memory: tuple[int, int], make: Callable[[], Submission]
    ) -> Work[Any] | None:
        """Issue a call; None if it must wait for anything: then nothing has happened. Under the comm's lock.

        Args:
            memory: the addresses of its source and its target.
            make: numbers the call, and makes its submission.
        """
        with self._lock:
            if self.waiting or self.ended or not (self._connected and self.in_flight.quiet):
                return None
            if not self.communicator.knows_direct(direct):
                return None
            ready = self._device.current_stream().record()
            submission = make()
            submission.work.order = self._last = flight = StreamPosition(self._device)
            batch = (submission,)
            self.in_flight.note(flight, batch)
            queue = partial(self.communicator.issue_direct, direct, memory, submission.op)
            self._issue(batch, None, (ready,), flight, queue)
        return submission.work

    def _start(
        self, batch: Sequence[Submission], plan: LoweredBatch, ready: Sequence[Event], flight: StreamPosition
    ) -> None:
        """Issue the batch, or queue it for a lane if issuing it could wait for other ranks."""
        with self._lock:
            self._last = flight
            if self._now(plan):
                self._issue(batch, plan, ready, flight, partial(self._queue, plan, known=True))
            else:
                self.waiting += 1
                self._lanes.put(LANE, partial(self._issue_later, batch, plan, ready, flight))

    def _issue_later(
        self, batch: Sequence[Submission], plan: LoweredBatch, ready: Sequence[Event], flight: StreamPosition
    ) -> None:
        """Issue the batch on a lane."""
        try:
            if self.ended:
                return  # the Works have failed
            if not self._connected:
                self._connect()
            known = self.communicator.knows(plan.calls)
            self._issue(batch, plan, ready, flight, partial(self._queue, plan, known=known))
        except BrokenError as exc:
            self._on_error(exc)
        finally:
            with self._lock:
                self.waiting -= 1

    def _issue(
        self,
        batch: Sequence[Submission],
        plan: LoweredBatch | None,
        ready: Sequence[Event],
        flight: StreamPosition,
        queue: Callable[[], object],
    ) -> None:
        """Have ``queue`` put the batch in the stream, behind ``ready``. ``plan`` is kept until the batch has passed."""
        stream = self.communicator.stream
        for event in ready:
            stream.wait(event)
            self._device.release(event)
        try:
            queue()
        except Exception as exc:  # torch may lack memory or a kernel
            self._wreck.append((batch, plan))  # parts of the batch may be in flight
            if not isinstance(exc, BrokenError):
                exc = _not_started(_all_of(batch), exc)
            self._on_error(exc)  # fails the Works, and so all listeners of ``flight``
            return
        event = stream.record()
        flight.issue(event)
        self._poller.watch(stream.handle, event, partial(self._passed, batch, plan, flight))

    def _queue(self, plan: LoweredBatch, stream: DeviceStream | None = None, *, known: bool) -> None:
        stream = self.communicator.stream if stream is None else stream
        _run(plan.before, stream)
        if plan.calls:
            self.communicator.issue(plan.calls, stream=stream, known=known)
        _run(plan.after, stream)

    def _passed(
        self, batch: Sequence[Submission], plan: LoweredBatch | None, flight: StreamPosition, error: BrokenError | None
    ) -> None:  # the callback keeps ``plan`` and its memory until now
        flight.pass_()
        self.in_flight.passed(flight)
        if error is not None:
            self._on_error(error)
            return
        for submission in batch:
            submission.work.settle()

    def _lowered(self, batch: Sequence[Submission], stream: DeviceStream) -> LoweredBatch:
        plan = LoweredBatch(self._rank, self._size, self._ability, partial(self._device.empty, stream=stream))
        for submission in batch:
            lower(submission, plan)
        return plan

    def _now(self, plan: LoweredBatch) -> bool:
        """Whether ``plan`` is next, and can be issued without waiting for other ranks. With the lock held."""
        return not self.waiting and self._connected and self.communicator.knows(plan.calls)

    def _not_begun(self, entry: Entry, exc: Exception) -> None:
        """Break the comm: a collective failed to start after waiting for its memory."""
        self.broken(_all_of(entry.batch) if entry.batch else Barrier(), exc)

    def broken(self, op: Op, exc: BaseException) -> None:
        """Break the comm: ``op`` is half done."""
        self._on_error(exc if isinstance(exc, BrokenError) else _not_started(op, exc))

    # -- capturing and estimating --------------------------------------------------------------------------------------

    def capture(self, batch: Sequence[Submission]) -> None:
        """Make operations part of the graph that captures the current stream."""
        for submission in batch:
            if not isinstance(submission.op, TensorOp) and not is_collective(submission):
                raise RuntimeError(f"{submission.op} cannot become part of a CUDA graph: it needs the host")
            if isinstance(submission.op, PeerOp) and submission.op.peer == self._rank and len(batch) == 1:
                raise RuntimeError(f"{submission.op} to oneself can be captured in a batch only: NCCL needs both ends")
        if not self._connected or self.waiting:
            raise RuntimeError(
                "NCCL is not connected yet: run a collective on this comm, and await it, before capturing"
            )
        if self.in_flight.waiting:
            raise RuntimeError("collectives wait for memory that others still use: await them before capturing")
        stream = self._device.current_stream()
        before = call_streams.streams(self._device, batch)
        plan = self._lowered(batch, stream)
        for other in before:
            if other.handle != stream.handle:
                stream.wait(other.record(captured=True))
        self._queue(plan, stream, known=self.communicator.knows(plan.calls))
        flight = StreamPosition(self._device)
        flight.issue(stream.record(captured=True), captured=True)
        for submission in batch:
            submission.work.order = flight
            submission.work.capture()

    def estimate(self, batch: Sequence[Submission]) -> Future[float]:
        for submission in batch:
            if not is_collective(submission):
                raise ValueError(f"nccl cannot estimate how long {submission.op} takes: it begins on the host")
        estimates.check_comm(self._nccl, self._config, self._size)
        if self._device.capturing():
            raise RuntimeError("how long operations take cannot be estimated while a CUDA graph is captured")
        future: Future[float] = Future()
        future.set_running_or_notify_cancel()  # not cancellable: other ranks may be waiting in the estimate
        plan = self._lowered(batch, self.communicator.stream)
        estimates.check_calls(plan.calls)
        ended = partial(future.set_exception, BackendError("the comm has ended"))
        self.in_flight.submit(Entry(lambda *_: self._estimate_in_order(plan, future), drop=ended))
        return future

    def _estimate_in_order(self, plan: LoweredBatch, future: Future[float]) -> None:
        with self._lock:
            if self._now(plan):
                self._estimate(plan, future, known=True)
            else:
                self.waiting += 1
                self._lanes.put(LANE, partial(self._estimate_later, plan, future))

    def _estimate_later(self, plan: LoweredBatch, future: Future[float]) -> None:
        """Make the estimate on a lane."""
        try:
            self._estimate(plan, future, known=False)
        finally:
            with self._lock:
                self.waiting -= 1

    def _estimate(self, plan: LoweredBatch, future: Future[float], *, known: bool) -> None:
        try:
            if self.ended:
                raise BackendError("the comm has ended")
            if not self._connected:
                self._connect()
            future.set_result(estimates.estimate(plan.calls, self.communicator, known=known))
        except Exception as exc:
            if isinstance(exc, BrokenError):
                self._on_error(exc)
            future.set_exception(exc)

    # -- in order with the collectives ---------------------------------------------------------------------------------

    def after_all(self, done: Callable[[BrokenError | None], object]) -> None:
        """Call ``done`` once all earlier collectives have passed."""
        with self._lock:
            if self._last is None or self._last.over:
                done(None)
            elif self.waiting:
                self._lanes.put(LANE, partial(self._mark, done))
            else:
                self._mark(done)

    def _mark(self, done: Callable[[BrokenError | None], object]) -> None:
        stream = self.communicator.stream
        event = stream.record()

        def passed(error: BrokenError | None) -> None:
            self._device.release(event)
            done(error)

        self._poller.watch(stream.handle, event, passed)

    async def in_order(self, call: Callable[[CommHandle, int], T]) -> T:
        """Make a call of NCCL that waits for no other rank, in the order of the collectives."""

        def job() -> T:
            try:
                return self.communicator.run(call)
            finally:
                with self._lock:
                    self.waiting -= 1

        with self._lock:
            if not self._connected:
                raise RuntimeError(
                    "NCCL is not connected yet: run a collective on this comm, and await it, before registering"
                )
            self.waiting += 1
        return await self._lanes.run(LANE, job, self._mailbox)


class _NeedsMemoryError(Exception):
    """A lowered operation has copies of its tensors."""


def _no_memory(nbytes: int) -> NoReturn:
    raise _NeedsMemoryError


def _run(steps: Sequence[Step], stream: DeviceStream) -> None:
    for step in steps:
        try:
            stream.run(step)
        except Exception as exc:
            raise _not_started(step.op, exc) from exc


def _all_of(batch: Sequence[Submission]) -> Op:
    return batch[0].op if len(batch) == 1 else GroupedOp(tuple([submission.op for submission in batch]))


def _not_started(op: Op, exc: BaseException) -> BackendError:
    error = BackendError(f"nccl could not start {op}: {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error


def is_collective(submission: Submission) -> bool:
    """Whether NCCL alone runs the operation, without the side channel."""
    op = submission.op
    return (isinstance(op, TensorOp) and not op.p2p) or op.kind == "all_to_all"
