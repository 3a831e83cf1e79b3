"""The poller, with events that are flags to be flipped."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.backends.nccl import poller as module
from asynccomm.backends.nccl.event_pool import EventPool
from asynccomm.backends.nccl.poller import (
    HEAD_START,
    LEAST_NAP,
    MOST_NAP,
    NAP_SHARE,
    SPIN_SECONDS,
    Poller,
    sleep_seconds,
)
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.errors import BackendError, BrokenError, ClosedError
from asynccomm.ops import AllReduce
from asynccomm.ops.reduce_op import ReduceOp
from tests.sampling import examples

NAME = "asynccomm-poller"


class Flag:
    """An event."""

    def __init__(self, name: object = "") -> None:
        self.name = name
        self.passed = False
        self.error: Exception | None = None
        self.queries = 0

    def __repr__(self) -> str:
        return f"<Flag {self.name}>"


class Flags:
    """A probe."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.queried: list[Flag] = []
        self.threads: set[str] = set()
        self.unfit: Exception | None = None

    def enter(self) -> None:
        self.entered.append(threading.current_thread().name)
        if self.unfit is not None:
            raise self.unfit

    def query(self, event: Flag) -> bool:
        self.threads.add(threading.current_thread().name)
        self.queried.append(event)
        event.queries += 1
        os.sched_yield()  # lets go of the GIL, as the real one does
        if event.error is not None:
            raise event.error
        return event.passed


class Heard:
    """What was called back, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, BrokenError | None]] = []

    def of(self, name: object) -> Callable[[BrokenError | None], object]:
        return lambda error: self.calls.append((name, error))

    @property
    def names(self) -> list[object]:
        return [name for name, _ in self.calls]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        os.sched_yield()


def asleep(poller: Poller[Any]) -> bool:
    """Whether the thread waits for an alarm that is not set."""
    return poller._wakes == math.inf


@pytest.fixture
def flags() -> Flags:
    return Flags()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def poller(flags: Flags) -> Iterator[Poller[Flag]]:
    poller = Poller(flags)
    yield poller
    poller.close(0)
    assert NAME not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def without_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread never comes to look."""
    monkeypatch.setattr(module, "HEAD_START", 1e6)


