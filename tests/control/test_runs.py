"""Lists of ranks: what is written is read, in one form, of few bytes, and hostile lists are refused by their size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.control.runs import (
    MAX_LISTED,
    MAX_RANK,
    RankRuns,
    Run,
    Runs,
    compact,
    compact_ranks,
    expand,
    expand_ranks,
)
from asynccomm.control.transport.schema import MessageError, decode, dumps, loads
from tests.cases import cases

PEOPLE: Any = st.lists(st.integers(0, 20) | st.sampled_from(["a", "b"]), max_size=30)


@given(PEOPLE)
def test_any_list_comes_through_json_in_its_order(people: list[int | str]) -> None:
    runs = loads(Runs, dumps(compact(people)))
    assert expand(runs) == tuple(people)
    assert compact(runs) == runs == compact(people), "one form"
    assert len(runs) <= len(people)


@cases(
    "people, runs",
    [
        ([], ()),
        ([0, 1], (0, 1)),
        (range(10_000), (Run(0, 10_000, 1),)),
        ([*range(500), *range(501, 10_000)], (Run(0, 500, 1), Run(501, 9499, 1))),
        (range(3, 800, 8), (Run(3, 100, 8),)),
        ([3, 2, 1, 0], (Run(3, 4, -1),)),
        ([5, 5, 5], (5, 5, 5)),
        ([0, 1, 2, "new", 3, 4, 5], (Run(0, 3, 1), "new", Run(3, 3, 1))),
        (["new", "newer"], ("new", "newer")),
    ],
)
def test_ranks_at_equal_distances_are_a_run(people: Any, runs: Runs) -> None:
    assert compact(people) == runs
    assert expand(runs) == tuple(people)


def test_equal_lists_are_one_object() -> None:
    """A root compares the list in the report of each of many ranks."""
    one, other = (loads(RankRuns, "[[0,5000,1],[5001,5000,1]]") for _ in range(2))
    assert compact_ranks(one) is compact_ranks(other)
    assert expand_ranks(one) is expand_ranks(other)


@cases(
    "run",
    [
        [0, 5],
        [0, 5, 1, 1],
        [-1, 5, 1],
        [0, 2, 1],
        [0, MAX_LISTED + 1, 1],
        [0, 5, MAX_RANK + 1],
        [0, 5.0, 1],
        [0, 3, 0],
        [1, 3, -1],
        [MAX_RANK - 1, 3, 1],
        ["new", 3, 1],
        {"first": 0, "count": 3, "step": 1},
    ],
)
def test_a_run_has_three_numbers_within_limits(run: object) -> None:
    for kind in (Runs, RankRuns):
        with pytest.raises(MessageError):
            decode(kind, [0, run])


@cases("items", [[Run(0, MAX_LISTED, 1)] * 1000, [Run(0, MAX_LISTED, 1), 0]])
def test_long_lists_are_refused_before_they_take_memory(items: Any) -> None:
    for read in (compact, expand):
        with pytest.raises(ValueError, match=f"a list has at most {MAX_LISTED} participants"):
            read(items)


def test_ranks_are_not_names() -> None:
    assert dumps(compact_ranks([0, 1, 2])) == "[[0,3,1]]"
    with pytest.raises(MessageError):
        decode(RankRuns, ["new"])
