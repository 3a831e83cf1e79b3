"""How much the tests try: samples by default, and everything with ``pytest --exhaustive``.

A test that tries many cases of one kind says how many it tries at most. In the default run it tries a fixed share of
them, which is the same in each run. Of a test with several parameters, the default run tries each value of each
parameter, but not each combination.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, TypeVar

import pytest
from hypothesis import settings

C = TypeVar("C")

SHARE: Final = 0.2  # of the examples of a property, without --exhaustive
LEAST: Final = 20  # examples of a property


_VARIABLE: Final = "ASYNCCOMM_TESTS_EXHAUSTIVE"  # which ranks inherit


def be_exhaustive(everything: bool) -> None:
    """From now on, tests try everything, or samples. Before they are collected."""
    os.environ.pop(_VARIABLE, None)
    if everything:
        os.environ[_VARIABLE] = "1"


def exhaustive() -> bool:
    """Whether all cases are to be tried."""
    return _VARIABLE in os.environ


def examples(count: int, usual: int | None = None) -> settings:
    """``count`` examples of a property with ``--exhaustive``, and ``usual`` without; None: a share of them."""
    if usual is None:
        usual = max(min(LEAST, count), math.ceil(count * SHARE))
    return settings(max_examples=amount(count, usual))


def amount(all_of_them: int, usual: int) -> int:
    """``usual`` without ``--exhaustive``, ``all_of_them`` with it."""
    return all_of_them if exhaustive() else usual


def some(cases: Sequence[C], count: int) -> Sequence[C]:
    """``count`` of ``cases``, evenly spread, without ``--exhaustive``; all with it."""
    if exhaustive() or len(cases) <= count:
        return cases
    return [cases[round(i * (len(cases) - 1) / max(count - 1, 1))] for i in range(count)]


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests of which all parameters' values are among those of others of the same function."""
    functions = defaultdict[str, list[tuple[pytest.Item, frozenset[tuple[str, int]]]]](list)
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None:
            values = frozenset((name, id(value)) for name, value in callspec.params.items())
            functions[item.nodeid.partition("[")[0]].append((item, values))
    chosen: set[pytest.Item] = set()
    for cases in functions.values():
        missing = frozenset[tuple[str, int]]().union(*(values for _, values in cases))
        while missing:
            item, values = max(cases, key=lambda case: len(missing & case[1]))
            chosen.add(item)
            missing -= values
    return [item for cases in functions.values() for item, _ in cases if item not in chosen]
