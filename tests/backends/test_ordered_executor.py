"""Jobs in order within a lane, side by side across lanes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asynccomm.backends import ordered_executor as module
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.core.mailbox import Mailbox

PATIENCE = 20.0  # seconds until a test that hangs is given up


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Something for jobs to wait at; open at the end whatever happens."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def quick_to_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def join_threads(name: str) -> None:
    for thread in threads_named(name):
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_order_within_a_lane() -> None:
    lanes = OrderedExecutor("order", 4)
    done: list[int] = []
    for i in range(1000):
        lanes.put("lane", lambda i=i: done.append(i))
    assert lanes.join(PATIENCE)
    assert done == list(range(1000))


def test_order_within_each_of_many_lanes() -> None:
    lanes = OrderedExecutor("many", 8)
    done: dict[Any, list[int]] = {lane: [] for lane in range(20)}
    for i in range(200):
        for lane in done:
            lanes.put(lane, lambda lane=lane, i=i: done[lane].append(i))
    assert lanes.join(PATIENCE)
    assert all(numbers == list(range(200)) for numbers in done.values())


def test_a_blocked_lane_does_not_hold_the_others(gate: threading.Event) -> None:
    lanes = OrderedExecutor("independent", 4)
    done: list[str] = []
    others = threading.Event()
    lanes.put("blocked", gate.wait)
    lanes.put("blocked", lambda: done.append("blocked"))
    lanes.put(("send", 1, 0), lambda: done.append("send"))
    lanes.put(("send", 1, 0), others.set)
    assert others.wait(PATIENCE)
    assert done == ["send"]
    gate.set()
    assert lanes.join(PATIENCE)
    assert done == ["send", "blocked"]


def test_a_job_behind_lanes(gate: threading.Event) -> None:
    lanes, over, later = OrderedExecutor("behind", 3), threading.Event(), threading.Event()
    lanes.put("a", gate.wait)
    lanes.put("b", gate.wait)
    then = lanes.behind(["a", "b", "idle"], over.set)
    lanes.put("a", later.wait)  # comes after it
    then()
    assert not over.is_set()
    gate.set()
    assert over.wait(PATIENCE)
    later.set()
    assert lanes.join(PATIENCE) is not False
    again = threading.Event()
    then = lanes.behind(["a"], again.set)
    assert not again.is_set()
    then()
    assert again.is_set()


def test_one_job_of_a_lane_at_a_time() -> None:
    lanes = OrderedExecutor("exclusive", 8)
    busy = threading.Lock()
    clashes: list[int] = []

    def job(i: int) -> None:
        if not busy.acquire(blocking=False):
            clashes.append(i)
            return
        busy.release()

    def put() -> None:
        for i in range(500):
            lanes.put("lane", lambda i=i: job(i))

    threads = [threading.Thread(target=put) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lanes.join(PATIENCE)
    assert clashes == []


def test_a_job_may_put_another() -> None:
    lanes = OrderedExecutor("chain", 1)
    done: list[str] = []

    def first() -> None:
        lanes.put("lane", lambda: done.append("same lane"))
        lanes.put("other", lambda: done.append("other lane"))
        done.append("first")

    lanes.put("lane", first)
    assert lanes.join(PATIENCE)
    assert done == ["first", "same lane", "other lane"]


def test_threads_are_used_again() -> None:
    lanes = OrderedExecutor("reuse", 100)
    threads: list[threading.Thread] = []
    for lane in range(200):
        lanes.put(lane, lambda: threads.append(threading.current_thread()))
        assert lanes.join(PATIENCE)
    assert len(threads) == 200
    # the one that has just finished a job may not be ready for the next: few, but not always one
    assert len(set(threads)) <= 10


def test_no_more_threads_than_the_limit(gate: threading.Event) -> None:
    lanes = OrderedExecutor("limit", 3)
    running: list[threading.Thread] = []
    all_running = threading.Semaphore(0)

    def job() -> None:
        running.append(threading.current_thread())
        all_running.release()
        gate.wait()

    for lane in range(10):
        lanes.put(lane, job)
    for _ in range(3):
        assert all_running.acquire(timeout=PATIENCE)
    assert not lanes.join(0.02)
    assert len(running) == len(set(running)) == 3
    assert len(threads_named("limit")) == 3
    gate.set()
    assert lanes.join(PATIENCE)
    assert len(running) == 10
    assert len(set(running)) == 3


def test_it_warns_once_when_more_lanes_are_busy_than_there_may_be_threads(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    lanes = OrderedExecutor("warning", 1)
    for _ in range(100):
        lanes.put("lane", lambda: None)
        assert lanes.join(PATIENCE)  # the thread may still be on its way back
    assert not caplog.records
    lanes.put("first", gate.wait)
    for lane in ("second", "third"):
        lanes.put(lane, lambda: None)
    assert [record.message for record in caplog.records] == ["warning: more than 1 lanes are busy; the newest wait"]
    gate.set()
    assert lanes.join(PATIENCE)


def test_join_gives_up(gate: threading.Event) -> None:
    lanes = OrderedExecutor("join", 2)
    assert lanes.join(0.0)
    lanes.put("lane", gate.wait)
    assert not lanes.join(0.0)
    assert not lanes.join(0.01)
    gate.set()
    assert lanes.join(PATIENCE)


def test_join_waits_for_jobs_that_are_queued(gate: threading.Event) -> None:
    lanes = OrderedExecutor("queued", 1)
    done: list[int] = []
    lanes.put("lane", gate.wait)
    for i in range(10):
        lanes.put("lane", lambda i=i: done.append(i))
        lanes.put(i, lambda i=i: done.append(100 + i))
    gate.set()
    assert lanes.join(PATIENCE)
    assert done == [*range(10), *range(100, 110)]


@pytest.mark.usefixtures("quick_to_idle")
def test_idle_threads_end_and_new_ones_come() -> None:
    lanes = OrderedExecutor("idle", 4)
    done: list[int] = []
    for i in range(5):
        lanes.put("lane", lambda i=i: done.append(i))
        assert lanes.join(PATIENCE)
        join_threads("idle")
        assert threads_named("idle") == []
    assert done == list(range(5))


@pytest.mark.usefixtures("quick_to_idle")
def test_a_busy_thread_is_not_idle(gate: threading.Event) -> None:
    lanes = OrderedExecutor("busy", 1)
    ran = threading.Event()
    lanes.put("lane", gate.wait)
    assert not lanes.join(0.05)
    lanes.put("lane", ran.set)
    gate.set()
    assert ran.wait(PATIENCE)


@pytest.mark.usefixtures("quick_to_idle")
def test_a_job_is_not_left_to_a_thread_that_ends() -> None:
    lanes = OrderedExecutor("ending", 1)
    lanes.put("lane", lambda: None)
    assert lanes.join(PATIENCE)
    queue = lanes._threads._jobs

    class SlowQueue:
        """Its writer is slow, and its reader's patience ends meanwhile."""

        def put(self, job: Callable[[], None]) -> None:
            for thread in threads_named("ending"):
                thread.join(0.2)
            queue.put(job)

        def __getattr__(self, name: str) -> Any:
            return getattr(queue, name)

    lanes._threads._jobs = SlowQueue()  # type: ignore[assignment]
    done = threading.Event()
    lanes.put("lane", done.set)
    assert done.wait(1.0), "the job was left in a queue that nobody reads"


