"""A run and its end, for good or bad; what ranks print is in test_rank_output.py."""

import asyncio
import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asynccomm.cli.launch import Launch, LaunchedRank, LaunchOptions
from asynccomm.cli.rank_output import RankOutput, Terminal

# short sleeps: Python's handler of a signal that comes just before a sleep runs only after it
ENDLESS = """
    import os, signal, time
    print("pid", os.getpid(), flush=True)
    while True:
        time.sleep(0.1)
"""

STUBBORN = """
    import os, signal, time
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: print("got", signal.Signals(number).name, flush=True))
    print("pid", os.getpid(), flush=True)
    while True:
        time.sleep(0.1)
"""

# -- failure


def test_success_is_silent(launcher) -> None:
    assert launcher.run("run", "-n", "2", launcher.script("")) == (0, "", "")


def test_first_failure_ends_the_others_and_is_told_again(launcher, is_running) -> None:
    script = launcher.script(
        """
        import os, sys, time
        print("pid", os.getpid(), flush=True)
        if os.environ["RANK"] == "1":
            while not os.path.exists("go"):
                time.sleep(0.01)
            raise SystemExit(sys.stdin.readline() or 1 / 0)
        time.sleep(60)
        """
    )
    started = launcher.start("run", "-n", "3", script)
    started.sees("pid", times=3)
    began = time.monotonic()
    (launcher.directory / "go").touch()
    assert started.finish() == 1
    assert time.monotonic() - began < 10
    err = started.err.decode()
    assert "asynccomm: rank 1 ended with exit code 1; the others have 1 s to end\n" in err
    report = err[err.index("asynccomm: rank 1 failed first: it ended with exit code 1; the end of its stderr:") :]
    assert report.splitlines()[1] == "[1] Traceback (most recent call last):"
    assert report.splitlines()[-1] == "[1] ZeroDivisionError: division by zero"
    assert not any(map(is_running, started.words_after("pid")))


def test_exit_code_is_the_rank_s(launcher) -> None:
    code, _, err = launcher.run(
        "run", "-n", "2", launcher.script("import os, sys; sys.exit(int(os.environ['RANK']) * 42)")
    )
    assert code == 42
    assert "rank 1 failed first: it ended with exit code 42; it wrote nothing to stderr" in err


def test_a_killed_rank_is_reported_as_such(launcher) -> None:
    started = launcher.start("run", "-n", "1", launcher.script(ENDLESS))
    started.sees("pid")
    os.kill(started.words_after("pid")[0], signal.SIGKILL)
    assert started.finish() == 137
    assert b"rank 0 failed first: it was killed by SIGKILL" in started.err


def test_others_get_a_moment_to_end_by_themselves(launcher) -> None:
    script = launcher.script(
        """
        import os, sys, time
        if os.environ["RANK"] == "0":
            sys.exit(3)
        time.sleep(0.3)
        print("asynccomm.errors.AbortedError: aborted by rank 0: SystemExit", file=sys.stderr)
        sys.exit(4)
        """
    )
    code, _, err = launcher.run("run", "-n", "2", script)
    assert code == 3
    assert "[1] asynccomm.errors.AbortedError" in err
    assert "rank 0 failed first: it ended with exit code 3 (1 other failed after it)" in err


def test_who_ignores_sigterm_is_killed(launcher, is_running) -> None:
    script = launcher.script(
        """
        import os, signal, time
        if os.environ["RANK"] == "0":
            while not os.path.exists("deaf"):
                time.sleep(0.01)
            os._exit(9)
        signal.signal(signal.SIGTERM, lambda *_: print("not me", flush=True))
        print("pid", os.getpid(), flush=True)
        open("deaf", "w")
        while True:
            time.sleep(0.1)
        """
    )
    started = launcher.start("run", "-n", "2", "--grace", "0.2", script)
    assert started.finish() == 9
    assert b"[1] not me\n" in started.out
    assert not is_running(started.words_after("pid")[0])


