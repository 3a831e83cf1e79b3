"""Windows in shared memory: one segment for each window, of which every rank maps the whole.

An operation is one copy in the call, without any thread of the target. Operations that are large, or that would wait
for a lock, go to a thread of the window, and later operations queue up behind them.

Operations of plain tensors take the fast path, in C (``_windows.c``), unless others are queued.

A rank that waits for a signal spins for a moment, as for a collective, and then sleeps without using the CPU: its event
loop watches a doorbell of the window, and the progress thread does so for a caller that blocks.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, Self, final

from torch import Tensor

from asynccomm.backends.base import BackendContext, BackendWindow, FastCalls, FastWindow, Submission
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.backends.shm.bakery import BakeryLock
from asynccomm.backends.shm.bootstrap import PeerMapping, bootstrap_segment, report_unsupported
from asynccomm.backends.shm.doorbell import Bell
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.progress_thread import ProgressResult, ProgressThread
from asynccomm.backends.shm.window_parts import GuestPart, ShmPart, WindowLayout
from asynccomm.backends.spinning import SHORT_WAIT_SECONDS
from asynccomm.backends.windows import SignalWaits
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, BackendError
from asynccomm.ops import (
    SignalCmpOp,
    WindowAccumulate,
    WindowFence,
    WindowGet,
    WindowInfo,
    WindowOp,
    WindowPut,
    WindowSignal,
    WindowWait,
)

_KINDS: Final = WindowPut, WindowGet, WindowSignal, WindowWait, WindowFence  # in the order of ``_windows.c``
CLOSE_SECONDS: Final = 5.0  # for the thread to finish its copy


class WindowPace(NamedTuple):
    """When to copy in the call, and for how long to look out for a signal before sleeping."""

    inline_bytes: int
    patience: float  #: seconds


@final
class ShmWindow(BackendWindow):
    """One rank's access to a window in shared memory."""

    def __init__(
        self,
        context: BackendContext,
        layout: WindowLayout,
        mapping: PeerMapping,
        worker: ProgressThread,
        pace: WindowPace,
    ) -> None:
        rank, core = context.group.rank, load_core()
        store, copy_large = (None, None) if isinstance(core, CoreUnavailable) else (core.signal, core.copy)
        self._loop = context.mailbox.loop
        self._on_error = context.on_error
        self._rank = rank
        self._mapping = mapping
        self._worker = worker
        self._layout = layout
        self._store = store
        self._words = mapping.segment.words
        self._asleep = [layout.bell(rank, bell) for bell in Bell]
        self._parts = [
            ShmPart(mapping.segment, layout, rank, peer, mapping.bells[peer], store, copy_large)
            for peer in range(context.group.size)
        ]
        self._words[layout.atomic(rank)] = store is not None
        self._waits = SignalWaits(self._parts[rank].load)
        self._sleeping = threading.Lock()  # held while bells are armed
        self._fence = Fence()
        self._bell = mapping.bells[rank][Bell.LOOP]
        self._inline_bytes, self._patience = pace
        self.awake: float = self._patience  #: for the progress thread
        self.stretch = math.inf  #: for the progress thread: a look does not take long
        self._lane = OrderedExecutor(f"asynccomm-window-{layout.window.number}", 1)
        self._queued = 0  # jobs of the lane that are not done
        self._fast: Any = None  # ``_core.FastWindow``
        self._applying = threading.Lock()  # held while an operation is applied, and while the lane's jobs are counted
        self._blocked: set[Work[Any]] = set()  # that must be settled without the event loop
        self._guests: list[GuestPart] = []
        self._ended = False
        self.closed: bool = False
        self._loop.add_reader(self._bell, self._on_bell)

    @classmethod
    async def connect(
        cls, context: BackendContext, window: WindowInfo, worker: ProgressThread, pace: WindowPace, guests: int = 0
    ) -> Self:
        """Make the window. Collective; a cancelled call cleans up.

        Args:
            guests: the number of guest parts that each rank may have (see ``guest``).

        Raises: see ``bootstrap_segment``.
        """
        room = context.store.prefix(f"window {window.number}")
        context = replace(context, store=room, announcements=None)
        layout = WindowLayout(window, guests)
        with contextlib.ExitStack() as unless_connected:
            try:
                bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            except OSError as exc:  # no descriptors are left; the other ranks must be informed
                await report_unsupported(context, str(exc.strerror))
            unless_connected.callback(os.close, bell)
            settings: Mapping[str, int] = {}
            mapping = await bootstrap_segment(context, settings, layout, (bell, worker.bell))
            unless_connected.callback(mapping.close)
            for fd in (mapping.liveness_fd, *mapping.liveness_fds):  # the comm watches the ranks already
                mapping.descriptors.close_one(fd)
            made = cls(context, layout, mapping, worker, pace)
            unless_connected.pop_all()
        try:
            await context.all_connected()
        except BaseException:
            made.close()
            raise
        for part in made._parts:
            part.decide()
        return made

    def fast_path(self, calls: FastCalls | None) -> FastWindow | None:
        signals = [part.signal_lock for part in self._parts]
        if calls is None or any(signals):
            return None
        layout = self._layout
        parts = [
            (
                layout.memory(rank),
                nbytes,
                layout.signals(rank),
                [layout.bell(rank, bell) for bell in Bell],
                self._mapping.bells[rank],
            )
            for rank, nbytes in enumerate(layout.window.sizes)
        ]
        self._fast = load_core().FastWindow(
            calls,
            self._mapping.segment.raw,
            self._rank,
            layout.window.number,
            layout.window.signals,
            self._inline_bytes,
            parts,
            _KINDS,
            tuple(SignalCmpOp),
        )
        return self._fast  # type: ignore[no-any-return]

    def memory(self, rank: int) -> Tensor:
        return self._parts[rank].memory

    def load(self, slot: int) -> int:
        return self._parts[self._rank].load(slot)

    def guest(self) -> GuestPart:
        """This rank's part, for threads that serve ranks which cannot map it. As often as ``connect`` made room for."""
        rank = self._rank
        origin = self._layout.size + len(self._guests)
        accumulating, signalling = [
            ShmPart(self._mapping.segment, self._layout, origin, rank, self._mapping.bells[rank], self._store)
            for _ in range(2)
        ]
        signalling.decide()
        made = GuestPart(accumulating, signalling, self._layout.window.signals)
        self._guests.append(made)
        return made

    # -- operations ---------------------------------------------------------------------------------------------------

    def submit(self, batch: Sequence[Submission]) -> None:
        for submission in batch:
            op = submission.op
            assert isinstance(op, WindowOp), op
            if isinstance(op, WindowWait):
                self._waits.add(submission)
                self.look()
            else:
                self._apply_or_queue(op, submission)

    def _apply_or_queue(self, op: WindowOp, submission: Submission) -> None:
        lock = self._lock_for(op)
        with self._applying:
            if self._queued:
                self._queue(submission, lock, taken=False)
                return
            if lock is not None:
                lock.take()
            if submission.nbytes > self._inline_bytes or (lock is not None and not lock.held()):
                self._queue(submission, lock, taken=True)
                return
            self._apply(submission, lock)
        self._settle(submission)

    def _lock_for(self, op: WindowOp) -> BakeryLock | None:
        if op.peer is None:
            return None
        part = self._parts[op.peer]
        if isinstance(op, WindowAccumulate):
            return part.memory_lock
        return part.signal_lock if isinstance(op, WindowSignal) else None

    def _apply(self, submission: Submission, lock: BakeryLock | None) -> None:
        op = submission.op
        assert isinstance(op, WindowOp), op
        try:
            if not isinstance(op, WindowFence):  # earlier operations are over
                assert op.peer is not None
                self._parts[op.peer].apply(submission)
        finally:
            if lock is not None:
                lock.leave()

    def _queue(self, submission: Submission, lock: BakeryLock | None, *, taken: bool) -> None:
        self._count(1)
        self._lane.put("window", partial(self._job, submission, lock, taken))

    def _job(self, submission: Submission, lock: BakeryLock | None, taken: bool) -> None:
        """Run a queued operation. On the lane; alone, as all later operations are queued."""
        try:
            if lock is not None and not taken:
                lock.take()
            if self._ended if lock is None else not lock.wait(lambda: self._ended):
                return
            self._apply(submission, lock)
        except Exception as exc:
            error = BackendError(f"shm failed in {submission.op}: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            self._on_error(error)
        else:
            self._settle(submission)
        finally:
            with self._applying:
                self._count(-1)

    def _count(self, jobs: int) -> None:
        self._queued += jobs
        if self._fast is not None:
            self._fast.queued = self._queued

    def _settle(self, submission: Submission) -> None:
        op = submission.op
        if isinstance(op, WindowSignal) and op.peer == self._rank:
            self.look()
        submission.work.settle()

    # -- waiting for signals ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Settle the waits for signals that have come, and have the peers ring for the others. From any thread."""
        self._settle_waits()
        if not self._waits or self._ended:
            return
        with self._sleeping:
            for bell in (Bell.LOOP, Bell.WORKER) if self._blocked else (Bell.LOOP,):
                self._words[self._asleep[bell]] = 1
            self._fence.full()
        self._settle_waits()  # a signal may have come before its rank could see that it is to ring

    def _settle_waits(self) -> None:
        self._waits.look()
        if self._fast is not None:
            self._fast.waited = self._waits.waited

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self.look()

    def before_await(self, work: Work[Any]) -> None:
        if isinstance(work.op, WindowWait) and self._patience and self._waits.waited <= SHORT_WAIT_SECONDS:
            self._spin(work)

    def _spin(self, work: Work[Any]) -> bool:
        until = time.perf_counter() + self._patience
        while not work.done():
            if time.perf_counter() > until:
                return False
            os.sched_yield()  # the late peer may need this core
            self._settle_waits()
        return True

    def before_block(self, work: Work[Any]) -> None:
        if not isinstance(work.op, WindowWait) or (self._patience and self._spin(work)):
            return
        self._blocked.add(work)
        self.look()
        if not work.done():
            self._worker.take(self)

    # -- on the progress thread ---------------------------------------------------------------------------------------

    def turn(self) -> ProgressResult:
        """Look at the signals that blocked callers wait for."""
        self._settle_waits()
        for work in self._blocked.copy():
            if work.done():
                self._blocked.discard(work)
        return ProgressResult.STUCK if self._blocked and not self._ended else ProgressResult.OVER

    def interrupt(self) -> None:
        """A turn is short."""

    def settle_on(self, cpu: int) -> Sequence[int]:
        """No other process's thread moves data for this window."""
        return ()

    def doze(self) -> bool:
        """Have the peers ring before the progress thread sleeps."""
        self.look()
        return not self._ended and not any(work.done() for work in self._blocked.copy())

    def failed(self, exc: Exception) -> None:
        """Break the comm: a caller blocks for a signal that cannot be seen any more."""
        error = BackendError(f"shm failed: {type(exc).__name__}: {exc}")
        error.__cause__ = exc
        self._on_error(error)

    # -- ending -------------------------------------------------------------------------------------------------------

    def end_waits(self, error: AsyncCommError) -> None:
        self._waits.end(error)
        if self._blocked:
            self._worker.ring()

    def abort(self) -> None:
        self._ended = True
        if self._fast is not None:
            self._fast.ended = True
        self._waits.end()
        for guest in self._guests:
            guest.end()
        if self._blocked:
            self._worker.ring()

    def close(self) -> None:
        self.abort()
        if self.closed:
            return
        self.closed = True
        for guest in self._guests:
            guest.close()
        self._lane.end()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._bell)
        self._mapping.close()
        os.close(self._bell)
        self._fast = None  # it holds the comm's backend, which holds its windows: a cycle through C

    def join(self) -> None:
        """Block until the thread of the window has finished its copy. After ``abort``."""
        self._lane.join(CLOSE_SECONDS)
