"""Indexes of other systems' interfaces: the tests that they name exist."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "asynccomm/compat/README.md"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def tests_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, FUNCTIONS)}


def missing_tests(folder: Path, shown: Iterable[str]) -> list[str]:
    """The names "file::test" in ``shown``, of files ``test_file.py`` in ``folder``, that are no tests."""
    found = []
    for name in " ".join(shown).split():
        file, function = name.split("::")
        if function not in tests_of(folder / f"test_{file}.py"):
            found.append(name)
    return found


def rows_of(head: str) -> list[str]:
    """The first cells of the table with the first column ``head`` in the document of the faces."""
    lines = DOCUMENT.read_text().splitlines()
    at = lines.index(next(line for line in lines if line.startswith(f"| {head} |")))
    cells = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        cells.append(line.split(" | ")[0].removeprefix("| "))
    return cells
