"""How long to look out for peers."""

import pytest

from asynccomm.backends.shm import spin_budget
from asynccomm.backends.shm.spin_budget import LEAST, MOST, patience_for, wake_up_seconds


def test_a_wake_up_is_measured() -> None:
    assert 0 < wake_up_seconds() < 0.1
    assert wake_up_seconds() == wake_up_seconds()  # once per process


@pytest.mark.parametrize(("wake_up", "seconds"), [(1e-9, LEAST), (30e-6, 150e-6), (1.0, MOST)])
def test_some_wake_ups_within_limits(monkeypatch: pytest.MonkeyPatch, wake_up: float, seconds: float) -> None:
    monkeypatch.setattr(spin_budget, "wake_up_seconds", lambda: wake_up)
    assert patience_for(2) == pytest.approx(seconds)


def test_none_where_nobody_can_be_late() -> None:
    assert patience_for(1) == 0
