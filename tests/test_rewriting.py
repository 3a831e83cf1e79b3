"""Rewritten assertions are shared by the processes of a run, and remain those of the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests import rewriting


@pytest.fixture
def rewrites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The files that pytest has rewritten; an empty folder has what they came to."""
    found: list[Path] = []
    real: Any = rewriting._real_rewrite

    def noted(path: Path, config: pytest.Config) -> Any:
        found.append(path)
        return real(path, config)

    monkeypatch.setattr(rewriting, "_real_rewrite", noted)
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(rewriting, "_folder", tmp_path / "folder")
    return found


def failure_of(path: Path, config: pytest.Config) -> str:
    names: dict[str, Any] = {}
    exec(rewriting.rewritten(path, config)[1], names)
    with pytest.raises(AssertionError) as caught:
        names["check"]()
    return str(caught.value)


def test_a_file_is_rewritten_once(rewrites: list[Path], tmp_path: Path, pytestconfig: pytest.Config) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("def check():\n    a = 1\n    assert a == 2\n")
    texts = [failure_of(path, pytestconfig) for _ in range(3)]
    assert rewrites == [path]
    assert [text.split("\n")[0] for text in texts] == ["assert 1 == 2"] * 3


def test_a_file_that_has_changed_is_rewritten_again(
    rewrites: list[Path], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    path = tmp_path / "test_it.py"
    for value in (2, 3):
        path.write_text(f"def check():\n    a = 1\n    assert a == {value}\n")
        os.utime(path, (value, value))
        assert failure_of(path, pytestconfig).startswith(f"assert 1 == {value}")
    assert rewrites == [path, path]


def test_the_workers_of_xdist_divide_the_files(
    rewrites: list[Path], tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        (tmp_path / f"test_{number}.py").write_text("")
    monkeypatch.setattr(pytestconfig, "args", [str(tmp_path)])
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    for worker, files in (("gw1", [1, 3]), ("gw0", [0, 2, 4])):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        rewriting.rewrite_share(pytestconfig)
        assert rewrites == [tmp_path / f"test_{number}.py" for number in files]
        rewrites.clear()


def test_without_xdist_there_is_nothing_to_divide(
    rewrites: list[Path], pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    rewriting.rewrite_share(pytestconfig)
    assert rewrites == []
