"""When events on CUDA streams have passed: one thread for all streams, which sleeps unless something is in flight.

The events of one stream pass in order, so only its head is queried. What one look over all heads finds is handed over
back to back, so that the event loop is woken once for it.

The first to look at a new head is the loop's own thread, in :meth:`Poller.hurry`: what takes microseconds ends there,
without any hand-over. The poller's thread begins after that, looking all the time at first and then with naps that grow
with the age of the youngest head, so that waiting for a late rank costs next to nothing. With nothing in flight, and no
question to ask, it is blocked in one system call.

A stream is seen to by one thread at a time, the poller's own or one in :meth:`Poller.hurry`, which takes what has
passed, calls back, and only then leaves the stream to others. That is what keeps the calls in order; the lock is held
for bookkeeping only, never for a query or a call.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, Protocol, TypeVar, final

from asynccomm.errors import BackendError, BrokenError, ClosedError

# All from bench/completion.py, on 2 cores that others share. A look takes 15 us of CPU time after a short nap, and 45
# after a long one: the wake-up is what costs. To spin without end would gain the medians some 10 us.
HURRY_SECONDS: Final = 50e-6  # what a stall of the loop may cost
HEAD_START: Final = 60e-6  # before the thread looks at a new head: beside hurry it would only be in the way
SPIN_SECONDS: Final = 250e-6  # age of a head up to which looks follow each other without a nap: that of small ones
NAP_SHARE: Final = 0.005  # of the age of the head: by so much an operation may seem longer than it was
LEAST_NAP: Final = 50e-6
MOST_NAP: Final = 20e-3
QUESTION_SECONDS: Final = 5e-3
CLOSE_SECONDS: Final = 5.0  # for what is in flight when the poller is closed
STUCK_SECONDS: Final = 2.0  # for a query or a callback to return, when the thread is to end
POOLED: Final = 256  # events

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)
Done = Callable[[BrokenError | None], object]

_log = logging.getLogger("asynccomm")


class Probe(Protocol[E_contra]):
    """What the poller needs of CUDA."""

    def query(self, event: E_contra) -> bool:
        """Whether ``event`` has passed, without waiting and without the GIL. From any thread.

        Raises: BrokenError when the device failed: no event of this stream will pass any more.
        """

    def enter(self) -> None:
        """Make the calling thread, which is the poller's, fit for queries. Called once."""


def sleep_seconds(age: float) -> float:
    """How long to nap when the youngest head has been one for ``age`` seconds; 0 for not at all."""
    if age < SPIN_SECONDS:
        return 0.0
    return min(MOST_NAP, max(LEAST_NAP, NAP_SHARE * age))


@final
class _EventQueue(Generic[E]):
    """The events of one stream that have not passed yet, oldest first."""

    __slots__ = ("busy", "entries", "since")

    def __init__(self) -> None:
        self.entries: deque[tuple[E, Done]] = deque()
        self.since = 0.0  # when its head became that
        self.busy = False  # some thread sees to it; nobody else may


@final
class _TimerFd:
    """Wakes one thread at a time that others may still change: a timerfd, whose clock is exact.

    The timeouts of locks and sleeps come 50 us late on Linux, and setting them takes the thread that is to sleep. The
    calls keep the GIL: to let go of it costs more, and would wake who wants it.
    """

    def __init__(self) -> None:
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._spec = (ctypes.c_long * 4)()  # struct itimerspec: two for an interval, seconds and nanoseconds
        self._address = ctypes.byref(self._spec)

    def set(self, seconds: float) -> None:
        """End the wait, or the next one, in so many seconds, not when it was to end before. One caller at a time."""
        spec = self._spec
        nanoseconds = 0 if seconds == math.inf else max(1, round(seconds * 1e9))  # 0: never
        spec[2], spec[3] = divmod(nanoseconds, 1_000_000_000)
        self._libc.timerfd_settime(self._fd, 0, self._address, None)

    def wait(self) -> None:
        os.read(self._fd, 8)

    def close(self) -> None:
        os.close(self._fd)


