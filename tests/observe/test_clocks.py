"""The offset between two clocks."""

import pytest

from asynccomm.observe.clocks import ClockOffset, estimate


def test_the_shortest_way_there_and_back_counts() -> None:
    found = estimate([(1.0, 101.5, 2.0), (3.0, 103.05, 3.1), (4.0, 104.9, 5.0)], same_host=False)
    assert found is not None
    assert found.seconds == pytest.approx(100.0)
    assert found.uncertainty == pytest.approx(0.05)


def test_one_host_has_one_clock_unless_the_estimate_excludes_it() -> None:
    assert estimate([(1.0, 1.04, 1.1)], same_host=True) == ClockOffset(0.0, 0.0)
    found = estimate([(1.0, 3.05, 1.1)], same_host=True)
    assert found is not None
    assert found.seconds == pytest.approx(2.0)


def test_without_an_answer_there_is_no_estimate() -> None:
    assert estimate([], same_host=True) is None
