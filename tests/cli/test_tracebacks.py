"""Tracebacks of several ranks become one, and an interrupt becomes a line."""

import traceback
from collections.abc import Callable

import pytest

from asynccomm.cli import tracebacks
from asynccomm.cli.tracebacks import SeenTracebacks, TracebackFolder


def text_of(call: Callable[[], object]) -> list[bytes]:
    """The lines that Python prints for the exception of ``call``."""
    try:
        call()
    except BaseException as exc:
        return "".join(traceback.format_exception(exc)).encode().splitlines(keepends=True)
    raise AssertionError


def plain() -> None:
    raise ValueError("no")


def chained() -> None:
    try:
        plain()
    except ValueError as exc:
        raise KeyError("x") from exc


def during() -> None:
    try:
        plain()
    except ValueError:
        raise KeyboardInterrupt  # noqa: B904 - as asyncio does


def group() -> None:
    raise ExceptionGroup("two", [ValueError("a"), ExceptionGroup("inner", [KeyError("b"), OSError(2, "c")])])


def group_with_stacks() -> None:
    errors: list[Exception] = []
    for call in (plain, group):
        try:
            call()
        except Exception as exc:
            errors.append(exc)
    raise ExceptionGroup("outer", errors) from errors[0]


CASES = {
    plain: b"ValueError: no\n",
    chained: b"KeyError: 'x'\n",
    during: b"KeyboardInterrupt\n",
    group: b"ExceptionGroup: two (2 sub-exceptions)\n",
    group_with_stacks: b"ExceptionGroup: outer (2 sub-exceptions)\n",
}


@pytest.mark.parametrize("call", CASES, ids=lambda call: call.__name__)
@pytest.mark.parametrize("piecemeal", [False, True])
def test_a_traceback_that_another_rank_has_printed_is_a_line(call: Callable[[], None], piecemeal: bool) -> None:
    lines, seen = text_of(call), SeenTracebacks()
    first, second = TracebackFolder(0, seen), TracebackFolder(1, seen)

    def feed(folder: TracebackFolder) -> list[bytes]:
        pieces = [[line] for line in lines] if piecemeal else [lines]
        return [line for piece in ([b"before\n"], *pieces, [b"after\n"]) for line in folder.feed(piece)]

    assert feed(first) == [b"before\n", *lines, b"after\n"]
    assert not first.holds
    assert feed(second) == [b"before\n", b"traceback as on rank 0: " + CASES[call], b"after\n"]
    assert feed(first) == [b"before\n", *lines, b"after\n"], "a rank's own"


def test_lines_are_held_until_a_timer_ends() -> None:
    seen = SeenTracebacks()
    lines, folder = text_of(plain), TracebackFolder(0, seen)
    assert folder.feed(lines) == []
    assert folder.holds
    assert folder.flush() == lines
    assert not folder.holds
    assert TracebackFolder(1, seen).feed([*lines, b"\n", b"next\n"]) == [
        b"traceback as on rank 0: ValueError: no\n",
        b"\n",
        b"next\n",
    ]


def test_an_interrupt_is_a_line() -> None:
    seen = SeenTracebacks()
    folder = TracebackFolder(0, seen)
    assert folder.feed([*text_of(during), b"x\n"]) == [*text_of(during), b"x\n"]
    seen.interrupted = True
    assert folder.feed([*text_of(during), b"x\n"]) == [b"KeyboardInterrupt\n", b"x\n"]
    assert folder.feed([*text_of(plain), b"x\n"]) == [*text_of(plain), b"x\n"], "another error"
    lost = [b"Traceback (most recent call last):\n", b"  File\n", b"asynccomm.errors.AbortedError: by rank 1\n"]
    assert folder.feed([*lost, b"x\n"]) == [b"asynccomm.errors.AbortedError: by rank 1\n", b"x\n"]


def test_two_tracebacks_in_a_row_are_two() -> None:
    seen = SeenTracebacks()
    lines = text_of(plain)
    assert TracebackFolder(0, seen).feed([*lines, b"x\n"]) == [*lines, b"x\n"]
    assert TracebackFolder(1, seen).feed([*lines, *lines, b"x\n"]) == [
        *[b"traceback as on rank 0: ValueError: no\n"] * 2,
        b"x\n",
    ]


def test_text_that_only_looks_like_a_traceback_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = TracebackFolder(1, SeenTracebacks())
    lines = [b"Traceback (most recent call last):\n", b"  cut off\n"]
    assert folder.feed(lines) == []
    assert folder.flush() == lines
    monkeypatch.setattr(tracebacks, "FOLDED_LINES", 5)
    lines = [b"Traceback (most recent call last):\n", *[b"  deep\n"] * 10, b"RecursionError\n"]
    assert folder.feed([*lines, b"x\n"]) == [*lines, b"x\n"]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracebacks, "KEPT_BYTES", 10)
    seen = SeenTracebacks()
    assert [seen.first(b"long traceback", rank) for rank in (0, 1)] == [0, 1]
    assert [seen.first(b"short", rank) for rank in (0, 1)] == [0, 0]
