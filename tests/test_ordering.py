"""The longest files come first, whole, and there are such files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests import ordering


class Item(NamedTuple):
    path: Path
    name: str


def test_the_longest_and_then_those_with_the_most_tests() -> None:
    paths = [ordering.ROOT / name for name in ("a.py", "b.py", ordering.LONGEST[1], ordering.LONGEST[0])]
    items = [Item(path, name) for path, names in zip(paths, ["x", "zy", "x", "yx"], strict=True) for name in names]
    ordering.sort(items)  # type: ignore[arg-type]
    assert items == [
        Item(paths[place], name) for place, name in [(3, "y"), (3, "x"), (2, "x"), (1, "z"), (1, "y"), (0, "x")]
    ]


def test_there_are_such_files() -> None:
    assert [name for name in ordering.LONGEST if not (ordering.ROOT / name).is_file()] == []
