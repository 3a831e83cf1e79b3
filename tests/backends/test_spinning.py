"""The decision whether a wait begins with a spin."""

from __future__ import annotations

from asynccomm.backends.spinning import MOST_SKIPPED, SpinPolicy


def test_failed_spins_are_followed_by_exponentially_more_waits_without() -> None:
    policy = SpinPolicy()
    gaps = []
    for _ in range(9):
        gap = 0
        while not policy.should_spin():
            gap += 1
        policy.record(False)
        gaps.append(gap)
    assert gaps == [0, 1, 3, 7, 15, 31, 63, MOST_SKIPPED, MOST_SKIPPED]


def test_a_successful_spin_ends_the_back_off() -> None:
    policy = SpinPolicy()
    for _ in range(3):
        while not policy.should_spin():
            pass
        policy.record(False)
    while not policy.should_spin():
        pass
    policy.record(True)
    assert policy.should_spin()
    assert policy.should_spin()


def test_the_next_decision_is_known_before() -> None:
    policy = SpinPolicy()
    for _ in range(20):
        sleeps = policy.sleeps
        assert policy.should_spin() is not sleeps
        if not sleeps:
            policy.record(False)
