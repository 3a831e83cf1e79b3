"""The worker thread, with things to drive that are made up."""

import ctypes
import math
import os
import runpy
import select
import sys
import threading
from collections.abc import Sequence

import pytest

from asynccomm.backends.shm import progress_thread as module
from asynccomm.backends.shm.progress_thread import (
    SWITCH_SECONDS,
    ProgressResult,
    ProgressThread,
    _some_core_is_idle,
    shared_thread,
)


class Script:
    """Takes the turns it was told to; then it is stuck, until it is told more."""

    def __init__(
        self, *turns: ProgressResult, awake: float = 0.0, stretch: float = math.inf, others: Sequence[int] = ()
    ) -> None:
        self.awake = awake
        self.stretch = stretch
        self.others = others  # processors that the workers of other ranks are awake on
        self.places: list[int] = []
        self.turns = list(turns)
        self.taken: list[ProgressResult] = []
        self.threads: set[str] = set()
        self.dozing = threading.Event()
        self.over = threading.Event()
        self.intervals: list[float] = []
        self.failure: Exception | None = None
        self.interrupts = 0

    def turn(self) -> ProgressResult:
        self.threads.add(threading.current_thread().name)
        self.intervals.append(sys.getswitchinterval())
        turn = self.turns.pop(0) if self.turns else ProgressResult.STUCK
        self.taken.append(turn)
        if turn is ProgressResult.OVER:
            self.over.set()
        return turn

    def interrupt(self) -> None:
        self.interrupts += 1

    def settle_on(self, cpu: int) -> Sequence[int]:
        self.places.append(cpu)
        return self.others

    def failed(self, exc: Exception) -> None:
        self.failure = exc
        self.over.set()

    def doze(self) -> bool:
        if self.turns:
            return False
        self.dozing.set()
        return True


@pytest.fixture
def worker() -> ProgressThread:
    return shared_thread()


class Sleeper(Script):
    """Sleeps in its turn, as the executor in C does, and reads the ring that wakes it."""

    def __init__(self, worker: ProgressThread) -> None:
        super().__init__()
        self.worker = worker
        self.asleep = threading.Event()

    def turn(self) -> ProgressResult:
        if self.turns or self.asleep.is_set():
            return super().turn()
        self.asleep.set()
        select.select([self.worker.bell], [], [], 10)
        os.eventfd_read(self.worker.bell)
        return ProgressResult.STUCK


def test_another_one_is_driven_although_a_turn_has_read_the_ring(worker: ProgressThread) -> None:
    sleeper, other = Sleeper(worker), Script(ProgressResult.OVER)
    worker.take(sleeper)
    assert sleeper.asleep.wait(10)
    worker.take(other)
    assert other.over.wait(10)
    sleeper.turns.append(ProgressResult.OVER)
    worker.ring()
    assert sleeper.over.wait(10)


def test_it_drives_until_it_is_over(worker: ProgressThread) -> None:
    script = Script(ProgressResult.MOVED, ProgressResult.STUCK, ProgressResult.MOVED, ProgressResult.OVER)
    worker.take(script)
    assert script.over.wait(10)
    assert script.taken == [ProgressResult.MOVED, ProgressResult.STUCK, ProgressResult.MOVED, ProgressResult.OVER]
    assert script.threads == {"asynccomm shm"}


def test_stuck_it_sleeps_until_it_is_rung(worker: ProgressThread) -> None:
    script = Script(ProgressResult.MOVED)
    worker.take(script)
    assert script.dozing.wait(10)
    turns = len(script.taken)
    script.turns += [ProgressResult.MOVED, ProgressResult.OVER]
    worker.ring()
    assert script.over.wait(10)
    assert len(script.taken) == turns + 2


def test_one_that_is_stuck_does_not_hold_up_others(worker: ProgressThread) -> None:
    stuck, other = Script(), Script(ProgressResult.MOVED, ProgressResult.MOVED, ProgressResult.OVER)
    worker.take(stuck)
    assert stuck.dozing.wait(10)
    worker.take(other)
    assert other.over.wait(10)
    stuck.turns += [ProgressResult.OVER]
    worker.ring()
    assert stuck.over.wait(10)


def test_one_that_raises_is_told_and_the_others_go_on(worker: ProgressThread) -> None:
    class Broken(Script):
        def turn(self) -> ProgressResult:
            raise ValueError("oh")

    broken, other = Broken(), Script(ProgressResult.MOVED, ProgressResult.OVER)
    worker.take(broken)
    worker.take(other)
    assert broken.over.wait(10)
    assert str(broken.failure) == "oh"
    assert other.over.wait(10)


