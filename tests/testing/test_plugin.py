"""The plugin as its users meet it. One inner run has most of the tests, on one pool; what it said is then looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Project, Run, running, wait_until

HEAD = """
    import asyncio, os, pytest, signal, sys, time, pathlib
    import asynccomm, torch

    def note():
        with open(pathlib.Path(__file__).parent / "pids", "a") as file:
            file.write(f"{os.getpid()}\\n")
"""

PASS = """
    @pytest.fixture
    def numbers(tmp_path):
        (tmp_path / "from_parent").write_text("here")
        return {"seven": 7}

    def helper(comm):
        return torch.tensor([float(comm.rank)])

    @pytest.mark.ranks(2)
    async def test_sum(comm):
        note()
        tensor = helper(comm)
        await comm.all_reduce(tensor)
        assert tensor.item() == 1
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(comm.rank), "2")

    @pytest.mark.ranks(2)
    async def test_again(comm):
        note()
        await comm.barrier()

    @pytest.mark.ranks([1, 2], backend=["gloo", "auto"])
    @pytest.mark.parametrize("word", ["a", "b"])
    async def test_lists(comm, word):
        assert word in "ab" and comm.backend == "gloo" and comm.size in (1, 2)

    @pytest.mark.ranks(2)
    class TestClass:
        word = "class"

        async def test_method(self, comm, tmp_path, numbers, default=3):
            assert (self.word, numbers["seven"], default) == ("class", 7, 3)
            assert (tmp_path / "from_parent").read_text() == "here"
            with pytest.raises(ValueError, match="size of 7"):
                raise ValueError("size of 7")

    @pytest.mark.ranks(2)
    async def test_own():
        async with asynccomm.new_comm(name="mine") as mine:
            await mine.barrier()
            assert mine.size == 2

    @pytest.mark.ranks(2)
    async def test_skip(comm):
        pytest.skip(f"not today")

    @pytest.mark.ranks(2)
    @pytest.mark.filterwarnings("ignore:harmless")
    async def test_warning_ignored(comm):
        import warnings
        warnings.warn("harmless", UserWarning)
"""

FAIL = """
    @pytest.mark.ranks(2)
    async def test_all(comm):
        print("output of", comm.rank)
        left = [1, 2, comm.rank]
        assert left == [1, 2, 7]

    @pytest.mark.ranks(2)
    async def test_one(comm):
        await comm.barrier()
        if comm.rank == 1:
            raise LookupError("mine alone")
        await comm.all_reduce(torch.ones(3))  # here rank 0 waits

    @pytest.mark.ranks(2)
    async def test_some_skip(comm):
        await comm.barrier()
        if comm.rank == 1:
            pytest.skip("only me")

    @pytest.mark.ranks(2)
    async def test_pytest_fail(comm):
        pytest.fail("on purpose")

    @pytest.mark.ranks(2)
    async def test_base_exception():
        raise asyncio.CancelledError("loose")

    @pytest.mark.ranks(2)
    async def test_sys_exit():
        sys.exit(7)

    @pytest.mark.ranks(2)
    async def test_warning(comm):
        import warnings
        warnings.warn("unwelcome", UserWarning)

    @pytest.mark.ranks(1)
    async def test_still_the_same():
        note()
"""

END = """
    import faulthandler

    @pytest.mark.ranks(2)
    async def test_killed(comm):
        await comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await comm.barrier()

    @pytest.mark.ranks(2)
    async def test_segfault_and_exit():
        if os.environ["RANK"] == "1":
            os._exit(3)
        faulthandler._sigsegv()

    @pytest.mark.ranks(2, timeout=1)
    async def test_never_comes(comm):
        await comm.barrier()
        if comm.rank == 1:
            await asyncio.Event().wait()  # rank 1 stays here
        await comm.all_reduce(torch.ones(3))  # rank 0 stays here

    @pytest.mark.ranks(2, timeout=1)
    async def test_busy():
        if os.environ["RANK"] == "1":
            time.sleep(1000)  # blocked
        while True: pass  # spinning

    @pytest.mark.ranks(2, timeout=1)
    async def test_silent():
        import ctypes
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
        ctypes.PyDLL(None).sleep(1000)  # with the interpreter lock

    @pytest.mark.ranks(2)
    @pytest.mark.timeout(1.5)
    async def test_pytest_timeout(comm):
        note()
        await asyncio.Event().wait()

    @pytest.mark.ranks(2)
    async def test_after(comm):
        note()
        await comm.barrier()
"""

WRONG = """
    import threading

    @pytest.fixture
    def lock():
        return threading.Lock()

    @pytest.mark.ranks(2)
    async def test_unpicklable(comm, lock):
        pass

    def test_no_marker(comm):
        pass

    @pytest.mark.ranks(2)
    def test_not_async():
        pass
