"""Events that one thread waits for."""

from __future__ import annotations

import math
import random
import signal
import threading

from asynccomm.core.thread_event import ThreadEvent


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


class Interrupt(BaseException):
    """Of a signal's handler."""


def test_a_wait_can_be_interrupted_at_any_place_and_repeated() -> None:
    choose = random.Random(0)
    interrupts = 0

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(500):
            event, other = ThreadEvent(), ThreadEvent()
            try:
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-6, 1e-4))
                for _ in range(20_000):  # with an end, as a finalizer may be interrupted, whose exceptions are ignored
                    other.wait(1e-6)
                    event.set()
                    event.wait(math.inf)
            except Interrupt:
                interrupts += 1
            event.set()
            assert event.wait(math.inf)
            assert not other.wait(0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 250
