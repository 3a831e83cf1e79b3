"""The usual run has each value of each parameter, and no more cases than that takes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from tests import sampling


class Item:
    def __init__(self, name: str, **params: Any) -> None:
        self.nodeid = f"{name}[{params}]" if params else name
        if params:
            self.callspec = SimpleNamespace(params=params)


def test_each_value_of_each_parameter_is_left() -> None:
    both = [Item("both", first=f, second=s) for f, s in itertools.product("abcd", (1, 2, 3))]
    one = [Item("one", value=value) for value in range(5)]
    others: list[Any] = [*one, Item("none")]
    without: list[Any] = sampling.left_out([*both, *others])  # type: ignore[list-item]
    left = [item.callspec.params for item in both if item not in without]
    assert len(left) == 4
    assert {params["first"] for params in left} == set("abcd")
    assert {params["second"] for params in left} == {1, 2, 3}
    assert not set(others) & set(without)