def test_log_file_is_named_in_the_report(launcher) -> None:
    code, _, err = launcher.run("run", "-n", "1", "--log-dir", "logs", launcher.script("raise KeyError(7)"))
    assert code == 1
    assert "all of its output is in logs/rank0.log" in err
    assert "[0] KeyError: 7\n" in err


ABORT = """
    import asynccomm, torch

    async def main():
        async with asynccomm.new_comm(timeout=60) as comm:
            if comm.rank == 1:
                raise ValueError("the culprit")
            await comm.all_reduce(torch.ones(4))

    asynccomm.run(main())
"""


def test_the_rank_that_aborted_is_blamed(launcher) -> None:
    (launcher.directory / "scripts").mkdir()
    launcher.script("raise SystemExit('found in the current directory')", "anyio.py")  # must not reach the store
    code, _, err = launcher.run("run", "-n", "2", launcher.script(ABORT, "scripts/train.py"))
    assert code == 1
    assert "[0] asynccomm.errors.AbortedError: aborted by rank 1: ValueError: the culprit" in err
    assert "asynccomm: rank 1 failed first" in err
    assert err.rstrip().endswith("[1] ValueError: the culprit")


ABORT_APART = """
    import asynccomm, sys

    async def main():
        async with asynccomm.new_comm(timeout=60) as comm:
            part = await comm.split([1, 2], "part") if comm.rank else None
            await comm.barrier()
            if part is None:
                await comm.barrier()  # until rank 1 or 2 leaves
                return
            async with part:
                if comm.rank == 2:
                    sys.exit(7)
                await part.barrier()

    asynccomm.run(main())
"""


def test_the_rank_that_aborted_a_part_of_the_ranks_is_blamed(launcher) -> None:
    code, _, err = launcher.run("run", "-n", "3", launcher.script(ABORT_APART))
    assert "AbortedError: aborted by rank 1: SystemExit: 7" in err, "rank 1 of the part is rank 2 of the run"
    assert "asynccomm: rank 2 failed first: it ended with exit code 7" in err
    assert code == 7


def test_store_that_is_lost_ends_the_run(launcher, until) -> None:
    started = launcher.start("run", "-n", "1", launcher.script(ENDLESS))
    started.sees("pid")
    os.kill(store_of(started.process.pid, until), signal.SIGKILL)
    assert started.finish() == 1
    assert b"the process that hosts the store was killed by SIGKILL" in started.err


def hosts_store(pid: str) -> bool:
    """Whether that is what the process does: a new interpreter, or a fork with the name of its module."""
    about = Path(f"/proc/{pid}")
    return b"store_process" in (about / "cmdline").read_bytes() + (about / "comm").read_bytes()


def store_of(launcher_pid: int, until) -> int:
    found: list[int] = []

    def find() -> bool:
        children = Path(f"/proc/{launcher_pid}/task/{launcher_pid}/children").read_text().split()
        found.extend(int(pid) for pid in children if hosts_store(pid))
        return bool(found)

    until(find, "a process that hosts the store")
    return found[0]


# -- tracebacks


def test_one_traceback_for_all_ranks(launcher) -> None:
    code, _, err = launcher.run("run", "-n", "3", launcher.script("import time; raise ValueError('everywhere')"))
    assert code == 1
    shown = err.split("failed first")[0]
    assert shown.count("Traceback") == 1
    assert len(re.findall(r"\[\d\] traceback as on rank \d: ValueError: everywhere\n", shown)) == 2


def test_an_interrupt_is_a_line_of_each_rank(launcher) -> None:
    script = """
        import time
        print("ready", flush=True)
        while True:
            time.sleep(0.1)
    """
    started = launcher.start("run", "-n", "2", launcher.script(script))
    started.sees("ready", 2)
    started.process.send_signal(signal.SIGINT)
    assert started.finish() == 130
    assert sorted(started.err.decode().splitlines()) == [
        "[0] KeyboardInterrupt",
        "[1] KeyboardInterrupt",
        "asynccomm: SIGINT; the ranks have 10 s to end",
    ]


