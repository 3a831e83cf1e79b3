"""The English of docstrings, comments and documents: each sentence has a noun as its subject.

Sentences around "what", "who" and "nobody" leave the reader to find the noun. So these words are counted, and a file
may not have more of them than it had.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALLOWED = Path(__file__).with_suffix(".json")  # words by file; files that are not there have none
WORDS = re.compile(r"\b(what(?:ever)?|who(?:ever|m|mever|se)?|(?:no|some|every|any)body)\b", re.IGNORECASE)
COMMENTED = re.compile("#.*" + WORDS.pattern, re.IGNORECASE)
STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")  # where a statement has others
QUOTED = re.compile(r"```.*?```|``.*?``|`[^`\n]*`|\"[^\"\n]*\"", re.DOTALL)


def prose_of(path: Path) -> Iterator[str]:
    """The texts of a file, without quotations and code."""
    text = path.read_text()
    if WORDS.search(text) is None:  # most files; they need no parsing
        return
    if path.suffix == ".md":
        yield text
        return
    nodes: list[ast.AST] = [ast.parse(text)]
    while nodes:  # not ast.walk(), which looks at all expressions, too
        node = nodes.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=False) or ""
        for name in STATEMENTS:
            nodes.extend(getattr(node, name, ()))
    if COMMENTED.search(text) is None:  # the split into tokens takes long
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@functools.cache
def counts() -> dict[str, int]:
    """The counted words of each file of the library and of each document, where there are any."""
    found = {}
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    documents = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]
    for path in sorted([*(ROOT / "asynccomm").rglob("*.py"), *documents]):
        name = path.relative_to(ROOT).as_posix()
        found[name] = sum(len(WORDS.findall(QUOTED.sub("", text))) for text in prose_of(path))
    return {name: count for name, count in found.items() if count}


def test_no_file_has_more_than_before() -> None:
    allowed, found = json.loads(ALLOWED.read_text()), counts()
    more = {
        name: f"{count}, not {allowed.get(name, 0)}" for name, count in found.items() if count > allowed.get(name, 0)
    }
    assert not more, f"write sentences with nouns as subjects: {more}"


def test_the_numbers_only_fall() -> None:
    allowed, found = json.loads(ALLOWED.read_text()), counts()
    fewer = {name: found.get(name, 0) for name, count in allowed.items() if found.get(name, 0) < count}
    assert not fewer, f"{ALLOWED.name} allows more than there are; write these numbers: {fewer}"