class Time:
    """A clock that moves by itself while the thread naps, and by a microsecond when it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.naps: list[float] = []
        self.at: list[tuple[float, Callable[[], object]]] = []
        monkeypatch.setattr(module, "TimerFd", lambda: TimedAlarm(self))

    def __call__(self) -> float:
        self.now += 1e-6
        while self.at and self.at[0][0] <= self.now:
            self.at.pop(0)[1]()
        return self.now


class TimedAlarm:
    def __init__(self, time: Time) -> None:
        self._time = time
        self._is_set = threading.Event()
        self._after = 0.0

    def set(self, seconds: float) -> None:
        self._after = seconds
        if seconds == math.inf:
            self._is_set.clear()
        else:
            self._is_set.set()

    def wait(self) -> None:
        self._is_set.wait()
        self._is_set.clear()
        self._time.naps.append(self._after)
        self._time.now += self._after

    def close(self) -> None:
        pass


# -- events -----------------------------------------------------------------------------------------------------------


def test_an_event_that_has_passed_is_told(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    flag = Flag()
    flag.passed = True
    poller.watch("s", flag, heard.of("a"))
    until(lambda: heard.calls == [("a", None)])
    assert flags.threads == {NAME}
    assert flags.entered == [NAME]
    assert poller.in_flight() == 0


def test_one_thread_for_all_streams(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    for stream in range(5):
        flag = Flag()
        flag.passed = True
        poller.watch(stream, flag, heard.of(stream))
        until(lambda stream=stream: len(heard.calls) == stream + 1)
    assert [thread.name for thread in threading.enumerate()].count(NAME) == 1
    assert flags.entered == [NAME]


def test_no_thread_before_the_first_event(poller: Poller[Flag]) -> None:
    assert NAME not in {thread.name for thread in threading.enumerate()}
    poller.before_await("s")
    assert poller.in_flight() == 0


def test_a_stream_is_told_in_order_and_only_its_head_is_queried(
    poller: Poller[Flag], flags: Flags, heard: Heard
) -> None:
    watched = [Flag(i) for i in range(10)]
    for flag in watched:
        poller.watch("s", flag, heard.of(flag.name))
    for flag in watched[1:]:
        flag.passed = True
    until(lambda: watched[0].queries > 20)
    assert [flag.queries for flag in watched[1:]] == [0] * 9
    assert poller.in_flight() == 10
    watched[0].passed = True
    until(lambda: len(heard.calls) == 10)
    assert heard.calls == [(i, None) for i in range(10)]
    assert [flag.queries for flag in watched[1:]] == [1] * 9


def test_streams_do_not_wait_for_each_other(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    late, soon = Flag(), Flag()
    poller.watch("late", late, heard.of("late"))
    until(lambda: late.queries > 2)
    soon.passed = True
    poller.watch("soon", soon, heard.of("soon"))
    until(lambda: heard.names == ["soon"])
    late.passed = True
    until(lambda: heard.names == ["soon", "late"])


def test_what_has_passed_at_once_wakes_the_loop_once(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    """100 Works of two streams, settled while the loop is away."""

    class CountingMailbox(Mailbox):
        rings = 0

        def _drain(self) -> None:
            self.rings += 1
            super()._drain()

    async def main() -> None:
        mailbox = CountingMailbox(asyncio.get_running_loop())
        works: list[Work[None]] = [
            Work(
                AllReduce(torch.float32, 4, ReduceOp.SUM),
                i,
                mailbox,
                value=None,
                timeout=600.0,
                on_settled=lambda work: None,
            )
            for i in range(100)
        ]
        watched = [Flag(i) for i in range(100)]
        for work in works:
            work.add_done_callback(lambda work: heard.calls.append((work.seq, None)))
        for flag, work in zip(watched, works, strict=True):
            poller.watch(flag.name % 2, flag, work.settle)  # type: ignore[operator]
        for flag in reversed(watched):
            flag.passed = True
        until(lambda: all(work.done() for work in works))  # the loop stands still
        assert mailbox.rings == 0
        await asyncio.gather(*works)
        assert mailbox.rings == 1
        assert sorted(heard.names) == list(range(100))

    asyncio.run(main())


def test_a_callback_may_watch_again(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    first, second = Flag(), Flag()
    first.passed = second.passed = True

    def again(error: BrokenError | None) -> None:
        heard.calls.append(("first", error))
        poller.watch("s", second, heard.of("second"))

    poller.watch("s", first, again)
    until(lambda: heard.names == ["first", "second"])


def test_an_error_out_of_a_callback_is_logged_and_no_more(
    poller: Poller[Flag], flags: Flags, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: BrokenError | None) -> None:
        raise ValueError("bad callback")

    def leave(error: BrokenError | None) -> None:
        sys.exit()

    watched = [Flag(i) for i in range(4)]
    for flag, done in zip(watched, (fail, heard.of(1), leave, heard.of(3)), strict=True):
        poller.watch("s", flag, done)
    with caplog.at_level(logging.ERROR, "asynccomm"):
        for flag in reversed(watched):
            flag.passed = True
        until(lambda: heard.names == [1, 3])
        until(lambda: asleep(poller))
    assert "bad callback" in caplog.text
    assert "SystemExit" in caplog.text


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_fails_all_of_the_stream_and_no_other(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    bad, good = [Flag(i) for i in range(3)], Flag("good")
    for flag in bad:
        poller.watch("bad", flag, heard.of(flag.name))
    poller.watch("good", good, heard.of("good"))
    error = BackendError("the device is lost")
    bad[0].error = error
    until(lambda: len(heard.calls) == 3)
    assert heard.names == [0, 1, 2]
    assert all(told is error for _, told in heard.calls)
    good.passed = True
    until(lambda: heard.calls[3:] == [("good", None)])


def test_what_passed_before_the_error_is_well(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    watched = [Flag(i) for i in range(3)]
    watched[1].error = BackendError("lost")
    for flag in watched:
        poller.watch("s", flag, heard.of(flag.name))
    watched[0].passed = True
    until(lambda: len(heard.calls) == 3)
    assert heard.calls == [(0, None), (1, watched[1].error), (2, watched[1].error)]


@pytest.mark.parametrize("foreign", [IndexError("foreign"), OSError("foreign")])
def test_a_foreign_error_becomes_ours(poller: Poller[Flag], flags: Flags, heard: Heard, foreign: Exception) -> None:
    flag = Flag()
    flag.error = foreign
    poller.watch("s", flag, heard.of("a"))
    until(lambda: len(heard.calls) == 1)
    ((_, error),) = heard.calls
    assert isinstance(error, BackendError)
    assert error.__cause__ is foreign
    assert "foreign" in str(error)


def test_a_thread_that_cannot_query_fails_everything(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    flags.unfit = RuntimeError("no context")
    for stream in range(2):
        poller.watch(stream, Flag(), heard.of(stream))
    until(lambda: len(heard.calls) == 2)
    assert all("no context" in str(error) for _, error in heard.calls)
    assert flags.queried == []


# -- sleeping ---------------------------------------------------------------------------------------------------------


def test_with_nothing_in_flight_the_thread_is_blocked(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    for round_number in range(3):
        flag = Flag()
        poller.watch("s", flag, heard.of(round_number))
        until(lambda flag=flag: flag.queries > 2)
        flag.passed = True
        until(lambda: asleep(poller))
        assert heard.names == list(range(round_number + 1))
        queries = len(flags.queried)
        assert poller._thread is not None
        stat = Path(f"/proc/self/task/{poller._thread.native_id}/stat")
        until(lambda stat=stat: stat.read_text().rpartition(")")[2].split()[0] == "S")
        assert len(flags.queried) == queries


@given(st.floats(0, 1e4), st.floats(0, 1e4))
def test_naps_grow_with_age_within_limits(one: float, other: float) -> None:
    younger, older = sorted([one, other])
    assert sleep_seconds(younger) <= sleep_seconds(older)
    for age in (younger, older):
        nap = sleep_seconds(age)
        assert nap == 0 if age < SPIN_SECONDS else LEAST_NAP <= nap <= MOST_NAP
        assert nap <= LEAST_NAP + NAP_SHARE * age


def test_the_longest_nap_is_reached() -> None:
    assert sleep_seconds(0) == 0
    assert sleep_seconds(SPIN_SECONDS) == LEAST_NAP
    assert sleep_seconds(10) == MOST_NAP


def test_waiting_for_a_late_rank_takes_few_looks(monkeypatch: pytest.MonkeyPatch, flags: Flags, heard: Heard) -> None:
    clock = Time(monkeypatch)
    flag = Flag()
    clock.at.append((10.0, lambda: setattr(flag, "passed", True)))
    poller = Poller(flags, clock=clock)
    poller.watch("s", flag, heard.of("a"))
    until(lambda: heard.names == ["a"])
    poller.close(0)
    assert flag.queries < 5000
    assert clock.now < 10 + 2 * MOST_NAP
    naps = clock.naps[1:-1]  # until its first look, and until it was to end
    assert naps == sorted(naps)
    assert naps[0] == LEAST_NAP
    assert naps[-1] == MOST_NAP


def test_a_new_head_is_looked_at_soon_whatever_else_is_late(
    monkeypatch: pytest.MonkeyPatch, flags: Flags, heard: Heard
) -> None:
    clock = Time(monkeypatch)
    poller = Poller(flags, clock=clock)
    late, behind, young = Flag(), Flag(), Flag()
    poller.watch("late", late, heard.of("late"))
    poller.watch("late", behind, heard.of("behind"))
    until(lambda: MOST_NAP in clock.naps)
    before = len(clock.naps)
    poller.watch("young", young, heard.of("young"))
    until(lambda: LEAST_NAP in clock.naps[before:])
    young.passed = True
    until(lambda: heard.names == ["young"])
    before = len(clock.naps)
    until(lambda: MOST_NAP in clock.naps[before:])  # the late one is late again
    before = len(clock.naps)
    late.passed = True
    until(lambda: LEAST_NAP in clock.naps[before:])  # for a new head, to which the same applies
    behind.passed = True
    until(lambda: heard.names == ["young", "late", "behind"])
    poller.close(0)


# -- questions --------------------------------------------------------------------------------------------------------


def test_a_question_is_asked_until_it_says_no(poller: Poller[Flag]) -> None:
    threads: list[str] = []

    def question() -> bool:
        threads.append(threading.current_thread().name)
        return len(threads) < 4

    poller.ask(question, every=1e-4)
    until(lambda: asleep(poller))
    assert threads == [NAME] * 4


def test_a_question_is_asked_until_it_is_cancelled(poller: Poller[Flag]) -> None:
    asked: list[None] = []
    question = poller.ask(lambda: asked.append(None) is None, every=1e-4)
    until(lambda: len(asked) > 3)
    question.cancel()
    question.cancel()
    until(lambda: asleep(poller))


def test_a_question_that_raises_is_not_asked_again(poller: Poller[Flag], caplog: pytest.LogCaptureFixture) -> None:
    asked: list[None] = []

    def question() -> bool:
        asked.append(None)
        raise ValueError("bad question")

    with caplog.at_level(logging.ERROR, "asynccomm"):
        poller.ask(question, every=1e-4)
        until(lambda: len(asked) == 1 and asleep(poller))
    assert "bad question" in caplog.text
    assert len(asked) == 1


def test_questions_come_at_their_own_pace(monkeypatch: pytest.MonkeyPatch, flags: Flags) -> None:
    clock = Time(monkeypatch)
    poller = Poller(flags, clock=clock)
    times: dict[str, list[float]] = {"often": [], "seldom": []}

    def question(name: str) -> bool:
        times[name].append(clock.now)
        return len(times["seldom"]) < 5  # the thread may have begun before that is asked, too

    poller.ask(lambda: question("often"), every=0.5e-3)
    poller.ask(lambda: question("seldom"), every=50e-3)
    until(lambda: asleep(poller))
    poller.close(0)
    for name, every in (("often", 0.5e-3), ("seldom", 50e-3)):
        waits = [b - a for a, b in zip(times[name], times[name][1:], strict=False)]
        assert min(waits) >= every
        assert max(waits) < every + 1e-4


def test_hurried_operations_do_not_hold_up_questions(
    poller: Poller[Flag], flags: Flags, heard: Heard, without_thread: None
) -> None:
    """Each of them puts the thread's next look off."""
    asked: list[None] = []
    poller.ask(lambda: asked.append(None) is None, every=1e-3)

    def hurried() -> bool:
        flag = Flag()
        flag.passed = True
        poller.watch("s", flag, heard.of("a"))
        poller.before_await("s", 10)
        return len(asked) > 5

    until(hurried)


