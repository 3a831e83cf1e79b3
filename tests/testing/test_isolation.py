"""The result of a test on ranks does not depend on the tests before it, and a stale process is known as such."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asynccomm.testing.isolation import ImportedFiles, is_importable_as

from .conftest import Project, Run
from .foreign import FOREIGN, NAMES


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("foreign"), FOREIGN)


def check(project: Project, run: Run, names: set[str] = NAMES) -> list[str]:
    """All of these tests passed, and drew the same random numbers on all ranks; returns the numbers."""
    assert run.outcomes() == dict.fromkeys(names, "passed"), run.output
    draws = (project.directory / "draws").read_text().splitlines()
    (project.directory / "draws").unlink()
    assert len(set(draws)) == 1
    return draws


def covered(project: Project) -> list[int]:
    report = json.loads((project.directory / "coverage.json").read_text())
    return list(report["files"]["product.py"]["executed_lines"])


COVERAGE = ("--cov=.", "--cov-report=json")


@pytest.mark.exhaustive
def test_in_order_with_coverage(project: Project) -> None:
    run = project.run(*COVERAGE)
    assert len(check(project, run)) == 5
    assert covered(project) == [1, 2, 3], "the function runs in ranks only"
    assert project.pids("processes")[0] == 1, "the start of the processes is no part of the test"


@pytest.mark.exhaustive
def test_in_reverse_order_without_other_plugins(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVERSED", "1")
    check(project, project.run("-p", "no:cov", "-p", "no:xdist"))


def test_selected_with_output_at_once(project: Project) -> None:
    run = project.run("-k", "test_one or test_of_b", "-s")
    check(project, run, {name for name in NAMES if "test_one" in name or "test_of_b" in name})
    for rank in range(2):
        assert f"[rank {rank}] the output of {rank}\n" in run.output


def test_on_workers_of_xdist_with_coverage(project: Project) -> None:
    check(project, project.run("-n", "2", *COVERAGE))
    assert covered(project) == [1, 2, 3]


def test_in_random_order(project: Project) -> None:
    usual = check(project, project.run("--ranks-seed=5", "-k", "test_two"), {"test_mess.py::test_two[2ranks]"})
    other = check(project, project.run("-p", "randomly", "-p", "no:cacheprovider", "--randomly-seed=5"))
    assert other[0] == usual[0], "the seed of pytest-randomly is used"


# -- stale modules ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two directories with modules of one name, the first of which can be imported."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "namesake_module.py").write_text(f"NAME = {name!r}\n")
    paths = [str(tmp_path / "one"), str(tmp_path / "two")]
    monkeypatch.setattr(sys, "path", [paths[0], *sys.path])
    yield paths
    sys.modules.pop("namesake_module", None)
    importlib.invalidate_caches()


def test_changed_files_and_namesakes_are_stale(folders: list[str]) -> None:
    one, two = folders
    files = ImportedFiles()
    importlib.import_module("namesake_module")
    assert files.stale(sys.path) is None, "it was not noted yet"
    files.update()
    assert files.stale([one, *sys.path]) is None
    assert "another file of that name comes first now" in str(files.stale([two, *sys.path]))
    file = Path(one) / "namesake_module.py"
    os.utime(file, ns=(1, 1))
    assert files.stale(sys.path) == f"{file} has changed since it was imported"
    file.unlink()
    assert files.stale(sys.path) is None, "there is nothing to import instead"


def test_installed_modules_are_not_watched() -> None:
    files = ImportedFiles()
    sys.modules.pop("wave", None)
    files._known.discard("wave")
    importlib.import_module("wave")
    files.update()
    assert files._files == {}


def test_importable_as(folders: list[str]) -> None:
    assert is_importable_as("namesake_module", f"{folders[0]}/namesake_module.py", folders)
    assert not is_importable_as("namesake_module", f"{folders[1]}/namesake_module.py", folders)
    assert is_importable_as("no_such_module", "/anywhere.py", folders)