def test_threads_are_daemons() -> None:
    lanes = OrderedExecutor("daemon", 1)
    seen: list[bool] = []
    lanes.put("lane", lambda: seen.append(threading.current_thread().daemon))
    assert lanes.join(PATIENCE)
    assert seen == [True]


def test_all_threads_end_with_the_lanes() -> None:
    before = set(threading.enumerate())
    lanes = OrderedExecutor("test", 20)
    together = threading.Barrier(20)
    for i in range(20):
        lanes.put(i, lambda: together.wait(5.0))  # each on a thread of its own
    assert lanes.join(5.0)
    made = set(threading.enumerate()) - before
    assert made
    lanes.end()
    for thread in made:
        thread.join(5.0)
        assert not thread.is_alive(), "it waits until it has been idle for long"


async def test_a_coroutine_waits_for_a_job(gate: threading.Event) -> None:
    lanes, mailbox = OrderedExecutor("awaited", 2), Mailbox(asyncio.get_running_loop())
    assert await lanes.run("lane", lambda: threading.current_thread().name, mailbox) == "awaited"
    with pytest.raises(ZeroDivisionError):
        await lanes.run("lane", lambda: 1 // 0, mailbox)
    done: list[int] = []
    task = asyncio.ensure_future(lanes.run("lane", lambda: (gate.wait(PATIENCE), done.append(1)), mailbox))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert await lanes.run("lane", lambda: done, mailbox) == [1], "a cancelled wait has ended the job"
    lanes.end()


def test_jobs_that_come_while_the_threads_end_are_run() -> None:
    """A thread that has yet to take its sentinel counts as alive, and runs nothing any more."""
    for turn in range(200):
        executor = OrderedExecutor(f"ends {turn}", 1)
        executor.put(0, lambda: None)
        assert executor.join(PATIENCE)
        executor.end()
        over = threading.Event()
        executor.put(0, over.set)
        assert over.wait(PATIENCE), turn
        join_threads(f"ends {turn}")
