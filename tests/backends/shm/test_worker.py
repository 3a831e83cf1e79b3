"""The worker thread, with things to drive that are made up."""

import os
import sys
import threading

import pytest

from asynccomm.backends.shm.worker import SWITCH_SECONDS, Turn, Worker, the_worker


class Script:
    """Takes the turns it was told to; then it is stuck, until it is told more."""

    def __init__(self, *turns: Turn, patience: float = 0.0) -> None:
        self.patience = patience
        self.turns = list(turns)
        self.taken: list[Turn] = []
        self.threads: set[str] = set()
        self.dozing = threading.Event()
        self.over = threading.Event()
        self.intervals: list[float] = []
        self.failure: Exception | None = None

    def turn(self) -> Turn:
        self.threads.add(threading.current_thread().name)
        self.intervals.append(sys.getswitchinterval())
        turn = self.turns.pop(0) if self.turns else Turn.STUCK
        self.taken.append(turn)
        if turn is Turn.OVER:
            self.over.set()
        return turn

    def failed(self, exc: Exception) -> None:
        self.failure = exc
        self.over.set()

    def doze(self) -> bool:
        if self.turns:
            return False
        self.dozing.set()
        return True


@pytest.fixture
def worker() -> Worker:
    return the_worker()


def test_it_drives_until_it_is_over(worker: Worker) -> None:
    script = Script(Turn.MOVED, Turn.STUCK, Turn.MOVED, Turn.OVER)
    worker.take(script)
    assert script.over.wait(10)
    assert script.taken == [Turn.MOVED, Turn.STUCK, Turn.MOVED, Turn.OVER]
    assert script.threads == {"asynccomm shm"}


def test_stuck_it_sleeps_until_it_is_rung(worker: Worker) -> None:
    script = Script(Turn.MOVED)
    worker.take(script)
    assert script.dozing.wait(10)
    turns = len(script.taken)
    script.turns += [Turn.MOVED, Turn.OVER]
    worker.ring()
    assert script.over.wait(10)
    assert len(script.taken) == turns + 2


def test_one_that_is_stuck_does_not_hold_up_others(worker: Worker) -> None:
    stuck, other = Script(), Script(Turn.MOVED, Turn.MOVED, Turn.OVER)
    worker.take(stuck)
    assert stuck.dozing.wait(10)
    worker.take(other)
    assert other.over.wait(10)
    stuck.turns += [Turn.OVER]
    worker.ring()
    assert stuck.over.wait(10)


def test_one_that_raises_is_told_and_the_others_go_on(worker: Worker) -> None:
    class Broken(Script):
        def turn(self) -> Turn:
            raise ValueError("oh")

    broken, other = Broken(), Script(Turn.MOVED, Turn.OVER)
    worker.take(broken)
    worker.take(other)
    assert broken.over.wait(10)
    assert str(broken.failure) == "oh"
    assert other.over.wait(10)


def test_switch_interval_is_short_only_while_it_drives(worker: Worker) -> None:
    before = sys.getswitchinterval()
    assert before > 10 * SWITCH_SECONDS
    script = Script(Turn.MOVED, Turn.OVER)
    worker.take(script)
    assert script.over.wait(10)
    assert script.intervals == [pytest.approx(SWITCH_SECONDS, rel=0.1)] * 2
    for _ in range(10_000):
        if sys.getswitchinterval() == pytest.approx(before, rel=0.1):
            break
        os.sched_yield()
    assert sys.getswitchinterval() == pytest.approx(before, rel=0.1)


def test_a_pipe_that_nobody_can_write_to_is_reported_once(worker: Worker) -> None:
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
    script = Script(Turn.OVER)  # a full turn of the thread later
    worker.take(script)
    assert script.over.wait(10)
    assert calls == [1]
    worker.unwatch(reading)  # again, which does nothing
    os.close(reading)
    os.close(other)


def test_a_forked_child_makes_its_own(worker: Worker) -> None:
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        script = Script(Turn.OVER)
        own = the_worker()
        own.take(script)
        os._exit(0 if own is not worker and script.over.wait(10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert the_worker() is worker


def test_it_ends() -> None:
    worker = Worker()
    worker.end()
    assert not worker._thread.is_alive()
