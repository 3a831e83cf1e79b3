"""The plugin as its users meet it. One inner run has most of the tests (see ``projects.py``), on one pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Project, Run, running, wait_until
from .projects import CONFTEST, END, EXIT, FAIL, FOREVER, HEAD, MARKERS, PACKAGE, PASS, STRICT, WRONG


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    files = {f"test_{name}.py": HEAD + source for name, source in [("1", PASS), ("2", FAIL), ("3", END), ("4", WRONG)]}
    for name, (arguments, _) in MARKERS.items():
        source = f"import pytest\n@pytest.mark.ranks({arguments})\nasync def test_x(comm): pass\n"
        files[f"test_marker_{name}.py"] = source
    files |= {"pytest.ini": STRICT, "conftest.py": CONFTEST, "sibling.py": "FROM_SIBLING = 2\n"}
    return Project(tmp_path_factory.mktemp("plugin"), files)


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    return project.run("--continue-on-collection-errors")


# -- what passes ------------------------------------------------------------------------------------------------------


def test_passes_skips_and_names(run: Run) -> None:
    outcomes = {name.partition("::")[2]: how for name, how in run.outcomes().items() if name.startswith("test_1")}
    assert outcomes == {
        "test_sum[2ranks]": "passed",
        "test_again[2ranks]": "passed",
        **{f"test_lists[{n}ranks-{b}-{word}]": "passed" for word in "ab" for n in (1, 2) for b in ("gloo", "auto")},
        "TestClass::test_method[2ranks]": "passed",
        "test_own[2ranks]": "passed",
        "test_skip[2ranks]": "skipped",
        "test_unittest_skip[2ranks]": "skipped",
        "test_anyio[asyncio-2ranks]": "passed",
        "test_xfail_raises[2ranks]": "skipped",
        "test_xfail_call[2ranks]": "skipped",
        "test_warning_ignored[2ranks]": "passed",
    }
    assert "not today" in run.text("test_skip[2ranks]", "skipped")
    assert "not today either" in run.text("test_unittest_skip[2ranks]", "skipped")


def test_processes_are_kept(run: Run, project: Project) -> None:
    pids = project.pids()
    assert len(set(pids[:2])) == 2
    assert set(pids[2:4]) == set(pids[:2])
    assert pids[4] in pids[:2], "failed tests cost no process"


def test_nothing_is_left(run: Run, project: Project) -> None:
    assert run.status == 1
    assert run.childless
    pids = project.pids() + project.pids("timed_out") + project.pids("after")
    assert not any(running(pid) for pid in pids)
    assert not [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]


# -- what fails -------------------------------------------------------------------------------------------------------


def test_every_rank_is_shown(run: Run) -> None:
    text = run.text("test_all[2ranks]")
    for rank in range(2):
        assert f"rank {rank} of 2 failed: assert [1, 2, {rank}] == [1, 2, 7]" in text
        assert f"At index 2 diff: {rank} != 7" in text
        assert f"output of {rank}" in run.printed("test_all[2ranks]")
    assert "asynccomm/testing" not in text, "our own frames are of no interest"


def test_exception_groups_have_the_tests_frames(run: Run) -> None:
    text = run.text("test_group[1ranks]")
    assert 'raise LookupError("in a task")' in text
    assert ", in test_group\n" in text
    assert "asynccomm/testing" not in text


def test_cause_first_then_who_waited(run: Run) -> None:
    text = run.text("test_one[2ranks]")
    cause, waiter = text.split("\n\nrank 0 of 2 was waiting for ")
    assert cause.startswith("rank 1 of 2 failed: LookupError: mine alone")
    assert waiter.startswith("#1 all_reduce(float32[3]")
    assert "when rank 1 left the test, here:" in waiter
    assert "await comm.all_reduce(torch.ones(3))  # here rank 0 waits" in waiter
    assert "test_2.py:" in waiter


def test_skipping_is_for_all(run: Run) -> None:
    text = run.text("test_some_skip[2ranks]")
    assert text.startswith("only 1 of 2 ranks skipped the test; all have to, or none")
    assert "rank 1 of 2 skipped: only me" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_pytest_fail", "Failed: on purpose"),
        ("test_base_exception", "asyncio.exceptions.CancelledError: loose"),
        ("test_sys_exit", "SystemExit: 7"),
        ("test_warning", "UserWarning: unwelcome"),
    ],
)
def test_other_ways_to_fail(run: Run, name: str, said: str) -> None:
    assert f"of 2 failed: {said}" in run.text(f"{name}[2ranks]")


# -- what ends --------------------------------------------------------------------------------------------------------


def test_death_is_named(run: Run) -> None:
    assert run.text("test_killed[2ranks]").startswith("rank 1 of 2 was killed by signal 9 (SIGKILL)")
    text = run.text("test_segfault_and_exit[2ranks]")
    assert "rank 0 of 2 was killed by signal 11 (SIGSEGV)" in text
    assert "rank 1 of 2 exited with code 3" in text
    assert "in test_segfault_and_exit" in run.printed("test_segfault_and_exit[2ranks]"), "faulthandler's stack"


def test_stuck_ranks_are_shown(run: Run) -> None:
    text = run.text("test_never_comes[2ranks]")
    first, second = text.split("\n\nrank 1 of 2")
    assert "rank 0 of 2 was not done after 3 s (timeout= of @pytest.mark.ranks) and had to be ended, here:\n" in first
    assert "await comm.all_reduce(torch.ones(3))  # rank 0 stays here" in first
    assert "waiting for <Work #1 all_reduce(float32[3]" in first
    assert "await asyncio.Event().wait()  # rank 1 stays here" in second
    assert "test_3.py" in second
    assert "asynccomm/testing" not in text


def test_busy_ranks_are_shown(run: Run) -> None:
    text = run.text("test_busy[3ranks]")
    assert "pass  # spinning" in text
    assert "time.sleep(1000)  # blocked" in text
    assert (
        "rank 2 of 3 was not done after 1 s (timeout= of @pytest.mark.ranks) and had to be ended, here:\n(it d" in text
    )
    assert "in test_busy" in run.printed("test_busy[3ranks]"), "the stack from faulthandler"


def test_pytest_timeout_and_after(run: Run, project: Project) -> None:
    assert "Timeout" in run.text("test_pytest_timeout[2ranks]")
    assert run.only("test_after[2ranks]")["outcome"] == "passed"
    before, after = project.pids("timed_out"), project.pids("after")
    assert len(before) == len(after) == 2
    assert not set(before) & set(after), "who was busy then is ended"


# -- what is wrong ----------------------------------------------------------------------------------------------------

ON_FUNCTION = "the marker `ranks` must be on the function, its class or its module"


@pytest.mark.parametrize("name", MARKERS)
def test_bad_markers(run: Run, name: str) -> None:
    said = run.text(f"test_marker_{name}.py").removesuffix(". Did you mean 'timeout'?")  # from Python 3.13 on
    assert said == f"@pytest.mark.ranks: {MARKERS[name][1]}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "test_unpicklable[2ranks]",
            "fixture 'lock' cannot be sent to the ranks: cannot pickle ",
        ),
        ("test_no_marker", "test_no_marker uses the fixture `comm` without @pytest.mark.ranks(size)"),
        ("test_marked_parameter[1]", ON_FUNCTION),
        ("test_marked_twice[2ranks-1]", ON_FUNCTION),
        ("test_marked_by_a_hook", ON_FUNCTION),
        ("test_not_async[2ranks]", "a test marked `ranks` must be an async function"),
        ("test_yields[2ranks]", "a test marked `ranks` must not yield"),
        ("TestSetup::test_setup[2ranks]", "setup_method() runs in pytest's own process, and not in the ranks"),
        (
            "TestAttribute::test_attribute[2ranks]",
            "a fixture has set self.x in pytest's own process, and not in the ranks",
        ),
        ("TestUnit::test_unit", "a method of a unittest.TestCase cannot be marked `ranks`"),
    ],
)
def test_misuse(run: Run, name: str, said: str) -> None:
    text = run.text(name)
    assert said in text
    assert len(text.splitlines()) == 1


# -- other ways to run ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("package"), PACKAGE)


@pytest.mark.parametrize("mode", ["importlib", "prepend"])
def test_packages_in_both_import_modes(package: Project, mode: str) -> None:
    run = package.run(f"--import-mode={mode}", "-W", "ignore:let. me")
    assert run.only("test_imports[1ranks]")["outcome"] == "passed", run.output
    assert run.only("test_plain")["outcome"] == "passed"
    assert "left holds 42" in run.text("test_explained[1ranks]")
    assert run.childless


def test_selection(package: Project) -> None:
    failing = "suite/deep/test_it.py::test_explained[1ranks]"
    assert list(package.run("-x", "-k", "explained or last").outcomes()) == [failing]
    again = package.run("--lf", "--collect-only", "-q").output.splitlines()
    assert [line for line in again if "::" in line] == [failing]


def test_an_exit_on_a_rank_ends_the_run(tmp_path: Path) -> None:
    run = Project(tmp_path, {"test_it.py": HEAD + EXIT}).run()
    assert run.status == 7, run.output
    assert "Exit: enough" in run.output
    assert not run.outcomes()
    assert run.childless


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_ended_from_outside(tmp_path: Path, name: str) -> None:
    project = Project(tmp_path, {"test_it.py": HEAD + FOREVER})
    process = project.start()
    try:
        wait_until(lambda: len(project.pids()) == 2, "both ranks in the test")
        process.send_signal(signal.Signals[name])
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    wait_until(lambda: not any(map(running, project.pids())), "the ranks' end")
    if name == "SIGINT":
        assert process.returncode == pytest.ExitCode.INTERRUPTED, output
        assert {"kind": "childless"} in project.record


@pytest.mark.real_python
def test_import_is_light() -> None:
    code = "import sys, asynccomm.testing.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
