"""The pool with processes that only play their part: they need no torch, and misbehave as they are told.

The real ones are behind every test of the plugin.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asynccomm.testing import pool as module
from asynccomm.testing.pool import SILENT, RankPool
from asynccomm.testing.protocol import (
    DebuggerStop,
    Died,
    Failed,
    Filters,
    Passed,
    Preparation,
    RankTask,
    RankWorld,
    Setup,
    Skipped,
    Surroundings,
    TimedOut,
)

from .conftest import running, wait_until

PLAYER = """
import os, signal, subprocess, sys, time
from multiprocessing.connection import Connection
from asynccomm.testing.protocol import *

def first(file):
    try:
        open(file, "x").close()
    except FileExistsError:
        return False
    return True

channel = Connection(int(sys.argv[1]))
setup = channel.recv()
if setup.pytest_args == ["refuse"]:
    print("no good reason")
    sys.exit(4)
channel.send("ready")
while True:
    job = channel.recv()
    if isinstance(job, Preparation):
        match job.path.split():
            case ["stale", file] if first(file):
                channel.send(Stale("old"))
            case ["exit"]:
                print("no import")
                os._exit(3)
            case ["orphan"]:
                if os.fork() == 0:
                    time.sleep(1000)
                os._exit(3)
            case ["once", file] if first(file):
                os._exit(3)
            case _:
                channel.send("ready")
        continue
    print(f"rank {job.rank} plays {job.qualname}")
    match job.qualname.split():
        case ["pass"]:
            channel.send(Passed(0.5))
        case ["skip"]:
            channel.send(Skipped("why not"))
        case ["fail"]:
            channel.send(Failed("summary", "traceback", None, None))
        case ["exit"]:
            os._exit(3)
        case ["orphan"]:
            child = os.fork()  # it keeps the channel open
            if child == 0:
                time.sleep(1000)
            print("child", child)
            os._exit(3)
        case ["signal", number]:
            os.kill(os.getpid(), int(number))
            time.sleep(1000)
        case ["hang"]:
            channel.recv()
            channel.send(StackDump("here"))
            time.sleep(1000)
        case ["late"]:
            channel.recv()
            channel.send(Passed(0.5))
            channel.send(StackDump("too late"))
        case ["die", "late"]:
            channel.recv()
            os._exit(5)
        case ["child"]:
            child = subprocess.Popen(["sleep", "1000"])
            print("child", child.pid)
            channel.send(Passed(0.5))
        case ["debug"]:
            channel.send(DebuggerStart("stopped"))
            channel.send(DebuggerOutput("(Pdb) "))
            channel.send(DebuggerPrompt())
            line = channel.recv().line
            time.sleep(0.3)
            channel.send(DebuggerStop(line == "q"))
            channel.recv() if line == "q" else channel.send(Skipped(line))
        case ["debug", "late"]:
            channel.recv()
            channel.send(DebuggerStart("stopped"))
            channel.send(StackDump("in the debugger"))
            time.sleep(1000)
        case ["hang", "up"]:
            channel.close()
            time.sleep(1000)