def test_a_question_may_be_asked_later(monkeypatch: pytest.MonkeyPatch, flags: Flags) -> None:
    clock = Time(monkeypatch)
    poller = Poller(flags, clock=clock)
    start = clock.now
    asked: list[float] = []
    poller.ask(lambda: asked.append(clock.now) is None, every=1e-3, first=20e-3)
    until(lambda: len(asked) > 2)
    assert asked[0] - start >= 20e-3
    assert asked[1] - asked[0] < 20e-3
    poller.close(0)


def test_a_question_that_comes_during_another_is_asked(poller: Poller[Flag]) -> None:
    asked: list[str] = []

    def first() -> bool:
        asked.append("first")
        poller.ask(lambda: asked.append("second") is not None)
        return False

    poller.ask(first, every=3600.0)
    until(lambda: asked == ["first", "second"])


def test_a_question_about_a_stream_is_asked_while_that_is_late(
    monkeypatch: pytest.MonkeyPatch, flags: Flags, heard: Heard
) -> None:
    clock = Time(monkeypatch)
    poller = Poller(flags, clock=clock)
    asked: list[float] = []
    poller.ask(lambda: asked.append(clock.now) is None, every=5e-3, stream="s")
    until(lambda: asleep(poller))
    assert asked == []
    for _ in range(10):  # as it should be
        flag = Flag()
        flag.passed = True
        poller.watch("s", flag, heard.of("soon"))
        until(lambda: asleep(poller))
    assert asked == []
    start = clock.now
    late = Flag()
    poller.watch("s", late, heard.of("late"))
    until(lambda: len(asked) > 5)
    late.passed = True
    until(lambda: asleep(poller))
    assert asked[0] - start >= 5e-3
    assert asked[0] - start < 6e-3
    poller.close(0)


