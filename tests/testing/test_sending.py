"""The state of this process that ranks get; ``test_fixtures.py`` has the arguments of tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from asynccomm.testing.sending import surroundings


def test_the_state_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = surroundings()
    assert (before.dtype, before.device) == ("torch.float32", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONLY_NOW", "yes")
    monkeypatch.syspath_prepend(tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            now = surroundings()
    finally:
        torch.set_default_dtype(torch.float32)
    assert (now.environ["ONLY_NOW"], now.cwd, now.dtype, now.device) == ("yes", os.getcwd(), "torch.float64", "meta")
    assert now.sys_path == sys.path
    assert "ONLY_NOW" not in before.environ


def test_a_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(pytest.fail.Exception, match="current directory of pytest's process does not exist"):
        surroundings()
