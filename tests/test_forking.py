"""The end of a forked child of a test."""

from __future__ import annotations

import pytest

from tests.forking import ending_child, exit_code, fork


def test_a_child_that_raises_leaves_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    child = fork()
    if child == 0:
        with ending_child():
            raise LookupError("of the child")
    assert exit_code(child) == 1
    assert "LookupError: of the child" in capfd.readouterr().err


def test_a_child_that_returns_ends_well() -> None:
    child = fork()
    if child == 0:
        with ending_child():
            pass
    assert exit_code(child) == 0
