"""Threads for jobs that block: in order within a lane, in parallel across lanes.

Jobs that finish in order share a lane: for example one lane per direction, peer and tag, since a receive that waits for
its sender must not delay any other job. A lane has a thread only while it has jobs.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import TypeVar, final

from asynccomm.backends.latch import Latch
from asynccomm.core.mailbox import Mailbox

T = TypeVar("T")

_log = logging.getLogger("asynccomm")

IDLE_SECONDS = 10.0  # a thread without a job ends after this time


@final
class _DaemonPool:
    """Daemon threads that run functions and stay for ``IDLE_SECONDS`` after the last."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._alive = 0
        self._ending = False
        self._spoken_for = 0  # functions submitted and not finished

    def run(self, function: Callable[[], None]) -> None:
        with self._lock:
            self._spoken_for += 1
            # while the threads end, one more: those alive may take their sentinels, and leave the function
            start = self._ending or (self._spoken_for > self._alive and self._alive < self._limit)
            self._alive += start
            self._jobs.put(function)  # under the lock: a thread about to end checks the queue once more under the lock
        if start:
            threading.Thread(target=self._main, name=self._name, daemon=True).start()

    def end(self) -> None:
        """End the threads as soon as the queue is empty."""
        with self._lock:
            self._ending = True
            for _ in range(self._alive):
                self._jobs.put(_nothing)

    def _main(self) -> None:
        while True:
            try:
                function = self._jobs.get(timeout=0.0 if self._ending else IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._alive -= 1
                        return
                continue
            if function is _nothing:  # one for each thread, behind all jobs
                with self._lock:
                    self._alive -= 1
                return
            function()
            del function
            with self._lock:
                self._spoken_for -= 1


def _nothing() -> None:
    """Sentinel that wakes a thread."""


@final
class OrderedExecutor:
    """Runs jobs: in order within a lane, in parallel across lanes.

    Args:
        name: the name of the threads.
        limit: maximum number of threads; further busy lanes wait for a thread.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._warned = False
        self._threads = _DaemonPool(name, limit)
        self._lock = threading.Lock()
        self._lanes: dict[Hashable, deque[Callable[[], None]]] = {}
        self._idle = threading.Condition(self._lock)

    def put(self, lane: Hashable, job: Callable[[], None]) -> None:
        """Queue ``job``, which must not raise. Callable from any thread; does not block."""
        with self._lock:
            jobs = self._lanes.get(lane)
            if jobs is not None:
                jobs.append(job)
                return
            self._lanes[lane] = deque([job])
            if len(self._lanes) > self._limit and not self._warned:
                self._warned = True
                _log.warning("%s: more than %d lanes are busy; the newest wait", self._name, self._limit)
        self._threads.run(lambda: self._work_off(lane))

    def behind(self, lanes: Iterable[Hashable], job: Callable[[], object]) -> Callable[[], None]:
        """A function to be called once: ``job`` runs then, but not before the jobs now in ``lanes`` are over."""
        with self._lock:
            busy = [jobs for lane in lanes if (jobs := self._lanes.get(lane)) is not None]
            over = Latch(len(busy) + 1, lambda _: job())
            for jobs in busy:
                jobs.append(over)
        return over

    def _work_off(self, lane: Hashable) -> None:
        jobs = self._lanes[lane]
        while True:
            jobs[0]()
            with self._lock:
                jobs.popleft()
                if not jobs:
                    del self._lanes[lane]
                    self._idle.notify_all()
                    return

    async def run(self, lane: Hashable, job: Callable[[], T], mailbox: Mailbox) -> T:
        """Run ``job``, and wait for it; an error that it raises is raised here. A cancelled call leaves it running."""
        done: asyncio.Future[T] = mailbox.loop.create_future()

        def tell(result: T | None, error: Exception | None) -> None:
            if done.done():
                return  # cancelled
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]
            else:
                done.set_exception(error)

        def guarded() -> None:
            try:
                tell_later = partial(tell, job(), None)
            except Exception as exc:
                tell_later = partial(tell, None, exc)
            mailbox.post(tell_later)

        self.put(lane, guarded)
        return await done

    def end(self) -> None:
        """End the threads: no more jobs will come."""
        self._threads.end()

    def join(self, timeout: float) -> bool:
        """Block until no job is left; False if that took longer than ``timeout`` seconds."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._lanes, timeout)