# -- before_await -----------------------------------------------------------------------------------------------------


@pytest.fixture
def idle(poller: Poller[Flag], flags: Flags, without_thread: None) -> Poller[Flag]:
    """A poller whose thread sleeps, and will not look of its own accord."""
    poller.ask(lambda: False)
    until(lambda: asleep(poller))
    return poller


def test_hurry_settles_on_the_calling_thread(idle: Poller[Flag], flags: Flags, heard: Heard) -> None:
    flag = Flag()
    flag.passed = True
    idle.watch("s", flag, heard.of("a"))
    idle.before_await("s", 10)
    assert heard.calls == [("a", None)]
    assert flags.threads == {threading.current_thread().name}
    assert idle.in_flight() == 0


def test_a_new_head_is_hurrys_first(idle: Poller[Flag], flags: Flags, heard: Heard) -> None:
    for i in range(100):
        flag = Flag()
        flag.passed = True
        idle.watch("s", flag, heard.of(i))
        assert idle._wakes > time.monotonic() + 1e5
        idle.before_await("s", 10)
    assert heard.names == list(range(100))
    assert NAME not in flags.threads
    assert HEAD_START > module.HURRY_SECONDS


def test_hurry_looks_until_it_passes(idle: Poller[Flag], flags: Flags, heard: Heard) -> None:
    flag = Flag()
    idle.watch("s", flag, heard.of("a"))
    thread = threading.Thread(target=lambda: (until(lambda: flag.queries > 10), setattr(flag, "passed", True)))
    thread.start()
    idle.before_await("s", 20)
    assert heard.names == ["a"]
    thread.join()


