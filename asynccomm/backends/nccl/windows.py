"""Windows by NCCL's one-sided calls: memory of each GPU that the other ranks write without its rank's help.

Each window has a communicator of its own, as the signals of one-sided calls belong to a communicator. NCCL knows one
kind of signal, which counts calls and has no value; a wait for it takes place on a stream, names the origin, and uses
the signals up. So the signals of a window are those of a window of the side channel, with values that any rank sets,
adds to and compares, and NCCL's signals say which puts the memory shows:

- A put is one ``put_signal`` for each piece. The host waits for the caller's stream first, so that no put in the
  window's stream ever waits for another rank.
- A signal leaves, on the host, when the earlier puts have passed in the stream, behind the number of puts so far.
- A rank that sees a signal lets its stream wait for as many signals of NCCL as were announced. It does so again at the
  end of each barrier, for puts that the other ranks had fenced.

``put_signal`` reads memory of the window only, so other tensors are copied into a part of it that is not the rank's
memory. NCCL has no call that reads or adds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self, final

import anyio.to_thread
import torch
from torch import Tensor

from asynccomm.backends import arithmetic, windows
from asynccomm.backends.base import BackendContext, BackendWindow, Submission
from asynccomm.backends.nccl.api import Config
from asynccomm.backends.nccl.communicator import LEAVE_SECONDS
from asynccomm.backends.nccl.device import Event
from asynccomm.backends.nccl.shared import DeviceRuntime
from asynccomm.backends.nccl.side_channel import SideChannel, SideWindow
from asynccomm.backends.nccl.stream_order import StreamPosition
from asynccomm.backends.nccl.window_memory import WindowMemory, allocate
from asynccomm.backends.nccl.window_stream import WindowStream
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.backends.regions import bytes_of
from asynccomm.core.background import BackgroundCall, in_background
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, BackendError, BrokenError, ClosedError
from asynccomm.ops import (
    Op,
    WindowAccumulate,
    WindowFence,
    WindowGet,
    WindowInfo,
    WindowPut,
    WindowSignal,
    WindowWait,
)

_PUTS: Final = "puts"  # the lanes
_SIGHTS: Final = "sights"

Done = Callable[[], object]


@final
class NcclWindow(BackendWindow):
    """One rank's access to a window in the memory of GPUs."""

    def __init__(
        self,
        context: BackendContext,
        window: WindowInfo,
        runtime: DeviceRuntime,
        signals: SideWindow,
        memory: WindowMemory,
    ) -> None:
        group = window.group
        self._rank, self._size, self._name = group.rank, group.size, group.name
        self._number, self._counts = window.number, window.signals  # behind the signals: the puts of each rank
        self._on_error = context.on_error
        self._device, self._poller = runtime.device, runtime.poller
        self._signals = signals
        self._base = memory.address
        self._memory, self._piece = memory.tensors(runtime.device)
        self._stream = WindowStream(runtime, high_priority=context.high_priority_stream, on_error=context.on_error)
        self._lanes = OrderedExecutor(f"asynccomm-{group.name}-window-{window.number}", 2)
        self._sent = [0] * self._size  # NCCL's signals to each rank: of the lane of puts
        self._told = [0] * self._size  # those that the rank knows of
        self._seen = [0] * self._size  # NCCL's signals of each rank that the stream has waited for
        self._last_put: StreamPosition | None = None  # of the latest put, or signal or fence behind puts
        self._last_sight: StreamPosition | None = None
        self._waits: dict[Work[Any], Work[None]] = {}  # the waits of callers, and those of the side channel for them
        self._refusal: AsyncCommError | None = None  # of waits
        self._failed = self._ended = False
        self._ending_lock = threading.Lock()
        self._ending: BackgroundCall | None = None

    @classmethod
    async def connect(
        cls, context: BackendContext, window: WindowInfo, runtime: DeviceRuntime, side: SideChannel, config: Config
    ) -> Self:
        """Make the window. Collective; a cancelled call cleans up.

        Raises: UnsuitableError on all ranks alike, if one has no memory or no such calls of NCCL; BackendError.
        """
        group = window.group
        context = replace(context, store=context.store.prefix(f"window {window.number}"))
        memory = await allocate(context, window, runtime)
        signals = await side.window(replace(window, sizes=(0,) * group.size, signals=window.signals + group.size))
        made = cls(context, window, runtime, signals, memory)
        try:
            if group.rank == 0:
                await context.store.set("unique_id", await anyio.to_thread.run_sync(runtime.nccl.unique_id))
            unique_id = await context.store.get("unique_id", math.inf)
            opening = partial(made._stream.open, group.size, group.rank, unique_id, config, memory)
            del memory  # an error keeps this frame
            await made._lanes.run(_SIGHTS, opening, context.mailbox)
            await context.all_connected()
        except BaseException:
            made.abort()
            raise
        return made

    @property
    def stream(self) -> WindowStream:
        """The stream, with the communicator."""
        return self._stream

    def memory(self, rank: int) -> Tensor | None:
        return self._memory if rank == self._rank else None

    def load(self, slot: int) -> int:
        return self._signals.window.load(slot)

    # -- operations ---------------------------------------------------------------------------------------------------

    def submit(self, batch: Sequence[Submission]) -> None:
        for submission in batch:
            op = submission.op
            if isinstance(op, (WindowGet, WindowAccumulate)):
                raise NotImplementedError(
                    f"backend 'nccl' cannot {op.kind}: NCCL's one-sided calls only write; {op} needs another way, such "
                    f"as a put by rank {op.peer}"
                )
            if self._device.capturing():
                raise RuntimeError(f"{op} cannot become part of a CUDA graph: it needs the host")
        for submission in batch:
            op = submission.op
            if isinstance(op, WindowWait):
                self._wait(submission, op)
                continue
            if isinstance(op, WindowPut):
                submission.work.order = flight = StreamPosition(self._device, immediate=False)
                job = partial(self._put, submission, op, self._device.current_stream().record(), flight)
            else:
                job = partial(self._follow, submission)
            self._lanes.put(_PUTS, partial(self._guarded, submission, job))

    def _guarded(self, submission: Submission, job: Done) -> None:
        """Run ``job`` on a lane. An exception breaks the comm, not the thread, and stops the window."""
        if self._ended:
            submission.work.settle(self._closed())
        elif not self._failed:
            try:
                job()
            except Exception as exc:
                self._fail(submission.op, exc)
                if self._ended:
                    submission.work.settle(self._closed())

    def _fail(self, op: Op, exc: Exception) -> None:
        self._failed = True
        if self._ended:
            return
        exc.__traceback__ = None  # its frames hold the memory
        if not isinstance(exc, BrokenError):
            error = BackendError(f"nccl could not run {op}: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            exc = error
        self._on_error(exc)

    def _closed(self) -> ClosedError:
        return ClosedError(f"window {self._number} of comm {self._name!r} is closed")

    def _put(self, submission: Submission, op: WindowPut, ready: Event, flight: StreamPosition) -> None:
        """Issue a put. On the lane of puts."""
        if not self._stream.passed(ready):
            submission.work.settle(self._closed())
            return
        (tensor,) = submission.inputs
        with self._stream.lock:
            if op.peer == self._rank:
                place = self._memory[op.start : op.start + op.nbytes].view(op.dtype)
                self._stream.communicator.stream.run(partial(windows.put, place, tensor))
            else:
                self._issue(tensor, op)
            self._last_put = flight
            self._stream.when_passed(flight, submission.work.settle, submission)

    def _issue(self, tensor: Tensor, op: WindowPut) -> None:
        """Queue the pieces of a put to another rank."""
        stream, piece = self._stream.communicator.stream, self._piece
        start = tensor.data_ptr()
        if arithmetic.is_plain(tensor) and self._base <= start <= self._base + len(self._memory) - op.nbytes:
            self._issue_piece(op.peer, start, op.nbytes, op.start)  # the tensor lies in the window
            return
        if arithmetic.is_plain(tensor):
            data = bytes_of(tensor)
        else:
            data = self._device.empty(op.nbytes, stream)
            stream.run(partial(arithmetic.write, data.view(op.dtype).view(tensor.shape), tensor))
        for first in range(0, op.nbytes, len(piece)):
            part = data[first : first + len(piece)]
            stream.run(partial(piece[: len(part)].copy_, part))  # behind the put of the piece before
            self._issue_piece(op.peer, piece.data_ptr(), len(part), op.start + first)

    def _issue_piece(self, peer: int, address: int, nbytes: int, offset: int) -> None:
        if nbytes:
            self._stream.put(address, nbytes, peer, offset)
            self._sent[peer] += 1

    def _follow(self, submission: Submission) -> None:
        """Have a signal or a fence follow the puts before it. On the lane of puts."""
        op = submission.op
        assert isinstance(op, (WindowSignal, WindowFence)), op
        act = partial(self._signal, submission, op, tuple(self._sent))
        if self._last_put is None or self._last_put.over:
            act()
            return
        with self._stream.lock:
            self._last_put = StreamPosition(self._device)
            self._stream.when_passed(self._last_put, act)

    def _signal(self, submission: Submission, op: WindowSignal | WindowFence, sent: Sequence[int]) -> None:
        """Tell the target of a signal or a fence how many of this rank's puts have passed, then of the signal."""
        for peer in range(self._size) if op.peer is None else [op.peer]:
            if sent[peer] > self._told[peer]:
                self._told[peer] = sent[peer]
                number = WindowSignal(self._number, peer, self._counts + self._rank, sent[peer], False)
                self._signals.submit(number, _nothing)
        self._signals.submit(op, submission.work.settle)

    # -- seeing puts --------------------------------------------------------------------------------------------------

    def _wait(self, submission: Submission, op: WindowWait) -> None:
        work = submission.work
        work.order = flight = StreamPosition(self._device, immediate=False)
        inner = self._signals.submit(op, partial(self._came, submission, flight))
        self._waits[work] = inner
        if inner.done() or self._refusal is not None:
            self._waits.pop(work, None)
            if self._refusal is not None:
                work.settle(self._refusal)

    def _came(self, submission: Submission, flight: StreamPosition, error: AsyncCommError | None) -> None:
        """Show the puts before a signal that has come, and settle its wait. By the side channel, in its locks."""
        work = submission.work
        self._waits.pop(work, None)
        if error is not None or work.done():
            return
        if self._sees_all():
            flight.pass_()
            work.settle()
            return
        self._lanes.put(_SIGHTS, partial(self._guarded, submission, partial(self._see, flight, work.settle)))

    def show(self, op: Op, done: Done) -> None:
        """Call ``done`` when all puts that were fenced before can be read here, or none will. From any thread."""

        def job() -> None:
            try:
                if not (self._ended or self._failed):
                    self._see(StreamPosition(self._device), done)
                    return
            except Exception as exc:
                self._fail(op, exc)
            done()

        if self._sees_all():
            done()
        else:
            self._lanes.put(_SIGHTS, job)

    def _sees_all(self) -> bool:
        """Whether the stream has waited for all puts that were announced; False if that is unsure. From any thread."""
        if not self._stream.lock.acquire(blocking=False):
            return False
        try:
            return not self._new_puts() and (self._last_sight is None or self._last_sight.over)
        finally:
            self._stream.lock.release()

    def _new_puts(self) -> dict[int, int]:
        """The number of puts, by origin, that were announced and not waited for. With the stream's lock held."""
        new = {rank: self.load(self._counts + rank) - seen for rank, seen in enumerate(self._seen)}
        return {rank: count for rank, count in new.items() if count > 0}

    def _see(self, flight: StreamPosition, done: Done) -> None:
        """Let the stream wait for the puts that were announced, and call ``done`` when they are there. On a lane."""
        with self._stream.lock:
            new = self._new_puts()
            if new:
                for rank, count in new.items():
                    self._seen[rank] += count
                self._stream.wait(new)
            if new or not (self._last_sight is None or self._last_sight.over):
                self._last_sight = flight
                self._stream.when_passed(flight, done)
                return
        flight.pass_()
        done()

    def before_await(self, work: Work[Any]) -> None:
        inner = self._waits.get(work)
        if inner is not None:
            self._signals.window.before_await(inner)
        elif not self._device.capturing():
            with self._device.looking():
                self._poller.before_await(self._stream.communicator.stream.handle, until=work.done)

    def before_block(self, work: Work[Any]) -> None:
        inner = self._waits.get(work)
        if inner is not None:
            self._signals.window.before_block(inner)

    # -- ending -------------------------------------------------------------------------------------------------------

    def end_waits(self, error: AsyncCommError) -> None:
        self._refusal = error
        for work, inner in list(self._waits.items()):
            work.settle(error)
            inner.settle()

    def abort(self) -> None:
        self._end()
        self._signals.window.abort()

    def close(self) -> None:
        self._end()
        self._signals.window.close()

    @property
    def ended(self) -> bool:
        """Whether the window was closed or aborted."""
        return self._ended

    def _end(self) -> None:
        with self._ending_lock:
            if self._ending is not None:
                return
            self._ended = True
            self._ending = in_background("asynccomm-nccl-window", self._free)

    def _free(self) -> None:
        """End the communicator without the other ranks: a window that closes in order has waited for them before."""
        self._stream.end()
        self._lanes.end()
        if self._lanes.join(LEAVE_SECONDS):
            self._memory = self._piece = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._stream.give_back()

    def join(self, seconds: float) -> bool:
        """Block until the communicator has ended; False if that took longer. After ``close`` or ``abort``."""
        assert self._ending is not None
        return self._ending.join(seconds)


def _nothing(error: AsyncCommError | None) -> None:
    """Ignore the end of a call: the side channel itself reports errors that break the comm."""
