"""What an uncaught exception prints."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from asynccomm.compat.c10d.excepthook import RankHook


@pytest.fixture
def printing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hook that prints three lines, one of them empty."""

    def hook(kind: Any, error: Any, traceback: Any) -> None:
        print(f"oh\n\n{error}", file=sys.stderr)

    monkeypatch.setattr(sys, "excepthook", hook)
    return hook


def test_each_line_says_the_rank(printing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hook = RankHook.install(3)
    sys.excepthook(ValueError, ValueError("no"), None)
    assert capsys.readouterr().err == "[rank3]: oh\n\n[rank3]: no\n"
    hook.remove()
    assert sys.excepthook is printing


def test_it_does_not_nest(printing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    RankHook.install(3)
    hook = RankHook.install(4)
    sys.excepthook(ValueError, ValueError("no"), None)
    assert capsys.readouterr().err == "[rank4]: oh\n\n[rank4]: no\n"
    hook.remove()
    assert sys.excepthook is printing


def test_a_hook_that_came_later_stays(printing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = RankHook.install(3)
    monkeypatch.setattr(sys, "excepthook", print)
    hook.remove()
    assert sys.excepthook is print
