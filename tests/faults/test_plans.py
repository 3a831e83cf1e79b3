"""The cases: the same for the same seed, all combinations, nothing that makes no sense."""

from __future__ import annotations

from collections import Counter

import pytest

from .plans import (
    BACKENDS,
    COMBINATIONS,
    FAULTS,
    LOCAL,
    LOCAL_FAULTS,
    OPERATIONS,
    PHASES,
    ROOTED,
    SIZED,
    WHERE,
    Case,
    expected,
    plan,
)

MANY = plan(5, 4000)


def test_the_same_seed_draws_the_same_cases() -> None:
    assert plan(3, 500) == plan(3, 500)
    assert plan(3, 500) != plan(4, 500)
    assert plan(3, 500)[:100] == plan(3, 100)


@pytest.mark.parametrize("count", [0, 1, len(COMBINATIONS), 1000])
def test_there_are_as_many_as_asked_for(count: int) -> None:
    cases = plan(1, count)
    assert [case.number for case in cases] == list(range(count))


def test_one_round_has_each_combination_once() -> None:
    first = plan(9, len(COMBINATIONS))
    assert Counter((c.fault, c.phase, c.backend, c.detail) for c in first) == Counter(COMBINATIONS)


def test_many_cases_have_everything() -> None:
    assert {case.fault for case in MANY} == set(FAULTS) == set(WHERE)
    assert {case.phase for case in MANY} == set(PHASES)
    assert {case.backend for case in MANY} == set(BACKENDS)
    assert {case.operation for case in MANY} == set(OPERATIONS)
    for backend in BACKENDS:
        death = "lose" if backend in LOCAL else "kill"
        killed = {case.operation for case in MANY if case.fault == death and case.backend == backend}
        assert killed == set(OPERATIONS)
    assert {case.size for case in MANY} == {2, 3, 4}
    assert {case.victim for case in MANY} == {0, 1, 2, 3}


@pytest.mark.parametrize("fault", FAULTS)
def test_cases_make_sense(fault: str) -> None:
    for case in MANY:
        if case.fault == fault:
            check(case)


def check(case: Case) -> None:
    assert 0 <= case.victim < case.size
    assert 0 <= case.delay < 1
    assert case.large == (case.phase == "tail")
    assert case.fault in LOCAL_FAULTS or case.backend not in LOCAL
    assert case.fault != "lose" or case.backend in LOCAL
    if case.fault == "memory":
        assert case.backend == "shm"
        assert case.victim == 0
    if case.fault.startswith("slow"):
        assert case.victim  # the others' connections lead to rank 0
    if case.detail == "root":
        assert case.operation in ROOTED
    if case.detail in ("size", "dtype") or case.large:
        assert case.operation in SIZED
    if case.phase == "shrink":
        assert case.size == 4  # two are left


def test_it_is_known_what_to_expect() -> None:
    for case in MANY:
        found = expected(case)
        assert bool(found.errors) == (found.within > 0)
        assert not found.errors or case.detail != "spare"
        assert found.within < 7
