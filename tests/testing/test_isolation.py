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
from tests.sampling import amount

from .conftest import Project, Run
from .foreign import FOREIGN, NAMES
from .projects import HEAD

FORKING = """
    from asynccomm.testing import rank_fixture

    def code(child):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    @rank_fixture
    async def noted(comm):
        yield
        note()

    @rank_fixture
    def forked():
        if (child := os.fork()) == 0:
            return
        yield code(child)

    @rank_fixture
    async def forked_twice():
        if (child := os.fork()) > 0:
            assert code(child) == 0
        yield
        if (child := os.fork()) > 0:
            assert code(child) == 0

    pytestmark = pytest.mark.ranks(2, timeout=20)

    async def test_parent_fails(comm, noted):
        if (child := os.fork()) == 0:
            return
        assert code(child) == 0
        assert comm.rank < 0, "the parent's error"

    async def test_child_fails(comm, noted):
        if (child := os.fork()) == 0:
            raise LookupError("the child's error")
        await comm.barrier()
        assert code(child) == 1
        assert comm.rank < 0, "the parent's error"

    async def test_child_exits(comm, noted):
        if (child := os.fork()) == 0:
            sys.exit(3)
        assert code(child) == 3
        await comm.barrier()

    async def test_child_awaits(comm, noted):
        if (child := os.fork()) == 0:
            await asyncio.sleep(0)
            sys.exit()
        assert code(child) == 0
        await comm.barrier()

    async def test_in_fixtures(comm, noted, forked, forked_twice):
        assert forked == 1, "it did not yield"
        note("in the test")
        await comm.barrier()
"""


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
    """With one worker, as our own tests run on several at a time."""
    check(project, project.run("-n", str(amount(2, 1)), *COVERAGE))
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


def test_forked_children_end_where_they_leave_the_test(tmp_path: Path) -> None:
    project = Project(tmp_path, {"test_it.py": HEAD + FORKING})
    run = project.run()
    assert run.outcomes() == {
        "test_it.py::test_parent_fails[2ranks]": "failed",
        "test_it.py::test_child_fails[2ranks]": "failed",
        "test_it.py::test_child_exits[2ranks]": "passed",
        "test_it.py::test_child_awaits[2ranks]": "passed",
        "test_it.py::test_in_fixtures[2ranks]": "passed",
    }
    for rank in range(2):
        for name in ("test_parent_fails", "test_child_fails"):
            assert f"rank {rank} of 2 failed: AssertionError: the parent's error" in run.text(f"{name}[2ranks]")
    assert run.printed("test_child_fails[2ranks]").count("LookupError: the child's error") == 2
    assert len(set(project.pids())) == 2, "fixtures end in the ranks only"
    assert len(project.pids()) == 10
    assert len(project.pids("in the test")) == 2
