"""Settings of coverage for ranks; ``test_isolation.py`` measures some."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import coverage
import pytest

from asynccomm.testing.measuring import RankCoverage, coverage_settings


class OldCoverage:
    @staticmethod
    def current() -> Any:
        return SimpleNamespace(config=object())


def test_nothing_is_measured_unless_pytest_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage.Coverage, "_instances", [])
    assert coverage_settings() is None
    RankCoverage(None).save()
    monkeypatch.delitem(sys.modules, "coverage")
    assert coverage_settings() is None
    assert "coverage" not in sys.modules
    monkeypatch.setitem(sys.modules, "coverage", SimpleNamespace(Coverage=OldCoverage, __version__="7.9"))  # type: ignore
    with pytest.warns(UserWarning, match=r"coverage 7.9 cannot measure ranks: it needs to be 7.10 or later"):
        assert coverage_settings() is None


def test_a_file_for_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "measured_module.py"
    source.write_text("def add(a, b):\n    return a + b\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(coverage.Coverage, "_instances", [])
    settings = coverage.Coverage(data_file=str(tmp_path / "data"), source=[str(tmp_path)]).config.serialize()
    rank = RankCoverage(settings)
    try:
        import measured_module  # type: ignore[import-not-found]

        assert measured_module.add(1, 2) == 3
        rank.save()
    finally:
        rank._coverage.stop()
    (file,) = tmp_path.glob("data.*")
    data = coverage.CoverageData(str(file))
    data.read()
    assert sorted(data.lines(str(source)) or []) == [1, 2]
