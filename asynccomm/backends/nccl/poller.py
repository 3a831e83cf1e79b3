"""The poller of CUDA events: one thread for all streams, which sleeps unless an event is in flight.

The events of one stream pass in order, so the poller queries only the head of each stream's queue. All events that one
sweep over the heads finds are handed over back to back, so that a sweep wakes the event loop once.

The event loop's thread is the first to query a new head, in :meth:`Poller.before_await`: operations of microseconds
complete there, without a switch of threads. The poller's thread starts after that. It spins at first if that thread has
gone to wait. Then it sleeps between queries, for longer the older the youngest head is, so that waiting for a late rank
costs next to nothing. With no event in flight and no periodic check, the thread is blocked in one system call.

One thread at a time handles a stream, either the poller's own or one in :meth:`Poller.before_await`: it takes the
passed events, calls their callbacks, and only then releases the stream. This keeps the callbacks in order. The lock is
held for bookkeeping only, never for a query or a callback.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, Protocol, TypeVar, final

from asynccomm.backends.nccl.timer_fd import TimerFd
from asynccomm.errors import BackendError, BrokenError, ClosedError

# All values from bench/completion.py, on 2 shared cores. A query takes 15 us of CPU time after a short sleep and 45 us
# after a long one: most of that is the wake-up. Endless spinning would improve the medians by some 10 us.
HURRY_SECONDS: Final = 50e-6  # longest stall of the event loop
HEAD_START: Final = 60e-6  # delay before the thread queries a new head: during ``before_await`` it would only compete
SPIN_SECONDS: Final = 250e-6  # age of a head up to which the thread spins: the duration of small operations
NAP_SHARE: Final = 0.005  # of the head's age: the share by which a sleep may lengthen an operation
LEAST_NAP: Final = 50e-6
MOST_NAP: Final = 20e-3
QUESTION_SECONDS: Final = 5e-3
CLOSE_SECONDS: Final = 5.0  # for events in flight when the poller is closed
STUCK_SECONDS: Final = 2.0  # for a query or a callback to return before the thread is abandoned

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)
Done = Callable[[BrokenError | None], object]

_log = logging.getLogger("asynccomm")


class Probe(Protocol[E_contra]):
    """The calls of CUDA that the poller needs."""

    def query(self, event: E_contra) -> bool:
        """Whether ``event`` has passed. Does not block, and releases the GIL. From any thread.

        Raises: BrokenError when the device failed: no event of this stream will pass any more.
        """

    def enter(self) -> None:
        """Prepare the calling thread, which is the poller's, for queries. Called once."""


def sleep_seconds(age: float) -> float:
    """The seconds to sleep when the youngest head is ``age`` seconds old; 0: spin."""
    if age < SPIN_SECONDS:
        return 0.0
    return min(MOST_NAP, max(LEAST_NAP, NAP_SHARE * age))


@final
class _EventQueue(Generic[E]):
    """The pending events of one stream, oldest first."""

    __slots__ = ("busy", "entries", "since")

    def __init__(self) -> None:
        self.entries: deque[tuple[E, Done]] = deque()
        self.since = 0.0  # time at which the head became the head
        self.busy = False  # a thread handles the stream; all others must not


@final
class PeriodicCheck:
    """A function that the poller calls periodically; from :meth:`Poller.ask`."""

    __slots__ = ("_asked", "_call", "due", "every", "stream")

    def __init__(
        self, asked: dict[PeriodicCheck, None], call: Callable[[], bool], every: float, stream: Hashable | None
    ) -> None:
        self._asked = asked
        self._call = call
        self.every: float = every  #: seconds from one return to the next call
        self.stream: Hashable | None = stream  #: call only while the head of this stream is late; None: always
        self.due: float = -math.inf  #: time of the next call, on the poller's clock

    def cancel(self) -> None:
        """Make no more calls. From any thread; a call may be running at this time."""
        self._asked.pop(self, None)

    def put(self) -> None:
        """Call the function, and cancel the check if the function returns False or raises."""
        try:
            again = self._call()
        except Exception:
            _log.exception("a question of the poller raised; it is not asked again")
            again = False
        if not again:
            self.cancel()


