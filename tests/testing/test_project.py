"""Files of tests in a real process; ``test_isolation.py`` has namesakes in several directories."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from _pytest.config import _prepareconfig

from asynccomm.testing.isolation import ImportedFiles
from asynccomm.testing.project import ProjectModules

TEST = """
class TestOuter:
    class TestInner:
        async def test_it(self): pass

async def test_alone(): pass
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "test_of_the_project.py"
    file.write_text(TEST)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return file


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_functions_and_staleness(file: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    path = list(sys.path)
    config = _prepareconfig([f"--rootdir={file.parent}", f"--import-mode={mode}", "-Wignore", "-c", os.devnull])
    try:
        modules = ProjectModules(config, ImportedFiles())
        assert modules.stale(file, sys.path) is None
        inner = modules.find(file, "TestOuter.TestInner.test_it")
        assert type(inner.instance).__name__ == "TestInner"
        assert inner.function.__self__ is inner.instance
        alone = modules.find(file, "test_alone")
        assert (alone.function.__name__, alone.instance) == ("test_alone", None)
        assert sys.path == path, "pytest's process decides about it"
        modules.update()
        assert modules.stale(file, sys.path) is None
        os.utime(file, ns=(1, 1))
        assert modules.stale(file, sys.path) == f"{file} has changed since it was imported"
    finally:
        config._ensure_unconfigure()