"""

MARKERS = {
    "zero": ("0", "size must be a positive integer or a list of such, got 0"),
    "true": ("True", "size must be a positive integer or a list of such, got True"),
    "word": ("'two'", "size must be a positive integer or a list of such, got 'two'"),
    "empty": ("[]", "size must be a positive integer or a list of such, got []"),
    "keyword": ("2, tiemout=3", "got an unexpected keyword argument 'tiemout'"),
    "missing": ("", "missing 1 required positional argument: 'size'"),
    "time": ("2, timeout='long'", "timeout must be a positive number of seconds, got 'long'"),
    "backend": ("2, backend=3", "backend must be a name or a list of names, got 3"),
    "hints": ("2, hints='none'", "hints must be a dict, got 'none'"),
}

STRICT = """
    [pytest]
    asyncio_mode = strict
    asyncio_default_fixture_loop_scope = function
    filterwarnings = error
    addopts = --import-mode=prepend -p no:cacheprovider
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    files = {f"test_{name}.py": HEAD + source for name, source in [("1", PASS), ("2", FAIL), ("3", END), ("4", WRONG)]}
    for name, (arguments, _) in MARKERS.items():
        source = f"import pytest\n@pytest.mark.ranks({arguments})\nasync def test_x(comm): pass\n"
        files[f"test_marker_{name}.py"] = source
    return Project(tmp_path_factory.mktemp("plugin"), {"pytest.ini": STRICT, **files})


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
        "test_warning_ignored[2ranks]": "passed",
    }
    assert "not today" in run.text("test_skip[2ranks]", "skipped")


def test_processes_are_kept(run: Run, project: Project) -> None:
    pids = project.pids()
    assert len(set(pids[:2])) == 2
    assert set(pids[2:4]) == set(pids[:2])
    assert pids[4] in pids[:2], "failed tests cost no process"


def test_nothing_is_left(run: Run, project: Project) -> None:
    assert run.status == 1
    assert run.childless
    pids = project.pids()
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
    assert "rank 0 of 2 was still waiting and had to be ended" in first
    assert "await comm.all_reduce(torch.ones(3))  # rank 0 stays here" in first
    assert "waiting for <Work #1 all_reduce(float32[3]" in first
    assert "await asyncio.Event().wait()  # rank 1 stays here" in second
    assert "test_3.py" in second
    assert "asynccomm/testing" not in text


def test_busy_ranks_are_shown(run: Run) -> None:
    text = run.text("test_busy[2ranks]")
    assert "pass  # spinning" in text
    assert "time.sleep(1000)  # blocked" in text
    text = run.text("test_silent[2ranks]")
    assert text.count("does not answer") == 2
    assert "in test_silent" in run.printed("test_silent[2ranks]"), "the stack from faulthandler"


def test_pytest_timeout_and_after(run: Run, project: Project) -> None:
    assert "Timeout" in run.text("test_pytest_timeout[2ranks]")
    assert run.only("test_after[2ranks]")["outcome"] == "passed"
    before, after = project.pids()[-4:-2], project.pids()[-2:]
    assert not set(before) & set(after)


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MARKERS)
def test_bad_markers(run: Run, name: str) -> None:
    assert run.text(f"test_marker_{name}.py") == f"@pytest.mark.ranks: {MARKERS[name][1]}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_unpicklable[2ranks]", "argument 'lock' cannot be sent to the rank processes: "),
        ("test_no_marker", "test_no_marker uses the fixture `comm` without @pytest.mark.ranks(size)"),
        ("test_not_async[2ranks]", "a test marked `ranks` must be an async function"),
    ],
)
def test_misuse(run: Run, name: str, said: str) -> None:
    text = run.text(name)
    assert said in text
    assert len(text.splitlines()) == 1


# -- other ways to run ------------------------------------------------------------------------------------------------

PACKAGE = {
    "pytest.ini": """
        [pytest]
        asyncio_mode = auto
        asyncio_default_fixture_loop_scope = function
        filterwarnings = error
        addopts = --import-mode=importlib
    """,
    "suite/__init__.py": "",
    "suite/helpers.py": "ANSWER = 42\n",
    "suite/deep/__init__.py": "",
    "suite/deep/conftest.py": """
        import pytest

        class Box:
            def __init__(self, value):
                self.value = value

        @pytest.fixture
        def box():
            return Box(42)

        def pytest_assertrepr_compare(op, left, right):
            if isinstance(left, Box):
                return ["boxes differ", f"left holds {left.value}"]
    """,
    "suite/deep/test_it.py": """
        import pytest
        from ..helpers import ANSWER
        from .conftest import Box

        class Local:
            pass

        @pytest.fixture
        def local():
            return Local()

        @pytest.mark.ranks(1)
        async def test_imports(comm, box, local):
            assert type(box) is Box and type(local) is Local and box.value == ANSWER

        @pytest.mark.ranks(1)
        async def test_explained(box):
            assert box == 1

        async def test_plain():
            assert ANSWER == 42

        @pytest.mark.ranks(1)
        async def test_last(comm):
            pass
    """,
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("package"), PACKAGE)


@pytest.mark.parametrize("mode", ["importlib", "prepend"])
def test_packages_in_both_import_modes(package: Project, mode: str) -> None:
    run = package.run(f"--import-mode={mode}")
    assert run.only("test_imports[1ranks]")["outcome"] == "passed", run.output
    assert run.only("test_plain")["outcome"] == "passed"
    assert "left holds 42" in run.text("test_explained[1ranks]")
    assert run.childless


def test_selection(package: Project) -> None:
    failing = "suite/deep/test_it.py::test_explained[1ranks]"
    assert list(package.run("-x", "-k", "explained or last").outcomes()) == [failing]
    again = package.run("--lf", "--collect-only", "-q").output.splitlines()
    assert [line for line in again if "::" in line] == [failing]


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_ended_from_outside(tmp_path: Path, name: str) -> None:
    source = HEAD + (
        """
    @pytest.mark.ranks(2)
    async def test_forever(comm):
        note()
        while True:
            time.sleep(1)
"""
    )
    project = Project(tmp_path, {"test_it.py": source})
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


def test_import_is_light() -> None:
    code = "import sys, asynccomm.testing.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