@final
class Poller(Generic[E]):
    """Calls back when events have passed.

    Its thread starts with the first event or check, and ends with :meth:`close` or with the process.

    Args:
        probe: queries CUDA.
        name: name of the thread.
        clock: seconds; for tests.
    """

    def __init__(
        self, probe: Probe[E], *, name: str = "asynccomm-poller", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probe = probe
        self._name = name
        self._clock = clock
        self._closed = False  # to new events and checks
        self._end = math.inf  # time at which the thread ends, even with events in flight
        self._fails = False  # whether the remaining events fail then
        self._inherited: list[object] = []
        self._begin()
        _pollers.add(self)

    def _begin(self) -> None:
        """Set the initial state, without a thread."""
        self._lock = threading.Lock()
        self._alarm: TimerFd | None = None  # the thread's alarm, while it runs
        self._wakes = -math.inf  # time of the thread's next sweep; if not in the future, the thread is awake
        self._awaited = -math.inf  # time at which a thread has last gone to wait for a head
        self._news = False  # whether a check has come since the thread last looked at the checks
        self._asks = math.inf  # time at which the thread must wake for the next check
        self._lines: dict[Hashable, _EventQueue[E]] = {}  # the streams with events, or with a thread that handles them
        self._checks: dict[PeriodicCheck, None] = {}
        self._thread: threading.Thread | None = None

    def watch(self, stream: Hashable, event: E, done: Done) -> None:
        """Call ``done(None)`` once ``event``, the latest of ``stream``, has passed; ``done(error)`` if it never will.

        From any thread. ``done`` is called once, on the thread that found the event, in order within a stream. ``done``
        must not block; its exceptions are logged. Raises: ClosedError, and then nothing is watched.
        """
        with self._lock:
            self._wake_up()
            line = self._lines.get(stream)
            if line is None:
                line = self._lines[stream] = _EventQueue()
            is_head = not line.entries
            line.entries.append((event, done))
            if is_head:  # other events are found by the thread that removes the head
                line.since = self._clock()
                self._alert(line.since + HEAD_START, alone=len(self._lines) == 1)

    def ask(
        self,
        question: Callable[[], bool],
        *,
        every: float = QUESTION_SECONDS,
        first: float = 0.0,
        stream: Hashable | None = None,
    ) -> PeriodicCheck:
        """Call ``question`` on the poller's thread in ``first`` seconds, then every ``every``, while it returns True.

        With ``stream``, call only while the head of that stream is older than ``every`` seconds: a check of a
        communicator then costs nothing while no operation is late. From any thread. ``question`` must not block; an
        exception is logged, and ends the check. Raises: ClosedError.
        """
        with self._lock:
            self._wake_up()
            asked = PeriodicCheck(self._checks, question, every, stream)
            asked.due = self._clock() + first
            self._checks[asked] = None
            self._news = True
            self._asks = min(self._asks, asked.due)
            self._alert(asked.due)
        return asked

    def before_await(
        self, stream: Hashable, seconds: float = HURRY_SECONDS, *, until: Callable[[], bool] | None = None
    ) -> None:
        """Poll the head of ``stream`` on the calling thread, which is about to wait anyway.

        Returns when no event is left, when ``until()`` is true, or when the head is ``seconds`` old: a late head gets
        only one query. So the loop stalls only once, however many tasks wait for a stream. Not for a thread that
        captures a graph: queries would invalidate the capture.
        """
        line = self._lines.get(stream)
        if line is None:
            return
        end = self._clock() + seconds
        while line.entries or line.busy:  # busy: the poller may be about to call back
            looked = self._look_at(stream, line)
            if until is not None and until():
                return
            now = self._clock()
            if now >= end or now - line.since >= seconds:
                self._awaited = now
                return
            if not looked:
                os.sched_yield()

    def in_flight(self) -> int:
        """The number of watched events."""
        with self._lock:
            return sum(len(line.entries) for line in self._lines.values())

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End the thread, and accept no more events or checks. From any thread, more than once.

        Blocks until the events in flight have passed, or for ``seconds``; the remaining events then fail with a
        BackendError. With nothing in flight it takes microseconds. From within ``done`` or a check it does not block.
        """
        self._fails = True
        self._stop(seconds)
        if threading.current_thread() is not self._thread:
            self._fail_rest()  # a stuck thread, or no thread, has not done so

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _wake_up(self) -> None:
        """Start the thread if it does not run. With the lock held."""
        if self._closed:
            raise ClosedError("the poller of CUDA events has been closed")
        if self._thread is None:
            self._alarm = alarm = TimerFd()
            self._wakes = -math.inf
            self._thread = threading.Thread(target=self._run, args=(alarm,), name=self._name, daemon=True)
            self._thread.start()

    def _alert(self, when: float, *, alone: bool = False) -> None:
        """Have the thread sweep by ``when``; ``alone``: no event needs an earlier sweep. With the lock held."""
        now = self._clock()
        if self._alarm is None or self._wakes <= now:  # no thread, or an awake thread
            return
        if alone:
            when = min(when, self._asks)
        elif when >= self._wakes:
            return
        self._wakes = when
        self._alarm.set(when - now)

    def _run(self, alarm: TimerFd) -> None:
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
                nap = 0.0 if self._news else min(self._nap(now), question)
                self._news = False
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
        """The seconds to sleep until the next sweep. With the lock held."""
        if not self._lines:
            return math.inf
        nap = sleep_seconds(now - max([line.since for line in self._lines.values()]))
        if nap == 0.0 and now - self._awaited >= SPIN_SECONDS:
            return LEAST_NAP  # no thread waits: one that makes calls would lose the GIL to each spin
        return nap

    def _ask(self) -> float:
        """Make the checks that are due; returns the seconds until the next check."""
        wait = math.inf
        with self._lock:
            self._news = False
            checks = list(self._checks)
        for question in checks:
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
        """Reset in a forked child, which has no poller thread and cannot use the GPU."""
        self._inherited.append((self._lines, self._checks))  # never freed in the child: that would call CUDA
        if self._alarm is not None:
            self._alarm.close()
        self._begin()

    # -- the streams --------------------------------------------------------------------------------------------------

    def _sweep(self, unfit: BrokenError | None) -> None:
        """Query the heads of all streams that no other thread handles."""
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
        except BaseException:  # such as SystemExit: only a callback can raise it here
            _log.exception("a callback of a CUDA event asked a thread to end that is not its own")
        with self._lock:
            for stream, line in ours:
                self._free(stream, line)

    def _look_at(self, stream: Hashable, line: _EventQueue[E]) -> bool:
        """Query the head of one stream, unless another thread handles it; returns whether any event had passed."""
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
                if passed and line.entries:  # a new head: the thread's sleep may be timed for the old head
                    self._alert(line.since + HEAD_START)
        return bool(passed)

    def _take(
        self, line: _EventQueue[E], passed: list[tuple[Done, BrokenError | None]], unfit: BrokenError | None = None
    ) -> None:
        """Move the passed events of ``line`` to ``passed``, or all on an error. The caller has set ``line.busy``."""
        for entry in list(line.entries):  # a snapshot: newer events may pass as fast as they are added
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
                    return  # the poller was closed during the query
                line.entries.popleft()
                line.since = self._clock()
            passed.append((entry[1], None))

    def _free(self, stream: Hashable, line: _EventQueue[E]) -> None:
        """Release ``line`` to other threads. With the lock held."""
        line.busy = False
        if not line.entries and self._lines.get(stream) is line:
            del self._lines[stream]


def _tell(passed: list[tuple[Done, BrokenError | None]]) -> None:
    """Call all callbacks, even if one raises."""
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


_pollers: weakref.WeakSet[Poller[Any]] = weakref.WeakSet()


def _end_all() -> None:
    """Stop all pollers at exit: a daemon thread may crash the interpreter's shutdown. Events in flight stay pending."""
    for poller in list(_pollers):
        poller._stop(0.0)


def _forget_all() -> None:
    for poller in list(_pollers):
        poller._forget()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
