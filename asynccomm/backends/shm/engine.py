"""The progress engine of one rank: advances the operations of a comm, from any of several threads.

The engine has no thread of its own and never waits. Its drivers are:

1. ``submit`` itself: when the peers have posted already, a small operation is done before the call returns;
2. a task that is about to wait (``before_await``), which spins for a late peer, for the spin budget (``patience``);
3. the event loop, when a peer rings its doorbell;
4. the progress thread (``progress_thread.py``): for large transfers, calls from threads without an event loop, and
   callers that block (``before_block``).

Only one thread drives at a time (``combining_lock.py``): the holder of the lock also serves the others' requests.

``doorbell.py`` describes how ranks go to sleep and are woken.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch

from asynccomm.backends.base import BackendContext, DirectCalls, FastCalls, HeldCall, Submission
from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.bootstrap import PeerMapping
from asynccomm.backends.shm.combining_lock import ANY_TIME, AT_ONCE, Acquire, CombiningLock, within
from asynccomm.backends.shm.doorbell import Bell, Bells
from asynccomm.backends.shm.executor import NO_WAIT, Executor, Pace
from asynccomm.backends.shm.fast_path import Limits, fast_path
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import Layout, State
from asynccomm.backends.shm.lowering import is_large, start
from asynccomm.backends.shm.p2p import Messages
from asynccomm.backends.shm.peer_memory import PeerMemory
from asynccomm.backends.shm.progress_thread import ProgressResult, ProgressThread
from asynccomm.backends.shm.rank_words import RankWords
from asynccomm.backends.shm.reference import Progress
from asynccomm.backends.shm.rings import Mapped
from asynccomm.backends.shm.settings import Settings
from asynccomm.backends.spinning import SHORT_WAIT_SECONDS, waited
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.core.state import CallCounts
from asynccomm.core.work import Work
from asynccomm.errors import BackendError, BrokenError, PeerLostError, describe_exception
from asynccomm.ops import Op

SLICE_SECONDS: Final = 1e-3  # that one call may drive, so that the loop's other tasks do not starve
CATCH_UP_SECONDS: Final = 0.02  # of CPU time at most, to finish earlier operations when another rank has failed
SPIN_SECONDS: Final = 2e-5  # of a spin in the executor in C, which sees only its own run
LOCK_SECONDS: Final = 1.0  # to wait for the lock; its holder may have been preempted in the middle of a step


@final
class Engine:
    """The progress engine of one rank of one comm.

    Args:
        settings: sizes, the same on all ranks.
        patience: the spin budget: seconds to spin for a late peer before sleeping.
        thread_patience: the same for the progress thread.
        stretch: seconds of driving after which the progress thread yields its core.
    """

    def __init__(
        self,
        context: BackendContext,
        layout: Layout,
        settings: Settings,
        mapping: PeerMapping,
        worker: ProgressThread,
        patience: float,
        thread_patience: float,
        stretch: float,
    ) -> None:
        group = context.group
        words = mapping.segment.words
        fence = Fence()
        self.patience = patience
        self.awake: float = min(patience, thread_patience)  #: for the thread while it drives several engines
        self._thread_patience = thread_patience
        self.stretch = stretch
        self._loop = context.mailbox.loop
        self._on_error = context.on_error
        self._worker = worker
        self.inline_bytes: int = settings.inline_bytes  #: larger operations are for the progress thread: ``is_large``
        self._whole_bytes = settings.whole_bytes
        self._lifecycle = RankWords(group.rank, layout, words, context.members)
        # none of these may refer to this engine: a cycle would keep the segment until the next garbage collection
        self._bells = Bells(group.rank, layout, words, fence, mapping.bells)
        core = load_core()
        state = None if isinstance(core, CoreUnavailable) else core.RankPosition()
        peers = PeerMemory(mapping.arenas)
        self._board = Board(group.rank, layout, words, mapping.segment.data, fence, self._bells.ring_all, state, peers)
        self._position = self._board.state
        self._executor = Executor(self._board, mapping.segment.raw, mapping.bells, core)
        if settings.single_copy and self._executor.segment is not None:
            self._executor.segment.single_copy(mapping.liveness_fds)
        self._finished: deque[Submission] = deque()  # done, to be settled after the lock is released
        self._faults: deque[BrokenError] = deque()
        self._grown = grown = deque[tuple[Submission, int]]()  # receives, and larger sizes than expected
        self._messages = Messages(
            group.rank,
            Mapped(layout, words, mapping.segment.raw, mapping.segment.data.data_ptr()),
            fence,
            self._bells.ring,
            self._finished.append,
            self._faults.append,
            lambda receive, nbytes: grown.append((receive, nbytes)),
            self._board.state,
            self._executor.segment,
            self.inline_bytes,
        )
        self._lock = CombiningLock()  # held by the driving thread
        self._inbox: deque[Submission] = deque()
        self._queue: deque[Submission] = deque()  # collectives, the first in progress
        self._current: Progress | None = None
        self._failing = False  # a failure is about to be reported
        self._gone: set[int] = set()  # ranks that have left
        # counts of large operations, which the progress thread drives: submitted, and done
        self._large_in = self._large_out = 0
        self._waited: set[Work[Any]] = set()  # operations that must complete without the event loop
        self._ended_at = 0.0  # time at which the last small collective was done
        self._with_worker = False
        self._dozing = False  # the progress thread may sleep until it is rung
        self._counts: CallCounts | None = None  # of the fast path's calls
        self._oldest: HeldCall | None = None  # the oldest posted message when ``_arm`` last ran
        self._posted: Callable[[HeldCall], Submission] | None = None  # see ``DirectCalls``

    # -- from the comm ------------------------------------------------------------------------------------------------

    def submit(self, batch: Sequence[Submission]) -> None:
        """Submit operations, in order, and advance them as far as possible without waiting. From any thread."""
        large = False
        for item in batch:
            if is_large(item, self.inline_bytes):
                self._large_in += 1
                large = True
            self._inbox.append(item)
            if (item.op.p2p or self._messages.pending) and self._lock.locked():
                self._executor.interrupt()  # C returns from a large operation, which makes way
        if large:
            self._to_worker()
        elif asyncio._get_running_loop() is self._loop:
            # a call that C has begun has seen that peers are late: this rank sleeps next, unless it spins
            late = batch[-1].run is not None and self._last_wait(batch[-1].op) > SHORT_WAIT_SECONDS
            self._drive(arm=late)
            if not late and (self._queue or self._messages.pending):
                self._arm_soon()
        else:
            self._drive()
            for submission in batch:
                if not submission.work.done():
                    self._without_loop(submission.work)

    def withdraw(self, receive: Submission) -> None:
        """Settle a receive: another backend has taken its claim. From any thread."""
        self._messages.withdraw(receive)
        self._drive()

    def fast_path(self, calls: DirectCalls) -> FastCalls | None:
        """See ``Backend.fast_path``."""
        self._counts, self._posted = calls.counts, calls.posted
        limits = Limits(self.inline_bytes, self._whole_bytes, self.patience)
        queues = self._queue, self._inbox
        return fast_path(
            self._executor, calls, limits, self._lock.locked, self.failed, self._arm_soon, self._waited, *queues
        )

    def before_await(self, work: Work[Any]) -> None:
        """Spin for the peers before a task on the loop waits for ``work``, if the last wait was short."""
        counts, position = self._counts, self._position
        if work.op.p2p and counts is not None and work.seq + 1 == counts.messages and work.seq == position.alone:
            position.calls_ahead = False
        short = self._last_wait(work.op) <= SHORT_WAIT_SECONDS
        if short and self.patience and not (self._large or self._waited):
            self._spin(work)

    def _last_wait(self, op: Op) -> float:
        return self._position.message_wait if op.p2p else self._position.collective_wait

    def before_block(self, work: Work[Any]) -> None:
        """Make ``work`` complete without the event loop, before a thread blocks for it."""
        if not self._large and (not self.patience or self._spin(work)):
            self._drive()
        if not work.done():
            self._without_loop(work)

    def _spin(self, work: Work[Any]) -> bool:
        """Drive until ``work`` is done, at most for the spin budget; returns whether ``work`` is done."""
        deadline = time.perf_counter() + self.patience
        while not work.done():
            left = deadline - time.perf_counter()
            if left <= 0 or self._position.dead or not self._drive(left):
                break
        return work.done()

    def _without_loop(self, work: Work[Any]) -> None:
        self._waited.add(work)
        if work.done():
            self._waited.discard(work)
        else:
            self._to_worker()

    @property
    def _large(self) -> bool:
        return self._large_in != self._large_out  # a stale value is corrected by the next check

    def _arm_soon(self) -> None:
        if not self._position.arming:
            self._loop.call_soon(self._arm)
            self._position.arming = True

    def _arm(self) -> None:
        # of tasks that await posted receives, as those of gather() do, the first steps run before the second call; a
        # program that goes on exchanging messages has another one posted by then
        posted, before = self._position.posted, self._oldest
        waiting = self._queue or self._messages.pending or self._inbox
        if posted and (before is None or not waiting) and posted[0] is not before:
            self._oldest = posted[0]
            self._loop.call_soon(self._arm)
            return
        self._position.arming, self._oldest = False, None
        if posted or waiting:  # else C has done all of it
            self._drive()

    # -- driving ------------------------------------------------------------------------------------------------------

    def on_bell(self, bell: int) -> None:
        """Handle a ring of the loop's doorbell."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(bell)
        self._drive()

    def _drive(self, patience: float = 0.0, *, arm: bool = True) -> bool:
        """Advance all operations as far as possible; returns whether this thread did so. From any thread.

        Args:
            patience: seconds to spin for peers while no operation finishes.
            arm: whether to ask the peers to ring if operations are left waiting.
        """
        if torch.is_inference_mode_enabled():  # the caller's mode: views created in it could not be written to later
            with torch.inference_mode(False):
                return self._drive(patience, arm=arm)
        try:
            drove = self._lock.run(self._may_drive, self._run, self._take_results, self._report, patience, arm)
        except BaseException as exc:  # Ctrl-C: operations may be neither driven nor settled
            self.failed(exc)
            raise
        if self._large:
            self._to_worker()
        return drove

    def _may_drive(self) -> bool:
        return not (self._large or self._position.dead)

    def _run(self, patience: float, arm: bool) -> None:
        if self._position.dead:  # set since the caller's check
            return
        bells, messages = self._bells, self._messages
        if self._executor.segment is not None:
            self._executor.resume()
        bells.disarm()
        until = 0.0
        started = 0.0
        pace = NO_WAIT
        while True:
            moved = self._step(pace=pace)
            pace = NO_WAIT
            if self._position.dead or self._large or not (self._queue or messages.pending or self._inbox):
                return
            if moved:
                now = time.perf_counter()
                started = started or now
                if now - started < SLICE_SECONDS:
                    continue
                if self._waited:
                    self._to_worker()
                else:
                    bells.ring_own_loop()  # which runs its other tasks first
                return
            if patience and not self._finished and not self._lock.requested:
                now = time.perf_counter()
                until = until or now + patience
                if now < until:
                    if messages.transferring or (self._executor.running is not None and not messages.pending):
                        pace = Pace(min(until - now, SPIN_SECONDS))
                    else:
                        os.sched_yield()  # the late peer may need this core
                    continue
            if not arm and not self._waited:
                return
            bells.arm(Bell.WORKER if self._waited else Bell.LOOP)
            if not self._step():
                return
            bells.disarm()

    def _step(self, *, one: bool = False, pace: Pace = NO_WAIT) -> bool:
        """Advance collectives and messages as far as possible, or by ``one`` step; returns whether anything advanced.

        Args:
            pace: of C; nothing else waits.

        If nothing advanced, then every operation waits for other ranks, and was checked after this call began.
        """
        moved = False
        queue, inbox = self._queue, self._inbox
        try:
            if self._position.posted:
                self._take_posted()
            while inbox:
                item = inbox.popleft()
                if item.op.p2p:
                    self._messages.submit(item)
                    if item.run is not None:  # here, and not for a posted send: C may have begun another one meanwhile
                        self._position.adopting = False
                else:
                    queue.append(item)
            while queue and (one or not self._large):
                current = self._current
                if current is None:
                    current = self._current = start(self._executor, queue[0], self._whole_bytes)
                if pace is not NO_WAIT and not (self._messages.pending or self._comes_first()):
                    self._executor.drive(pace)
                got_on = next(current, None)
                if got_on is None:
                    self._current = None
                    self._finished.append(queue.popleft())
                elif not got_on:
                    break
                moved = True
                if one:
                    break
            if self._messages.progress(NO_WAIT if queue or self._comes_first() else pace):
                moved = True
            if self._gone and not moved:
                self._miss_the_gone()
        except BrokenError as exc:
            self._faults.append(exc)
        except BaseException as exc:  # out of memory, Ctrl-C, or a bug: without an error, the peers would wait forever
            what = f" in {self._queue[0].op}" if self._queue else ""
            error = BackendError(f"shm failed{what}: {describe_exception(exc)}")
            error.__cause__ = exc
            self._faults.append(error)
            if not isinstance(exc, Exception):
                self._position.dead = True  # an interrupted step cannot be resumed
                raise
        if self._grown:
            self._count_the_grown()
        if self._faults:
            self._position.dead = True
        return moved and not self._position.dead

    def _take_posted(self) -> None:
        """Submit the messages that the fast path has posted.

        While the lock is held, the fast path does not look at messages; so this comes before anything that does. If
        there are posted messages without a lock, a call of ``_arm`` is on its way.
        """
        posted = self._position.posted[:]
        self._position.posted.clear()
        assert self._posted is not None
        for held in posted:
            if not held.work.done():  # else the comm has failed
                self._messages.submit(self._posted(held))

    def _comes_first(self) -> bool:
        """Whether there is something to do before C may wait."""
        return bool(self._inbox or self._finished or self._grown or self._faults)

    def _count_the_grown(self) -> None:
        """Pass receives that have become large on to the progress thread."""
        while self._grown:
            submission, nbytes = self._grown.popleft()
            if submission.nbytes <= self.inline_bytes < nbytes:
                self._large_out -= 1  # as if it were one more in: submitting threads own that count
            submission.nbytes = max(submission.nbytes, nbytes)

    def _hold(self, acquire: Acquire, serve: Callable[[], object]) -> bool:
        """Call ``serve`` with the lock held; returns whether it was acquired."""
        return self._lock.hold(acquire, serve, self._take_results, self._report)

    def _take_results(self) -> tuple[list[Submission], list[BrokenError]]:
        """Take the finished operations and the errors that ``_report`` is to report. With the lock."""
        finished: list[Submission] = []
        faults: list[BrokenError] = []
        while self._finished:
            item = self._finished.popleft()
            finished.append(item)
            if not is_large(item, self.inline_bytes):
                if item.op.p2p:
                    self._position.message_wait = waited(item.work.started, item.nbytes)
                else:  # which waits for others only once the collective before it is done
                    self._position.collective_wait = waited(max(item.work.started, self._ended_at), item.nbytes)
                    self._ended_at = time.monotonic()
            elif self._large:
                self._large_out += 1
        if self._position.dead:
            faults = list(self._faults)
            self._faults.clear()
            self._drop()
        return finished, faults

    def _report(self, finished: list[Submission], faults: list[BrokenError]) -> None:
        """Settle finished operations and report errors. Without the lock."""
        for submission in finished:
            submission.work.settle(submission.error)
            if self._waited:
                self._waited.discard(submission.work)
        for fault in faults:
            self._on_error(fault)

    # -- on the progress thread ----------------------------------------------------------------------------------------

    def _to_worker(self) -> None:
        if not self._with_worker:
            self._with_worker = True
            self._worker.take(self)
        elif self._dozing:
            self._dozing = False
            self._worker.ring()

    def turn(self) -> ProgressResult:
        """Advance all operations by one step, on the progress thread."""
        turns: list[ProgressResult] = []
        self._hold(ANY_TIME, lambda: turns.append(self._turn()))
        (turn,) = turns
        if turn is ProgressResult.OVER and (self._lock.requested or self._large or self._waited):
            self._drive()
            if self._waited:
                self._to_worker()
        return turn

    def _turn(self) -> ProgressResult:
        self._dozing = False
        self._executor.resume()
        self._bells.disarm()
        turn = ProgressResult.OVER
        if not self._position.dead:
            turn = ProgressResult.MOVED if self._step(one=True, pace=self._pace()) else ProgressResult.STUCK
        if self._position.dead or not (self._large or self._waited):
            self._with_worker = False
            self._lifecycle.leave_cpu()
            turn = ProgressResult.OVER
            if not self._position.dead:
                self._run(0.0, True)  # the event loop drives the remaining operations
        return turn

    def _pace(self) -> Pace:
        if self._failing:
            return NO_WAIT
        events = -1 if self._gone else self._worker.events_of(self)  # C does not know that a rank has left
        return Pace(self._thread_patience, self.stretch, events)

    def interrupt(self) -> None:
        """Make a turn in progress return soon. From any thread."""
        self._executor.interrupt()

    def doze(self) -> bool:
        """Arm the progress thread's doorbell before it sleeps; False if it has something to do."""
        self._dozing = False
        self._hold(ANY_TIME, self._doze)
        if self._lock.requested:  # another thread failed to take the lock meanwhile
            self._dozing = False
        return self._dozing

    def _doze(self) -> None:
        if self._position.dead or not (self._large or self._waited):
            return  # the next turn is the last
        self._dozing = True
        self._lifecycle.leave_cpu()
        self._bells.arm(Bell.WORKER)
        if self._step(one=True):
            self._dozing = False

    def settle_on(self, cpu: int) -> list[int]:
        """Publish that the progress thread runs on ``cpu``; returns the CPUs of other processes' progress threads."""
        return self._lifecycle.settle_on(cpu)

    def failed(self, exc: BaseException) -> None:
        """Break the comm after an exception has left an operation half done: it would otherwise never finish."""
        error = BackendError(f"shm failed: {describe_exception(exc)}")
        error.__cause__ = exc
        self._position.dead = True
        self._on_error(error)

    # -- peers --------------------------------------------------------------------------------------------------------

    def ended(self, rank: int) -> None:
        """Handle EOF on the liveness pipe of ``rank``. On the progress thread."""
        state = self._lifecycle.state_of(rank)
        if self._position.dead:
            return
        if state == State.LEFT:
            self._hold(ANY_TIME, lambda: self._gone.add(rank))
            self._drive()
            return
        if state == State.ABORTED:
            error: BrokenError = BackendError(f"rank {rank} has aborted the comm")
        else:
            error = PeerLostError(rank, "its process ended")
        self._on_error(error)

    def drain_before_failure(self) -> None:
        """Finish operations that need not wait, before a failure is reported: posts of a lost rank remain valid."""
        self._failing = True
        self._executor.interrupt()
        if not self._position.dead:
            self._hold(within(LOCK_SECONDS), self._catch_up)

    def _catch_up(self) -> None:
        until = time.thread_time() + CATCH_UP_SECONDS  # CPU time, not wall time: the machine may be busy
        while not self._position.dead and self._step(one=True) and time.thread_time() < until:
            pass

    def _miss_the_gone(self) -> None:
        """Raise BackendError if a pending operation needs a rank that has left."""
        for rank in self._gone:
            if self._current is not None and self._board.behind(rank):
                raise BackendError(f"rank {rank} has closed the comm and takes no part in {self._queue[0].op}")
            for submission in self._messages.gone(rank):
                raise BackendError(f"rank {rank} has closed the comm, and {submission.op} needs it")

    # -- ending -------------------------------------------------------------------------------------------------------

    def unreceived(self) -> list[str]:
        """The messages that have arrived and that no receive has taken, in words. Before ``leave``."""
        found: list[str] = []

        def look() -> None:
            self._messages.progress()
            found.extend(self._messages.unreceived())

        if not self._position.dead:
            self._hold(within(LOCK_SECONDS), look)
        return found

    def leave(self) -> None:
        """Publish that this rank leaves, so that the peers take the EOF on its pipe for an orderly close."""
        self._position.dead = True
        self._lifecycle.end(State.LEFT)
        self._executor.interrupt()

    def withdraw_tensors(self) -> None:
        """Make peers fail that read this rank's tensors from now on: see ``programs``. From any thread."""
        self._lifecycle.withdraw_tensors()

    def abort(self) -> None:
        """Drop all operations now, or when the driving thread releases the lock. From any thread."""
        self._position.dead = True
        self.withdraw_tensors()
        self._lifecycle.end(State.ABORTED)
        self._executor.interrupt()
        self._hold(AT_ONCE, _nothing)
        if self._with_worker:
            self._worker.ring()

    def idle(self, timeout: float) -> bool:
        """Wait until no thread drives, at most ``timeout`` seconds; returns whether that is so. After ``abort``."""
        return self._hold(within(timeout), _nothing)

    def _drop(self) -> None:
        self._inbox.clear()
        self._queue.clear()
        self._position.posted.clear()
        self._current = None
        self._messages.drop()
        self._grown.clear()
        self._large_out = self._large_in
        self._waited.clear()


def _nothing() -> None:
    """Hold the lock for no reason but the work that goes with its release."""