def test_hurry_ends_with_what_it_is_for(idle: Poller[Flag], flags: Flags, heard: Heard) -> None:
    first, second = Flag(), Flag()
    first.passed = True
    idle.watch("s", first, heard.of("first"))
    idle.watch("s", second, heard.of("second"))
    idle.before_await("s", 1e6, until=lambda: heard.names == ["first"])
    assert second.queries == 1  # the look that found the first


def test_the_thread_takes_over_what_hurry_leaves(
    idle: Poller[Flag], flags: Flags, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Flag(), Flag()
    first.passed = True
    idle.watch("s", first, heard.of("first"))
    idle.watch("s", second, heard.of("second"))
    monkeypatch.setattr(module, "HEAD_START", HEAD_START)
    idle.before_await("s", until=lambda: heard.names == ["first"])
    second.passed = True
    until(lambda: heard.names == ["first", "second"])
    assert NAME in flags.threads


def test_hurry_ends_in_time(flags: Flags, heard: Heard, without_thread: None) -> None:
    ticks = itertools.count()
    poller = Poller(flags, clock=lambda: next(ticks) * 1e-6)
    poller.ask(lambda: False)
    until(lambda: asleep(poller))
    flag = Flag()
    poller.watch("s", flag, heard.of("a"))
    poller.before_await("s", 50e-6)
    assert 5 < flag.queries < 50
    for _ in range(100):  # other tasks, which it would keep waiting
        flag.queries = 0
        poller.before_await("s", 50e-6)
        assert flag.queries == 1
    poller.close(0)


def test_the_thread_spins_only_where_a_thread_waits(flags: Flags, heard: Heard, without_thread: None) -> None:
    """Else it would take the GIL from a thread that makes one call after the other."""
    now = [100.0]

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    poller = Poller(flags, clock=clock)
    poller.ask(lambda: False)
    until(lambda: asleep(poller))
    poller.watch("a", Flag(), heard.of("a"))
    assert poller._nap(clock()) == LEAST_NAP
    poller.before_await("a", 50e-6)
    assert poller._nap(clock()) == 0.0
    now[0] += SPIN_SECONDS
    poller.watch("b", Flag(), heard.of("b"))
    assert poller._nap(clock()) == LEAST_NAP
    poller.close(0)


def test_hurry_leaves_other_streams_alone(idle: Poller[Flag], flags: Flags, heard: Heard) -> None:
    flag = Flag()
    flag.passed = True
    idle.watch("other", flag, heard.of("a"))
    idle.before_await("s", 1e6)
    assert heard.calls == []


def test_hurry_fails_a_stream_as_the_thread_would(idle: Poller[Flag], flags: Flags, heard: Heard) -> None:
    watched = [Flag(0), Flag(1)]
    watched[0].error = BackendError("lost")
    for flag in watched:
        idle.watch("s", flag, heard.of(flag.name))
    idle.before_await("s")
    assert heard.calls == [(0, watched[0].error), (1, watched[0].error)]


def test_an_interrupt_in_hurry_comes_out_after_the_rest_was_told(
    idle: Poller[Flag], flags: Flags, heard: Heard
) -> None:
    def interrupted(error: BrokenError | None) -> None:
        raise KeyboardInterrupt

    watched = [Flag(0), Flag(1)]
    for flag, done in zip(watched, (interrupted, heard.of(1)), strict=True):
        flag.passed = True
        idle.watch("s", flag, done)
    with pytest.raises(KeyboardInterrupt):
        idle.before_await("s")
    assert heard.names == [1]
    assert idle.in_flight() == 0


def test_hurry_keeps_the_order_beside_the_thread(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    """The thread is in a callback of the stream: what comes next must wait for that."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(error: BrokenError | None) -> None:
        inside.set()
        assert go_on.wait(20)
        heard.calls.append(("slow", error))

    first, second = Flag(), Flag()
    first.passed = second.passed = True
    poller.watch("s", first, slow)
    assert inside.wait(20)
    poller.watch("s", second, heard.of("second"))
    poller.before_await("s", 1e-4)
    assert heard.calls == []
    go_on.set()
    poller.before_await("s", 20)
    until(lambda: heard.names == ["slow", "second"])


# -- the end ----------------------------------------------------------------------------------------------------------


def test_closing_waits_for_what_is_in_flight(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    flag = Flag()
    poller.watch("s", flag, heard.of("a"))
    closing = threading.Thread(target=poller.close)
    closing.start()
    until(lambda: poller._closed and flag.queries > 5)
    assert heard.calls == []
    flag.passed = True
    closing.join(20)
    assert heard.calls == [("a", None)]


def test_closing_fails_what_does_not_pass(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    for i in range(4):
        poller.watch(i % 2, Flag(), heard.of(i))
    poller.close(0.01)
    poller.close(0.01)
    assert sorted(heard.calls, key=lambda call: call[0]) == [  # type: ignore[arg-type,return-value]
        (i, error) for i, (_, error) in enumerate(heard.calls)
    ]
    assert [name for name in heard.names if name in (0, 2)] == [0, 2]
    assert all(isinstance(error, BackendError) and "4 of them" in str(error) for _, error in heard.calls)
    assert poller.in_flight() == 0
    assert NAME not in {thread.name for thread in threading.enumerate()}


def test_a_closed_poller_takes_nothing(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    poller.close()
    with pytest.raises(ClosedError):
        poller.watch("s", Flag(), heard.of("a"))
    with pytest.raises(ClosedError):
        poller.ask(lambda: True)
    poller.before_await("s")
    assert heard.calls == []


def test_closing_ends_the_questions(poller: Poller[Flag]) -> None:
    asked: list[None] = []
    poller.ask(lambda: asked.append(None) is None, every=1e-4)
    until(lambda: len(asked) > 1)
    poller.close()
    assert poller._checks == {}


def test_closing_out_of_a_callback(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    flag, late = Flag(), Flag()
    flag.passed = True
    poller.watch("late", late, heard.of("late"))
    poller.watch("s", flag, lambda error: poller.close(0))
    until(lambda: NAME not in {thread.name for thread in threading.enumerate()})
    ((name, error),) = heard.calls
    assert name == "late"
    assert isinstance(error, BackendError)


def test_closing_does_not_wait_for_a_query_that_hangs(
    poller: Poller[Flag], flags: Flags, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.01)
    hanging, go_on = threading.Event(), threading.Event()

    def query(event: Flag) -> bool:
        hanging.set()
        return go_on.wait(20)

    monkeypatch.setattr(flags, "query", query)
    poller.watch("s", Flag(), heard.of("a"))
    assert hanging.wait(20)
    poller.close(0)
    assert heard.names == ["a"]
    go_on.set()  # it passed, after all
    until(lambda: NAME not in {thread.name for thread in threading.enumerate()})
    assert heard.names == ["a"]


def test_no_descriptor_is_left(flags: Flags) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):
        poller = Poller(flags)
        poller.ask(lambda: False)
        assert descriptors() == before + 1
        poller.close()
        assert descriptors() == before


def test_a_forked_child_has_nothing_in_flight(poller: Poller[Flag], flags: Flags, heard: Heard) -> None:
    poller.watch("s", Flag(), heard.of("parent's"))
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        ok = poller.in_flight() == 0
        flag = Flag()
        flag.passed = True
        poller.watch("s", flag, heard.of("child's"))
        until(lambda: len(heard.calls) == 1)
        poller.close()
        os._exit(0 if ok and heard.names == ["child's"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert poller.in_flight() == 1
    assert heard.calls == []


def test_the_process_ends_with_something_in_flight() -> None:
    program = """
import atexit, threading

atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # the last that is called

from asynccomm.backends.nccl.poller import Poller

class Never:
    def enter(self): pass
    def query(self, event): return False

poller = Poller(Never())
poller.watch("s", object(), lambda error: print("told", error))
poller.ask(lambda: True, every=1e-4)
print("end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n['MainThread']\n", "")


# -- all together -----------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("watch"), st.integers(0, 2)),
        st.tuples(st.just("pass"), st.integers(0, 2)),
        st.tuples(st.just("before_await"), st.integers(0, 2)),
        st.tuples(st.just("fail"), st.integers(0, 2)),
        st.tuples(st.just("turn"), st.integers(0, 50)),
    ),
    max_size=60,
)


