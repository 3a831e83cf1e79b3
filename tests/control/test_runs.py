"""Lists of ranks: what is written is read, in one form, of few bytes, and hostile lists are refused by their size."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.control.runs import (
    MAX_BITS,
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


@given(st.randoms(use_true_random=False), st.integers(0, MAX_RANK - 3000), st.integers(0, 400))
def test_any_set_of_ranks_comes_through_json(order: Any, first: int, count: int) -> None:
    ranks = sorted(order.sample(range(first, first + 2 * count + 1), count))
    mixed = [*ranks, "new", *ranks[::-1], *ranks]
    runs = loads(Runs, dumps(compact(mixed)))
    assert expand(runs) == tuple(mixed)
    assert compact(runs) == runs == compact(mixed), "one form"
    assert len(dumps(compact_ranks(ranks))) <= len(dumps(ranks))


@cases("share", [0.05, 0.2, 0.5, 0.8])
def test_ranks_at_random_distances_take_few_bits(share: float) -> None:
    order = random.Random(0)
    ranks = [rank for rank in range(10_000) if order.random() < share]
    (run,) = compact(ranks)
    assert isinstance(run, Run)
    assert isinstance(run.step, str)
    assert len(dumps([run])) < 10_000 / 6 + 40


def test_bits_up_to_the_last_rank() -> None:
    ranks = [MAX_RANK - distance for distance in sorted(random.Random(0).sample(range(1, 2000), 900), reverse=True)]
    ranks.append(MAX_RANK)
    (run,) = compact(ranks)
    assert isinstance(run, Run)
    assert isinstance(run.step, str)
    assert list(expand(loads(Runs, dumps([run])))) == ranks


def test_few_ranks_far_apart_are_no_bits() -> None:
    ranks = [rank**2 for rank in range(100)]
    assert compact(ranks) == tuple(ranks)
    far = [0, 1, 3, 7, 12, 13, 15, 3 * MAX_BITS]
    assert compact(far) == tuple(far)


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
        [0, 3, ""],
        [0, 3, "Dg=="],
        [0, 3, "Aw=="],
        [0, 2, "Aw=="],
        [0, 3, "B"],
        [0, 3, "\u00fc==="],
        [MAX_RANK - 1, 3, "Bw=="],
        [0, 3, "BwAA" * (MAX_BITS // 24 + 3)],
    ],
)
def test_a_run_has_three_parts_within_limits(run: object) -> None:
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