"""


NO_TERMINAL: Any = None


def jobs(*parts: str) -> list[RankTask]:
    world = RankWorld(len(parts), "auto", "cpu", 60.0, {})
    return [RankTask("", part, b"", [], False, world, rank, {}, Filters([], [], [])) for rank, part in enumerate(parts)]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    player = tmp_path / "player.py"
    player.write_text(PLAYER)
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[1:3] == ["-m", "asynccomm.testing.worker"]
        return real([sys.executable, str(player), *command[3:]], **options)

    monkeypatch.setattr(module.subprocess, "Popen", start)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(module, "STACKS_SECONDS", 20.0)
    return Setup(list(sys.path), str(tmp_path), [], dict(os.environ))


@pytest.fixture
def pool(setup: Setup) -> Iterator[RankPool]:
    pool = RankPool(setup, NO_TERMINAL)
    yield pool
    pool.close()


def test_reports_and_output_in_rank_order(pool: RankPool) -> None:
    assert pool.run(jobs("pass", "skip", "fail"), 60) == (
        [Passed(0.5), Skipped("why not"), Failed("summary", "traceback", None, None)],
        ["rank 0 plays pass\n", "rank 1 plays skip\n", "rank 2 plays fail\n"],
    )
    assert pool.run(jobs("pass"), 60) == ([Passed(0.5)], ["rank 0 plays pass\n"])


def test_processes_are_kept_and_added(pool: RankPool) -> None:
    assert pool.pids == []
    pool.run(jobs("pass", "fail"), 60)
    first = pool.pids
    pool.run(jobs("pass"), 60)
    assert pool.pids == first
    pool.run(jobs("pass", "pass", "pass"), 60)
    assert pool.pids[:2] == first
    assert len(set(pool.pids)) == 3


@pytest.mark.parametrize(
    ("part", "how"),
    [
        ("exit", "exited with code 3"),
        ("signal 9", "was killed by signal 9 (SIGKILL)"),
        (f"signal {signal.SIGRTMIN + 3}", f"was killed by signal {signal.SIGRTMIN + 3} (no standard signal)"),
    ],
)
def test_death_is_reported_and_replaced(pool: RankPool, part: str, how: str) -> None:
    reports, _ = pool.run(jobs("pass", part), 60)
    assert reports == [Passed(0.5), Died(how)]
    (kept,) = pool.pids
    assert pool.run(jobs("pass", "pass"), 60)[0] == [Passed(0.5), Passed(0.5)]
    assert pool.pids[0] == kept


def test_death_before_a_child(pool: RankPool) -> None:
    reports, (output, _) = pool.run(jobs("orphan", "pass"), 60)
    assert reports == [Died("exited with code 3"), Passed(0.5)]
    child = int(output.split()[-1])
    wait_until(lambda: not running(child), "the child's end")
    with pytest.raises(RuntimeError, match=r"exited with code 3 while importing orphan"):
        prepare(pool, "orphan")


def test_death_without_pidfd(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert pool.run(jobs("exit", "pass"), 60)[0] == [Died("exited with code 3"), Passed(0.5)]


def test_death_between_tests(pool: RankPool) -> None:
    pool.run(jobs("pass", "pass"), 60)
    dead, kept = pool.pids
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: not running(dead), "its end")
    assert pool.run(jobs("pass", "pass"), 60)[0] == [Passed(0.5), Passed(0.5)]
    assert pool.pids[0] == kept
    assert dead not in pool.pids


def test_death_just_before_the_job(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.run(jobs("pass"), 60)
    (pid,) = pool.pids
    take = pool._take

    def take_and_kill(count: int) -> Any:
        ranks = take(count)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not running(pid), "its end")
        return ranks

    monkeypatch.setattr(pool, "_take", take_and_kill)
    assert pool.run(jobs("pass"), 60)[0] == [Died("was killed by signal 9 (SIGKILL)")]


def test_a_closed_channel_is_the_end(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXIT_SECONDS", 0.1)
    assert pool.run(jobs("hang up"), 60)[0] == [Died("closed its channel")]
    assert pool.pids == []


def test_time_out(pool: RankPool) -> None:
    pool.run(jobs("pass", "pass"), 60)
    kept = pool.pids[1]
    reports, output = pool.run(jobs("hang", "pass"), 1.0)
    assert reports == [TimedOut("here"), Passed(0.5)]
    assert output[0] == "rank 0 plays hang\n"
    assert pool.pids == [kept]


def test_the_others_end_soon_after_a_failure(pool: RankPool) -> None:
    reports, _ = pool.run(jobs("fail", "hang"), 1000)
    assert reports == [Failed("summary", "traceback", None, None), TimedOut("here")]


def test_late_answers(pool: RankPool) -> None:
    reports, _ = pool.run(jobs("late", "die late"), 0.3)
    assert reports == [Passed(0.5), Died("exited with code 5")]
    assert pool.pids == [], "what comes after a late report must not meet the next test"
    assert pool.run(jobs("pass"), 60)[0] == [Passed(0.5)]


def test_silence(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STACKS_SECONDS", 0.1)
    assert pool.run(jobs(f"signal {signal.SIGSTOP}"), 0.3)[0] == [TimedOut(SILENT)]
    assert pool.pids == []


def test_interrupt_ends_the_busy_only(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.run(jobs("pass", "pass"), 60)
    busy, idle = pool.pids

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run(jobs("hang"), 60)
    assert pool.pids == [idle]
    assert not running(busy)


def test_no_start(setup: Setup) -> None:
    pool = RankPool(setup._replace(pytest_args=["refuse"]), NO_TERMINAL)
    with pytest.raises(RuntimeError, match=r"could not start: it exited with code 4\nno good reason"):
        pool.run(jobs("pass", "pass"), 60)
    pool.close()
    assert pool.pids == []


def test_close_ends_children_too(setup: Setup) -> None:
    pool = RankPool(setup, NO_TERMINAL)
    _, (output,) = pool.run(jobs("child"), 60)
    pids = [*pool.pids, int(output.split()[-1])]
    assert all(running(pid) for pid in pids)
    pool.close()
    wait_until(lambda: not any(running(pid) for pid in pids), "the end of all")
    with pytest.raises(ChildProcessError):  # reaped: no zombie
        os.waitpid(pids[0], os.WNOHANG)
    pool.close()


# -- before and within tests ------------------------------------------------------------------------------------------


def prepare(pool: RankPool, path: str, count: int = 2) -> None:
    pool.prepare(Preparation(path, Surroundings(), Filters([], [], [])), count)


def test_stale_and_dead_processes_are_replaced_before_a_test(pool: RankPool, tmp_path: Path) -> None:
    prepare(pool, "fine")
    before = pool.pids
    prepare(pool, "fine", 1)
    assert pool.pids == before
    for how in ("stale", "once"):
        prepare(pool, f"{how} {tmp_path / how}")
        assert len(set(pool.pids) & set(before)) == 1
        before = pool.pids
    assert pool.run(jobs("pass", "pass"), 60)[0] == [Passed(0.5), Passed(0.5)]


def test_an_import_that_ends_processes(pool: RankPool) -> None:
    with pytest.raises(RuntimeError, match=r"exited with code 3 while importing exit\nno import"):
        prepare(pool, "exit")
    assert pool.pids == []


class Typist:
    """The user at the terminal, who types one word."""

    def __init__(self, word: str) -> None:
        self.word, self.seen = word, [""]

    def start(self, title: str) -> None:
        self.seen.append(title)

    def write(self, text: str) -> None:
        self.seen.append(text)

    def read(self) -> str:
        return self.word

    def stop(self, message: DebuggerStop) -> None:
        if message.quit:
            raise KeyboardInterrupt


def test_ranks_are_debugged_one_after_another(setup: Setup) -> None:
    typist = Typist("next")
    pool = RankPool(setup, typist)
    try:
        reports, _ = pool.run(jobs("debug", "debug"), 0.5)  # its time is no part of the test's
        assert reports == [Skipped("next"), Skipped("next")]
        assert typist.seen == ["", "stopped", "(Pdb) ", "stopped", "(Pdb) "]
        assert pool.run(jobs("debug late"), 0.1)[0] == [TimedOut("in the debugger")]
        typist.word = "q"
        with pytest.raises(KeyboardInterrupt):
            pool.run(jobs("debug"), math.inf)
        assert pool.pids == [], "the first was ended by its time limit, the other one by the user"
    finally:
        pool.close()


def test_one_store(pool: RankPool) -> None:
    store = pool.store
    assert pool.store is store
    assert store.host == "127.0.0.1"
    assert store.port > 0