@examples(150)
@given(STEPS, st.booleans())
def test_each_event_is_told_once_in_order_and_not_before_it_passed(steps: list[tuple[str, int]], ends: bool) -> None:
    poller = Poller(Flags())
    watched: dict[int, list[Flag]] = {0: [], 1: [], 2: []}
    told: dict[int, list[tuple[Flag, bool, BrokenError | None]]] = {0: [], 1: [], 2: []}
    for what, n in steps:
        match what:
            case "watch":
                flag = Flag((n, len(watched[n])))
                watched[n].append(flag)
                poller.watch(n, flag, lambda error, n=n, flag=flag: told[n].append((flag, flag.passed, error)))  # type: ignore[misc]
            case "pass":  # the oldest that has not, as a stream does
                for flag in [flag for flag in watched[n] if not flag.passed][:1]:
                    flag.passed = True
            case "fail":
                for flag in [flag for flag in watched[n] if not flag.passed][:1]:
                    flag.error = BackendError("lost")
            case "before_await":
                poller.before_await(n, 1e-5)
            case "turn":
                for _ in range(n):
                    os.sched_yield()
    if ends:
        for flags in watched.values():
            for flag in flags:
                flag.passed = True
    poller.close(10 if ends else 0)
    for n, flags in watched.items():
        assert [flag for flag, _, _ in told[n]] == flags
        assert all(passed or error is not None for _, passed, error in told[n])
    assert poller.in_flight() == 0