@final
class PeriodicCheck:
    """Something the poller asks again and again; from :meth:`Poller.ask`."""

    __slots__ = ("_asked", "_call", "due", "every", "stream")

    def __init__(
        self, asked: dict[PeriodicCheck, None], call: Callable[[], bool], every: float, stream: Hashable | None
    ) -> None:
        self._asked = asked
        self._call = call
        self.every = every  #: seconds from one answer to the next time
        self.stream = stream  #: ask only while this one's head is late; None: always
        self.due = -math.inf  #: when to ask next, on the clock of the poller

    def cancel(self) -> None:
        """Do not ask again. From any thread; it may be being asked right now."""
        self._asked.pop(self, None)

    def put(self) -> None:
        """Ask it, and forget it when it says so."""
        try:
            again = self._call()
        except Exception:
            _log.exception("a question of the poller raised; it is not asked again")
            again = False
        if not again:
            self.cancel()


@final
class Poller(Generic[E]):
    """Tells when events have passed.

    Its thread begins with the first event or question, and ends with :meth:`close` or with the process.

    Args:
        probe: what asks CUDA.
        name: of the thread.
        clock: seconds; for tests.
    """

    def __init__(
        self, probe: Probe[E], *, name: str = "asynccomm-poller", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probe = probe
        self._name = name
        self._clock = clock
        self._closed = False  # for events and questions
        self._end = math.inf  # when the thread is to go, even with something in flight
        self._fails = False  # what is left then
        self._inherited: list[object] = []
        self._begin()
        _pollers.add(self)

    def _begin(self) -> None:
        """As new, without a thread."""
        self._lock = threading.Lock()
        self._alarm: _TimerFd | None = None  # the thread's, while there is one
        self._wakes = -math.inf  # when the thread will look next; not in the future: it is awake
        self._asks = math.inf  # when it has to, for the next question
        self._lines: dict[Hashable, _EventQueue[E]] = {}  # those with events, or that some thread sees to
        self._checks: dict[PeriodicCheck, None] = {}
        self._thread: threading.Thread | None = None

    def watch(self, stream: Hashable, event: E, done: Done) -> None:
        """Call ``done(None)`` once ``event``, the latest of ``stream``, has passed; ``done(error)`` if it never will.

        From any thread. ``done`` is called once, on whichever thread saw it, in order for one stream; it must not wait
        for anything, and an exception out of it is logged. Raises: ClosedError, and then nothing is watched.
        """
        with self._lock:
            self._wake_up()
            line = self._lines.get(stream)
            if line is None:
                line = self._lines[stream] = _EventQueue()
            is_head = not line.entries
            line.entries.append((event, done))
            if is_head:  # else it is found by whoever takes the head away
                line.since = self._clock()
                self._alert(line.since + HEAD_START, alone=len(self._lines) == 1)

    def ask(
        self, question: Callable[[], bool], *, every: float = QUESTION_SECONDS, stream: Hashable | None = None
    ) -> PeriodicCheck:
        """Call ``question`` on the poller's thread, soon and then every so many seconds, as long as it returns True.

        With ``stream``, only while the head of that stream has been one for so many seconds: what is asked of a
        communicator then costs nothing while nothing is in flight, or all goes well. From any thread. It must not wait
        for anything; an exception out of it is logged, and ends it. Raises: ClosedError.
        """
        with self._lock:
            self._wake_up()
            asked = PeriodicCheck(self._checks, question, every, stream)
            self._checks[asked] = None
            self._alert(self._clock())
        return asked

    def hurry(
        self, stream: Hashable, seconds: float = HURRY_SECONDS, *, until: Callable[[], bool] | None = None
    ) -> None:
        """Look at the head of ``stream`` again and again, on this thread: for one that is about to wait anyway.

        Ends when nothing is left, when ``until()`` is true, or when the head has been one for so many seconds: it is
        late then, and one look is all that it gets. So however many tasks wait for one stream, the loop stalls once.
        Not for a thread that captures a graph, which the queries would spoil.
        """
        line = self._lines.get(stream)
        if line is None:
            return
        end = self._clock() + seconds
        while line.entries or line.busy:  # busy: the poller may be about to say that one has passed
            looked = self._look_at(stream, line)
            if until is not None and until():
                return
            now = self._clock()
            if now >= end or now - line.since >= seconds:
                return
            if not looked:
                os.sched_yield()

    def in_flight(self) -> int:
        """How many events are watched."""
        with self._lock:
            return sum(len(line.entries) for line in self._lines.values())

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End the thread: no more events or questions. From any thread, more than once.

        Blocks until what is in flight has passed, or for ``seconds``; what is left then fails with a BackendError. With
        nothing in flight that takes microseconds. Called out of ``done`` or a question it does not block.
        """
        self._fails = True
        self._stop(seconds)
        if threading.current_thread() is not self._thread:
            self._fail_rest()  # of a thread that is stuck, or never was

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _wake_up(self) -> None:
        """With the lock held: have a thread."""
        if self._closed:
            raise ClosedError("the poller of CUDA events has been closed")
        if self._thread is None:
            self._alarm = alarm = _TimerFd()
            self._wakes = -math.inf
            self._thread = threading.Thread(target=self._run, args=(alarm,), name=self._name, daemon=True)
            self._thread.start()

    def _alert(self, when: float, *, alone: bool = False) -> None:
        """With the lock held: have the thread look at ``when``, or before; ``alone``: no event needs it before."""
        now = self._clock()
        if self._alarm is None or self._wakes <= now:  # no thread, or one that is awake
            return
        if alone:
            when = min(when, self._asks)
        elif when >= self._wakes:
            return
        self._wakes = when
        self._alarm.set(when - now)

    def _run(self, alarm: _TimerFd) -> None:
        unfit: BrokenError | None = None
        try:
            self._probe.enter()
        except Exception as exc:
            unfit = _broken(exc)
        while True:
            self._sweep(unfit)
            question = self._ask()
            with self._lock:
                now = self._clock()
                if self._closed and (now >= self._end or not self._lines):
                    self._alarm = None
                    break
                nap = min(self._nap(now), question)
                self._wakes, self._asks = now + nap, now + question
                if nap:
                    alarm.set(nap)
            if nap:
                alarm.wait()
            else:
                os.sched_yield()
        alarm.close()
        if self._fails:
            self._fail_rest()

    def _nap(self, now: float) -> float:
        """With the lock held."""
        if not self._lines:
            return math.inf
        return sleep_seconds(now - max([line.since for line in self._lines.values()]))

    def _ask(self) -> float:
        """Put the questions that are due; returns the seconds until the next one is."""
        wait = math.inf
        for question in list(self._checks):
            due = question.due
            if question.stream is not None:
                line = self._lines.get(question.stream)
                if line is None:
                    continue
                due = max(due, line.since + question.every)
            now = self._clock()
            if due <= now:
                question.put()
                due = question.due = self._clock() + question.every
            wait = min(wait, due - now)
        return wait

    def _stop(self, seconds: float) -> None:
        with self._lock:
            self._closed = True
            self._end = min(self._end, self._clock() + seconds)
            self._alert(self._clock())
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds + STUCK_SECONDS)

    def _fail_rest(self) -> None:
        with self._lock:
            rest = [entry for line in self._lines.values() for entry in line.entries]
            for line in self._lines.values():
                line.entries.clear()
            self._lines.clear()
            self._checks.clear()
        if rest:
            error = BackendError(f"the poller of CUDA events was closed with {len(rest)} of them in flight")
            _tell([(done, error) for _, done in rest])

    def _forget(self) -> None:
        """In a forked child, which has no such thread, and nothing in flight on a GPU that it could not use."""
        self._inherited.append((self._lines, self._checks))  # not to be freed here: that would be calls to CUDA
        if self._alarm is not None:
            self._alarm.close()
        self._begin()

    # -- the streams --------------------------------------------------------------------------------------------------

    def _sweep(self, unfit: BrokenError | None) -> None:
        """Look at the heads of all streams that nobody else looks at."""
        with self._lock:
            self._wakes = -math.inf
            ours = [(stream, line) for stream, line in self._lines.items() if line.entries and not line.busy]
            for _, line in ours:
                line.busy = True
        passed: list[tuple[Done, BrokenError | None]] = []
        for _, line in ours:
            self._take(line, passed, unfit)
        try:
            _tell(passed)
        except BaseException:  # of this thread's own making
            _log.exception("a callback of a CUDA event asked a thread to end that is not its own")
        with self._lock:
            for stream, line in ours:
                self._free(stream, line)

    def _look_at(self, stream: Hashable, line: _EventQueue[E]) -> bool:
        """Look at the head of one stream, unless somebody does; returns whether anything had passed."""
        with self._lock:
            if line.busy:
                return False
            line.busy = True
        passed: list[tuple[Done, BrokenError | None]] = []
        try:
            self._take(line, passed)
            _tell(passed)
        finally:
            with self._lock:
                self._free(stream, line)
                if passed and line.entries:  # a new head: the thread may be in a nap that was for the old one
                    self._alert(line.since + HEAD_START)
        return bool(passed)

    def _take(
        self, line: _EventQueue[E], passed: list[tuple[Done, BrokenError | None]], unfit: BrokenError | None = None
    ) -> None:
        """Move what has passed from ``line``, which is ours, to ``passed``; all of it if there was an error."""
        for entry in list(line.entries):  # and no newer ones, which may pass as fast as they come
            try:
                if unfit is not None:
                    raise unfit
                if not self._probe.query(entry[0]):
                    return
            except Exception as exc:
                error = _broken(exc)
                with self._lock:
                    passed += [(done, error) for _, done in line.entries]
                    line.entries.clear()
                return
            with self._lock:
                if not line.entries:
                    return  # the poller was closed meanwhile
                line.entries.popleft()
                line.since = self._clock()
            passed.append((entry[1], None))

    def _free(self, stream: Hashable, line: _EventQueue[E]) -> None:
        """With the lock held: leave ``line`` to others."""
        line.busy = False
        if not line.entries and self._lines.get(stream) is line:
            del self._lines[stream]


def _tell(passed: list[tuple[Done, BrokenError | None]]) -> None:
    """Make all the calls, whatever comes out of one."""
    interrupt: BaseException | None = None
    for done, error in passed:
        try:
            done(error)
        except Exception:
            _log.exception("error in a callback of a CUDA event")
        except BaseException as exc:
            interrupt = exc
    if interrupt is not None:
        raise interrupt


def _broken(exc: Exception) -> BrokenError:
    if isinstance(exc, BrokenError):
        return exc
    error = BackendError(f"CUDA events cannot be queried: {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error


@final
class EventPool(Generic[E]):
    """Events to be used again, since making one costs more than recording it. From any thread.

    An event may be given back once nobody asks for it, or is to wait for it, any more.

    Args:
        make: makes a new one.
        limit: how many are kept; the others are dropped.
    """

    def __init__(self, make: Callable[[], E], limit: int = POOLED) -> None:
        self._make = make
        self._free: deque[E] = deque(maxlen=limit)

    def take(self) -> E:
        """One that nobody uses."""
        try:
            return self._free.pop()  # the latest: what the driver keeps of it is in a cache
        except IndexError:
            return self._make()

    def give(self, event: E) -> None:
        """Put ``event`` back."""
        self._free.append(event)


_pollers: weakref.WeakSet[Poller[Any]] = weakref.WeakSet()


def _end_all() -> None:
    """At exit: a thread that runs into the end of the interpreter may take it down. What is in flight stays so."""
    for poller in list(_pollers):
        poller._stop(0.0)


def _forget_all() -> None:
    for poller in list(_pollers):
        poller._forget()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
