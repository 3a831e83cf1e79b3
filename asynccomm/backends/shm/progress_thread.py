"""The one thread per process that drives what must not wait for an event loop: large transfers, and blocked callers.

It also notices the death of other ranks, whatever the loops are doing. While there is nothing to do it sleeps in one
system call.

A thread that runs pure Python may keep the lock of the interpreter for a whole switch interval (5 ms by default), and
this thread takes that lock back after each chunk. So the interval is shorter while transfers are under way.
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

SWITCH_SECONDS: Final = 1e-4  # bench/loop_lag.py: beside a GIL-bound thread this is worth several times the bandwidth
END_SECONDS: Final = 5.0  # for the thread to get to the end of what it is at, when the process ends

# -1 where nobody can say; other systems import this, too, before they find that they cannot share memory
_current_cpu: Final[Callable[[], int]] = getattr(ctypes.PyDLL(None), "sched_getcpu", lambda: -1)
_log = logging.getLogger("asynccomm")


class Turn(Enum):
    """What came of driving something once."""

    MOVED = "moved"
    STUCK = "stuck"  # waits for other ranks
    OVER = "over"  # has no work for this thread any more


class Driven(Protocol):
    """What the worker drives. It stays the worker's until a turn is OVER."""

    patience: float  #: seconds to look out for other ranks before going to sleep
    stretch: float  #: seconds to be at it before the core is offered to others

    def turn(self) -> Turn:
        """Do a little of what there is to do, without waiting."""

    def settle_on(self, cpu: int) -> Sequence[int]:
        """The thread is awake on processor ``cpu``; returns those that other processes' are awake on."""

    def doze(self) -> bool:
        """Ask the other ranks to ring; False if there is something to do at once."""

    def failed(self, exc: Exception) -> None:
        """A turn raised ``exc``, and there will be no more."""


@final
class Worker:
    """A thread, an eventfd to wake it, and descriptors it watches."""

    def __init__(self) -> None:
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  #: wakes the thread; any process may have it
        self._epoll = select.epoll()
        self._epoll.register(self.bell, select.EPOLLIN)
        self._watched: dict[int, Callable[[], object]] = {}
        self._given: deque[Driven] = deque()
        self._driven: dict[Driven, None] = {}
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="asynccomm shm", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop the thread, which must not run into the end of the interpreter: freeing tensors there aborts."""
        self._ending = True
        self.ring()
        self._thread.join(END_SECONDS)

    def ring(self) -> None:
        """Wake the thread. From anywhere."""
        os.eventfd_write(self.bell, 1)

    def take(self, driven: Driven) -> None:
        """Drive ``driven`` from now on. From any thread."""
        self._given.append(driven)
        self.ring()

    def watch(self, fd: int, ended: Callable[[], object]) -> None:
        """Call ``ended`` on the thread once nobody can write to the pipe ``fd`` any more."""
        self._watched[fd] = ended
        self._epoll.register(fd, 0)  # the hang-up is always reported

    def unwatch(self, fd: int) -> None:
        """Forget ``fd``; call it before closing. From any thread."""
        if self._watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def _run(self) -> None:
        driven = self._driven
        interval = None  # the usual one, while it is not in force
        shorter = 0.0
        yielded = 0.0  # when this thread last offered its core to others
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
                shorter = sys.getswitchinterval()  # rounded
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
                    awake_until = now + max(each.patience for each in driven)
                if now < awake_until:
                    self._look(0)  # lets go of the interpreter's lock
                    os.sched_yield()  # whom we wait for may need this core
                    continue
                if not all(self._dozes(each) for each in driven):
                    continue
            elif interval is not None:
                if sys.getswitchinterval() == shorter:  # else somebody changed it meanwhile
                    sys.setswitchinterval(interval)
                interval = None
            self._look(-1)
            awake_until = 0.0
            woken = True

    def _spread(self) -> None:
        """Be on another core than the workers of other processes, if one is idle, or there is no loop to be considered.

        The system leaves threads that wake each other on one core while all are busy, and they would wait for each
        other there even once another has nothing to do. That it will have soon is likely where whoever keeps it busy is
        to wait for these transfers: a backward pass, say (bench/ddp.py). Loops that are busy go on, and share their
        cores better with threads that take turns (bench/loop_lag.py).
        """
        cpu = _current_cpu()
        others = Counter(place for each in self._driven for place in each.settle_on(cpu))
        if not others[cpu]:
            return
        with contextlib.suppress(OSError):  # not everybody may choose
            allowed = os.sched_getaffinity(0)
            fewest = min(others[each] for each in allowed)
            alone = all(math.isinf(each.stretch) for each in self._driven)
            if fewest < others[cpu] and (alone or _some_core_is_idle()):
                os.sched_setaffinity(0, {each for each in allowed if others[each] == fewest})
                os.sched_setaffinity(0, allowed)  # it is there now, and may be moved again
                for each in self._driven:
                    each.settle_on(_current_cpu())

    def _turns(self) -> bool:
        """Drive everything once; whether anything moved. In a call of its own, which holds nothing once it is over."""
        moved = False
        for each in list(self._driven):
            turn = self._turn(each)
            if turn is Turn.OVER:
                del self._driven[each]
            moved = moved or turn is Turn.MOVED
        return moved

    def _turn(self, each: Driven) -> Turn:
        try:
            return each.turn()
        except Exception as exc:  # one must not take the others down
            self._fail(each, exc)
            return Turn.OVER

    def _dozes(self, each: Driven) -> bool:
        try:
            return each.doze()
        except Exception as exc:
            self._fail(each, exc)
            return False  # its next turn is its last

    def _fail(self, each: Driven, exc: Exception) -> None:
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
            if ended is None or not _hung_up(fd):  # it may just have become another one's
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
    """Whether fewer threads can run than there are cores, on the whole machine. Raises: OSError."""
    with open("/proc/loadavg", "rb", buffering=0) as file:
        running = file.read(64).split()[3].partition(b"/")[0]
    return int(running) <= (os.cpu_count() or 1)


_worker: Worker | None = None
_making = threading.Lock()


def the_worker() -> Worker:
    """The worker of this process; its thread begins with the first call."""
    global _worker
    with _making:
        if _worker is None:
            _worker = Worker()
        return _worker


def _end() -> None:
    if _worker is not None:
        _worker.end()


def _forget() -> None:
    global _worker, _making
    _worker = None  # its thread is not in the child
    _making = threading.Lock()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