def test_switch_interval_is_short_only_while_it_drives(worker: ProgressThread) -> None:
    before = sys.getswitchinterval()
    assert before > 10 * SWITCH_SECONDS
    script = Script(ProgressResult.MOVED, ProgressResult.OVER)
    worker.take(script)
    assert script.over.wait(10)
    assert script.intervals == [pytest.approx(SWITCH_SECONDS, rel=0.1)] * 2
    for _ in range(10_000):
        if sys.getswitchinterval() == pytest.approx(before, rel=0.1):
            break
        os.sched_yield()
    assert sys.getswitchinterval() == pytest.approx(before, rel=0.1)


def test_a_pipe_that_nobody_can_write_to_is_reported_once(worker: ProgressThread) -> None:
    reading, writing = os.pipe()
    other, other_writing = os.pipe()
    ended = threading.Event()
    calls: list[int] = []
    worker.watch(reading, lambda: (calls.append(1), ended.set()))
    worker.watch(other, lambda: calls.append(2))
    os.close(writing)
    assert ended.wait(10)
    worker.unwatch(other)
    os.close(other_writing)
    script = Script(ProgressResult.OVER)  # a full turn of the thread later
    worker.take(script)
    assert script.over.wait(10)
    assert calls == [1]
    worker.unwatch(reading)  # again, which does nothing
    os.close(reading)
    os.close(other)


def test_a_forked_child_makes_its_own(worker: ProgressThread) -> None:
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        script = Script(ProgressResult.OVER)
        own = shared_thread()
        own.take(script)
        os._exit(0 if own is not worker and script.over.wait(10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert shared_thread() is worker


def test_it_ends() -> None:
    worker = ProgressThread()
    worker.end()
    assert not worker._thread.is_alive()


@pytest.mark.parametrize(("stretch", "offers"), [(math.inf, 0), (0.0, 5)])
def test_it_offers_its_core_as_often_as_it_is_told(
    worker: ProgressThread, monkeypatch: pytest.MonkeyPatch, stretch: float, offers: int
) -> None:
    offered: list[str] = []
    monkeypatch.setattr(os, "sched_yield", lambda: offered.append(threading.current_thread().name))
    script = Script(*[ProgressResult.MOVED] * 5, ProgressResult.OVER, stretch=stretch)
    worker.take(script)
    assert script.over.wait(10)
    assert offered.count("asynccomm shm") == offers


@pytest.mark.parametrize(
    ("others", "moves"),
    [
        ([], []),
        ([1, 3], []),
        ([0], [{1, 2, 3}, {0, 1, 2, 3}]),
        ([0, 0, 1, 2, 3], [{1, 2, 3}, {0, 1, 2, 3}]),
        ([0, 1, 2, 3], []),
        ([0, 0, 0, 1, 2, 2, 3, 3], [{1}, {0, 1, 2, 3}]),
    ],
    ids=str,
)
def test_it_goes_where_fewer_workers_are(
    worker: ProgressThread, monkeypatch: pytest.MonkeyPatch, others: list[int], moves: list[set[int]]
) -> None:
    """On a machine of four processors, of which it has woken up on the first."""
    here = [0]
    moved: list[set[int]] = []

    def move(_: int, to: set[int]) -> None:
        moved.append(to)
        here[0] = max(to) if here[0] not in to else here[0]

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", move)
    monkeypatch.setattr("asynccomm.backends.shm.progress_thread._current_cpu", lambda: here[0])
    monkeypatch.setattr("asynccomm.backends.shm.progress_thread._some_core_is_idle", lambda: True)
    script = Script(ProgressResult.OVER, others=others)
    worker.take(script)
    assert script.over.wait(10)
    assert moved == moves
    assert script.places == ([0, max(moves[0])] if moves else [0])


@pytest.mark.parametrize(("stretch", "places"), [(1.0, [0]), (math.inf, [0, 0])])
def test_without_an_idle_core_it_stays_if_there_is_a_loop(
    worker: ProgressThread, monkeypatch: pytest.MonkeyPatch, stretch: float, places: list[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr("asynccomm.backends.shm.progress_thread._current_cpu", lambda: 0)
    monkeypatch.setattr(module, "cores", lambda: -1)  # whoever asks is running
    script = Script(ProgressResult.OVER, others=[0], stretch=stretch)
    worker.take(script)
    assert script.over.wait(10)
    assert script.places == places
    assert script.failure is None
    monkeypatch.setattr(module, "cores", lambda: 10_000)
    assert _some_core_is_idle()


def test_it_stays_where_it_is_if_it_may_not_choose(worker: ProgressThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("asynccomm.backends.shm.progress_thread._some_core_is_idle", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setattr("asynccomm.backends.shm.progress_thread._current_cpu", lambda: 1)
    script = Script(ProgressResult.MOVED, ProgressResult.OVER, others=[1])
    worker.take(script)
    assert script.over.wait(10)
    assert script.taken == [ProgressResult.MOVED, ProgressResult.OVER]


def test_systems_that_do_not_name_the_processor_can_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find out there that they cannot share memory."""
    monkeypatch.setattr(ctypes, "PyDLL", lambda _: object())
    assert runpy.run_path(module.__file__)["_current_cpu"]() == -1
