"""Threads for jobs that block: in order within a lane, side by side across lanes.

What finishes in order shares a lane: one per direction, peer and tag, say, since a receive that waits for its sender
must not hold up anything else. A lane has a thread only while it has jobs.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import final

_log = logging.getLogger("asynccomm")

IDLE_SECONDS = 10.0  # a thread without a job ends after this


@final
class _DaemonPool:
    """Daemon threads that run functions, kept a while for the next one."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._alive = 0
        self._ending = False
        self._spoken_for = 0  # functions handed over and not finished

    def run(self, function: Callable[[], None]) -> None:
        with self._lock:
            self._spoken_for += 1
            start = self._spoken_for > self._alive and self._alive < self._limit
            self._alive += start
            self._jobs.put(function)  # under the lock: a thread about to end looks once more for jobs under it
        if start:
            threading.Thread(target=self._main, name=self._name, daemon=True).start()

    def end(self) -> None:
        """Let the threads go, as soon as they have nothing to do."""
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
            if function is _nothing:  # there is one for each thread, behind all jobs
                with self._lock:
                    self._alive -= 1
                return
            function()
            del function
            with self._lock:
                self._spoken_for -= 1


def _nothing() -> None:
    """What wakes a thread."""


@final
class OrderedExecutor:
    """Runs jobs: in order within a lane, side by side across lanes.

    Args:
        name: of the threads.
        limit: threads at most; with more busy lanes than that the newest wait for a thread.
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
        """Queue ``job``, which must not raise. From any thread; does not block."""
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

    def end(self) -> None:
        """There will be no more jobs: let the threads end."""
        self._threads.end()

    def join(self, timeout: float) -> bool:
        """Block until no job is left; False if that took longer than ``timeout`` seconds."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._lanes, timeout)