# -- elastic runs

FAILS = """
    import os, sys, time
    rank, newcomer = int(os.environ["RANK"]), os.environ.get("ASYNCCOMM_NEWCOMER")
    print("started", newcomer, flush=True)
    if newcomer is None and str(rank) in sys.argv[1:]:
        raise SystemExit(20 + rank)
    open(f"end{rank}", "w") if newcomer else None
    while "x" in sys.argv and not (os.path.exists("end1") or os.path.exists("end2")):
        time.sleep(0.01)
    print("ended", flush=True)
"""


def test_an_elastic_run_goes_on_without_the_lost(launcher) -> None:
    code, out, err = launcher.run("run", "-n", "3", "--elastic", launcher.script(FAILS), "1")
    assert code == 0
    assert out.count("ended") == 2
    assert err == "asynccomm: rank 1 ended with exit code 21; 2 of 3 are left\n"


def test_an_elastic_run_fails_when_too_few_are_left(launcher) -> None:
    code, _, err = launcher.run("run", "-n", "3", "--elastic", "--min-ranks", "3", launcher.script(FAILS), "1")
    assert code == 21
    assert "rank 1 failed, and 2 of 3 ranks are left, fewer than the 3 of --min-ranks: it ended with exit code" in err


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_report_of_an_elastic_run_tells_no_order_of_failures(launcher, restarts: int) -> None:
    script = launcher.script("""
        import os, sys, time
        rank, restart = int(os.environ["RANK"]), os.environ.get("ASYNCCOMM_NEWCOMER", "0")
        if rank == 0:
            while not os.path.exists("end"):
                time.sleep(0.01)
        elif rank == 2:
            from asynccomm.core.exit_records import recorded_exit
            while not (os.path.exists(sys.argv[1]) and recorded_exit(int(open(sys.argv[1]).read()))):
                time.sleep(0.01)
            open("end", "w").close()
        else:
            with open("new", "w") as file:
                file.write(str(os.getpid()))
            os.rename("new", restart)
        sys.exit(10 + rank if rank else 0)
    """)
    elastic = ["--restart", "1"] if restarts else ["--elastic"]
    code, _, err = launcher.run("run", "-n", "3", *elastic, "--min-ranks", "2", script, str(restarts))
    assert code == 12
    report = "rank 2 failed, and 1 of 3 ranks is left, fewer than the 2 of --min-ranks: it ended with exit code 12"
    assert f"asynccomm: {report} (1 other failed, too); it wrote nothing to stderr\n" in err
    assert err.count("takes its place") == restarts


def test_an_elastic_run_fails_when_all_have_failed(launcher) -> None:
    code, _, err = launcher.run("run", "-n", "1", "--elastic", "--restart", "5", launcher.script("raise SystemExit(4)"))
    assert code == 4
    assert "rank 0 failed, and no rank is left: it ended with exit code 4" in err
    assert "takes its place" not in err, "a newcomer would have no comm to join"


def test_newcomers_take_the_places_of_the_lost(launcher) -> None:
    script = launcher.script(FAILS)
    code, out, err = launcher.run("run", "-n", "3", "--restart", "1", "--log-dir", "logs", "--tee", script, "1", "x")
    assert code == 0
    assert out.count("started None") == 3
    assert out.count("[1] started 1") == 1
    assert out.count("ended") == 3
    assert "rank 1 ended with exit code 21; 2 of 3 are left; a newcomer takes its place (restart 1 of 1)" in err
    logs = launcher.directory / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["rank0.log", "rank1.1.log", "rank1.log", "rank2.log"]
    assert (logs / "rank1.1.log").read_text() == "started 1\nended\n"


def test_restarts_are_counted_in_all(launcher) -> None:
    code, out, err = launcher.run("run", "-n", "3", "--restart", "1", launcher.script(FAILS), "1", "2", "x")
    assert code == 0
    assert out.count("started 1") == 1
    assert err.count("takes its place") == 1
    assert err.count("are left") == 2