def test_many_threads_at_once(poller: Poller[Flag], flags: Flags) -> None:
    each, streams = 300, 4
    told: dict[int, list[int]] = {n: [] for n in range(streams)}

    def stream(n: int) -> None:
        for i in range(each):
            flag = Flag()
            poller.watch(n, flag, lambda error, i=i: told[n].append(i))  # type: ignore[misc]
            flag.passed = True
            if i % 3 == 0:
                poller.before_await(n)

    threads = [threading.Thread(target=stream, args=(n,)) for n in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: sum(map(len, told.values())) == each * streams)
    assert told == {n: list(range(each)) for n in range(streams)}


# -- the pool ---------------------------------------------------------------------------------------------------------


class Made:
    """Makes events, and remembers them."""

    def __init__(self) -> None:
        self.made: list[Flag] = []

    def make(self) -> Flag:
        self.made.append(Flag(len(self.made)))
        return self.made[-1]


@examples(50)
@given(st.lists(st.sampled_from(["watch", "pass", "before_await"]), max_size=60))
def test_an_event_that_is_watched_is_not_handed_out(steps: list[str]) -> None:
    poller = Poller(Flags())
    made = Made()
    pool = EventPool(made.make, limit=4)
    watched: list[Flag] = []

    def done(event: Flag, error: BrokenError | None) -> None:
        watched.remove(event)
        if error is None:
            event.passed = False
            pool.give(event)

    for step in steps:
        match step:
            case "watch":
                event = pool.take()
                assert event not in watched
                watched.append(event)
                poller.watch("s", event, lambda error, event=event: done(event, error))  # type: ignore[misc]
            case "pass":
                for event in watched[:1]:
                    event.passed = True
            case "before_await":
                poller.before_await("s", 1e-5)
    poller.close(0)
    assert watched == []
