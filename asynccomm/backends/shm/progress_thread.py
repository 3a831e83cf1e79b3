"""The progress thread: one thread per process that drives large transfers, and operations of blocked callers.

These must not wait for an event loop. The thread also notices lost ranks, even while the event loops are blocked. An
idle progress thread sleeps in one system call.

A thread that runs pure Python may keep the GIL for a whole switch interval (5 ms by default). The progress thread takes
the GIL between operations where C moves the bytes and sleeps (``core_continues`` in ``_core.c``), and after each chunk
in Python. The switch interval is therefore shorter (``SWITCH_SECONDS``) during transfers.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import os
import select
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Protocol, final

from asynccomm.backends.shm.settings import cores
from asynccomm.core.per_process import PerProcess

SWITCH_SECONDS: Final = 1e-4  # bench/loop_lag.py: beside a GIL-bound thread, a short interval multiplies the bandwidth
END_SECONDS: Final = 5.0  # limit of the wait for the thread to finish its turn, when the process ends

# -1 without sched_getcpu: systems that cannot share memory import this module, too
_current_cpu: Final[Callable[[], int]] = getattr(ctypes.PyDLL(None), "sched_getcpu", lambda: -1)
_log = logging.getLogger("asynccomm")


class ProgressResult(Enum):
    """The result of one turn of driving an engine."""

    MOVED = "moved"
    STUCK = "stuck"  # all operations wait for other ranks
    OVER = "over"  # no work is left for the progress thread


class Progressed(Protocol):
    """An engine that the progress thread drives, until a turn is OVER."""

    awake: float  #: seconds to spin for other ranks before sleeping
    stretch: float  #: seconds of driving after which the thread yields its core

    def turn(self) -> ProgressResult:
        """Advance the operations by one step, without waiting."""

    def interrupt(self) -> None:
        """Make a turn in progress return soon. From any thread."""

    def settle_on(self, cpu: int) -> Sequence[int]:
        """Publish that the thread runs on ``cpu``; returns the CPUs of other processes' progress threads."""

    def doze(self) -> bool:
        """Ask the other ranks to ring before the thread sleeps; False if there is something to do."""

    def failed(self, exc: Exception) -> None:
        """Handle ``exc``, raised by a turn; no more turns follow."""


