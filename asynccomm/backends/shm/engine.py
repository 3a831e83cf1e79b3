"""One rank's engine: takes operations and moves them on, whoever has a moment to drive it.

It has no thread of its own and never waits. It is driven by

1. ``submit`` itself: where the peers are there already, a small operation is over before the call returns;
2. a task that is about to wait (``hurry``), which looks out for a late peer for a moment;
3. the event loop, when a peer rings;
4. the worker thread (``progress_thread.py``): large transfers, calls from threads without the loop, and callers that
   block (``relieve``).

Only one thread drives at a time. One that finds another at it leaves word (``_news``) and goes; whoever drives looks
for word once more after giving up the lock, so none is lost.

How they go to sleep and are woken: ``doorbell.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, final

import torch

from asynccomm.backends.base import BackendContext, Submission
from asynccomm.backends.shm.algorithms import Progress
from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.bootstrap import Circle
from asynccomm.backends.shm.bundles import Bundle, cut
from asynccomm.backends.shm.doorbell import Bell, Bells
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import Layout, State, Word
from asynccomm.backends.shm.lowering import start
from asynccomm.backends.shm.p2p import Messages
from asynccomm.backends.shm.progress_thread import Turn, Worker
from asynccomm.backends.shm.rings import Mapped
from asynccomm.backends.shm.settings import Settings
from asynccomm.core.work import Work
from asynccomm.errors import BackendError, BrokenError, PeerLostError

SLICE_SECONDS: Final = 1e-3  # that one call may drive: a loop's other tasks must not starve
CATCH_UP_SECONDS: Final = 0.02  # at most, of work that comes before a failure of another rank
LOCK_SECONDS: Final = 1.0  # to wait for whoever drives, who may have lost its core in the middle of a step
MOST_SKIPPED: Final = 64  # awaits in a row that do not look out for peers, when that had not paid off


@final
class Engine:
    """Moves the operations of one rank of one comm.

    Args:
        settings: the same on all ranks.
        patience: seconds to look out for a late peer before going to sleep.
        stretch: seconds that the worker is at it before it offers its core to others.
    """

    def __init__(
        self,
        context: BackendContext,
        layout: Layout,
        settings: Settings,
        circle: Circle,
        worker: Worker,
        patience: float,
        stretch: float,
    ) -> None:
        group = context.group
        words = circle.segment.words
        fence = Fence()
        self.patience = patience
        self.stretch = stretch
        self._loop = context.mailbox.loop
        self._on_error = context.on_error
        self._worker = worker
        self._inline_bytes = settings.inline_bytes
        self._whole_bytes = settings.whole_bytes
        self._words = words
        self._state = layout.word(group.rank, Word.STATE)
        self._states = [layout.word(rank, Word.STATE) for rank in range(group.size)]
        self._place = layout.word(group.rank, Word.PLACE)
        homes = [(member.host, member.pid) for member in context.members]
        self._places = [  # ranks of one process have one worker, which is not to keep off itself
            layout.word(rank, Word.PLACE) for rank, home in enumerate(homes) if home != homes[group.rank]
        ]
        # neither of these three may refer to this engine: a cycle would keep the segment until the next collection
        self._bells = Bells(group.rank, layout, words, fence, circle.bells)
        self._board = Board(group.rank, layout, words, circle.segment.data, fence, self._bells.ring_all)
        self._finished: deque[Submission | Bundle] = deque()  # to be settled when the lock is free
        self._faults: deque[BrokenError] = deque()
        self._grown = grown = deque[tuple[Submission, int]]()  # receives that turned out to be of so many bytes
        self._messages = Messages(
            group.rank,
            Mapped(layout, words, circle.segment.raw, circle.segment.data.data_ptr()),
            fence,
            self._bells.ring,
            self._finished.append,
            self._faults.append,
            lambda receive, nbytes: grown.append((receive, nbytes)),
        )
        self._lock = threading.Lock()  # of whoever drives
        self._news = False  # something has happened since somebody began to drive
        self._inbox: deque[Submission | Bundle] = deque()
        self._queue: deque[Submission | Bundle] = deque()  # collectives, the first under way
        self._current: Progress | None = None
        self._dead = False
        self._gone: set[int] = set()  # ranks that have closed
        # operations for the worker: counted where they are submitted, and where they are done
        self._large_in = self._large_out = 0
        self._waited: set[Work[Any]] = set()  # operations that do not wait for the loop
        self._with_worker = False
        self._dozing = False  # the worker may be asleep until it is rung
        self._arming = False  # the loop will look after us soon
        self._skip = 0  # awaits that do not look out for peers
        self._skipped = 0

    # -- from the comm ------------------------------------------------------------------------------------------------

    def submit(self, batch: Sequence[Submission]) -> None:
        """Take operations, and move them as far as they go at once. In order; from any thread."""
        items: Sequence[Submission | Bundle] = batch
        if len(batch) != 1 or batch[0].members:
            items = cut(batch, self._board.size, self._board.chunk, self._whole_bytes)
        large = False
        for item in items:
            if item.nbytes > self._inline_bytes:
                self._large_in += 1
                large = True
            self._inbox.append(item)
        if large:
            self._to_worker()
        elif asyncio._get_running_loop() is self._loop:
            self._drive(arm=False)
            if not self._arming and (self._queue or self._messages.pending):
                self._arming = True
                self._loop.call_soon(self._arm)
        else:
            self._drive()
            for submission in batch:
                if not submission.work.done():
                    self._without_loop(submission.work)

    def hurry(self, work: Work[Any]) -> None:
        """A task on the loop is about to wait for ``work``: look out for the peers for a moment, if that pays."""
        if self._large or self._waited or not self.patience:
            return
        if self._skipped < self._skip:
            self._skipped += 1
            return
        self._skipped = 0
        if self._look_out(work):
            self._skip = 0
        else:
            self._skip = min(2 * self._skip + 1, MOST_SKIPPED)

    def relieve(self, work: Work[Any]) -> None:
        """A thread is about to block for ``work``: it must not need the loop from now on."""
        if not self._large and (not self.patience or self._look_out(work)):
            self._drive()
        if not work.done():
            self._without_loop(work)

    def _look_out(self, work: Work[Any]) -> bool:
        """Drive until ``work`` is done, for as long as patience goes; returns whether it is."""
        deadline = time.perf_counter() + self.patience
        while not work.done():
            left = deadline - time.perf_counter()
            if left <= 0 or self._dead or not self._drive(left):
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
        return self._large_in != self._large_out  # may be seen a little late, never for good

    def _arm(self) -> None:
        self._arming = False
        self._drive()

    # -- driving ------------------------------------------------------------------------------------------------------

    def on_bell(self, bell: int) -> None:
        """The loop's bell was rung."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(bell)
        self._drive()

    def _drive(self, patience: float = 0.0, *, arm: bool = True) -> bool:
        """Move everything that can be moved; returns whether this thread did so. From any thread.

        Args:
            patience: seconds to look out for peers as long as nothing gets finished.
            arm: ask the peers to ring if something is left waiting.
        """
        if torch.is_inference_mode_enabled():  # the caller's; views made in it could not be written to later
            with torch.inference_mode(False):
                return self._drive(patience, arm=arm)
        self._news = True
        drove = False
        while self._news and not self._large and not self._dead and self._lock.acquire(blocking=False):
            try:
                self._news = False
                self._run(patience, arm)
            finally:
                self._release()
            drove = True
        if self._large:
            self._to_worker()
        return drove

    def _run(self, patience: float, arm: bool) -> None:
        if self._dead:  # since the caller has looked
            return
        bells, messages = self._bells, self._messages
        bells.disarm()
        until = 0.0
        started = 0.0
        while True:
            moved = self._step()
            if self._dead or self._large or not (self._queue or messages.pending or self._inbox):
                return
            if moved:
                now = time.perf_counter()
                started = started or now
                if now - started < SLICE_SECONDS:
                    continue
                if self._waited:
                    self._to_worker()
                else:
                    bells.ring_own_loop()  # which has other things to do, too
                return
            if patience and not self._finished and not self._news:
                now = time.perf_counter()
                until = until or now + patience
                if now < until:
                    os.sched_yield()  # whom we wait for may need this core
                    continue
            if not arm and not self._waited:
                return
            bells.arm(Bell.WORKER if self._waited else Bell.LOOP)
            if not self._step():
                return
            bells.disarm()

    def _step(self, *, one: bool = False) -> bool:
        """Move each lane as far as it goes, or ``one`` step; returns whether anything moved.

        If not, then all there is waits for other ranks, and was looked at after this began.
        """
        moved = False
        queue, inbox = self._queue, self._inbox
        try:
            while inbox:
                item = inbox.popleft()
                if item.op.p2p and isinstance(item, Submission):
                    self._messages.submit(item)
                else:
                    queue.append(item)
            while queue and (one or not self._large):
                current = self._current
                if current is None:
                    current = self._current = start(self._board, queue[0], self._whole_bytes)
                got_on = next(current, None)
                if got_on is None:
                    self._current = None
                    self._finished.append(queue.popleft())
                elif not got_on:
                    break
                moved = True
                if one:
                    break
            if self._messages.progress():
                moved = True
            if self._gone and not moved:
                self._miss_the_gone()
        except BrokenError as exc:
            self._faults.append(exc)
        except BaseException as exc:  # out of memory, Ctrl-C, or a bug: the peers would wait for ever
            what = f" in {self._queue[0].op}" if self._queue else ""
            error = BackendError(f"shm failed{what}: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            self._faults.append(error)
            if not isinstance(exc, Exception):
                self._dead = True  # a step that was cut short cannot be taken up again
                raise
        if self._grown:
            self._count_the_grown()
        if self._faults:
            self._dead = True
        return moved and not self._dead

    def _count_the_grown(self) -> None:
        """What turned out to be large is for the worker from now on."""
        while self._grown:
            submission, nbytes = self._grown.popleft()
            if submission.nbytes <= self._inline_bytes < nbytes:
                self._large_out -= 1  # one more is in than out; the other count is not this thread's to change
            submission.nbytes = max(submission.nbytes, nbytes)

    def _release(self) -> None:
        """Give up driving, and tell what came of it."""
        finished: list[Submission] = []
        faults: list[BrokenError] = []
        while self._finished:
            item = self._finished.popleft()
            if isinstance(item, Submission):
                finished.append(item)
            else:
                finished += item.submissions
            if self._large and item.nbytes > self._inline_bytes:
                self._large_out += 1
        if self._dead:
            faults = list(self._faults)
            self._faults.clear()
            self._drop()
        self._lock.release()
        for submission in finished:
            submission.work.settle(submission.error)
            if self._waited:
                self._waited.discard(submission.work)
        for fault in faults:
            self._on_error(fault)

    # -- on the worker ------------------------------------------------------------------------------------------------

    def _to_worker(self) -> None:
        if not self._with_worker:
            self._with_worker = True
            self._worker.take(self)
        elif self._dozing:
            self._dozing = False
            self._worker.ring()

    def turn(self) -> Turn:
        """One step of everything, on the worker."""
        self._lock.acquire()
        turn = Turn.OVER
        try:
            self._news = self._dozing = False
            self._bells.disarm()
            if not self._dead:
                turn = Turn.MOVED if self._step(one=True) else Turn.STUCK
            if self._dead or not (self._large or self._waited):
                self._with_worker = False
                self._words[self._place] = 0
                turn = Turn.OVER
                if not self._dead:
                    self._run(0.0, True)  # what is left is the loop's
        finally:
            self._release()
        if turn is Turn.OVER and (self._news or self._large or self._waited):
            self._drive()
            if self._waited:
                self._to_worker()
        return turn

    def doze(self) -> bool:
        """The worker is about to sleep: have the peers ring; False if there is something to do."""
        self._lock.acquire()
        try:
            self._news = False
            if self._dead or not (self._large or self._waited):
                return False  # it shall have its last turn
            self._dozing = True
            self._words[self._place] = 0
            self._bells.arm(Bell.WORKER)
            if self._step(one=True):
                self._dozing = False
        finally:
            self._release()
        if self._news:  # somebody came while this held the lock
            self._dozing = False
        return self._dozing

    def settle_on(self, cpu: int) -> list[int]:
        """The worker is awake on processor ``cpu``; returns those that other processes' are awake on."""
        words = self._words
        words[self._place] = cpu + 1
        return [place - 1 for word in self._places if (place := words[word])]

    def failed(self, exc: Exception) -> None:
        """A turn raised: a bug. The comm ends; that is better than to wait for ever."""
        error = BackendError(f"shm failed: {type(exc).__name__}: {exc}")
        error.__cause__ = exc
        self._dead = True
        self._on_error(error)

    # -- peers --------------------------------------------------------------------------------------------------------

    def ended(self, rank: int) -> None:
        """Nobody is at the other end of ``rank``'s pipe any more. On the worker."""
        state = self._words[self._states[rank]]
        if self._dead:
            return
        if state == State.LEFT:
            with self._lock:
                self._gone.add(rank)
            self._drive()
            return
        if state == State.ABORTED:
            error: BrokenError = BackendError(f"rank {rank} has aborted the comm")
        else:
            error = PeerLostError(rank, "its process ended")
        self._on_error(error)

    def catch_up(self) -> None:
        """Do what can be done without waiting: what a rank posted before it failed is as good as ever."""
        if self._dead or not self._lock.acquire(timeout=LOCK_SECONDS):
            return
        until = time.thread_time() + CATCH_UP_SECONDS  # not counting that of others on a busy machine
        try:
            while not self._dead and self._step(one=True) and time.thread_time() < until:
                pass
        finally:
            self._release()

    def _miss_the_gone(self) -> None:
        """Fail when what is left needs a rank that has closed in good order."""
        for rank in self._gone:
            if self._current is not None and self._board.behind(rank):
                raise BackendError(f"rank {rank} has closed the comm and takes no part in {self._queue[0].op}")
            for submission in self._messages.gone(rank):
                raise BackendError(f"rank {rank} has closed the comm, and {submission.op} needs it")

    # -- ending -------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Tell the peers, who will see the pipe close, that this is in good order."""
        self._dead = True
        if self._words[self._state] == State.HERE:
            self._words[self._state] = State.LEFT
        Fence().full()  # the other one belongs to whoever drives

    def abort(self) -> None:
        """Let go of everything at once, or as soon as whoever drives does. From any thread."""
        self._dead = True
        if self._words[self._state] == State.HERE:
            self._words[self._state] = State.ABORTED
            Fence().full()  # the other one belongs to whoever drives
        if self._lock.acquire(blocking=False):
            self._release()
        if self._with_worker:
            self._worker.ring()

    def idle(self, timeout: float) -> bool:
        """Wait until nobody drives any more, at most ``timeout`` seconds; after ``abort``."""
        if not self._lock.acquire(timeout=timeout):
            return False
        self._release()
        return True

    def _drop(self) -> None:
        self._inbox.clear()
        self._queue.clear()
        self._current = None
        self._messages.drop()
        self._grown.clear()
        self._large_out = self._large_in
        self._waited.clear()
