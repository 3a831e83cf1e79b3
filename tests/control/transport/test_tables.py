"""Tables of facts about ranks: short, exact, and refused where they cannot be."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.control.transport.schema import MessageError
from asynccomm.control.transport.tables import Value, expanded, pack_table, unpack_table

MOST = 1 << 20


@given(st.lists(st.tuples(st.integers(-(2**62), 2**62), st.text(), st.text("a01\x00%", max_size=6)), min_size=1))
def test_any_table_comes_back(rows: list[tuple[int, str, str]]) -> None:
    assert unpack_table(pack_table(rows), (int, str, str), len(rows), MOST) == rows


def test_facts_that_grow_in_steps_take_hardly_any_bytes() -> None:
    def rows(size: int) -> list[tuple[Value, ...]]:
        hosts = [rank // 8 for rank in range(size)]
        facts = [(rank, f"node-{host:04d}", f"10.{host // 250}.{host % 250}.7") for rank, host in enumerate(hosts)]
        return [(*row, 32768 + row[0]) for row in facts]

    assert len(pack_table(rows(1000))) < 300
    assert len(pack_table(rows(10_000))) < 600
    assert unpack_table(pack_table(rows(10_000)), (int, str, str, int), 10_000, MOST) == rows(10_000)


def test_equal_lists_stand_there_once() -> None:
    numbers = random.Random(0).sample(range(1 << 30), 1000)
    once = len(pack_table([(number,) for number in numbers]))
    assert len(pack_table([(number, number, f"a/{number}/b") for number in numbers])) < once + 200


def packed(table: Any) -> bytes:
    return zlib.compress(json.dumps(table).encode())


GOOD = {"lists": [[1, 2], [0, 0]], "columns": [0, {"forms": [["a", "b"]], "form_of": 1, "numbers": [[0]]}]}


def test_a_good_table() -> None:
    assert unpack_table(packed(GOOD), (int, str), 2, MOST) == [(1, "a1b"), (3, "a3b")]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"columns": GOOD["columns"][:1]}, "a table must have the columns int, str, got"),
        ({"columns": GOOD["columns"][::-1]}, "a table must have the columns int, str, got"),
        ({"columns": [2, GOOD["columns"][1]]}, "must fit each other"),
        ({"columns": [-1, GOOD["columns"][1]]}, "Expected `int` >= 0"),
        ({"lists": [[1, 2], [0]]}, "must fit each other"),
        ({"lists": [[1, 2], [1, 0]]}, "must fit each other"),
        ({"lists": [[1, 2], [0, 0, 0]]}, "must fit each other"),
        ({"lists": [[1, "2"], [0, 0]]}, "Expected `int`, got `str`"),
        ({"columns": [0, {"forms": [["a"]], "form_of": 1, "numbers": [[0]]}]}, "1 pieces and 1 numbers"),
        ({"columns": [0, {"forms": [["a"], ["b"]], "form_of": 1, "numbers": [[]]}]}, "must fit each other"),
        ({"columns": [0, {"forms": [["a" * 2000]], "form_of": 1, "numbers": [[]]}]}, "must fit each other"),
        ({"columns": [0, {"forms": [[""] * 2000], "form_of": 1, "numbers": [[0] * 1999]}]}, "must fit each other"),
        ({"lists": [[1, 2, 3], [0, 0, 0]]}, "must be of 2 ranks, got 3"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_a_table_that_cannot_be(change: dict[str, Any], text: str) -> None:
    with pytest.raises(MessageError, match=text) as caught:
        unpack_table(packed({**GOOD, **change}), (int, str), 2, MOST)
    assert len(str(caught.value)) < 600


@given(st.binary(max_size=200))
def test_noise(data: bytes) -> None:
    with pytest.raises(MessageError):
        unpack_table(data, (int,), 1, MOST)


def test_a_table_that_is_too_long() -> None:
    with pytest.raises(MessageError, match="at most 10 bytes"):
        expanded(zlib.compress(b" " * 11), 10)
    assert expanded(zlib.compress(b" " * 10), 10) == b" " * 10