@final
class ProgressThread:
    """The progress thread, an eventfd that wakes it, and the liveness pipes that it watches."""

    def __init__(self) -> None:
        #: wakes the thread; other processes may hold it
        self.bell: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self.bell, select.EPOLLIN)
        self._watched: dict[int, Callable[[], object]] = {}
        self._given: deque[Progressed] = deque()
        self._driven: dict[Progressed, None] = {}
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="asynccomm shm", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop the thread before the interpreter ends: freeing tensors on it afterwards would abort the process."""
        self._ending = True
        self.ring()
        self._thread.join(END_SECONDS)

    def ring(self) -> None:
        """Wake the thread. From any thread."""
        for each in tuple(self._driven):
            each.interrupt()
        os.eventfd_write(self.bell, 1)

    def events_of(self, driven: Progressed) -> int:
        """The descriptor that ``driven`` may sleep on in its turn; -1 if the thread drives others, too.

        A call of ``ring`` interrupts such a sleep.
        """
        alone = len(self._driven) == 1 and driven in self._driven and not (self._given or self._ending)
        return self._epoll.fileno() if alone else -1

    def take(self, driven: Progressed) -> None:
        """Drive ``driven`` until a turn is OVER. From any thread."""
        self._given.append(driven)
        self.ring()

    def watch(self, fd: int, ended: Callable[[], object]) -> None:
        """Call ``ended`` on the progress thread when the last writing end of the pipe ``fd`` is closed."""
        self._watched[fd] = ended
        self._epoll.register(fd, 0)  # epoll always reports the hang-up

    def unwatch(self, fd: int) -> None:
        """Stop watching ``fd``, before it is closed. From any thread."""
        if self._watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def _run(self) -> None:
        driven = self._driven
        interval = None  # the switch interval to restore; None while it is in force
        shorter = 0.0
        yielded = 0.0  # time of this thread's last sched_yield
        awake_until = 0.0
        woken = False
        while not self._ending:
            while self._given:
                driven[self._given.popleft()] = None
            if woken and driven:
                woken = False
                self._spread()
            if driven and interval is None:
                interval = sys.getswitchinterval()
                sys.setswitchinterval(min(interval, SWITCH_SECONDS))
                shorter = sys.getswitchinterval()  # as rounded by the interpreter
            if self._turns():
                awake_until = 0.0
                now = time.perf_counter()
                if now - yielded > min([each.stretch for each in driven], default=math.inf):
                    os.sched_yield()
                    yielded = time.perf_counter()
                continue
            if driven:
                now = time.perf_counter()
                if not awake_until:
                    awake_until = now + max(each.awake for each in driven)
                if now < awake_until:
                    self._look(0)  # releases the GIL
                    os.sched_yield()  # the late peer may need this core
                    continue
                if not all(self._dozes(each) for each in driven):
                    continue
            elif interval is not None:
                if sys.getswitchinterval() == shorter:  # otherwise the program has changed it
                    sys.setswitchinterval(interval)
                interval = None
            if self._given or self._ending:  # an engine in C, which sleeps in its turn, has read the ring
                continue
            self._look(-1)
            awake_until = 0.0
            woken = True

    def _spread(self) -> None:
        """Move this thread to a core without another process's progress thread, if a core is idle or no engine yields.

        The kernel keeps threads that wake each other on one core while all cores are busy, and they would go on waiting
        for each other there when another core becomes idle. A core soon becomes idle if its busy thread is going to
        wait for these transfers, as a backward pass does (bench/ddp.py). Busy event loops do not wait, and share their
        cores better with progress threads that take turns on one core (bench/loop_lag.py).
        """
        cpu = _current_cpu()
        places = [place for each in self._driven for place in each.settle_on(cpu)]
        if cpu not in places:
            return
        others = Counter(places)
        with contextlib.suppress(OSError):  # a process may lack the permission
            allowed = os.sched_getaffinity(0)
            fewest = min(others[each] for each in allowed)
            alone = all(math.isinf(each.stretch) for each in self._driven)
            if fewest < others[cpu] and (alone or _some_core_is_idle()):
                os.sched_setaffinity(0, {each for each in allowed if others[each] == fewest})
                os.sched_setaffinity(0, allowed)  # the thread has moved; the kernel may move it again
                for each in self._driven:
                    each.settle_on(_current_cpu())

    def _turns(self) -> bool:
        """Drive all engines once; returns whether any advanced. Separate, so that no local keeps an engine alive."""
        moved = False
        for each in list(self._driven):
            turn = self._turn(each)
            if turn is ProgressResult.OVER:
                del self._driven[each]
            moved = moved or turn is ProgressResult.MOVED
        return moved

    def _turn(self, each: Progressed) -> ProgressResult:
        try:
            return each.turn()
        except Exception as exc:  # one failed comm must not break the others
            self._fail(each, exc)
            return ProgressResult.OVER

    def _dozes(self, each: Progressed) -> bool:
        try:
            return each.doze()
        except Exception as exc:
            self._fail(each, exc)
            return False  # the next turn is OVER

    def _fail(self, each: Progressed, exc: Exception) -> None:
        try:
            each.failed(exc)
        except Exception:
            _log.exception("could not report the failure of a transfer: %r", exc)

    def _look(self, timeout: float) -> None:
        for fd, _ in self._epoll.poll(timeout):
            if fd == self.bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
                continue
            ended = self._watched.get(fd)
            if ended is None or not _hung_up(fd):  # the number may belong to a new descriptor
                continue
            self.unwatch(fd)
            try:
                ended()
            except Exception:
                _log.exception("could not report that a rank is gone")


def _hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _some_core_is_idle() -> bool:
    """Whether the machine has at least as many cores as runnable threads. Raises: OSError."""
    with open("/proc/loadavg", "rb", buffering=0) as file:
        running = file.read(64).split()[3].partition(b"/")[0]
    return int(running) <= cores()


shared_thread: Final = PerProcess(ProgressThread)  #: the thread of this process, which a forked child lacks


def _end() -> None:
    if shared_thread.made is not None:
        shared_thread.made.end()


atexit.register(_end)
