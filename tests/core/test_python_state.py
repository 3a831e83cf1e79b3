"""The clock of a streak; all that is alike in C is in ``test_state.py``."""

from __future__ import annotations

import pytest

from asynccomm.core import python_state
from asynccomm.core.python_state import STREAK_AWAITS, STREAK_SECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that ``time.monotonic`` returns in ``python_state``, to be set by the test."""
    now = [100.0]
    monkeypatch.setattr(python_state.time, "monotonic", lambda: now[0])
    return now


def test_must_yield_after_a_number_of_awaits(clock: list[float]) -> None:
    streak = python_state.Streak()
    for _ in range(3):
        assert [streak.should_yield() for _ in range(STREAK_AWAITS)] == [False] * (STREAK_AWAITS - 1) + [True]
    assert STREAK_AWAITS == 64


def test_must_yield_after_some_time(clock: list[float]) -> None:
    streak = python_state.Streak()
    assert not streak.should_yield()
    clock[0] += 0.9 * STREAK_SECONDS
    assert not streak.should_yield()
    clock[0] += 0.2 * STREAK_SECONDS
    assert streak.should_yield()
    assert not streak.should_yield()  # a new streak, measured anew
    clock[0] += 0.9 * STREAK_SECONDS
    assert not streak.should_yield()
    assert STREAK_SECONDS == 1e-3
