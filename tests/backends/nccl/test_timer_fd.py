"""The alarm: it fires once for each setting, and only the last setting counts."""

from __future__ import annotations

import math
import select
import threading
from collections.abc import Iterator

import pytest

from asynccomm.backends.nccl.timer_fd import TimerFd


@pytest.fixture
def alarm() -> Iterator[TimerFd]:
    made = TimerFd()
    yield made
    made.close()


def fires(alarm: TimerFd, seconds: float) -> bool:
    """Whether the alarm fires within that time."""
    return bool(select.select([alarm._fd], [], [], seconds)[0])


def test_a_wait_ends_when_the_alarm_fires(alarm: TimerFd) -> None:
    for seconds in (0.0, 1e-3):
        alarm.set(seconds)
        alarm.wait()
        assert not fires(alarm, 0.0), "it fires once"


def test_another_thread_sets_the_alarm_of_one_that_sleeps(alarm: TimerFd) -> None:
    alarm.set(math.inf)
    sleeper = threading.Thread(target=alarm.wait, daemon=True)
    sleeper.start()
    alarm.set(0.0)
    sleeper.join(30)
    assert not sleeper.is_alive()


def test_only_the_last_setting_counts(alarm: TimerFd) -> None:
    alarm.set(0.0)
    assert fires(alarm, 30)
    alarm.set(3600)
    assert not fires(alarm, 0.0)
    alarm.set(math.inf)
    assert not fires(alarm, 0.0)
    alarm.set(1.5e-9)  # less than its resolution
    assert fires(alarm, 30)
