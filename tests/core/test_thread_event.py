"""Events that one thread waits for."""

from __future__ import annotations

import math
import threading

from asynccomm.core.thread_event import ThreadEvent
from tests.interrupts import interrupted


def test_an_event_that_is_set_stays_set() -> None:
    event = ThreadEvent()
    assert not event.is_set()
    event.set()
    event.set()
    assert event.is_set()
    assert all(event.wait(seconds) for seconds in (0, 1, math.inf))


def test_a_wait_ends_with_its_time() -> None:
    event = ThreadEvent()
    assert not event.wait(0.001)
    assert not event.wait(0)
    assert not event.wait(-math.inf)


def test_another_thread_ends_a_wait() -> None:
    event = ThreadEvent()
    thread = threading.Thread(target=event.set)
    thread.start()
    assert event.wait(math.inf)
    thread.join()


def test_a_wait_can_be_interrupted_at_any_place_and_repeated() -> None:
    events = [ThreadEvent(), ThreadEvent()]

    def call() -> None:
        never, soon = events
        never.wait(1e-6)
        soon.set()
        soon.wait(math.inf)

    def check() -> None:
        never, soon = events
        soon.set()
        assert soon.wait(math.inf)
        assert not never.wait(0)
        events[:] = ThreadEvent(), ThreadEvent()

    interrupted(500, call, check)