async def test_a_place_may_be_taken_more_often_than_calls_may_nest(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class FakeChild:
        stdout = stderr = None

        def __init__(self, pid: int, code: int | None) -> None:
            self.pid, self.alive = pid, code is None
            self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            if code is not None:
                self.exited.set_result(code)

        def tell(self, line: bytes) -> None:
            """As the store's process, which reads the pids."""

        async def clear_group(self) -> None:
            """No process is left."""

    def spawn_rank(number: int, restart: int = 0) -> LaunchedRank:
        child: Any = FakeChild(restart, 1 if restart < restarts else 0)
        return LaunchedRank(number, child, RankOutput(terminal, number, b""), restart)

    restarts, terminal = 2 * sys.getrecursionlimit(), Terminal()
    options = LaunchOptions(size=2, command=(), run_id="", threads="1", elastic=True, restarts=restarts)
    launch = Launch(options, terminal)
    monkeypatch.setattr(launch, "_spawn_rank", spawn_rank)
    endless: Any = FakeChild(0, None)
    launch._ranks = [LaunchedRank(0, endless, RankOutput(terminal, 0, b"")), spawn_rank(1)]
    launch._store = LaunchedRank(-1, endless, RankOutput(terminal, -1, b""))
    await launch._watch(launch._ranks[1])
    await terminal.drain()
    launch._exits.close()
    assert launch._ranks[1].restart == restarts
    assert f"(restart {restarts} of {restarts})" in capfd.readouterr().err


def test_no_newcomer_comes_when_all_others_have_ended(launcher) -> None:
    script = launcher.script("""
        import os, time
        if os.environ["RANK"] == "1":
            while any(os.path.exists(f"/proc/{pid}") for pid in [int(open("pid").read())]):
                time.sleep(0.01)
            raise SystemExit(21)
        with open("new", "w") as file:
            file.write(str(os.getpid()))
        os.rename("new", "pid")
    """)
    (launcher.directory / "pid").write_text(str(os.getpid()))
    code, _, err = launcher.run("run", "-n", "2", "--restart", "1", script)
    assert code == 0
    assert err == "asynccomm: rank 1 ended with exit code 21; 1 of 2 are left\n"


def test_a_newcomer_that_cannot_start_leaves_the_others(launcher) -> None:
    script = launcher.script("""
        import os, shutil, time
        from asynccomm.core.exit_records import recorded_exit
        if os.environ["RANK"] == "1":
            with open("new", "w") as file:
                file.write(str(os.getpid()))
            os.rename("new", "pid")
            shutil.rmtree("logs")
            raise SystemExit(21)
        while not (os.path.exists("pid") and recorded_exit(int(open("pid").read()))):
            time.sleep(0.01)
        print("ended", flush=True)
    """)
    code, out, err = launcher.run("run", "-n", "2", "--restart", "1", "--log-dir", "logs", "--tee", script)
    assert (code, out) == (0, "[0] ended\n")
    assert "asynccomm: no newcomer takes the place of rank 1: [Errno 2] No such file" in err


def test_ranks_know_how_another_rank_ended(launcher) -> None:
    script = launcher.script("""
        import os, signal, time
        from asynccomm.core.exit_records import recorded_exit
        if os.environ["RANK"] == "1":
            with open("new", "w") as file:
                file.write(str(os.getpid()))
            os.rename("new", "pid")
            os.kill(os.getpid(), signal.SIGKILL)
        while not (os.path.exists("pid") and recorded_exit(int(open("pid").read()))):
            time.sleep(0.01)
        print(recorded_exit(int(open("pid").read())), "of", recorded_exit(1), flush=True)
    """)
    code, out, _ = launcher.run("run", "-n", "2", "--elastic", script)
    assert (code, out) == (0, "[0] was killed by SIGKILL of \n")


def test_a_killed_launcher_takes_newcomers_along(launcher, is_running, until) -> None:
    script = launcher.script(
        """
        import os, subprocess, sys, time
        if os.environ["RANK"] == "1" and "ASYNCCOMM_NEWCOMER" not in os.environ:
            raise SystemExit(1)
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("pid", helper.pid, flush=True)
        time.sleep(60)
        """
    )
    started = launcher.start("run", "-n", "2", "--restart", "1", script)
    started.sees("pid", times=2)
    started.process.kill()
    started.process.wait()
    pids = started.words_after("pid")
    until(lambda: not any(map(is_running, pids)), "the helpers of ranks and newcomers are gone")


# -- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on_and_end_everything(launcher, is_running, number: signal.Signals) -> None:
    started = launcher.start("run", "-n", "2", "--grace", "1", launcher.script(STUBBORN))
    started.sees("pid", times=2)
    began = time.monotonic()
    started.process.send_signal(number)
    assert started.finish() == 128 + number
    assert time.monotonic() - began < 8  # not the usual 10 s of grace
    assert started.out.count(b"got " + number.name.encode()) == 2
    assert not any(map(is_running, started.words_after("pid")))


SAVES = """
    import asyncio, asynccomm, os, sys, torch

    async def main():
        async with asynccomm.new_comm(timeout=60) as comm:
            step = 0
            try:
                while True:
                    await comm.all_reduce(torch.ones(4))
                    step += 1
                    if step == 100:
                        print("steps", flush=True)
                    if "ask" in sys.argv and await comm.preempted():
                        break
            finally:
                await asyncio.sleep(0.2)  # longer than the second that survivors of a failure have in all
                open(f"saved{comm.rank}", "w").write(str(step))

    asynccomm.run(main())
"""


@pytest.mark.parametrize("ask", [[], ["ask"]])
def test_a_job_under_sigterm_saves_on_all_ranks(launcher, ask: list[str]) -> None:
    started = launcher.start("run", "-n", "3", launcher.script(SAVES), *ask)
    started.sees("steps", times=3)
    started.process.send_signal(signal.SIGTERM)
    assert started.finish() == 128 + signal.SIGTERM
    saved = [int((launcher.directory / f"saved{rank}").read_text()) for rank in range(3)]
    assert all(step >= 100 for step in saved)
    if ask:
        assert len(set(saved)) == 1, "they leave in the same step"


def test_a_survivor_that_waits_for_something_else_may_clean_up(launcher) -> None:
    script = launcher.script(
        """
        import asyncio, asynccomm, os

        async def main():
            if os.environ["RANK"] == "0":
                while not os.path.exists("waiting"):
                    await asyncio.sleep(0.01)
                raise SystemExit(7)
            try:
                open("waiting", "w")
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.1)
                open("cleaned", "w")

        asynccomm.run(main())
        """
    )
    started = launcher.start("run", "-n", "2", script)
    assert started.finish() == 7
    assert (launcher.directory / "cleaned").exists()
    assert b"SIGTERM; the others have 10 s more" in started.err


def test_ranks_that_obey_are_not_waited_for(launcher) -> None:
    started = launcher.start("run", "-n", "2", "--grace", "25", launcher.script(ENDLESS))
    started.sees("pid", times=2)
    began = time.monotonic()
    started.process.send_signal(signal.SIGINT)
    assert started.finish() == 130
    assert time.monotonic() - began < 20
    assert b"failed" not in started.err


def test_second_interrupt_kills_at_once(launcher, is_running) -> None:
    started = launcher.start("run", "-n", "2", "--grace", "25", launcher.script(STUBBORN))
    started.sees("pid", times=2)
    started.process.send_signal(signal.SIGINT)
    started.sees("got SIGINT", times=2)
    began = time.monotonic()
    started.process.send_signal(signal.SIGINT)
    assert started.finish() == 130
    assert time.monotonic() - began < 20
    assert not any(map(is_running, started.words_after("pid")))


SAVES_ON_A_FILE = """
    import os, signal, time
    signals = []
    def note(number, frame):
        signals.append(number)
        print("got", signal.Signals(number).name, flush=True)
    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    print("up", flush=True)
    while not (signals and os.path.exists("save")):
        if os.environ["RANK"] == os.environ.get("FAILS") and os.path.exists("fail"):
            raise SystemExit(7)
        time.sleep(0.05)
    print("saved", flush=True)
"""


@pytest.mark.parametrize("after", ["1 s to end", "10 s more"])
def test_the_first_signal_after_a_failure_leaves_the_grace_time(launcher, until, after: str) -> None:
    script = launcher.script(SAVES_ON_A_FILE)
    started = launcher.start("run", "-n", "2", script, environment={"FAILS": "1"})
    started.sees("up", times=2)
    (launcher.directory / "fail").touch()
    until(lambda: after.encode() in started.err, after)
    started.process.send_signal(signal.SIGTERM)
    started.sees("[0] got SIGTERM")
    (launcher.directory / "save").touch()
    assert started.finish() == 128 + signal.SIGTERM
    assert started.out.count(b"got SIGTERM") == 1
    assert b"[0] saved\n" in started.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_grace_time_on_all_nodes(
    launcher, until, unused_tcp_port: int, number: signal.Signals
) -> None:
    script = launcher.script(SAVES_ON_A_FILE)
    place = ["--nodes", "2", "--store", f"127.0.0.1:{unused_tcp_port}", "-n", "1", script]
    nodes = [launcher.start("run", "--node-rank", str(node), *place) for node in (0, 1)]
    for node in nodes:
        node.sees("up")
    nodes[0].process.send_signal(number)
    for node in nodes:
        until(lambda node=node: f"{number.name}; the ranks have 10 s to end".encode() in node.err, "the grace time")
        node.sees(f"got {number.name}")
    nodes[1].process.send_signal(number)  # as from a scheduler, which sends it to all nodes
    (launcher.directory / "save").touch()
    for node in nodes:
        assert node.finish() == 128 + number
        assert node.out.count(b"got") == node.out.count(b"saved") == 1


def test_a_store_of_an_unknown_name_is_reported_at_once(launcher, until, unused_tcp_port: int) -> None:
    store = f"asynccomm.invalid:{unused_tcp_port}"
    place = ["--nodes", "2", "--node-rank", "0", "--store", store]
    started = launcher.start("run", *place, "-n", "1", launcher.script(""))
    until(lambda: f"asynccomm: argument --store: {store}: ".encode() in started.err, "the report")
    assert started.process.poll() is None  # the name may be known later
    started.process.send_signal(signal.SIGTERM)
    assert started.finish() == 143


def test_control_c_in_a_terminal_reaches_each_rank_once(launcher, is_running) -> None:
    script = launcher.script(STUBBORN)
    source = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    take_terminal = launcher.script(source, "take_terminal.py")
    command = [
        sys.executable,
        take_terminal,
        sys.executable,
        "-m",
        "asynccomm.cli.main",
        "run",
        "-n",
        "2",
        "--grace",
        "1",
        script,
    ]
    master, slave = pty.openpty()
    with subprocess.Popen(
        command, cwd=launcher.directory, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    ) as process:
        os.close(slave)
        out = bytearray()
        while out.count(b"pid") < 2:
            out += os.read(master, 4096)
        os.write(master, b"\x03")
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while data := os.read(master, 4096):
                out += data
    os.close(master)
    assert process.returncode == 130
    assert out.count(b"got SIGINT") == 2
    assert not any(is_running(int(pid)) for pid in re.findall(rb"pid (\d+)", out))


def test_what_is_ignored_stays_ignored(launcher) -> None:
    script = launcher.script("import os; print('pid', os.getpid(), flush=True); input()")
    source = f"""
        import os, signal, sys
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        print("launcher", os.getpid(), flush=True)
        os.execv(sys.executable, [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", "1", "{script}"])
    """
    started = launcher.start("run", "-n", "1", launcher.script(source, "nohup.py"))
    started.sees("pid")
    os.kill(started.words_after("launcher")[0], signal.SIGHUP)
    started.process.stdin.write(b"\n")
    assert started.finish() == 0


def test_sigterm_is_the_rank_s_to_hand_to_its_helpers(launcher) -> None:
    script = launcher.script(
        """
        import os, signal, subprocess, sys, time

        def leave(*_):
            helper.stdin.close()
            print("helper", helper.wait(), flush=True)
            sys.exit(0)

        helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        signal.signal(signal.SIGTERM, leave)
        print("pid", os.getpid(), flush=True)
        while True:
            time.sleep(0.1)
        """
    )
    started = launcher.start("run", "-n", "1", script)
    started.sees("pid")
    started.process.send_signal(signal.SIGTERM)
    assert started.finish() == 128 + signal.SIGTERM
    assert started.words_after("helper") == [0]


def test_a_terminal_that_takes_nothing_does_not_stop_an_interrupt(launcher, is_running, until, leftovers) -> None:
    script = launcher.script(
        """
        import os
        open(f"pid{os.environ['RANK']}", "w").write(str(os.getpid()))
        while True:
            os.write(1, b"x" * 1000 + b"\\n")
        """
    )
    source = f"""
        import os, signal, subprocess, sys, time
        command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", "2", "{script}"]
        launcher = subprocess.Popen(command, stdout=subprocess.PIPE)  # nobody reads
        while not (os.path.exists("pid0") and os.path.exists("pid1")):
            time.sleep(0.01)
        time.sleep(0.3)  # for the queue to fill; too early would only make this test easier
        launcher.send_signal(signal.SIGINT)
        print("code", launcher.wait(), flush=True)
        os._exit(0)
    """
    started = launcher.start("run", "-n", "1", launcher.script(source, "outer.py"))
    assert started.finish() == 0
    assert started.words_after("code") == [130]
    assert not any(is_running(int((launcher.directory / f"pid{rank}").read_text())) for rank in (0, 1))


# -- what ranks leave behind

# the child would outlive what waits for its end
PARENT = """
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])  # holds our pipes
    print("child", child.pid, flush=True)
    print("pid", os.getpid(), flush=True)
    {then}
"""


def test_grandchildren_do_not_hold_up_the_end(launcher, is_running) -> None:
    started = launcher.start("run", "-n", "1", launcher.script(PARENT.format(then="os._exit(0)")))
    began = time.monotonic()
    assert started.finish() == 0
    assert time.monotonic() - began < 20
    assert not is_running(started.words_after("child")[0])


def test_grandchildren_go_with_an_interrupt(launcher, is_running) -> None:
    started = launcher.start("run", "-n", "2", launcher.script(PARENT.format(then="child.wait()")))
    started.sees("pid", times=2)
    started.process.send_signal(signal.SIGINT)
    assert started.finish() == 130
    assert not any(map(is_running, started.words_after("child") + started.words_after("pid")))


def test_everything_dies_with_the_launcher(launcher, is_running, until, leftovers) -> None:
    started = launcher.start("run", "-n", "2", launcher.script(PARENT.format(then="child.wait()")))
    started.sees("pid", times=2)
    pids = started.words_after("child") + started.words_after("pid")
    leftovers.extend(pids)
    store = store_of(started.process.pid, until)
    started.process.kill()
    assert started.process.wait() == -signal.SIGKILL
    until(lambda: not any(map(is_running, [*pids, store])), "the end of all processes")
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("asynccomm")]


def test_shared_memory_of_killed_ranks_is_unlinked(launcher, until) -> None:
    script = launcher.script(
        """
        import os
        from multiprocessing.shared_memory import SharedMemory
        segment = SharedMemory(create=True, size=4096)
        print("segment", segment.name, flush=True)
        os.kill(os.getpid(), 9)
        """
    )
    started = launcher.start("run", "-n", "1", script)
    assert started.finish() == 137
    name = bytes(started.out).decode().split("segment ")[1].strip().lstrip("/")
    until(lambda: not os.path.exists(f"/dev/shm/{name}"), "the end of the tracker, which unlinks it")
