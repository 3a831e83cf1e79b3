"""Looking at jobs from outside: real ones, started by the launcher or by hand."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asynccomm.cli import diagnose, jobs
from asynccomm.cli.jobs import Answer, ProcessTree
from asynccomm.cli.main import main
from asynccomm.control.diagnosis import Diagnosis, RankState
from asynccomm.control.messages import RankAnswer
from asynccomm.control.transport.connection import Look
from tests.sampling import some

DEADLINE = 60.0  # seconds until a condition counts as never met

PRELUDE = """\
import asyncio, os, sys, threading
import torch, asynccomm

def mark(text=""):
    name = f"rank{os.environ['RANK']}"
    with open(name + ".part", "w") as file:
        file.write(text or str(os.getpid()))
    os.rename(name + ".part", name)

"""
HANGS = """
async def main():
    async with (
        asynccomm.new_comm(sys.argv[1], name="world", timeout=300) as comm,
        asynccomm.new_comm(sys.argv[1], name="second", timeout=300) as second,
    ):
        tail = await comm.split([2, 1], "tail") if comm.rank else None
        await second.barrier()
        await comm.all_reduce(torch.ones(4))  # all call this
        if comm.rank == 2:
            mark()
            threading.Event().wait()  # the culprit
        work = comm.all_reduce(torch.ones(4))  # two call this
        mark()
        await work
asynccomm.run(main())
"""
WORKS = """
async def main():
    async with asynccomm.new_comm("shm", timeout=300) as comm:
        while not os.path.exists("stop"):
            await comm.all_reduce(torch.ones(4))
            mark() if not os.path.exists(f"rank{comm.rank}") else None
        comm.abort("enough")
asynccomm.run(main())
"""
LOSES = """
async def main():
    async with asynccomm.new_comm("gloo", name="world", timeout=300) as comm:
        await comm.all_reduce(torch.ones(4))
        if comm.rank != 1:
            work = comm.all_reduce(torch.ones(4))
            mark()
            with open(f"why{comm.rank}.part", "w") as file:
                file.write(await why(work))
            os.rename(f"why{comm.rank}.part", f"why{comm.rank}")
        else:
            mark()
        await asyncio.Event().wait()

async def why(work):
    try:
        await work
    except asynccomm.BrokenError as exc:
        return str(exc)
    return ""

asynccomm.run(main())
"""


def line_of(source: str, comment: str) -> int:
    """Where it is in the job's script."""
    return next(n for n, line in enumerate((PRELUDE + source).splitlines(), 1) if f"# {comment}" in line)


def wait_until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what()}"
        time.sleep(0.01)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Running:
    """A job. Ranks say by a file that they have come to where they stay."""

    def __init__(self, directory: Path, run: str | None, source: str, size: int) -> None:
        self.directory, self.run, self.size = directory, run, size
        self.script = directory / "job.py"
        self.script.write_text(PRELUDE + textwrap.dedent(source))
        self.output = (directory / "output").open("wb")
        self.processes: list[subprocess.Popen[bytes]] = []

    def launch(self, *arguments: str) -> None:
        """By the launcher."""
        assert self.run is not None
        self._start(
            [
                "-m",
                "asynccomm.cli.main",
                "run",
                "-n",
                str(self.size),
                "--run-id",
                self.run,
                self.script.name,
                *arguments,
            ],
            {},
        )

    def by_hand(self, port: int, *, only: int | None = None) -> None:
        for rank in range(self.size) if only is None else [only]:
            here = {"RANK": str(rank), "WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1"}
            self._start([self.script.name], {**here, "MASTER_PORT": str(port)})

    def _start(self, arguments: list[str], variables: dict[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        self.processes.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.directory,
                env=clean | variables | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
            )
        )

    @property
    def pids(self) -> list[int]:
        return [int((self.directory / f"rank{rank}").read_text()) for rank in range(self.size)]

    def wait_for(self, *names: str) -> None:
        wait_until(
            lambda: all((self.directory / name).exists() for name in names),
            lambda: f"{names}; {(self.directory / 'output').read_text()}",
        )

    def ready(self) -> Running:
        self.wait_for(*(f"rank{rank}" for rank in range(self.size)))
        return self

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(DEADLINE)
        self.output.close()


Start = Callable[..., Running]


@contextlib.contextmanager
def starting(base: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as resources:
        count = 0

        def start(source: str, size: int, run: str | None = None) -> Running:
            nonlocal count
            count += 1
            (directory := base / f"job{count}").mkdir()
            job = Running(directory, run, source, size)
            resources.callback(job.close)
            return job

        yield start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as start:
        yield start


@pytest.fixture(scope="module", params=some(["shm", "gloo"], 1))
def hanging(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Rank 2 of 3 does not call the second all_reduce, and blocks its loop. On gloo, a job below has lost a rank."""
    with starting(tmp_path_factory.mktemp("jobs")) as start:
        job = start(HANGS, 3, f"hangs-{request.param}-{os.getpid()}")
        job.launch(request.param)
        yield job.ready()


class Command:
    """Runs ``asynccomm diagnose``."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        try:
            code = main(["diagnose", *map(str, arguments)])
        except SystemExit as exc:
            assert isinstance(exc.code, int)
            code = exc.code
        return code, *self._capsys.readouterr()

    def comms(self, *arguments: object) -> tuple[int, dict[str, Any]]:
        """Exit code, and what was said of each comm by name."""
        code, out, err = self(*arguments, "--json")
        assert not err
        return code, {one["comm"]: one for one in json.loads(out)["comms"]}


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """As long as this lasts."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda pid=pid: state_of(pid) == "T", lambda pid=pid: f"{pid} stops")
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


# -- a job that hangs -------------------------------------------------------------------------------------------------


def test_the_rank_behind_is_named_with_its_place(hanging: Running, command: Command) -> None:
    code, out, err = command(hanging.run)
    assert (code, err) == (1, "")
    pids = hanging.pids
    first, second = (f"{hanging.script}:{line_of(HANGS, text)} in main" for text in ("all call this", "two call this"))
    assert out.startswith(f"run '{hanging.run}', 3 ranks here, processes {' '.join(map(str, sorted(pids)))}\n\n")
    assert "comm 'world', 3 ranks, 2 collectives issued; behind: ranks [2]" in out
    lines = out[out.index("comm 'world', ") :].splitlines()
    here = socket.gethostname()
    at = [next(n for n, line in enumerate(lines) if line.startswith(f"rank {r} (process {pids[r]}")) for r in range(3)]
    assert lines[at[2]].startswith(f"rank 2 (process {pids[2]} on {here}) called last all_reduce(float32[4], SUM) #0")
    assert lines[at[2]].endswith(f"at {first}, which is done; its event loop is blocked")
    for rank in (0, 1):
        assert lines[at[rank]].endswith(second)
        assert lines[at[rank] + 1].startswith("    waits for all_reduce(float32[4], SUM) #1 ")
        assert lines[at[rank] + 1].endswith(second)


def test_for_machines(hanging: Running, command: Command) -> None:
    code, out, _ = command(hanging.run, "--json")
    assert code == 1
    told = json.loads(out)
    assert (told["run"], told["ok"], told["silent"]) == (hanging.run, False, [])
    comms = {one["comm"]: one for one in told["comms"]}
    assert list(comms) == ["second", "world", "world/tail"]
    assert {name: (one["size"], one["late"]) for name, one in comms.items()} == {
        "world": (3, [2]),
        "world/tail": (2, []),
        "second": (3, []),
    }
    ranks = comms["world"]["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1, 2]
    assert [one["pid"] for one in ranks] == hanging.pids
    assert [one["collectives"] for one in ranks] == [2, 2, 1]
    assert [one["blocked"] for one in ranks] == [False, False, True]
    assert [one["in_flight"] for one in ranks] == [1, 1, 0]
    assert ranks[0]["pending"][0]["site"].endswith(f"job.py:{line_of(HANGS, 'two call this')} in main")
    assert not any(one["stacks"] for one in ranks)
    assert [one["pid"] for one in comms["world/tail"]["ranks"]] == [hanging.pids[2], hanging.pids[1]]


def test_stacks(hanging: Running, command: Command) -> None:
    code, out, _ = command(hanging.run, "--stacks", "--comm", "world")
    assert code == 1
    culprit = out[out.index("\nrank 2 ") :]
    assert f"line {line_of(HANGS, 'the culprit')}, in main" in culprit
    assert "| " in culprit


def test_one_comm(hanging: Running, command: Command) -> None:
    code, comms = command.comms(hanging.run, "--comm", "second")
    assert (code, list(comms)) == (0, ["second"])
    assert command(hanging.run, "--comm", "world/tail")[0] == 0
    code, out, err = command(hanging.run, "--comm", "wrold")
    assert (code, out) == (2, "")
    assert "has no open comm 'wrold'; there are: 'second', 'world', 'world/tail'" in err


def test_the_pid_of_a_rank_or_of_the_launcher(hanging: Running, command: Command) -> None:
    for pid in (hanging.pids[1], hanging.processes[0].pid):
        code, comms = command.comms(pid)
        assert code == 1
        assert [one["pid"] for one in comms["world"]["ranks"]] == hanging.pids


@pytest.mark.parametrize(
    "run", ["no-such-run", str(os.getpid()), "0", "999999999999999999999"], ids=["id", "own pid", "zero", "too large"]
)
def test_unknown_run(command: Command, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "doors_here", list)  # what other tests have started is below this process
    code, out, err = command(run)
    assert (code, out) == (2, "")
    assert f"there is no run of yours on this host that is called '{run}' or has such a process" in err


def test_a_pid_that_has_nothing_to_do_with_the_run(hanging: Running, command: Command) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert command(other.pid)[0] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_silent_and_another_one_is_asked(hanging: Running, command: Command, rank: int) -> None:
    """The root, over which the others talk to each other, and another."""
    pids = hanging.pids
    with stopped(pids[rank]):
        code, comms = command.comms(hanging.run)
        by_its_pid, text, _ = command(pids[rank], "--comm", "world")
    assert code == by_its_pid == 1
    ranks = comms["world"]["ranks"]
    assert [one["answered"] for one in ranks] == [each != rank for each in range(3)]
    assert [one["pid"] for one in ranks] == pids
    assert comms["world"]["late"] == [rank, 2]
    assert comms["second"]["late"] == [rank]
    assert comms["world/tail"]["late"] == ([1] if rank == 1 else [])  # where it is called 1, too, but is not rank 1
    assert f"rank {rank} (process {pids[rank]} on {socket.gethostname()}) does not answer" in text


def test_the_ranks_of_a_split_are_told_apart(hanging: Running, command: Command) -> None:
    with stopped(hanging.pids[2]):
        _, comms = command.comms(hanging.run)
    assert comms["world/tail"]["late"] == [0]  # rank 2 of the job
    assert [one["answered"] for one in comms["world/tail"]["ranks"]] == [False, True]


def test_all_are_stopped(hanging: Running, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "KNOCK_SECONDS", 0.3)
    with stopped(*hanging.pids):
        code, out, _ = command(hanging.run)
        told = json.loads(command(hanging.run, "--json")[1])
    assert code == 1
    assert out.endswith("\n\nno rank answers\n")
    for rank, pid in enumerate(hanging.pids):
        assert f"\nrank {rank} (process {pid}) does not answer: it is stopped\n" in out
    assert not told["ok"]
    assert not told["comms"]
    assert {one["pid"] for one in told["silent"]} == set(hanging.pids)


def test_the_flight_recorders_are_dumped_and_name_the_same_rank(
    hanging: Running, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(hanging.run, "--dump", tmp_path / "dumps")
    assert (code, err) == (0, "")
    assert out.split() == [str(tmp_path / "dumps" / f"rank_{rank}") for rank in range(3)]
    assert main(["trace", "analyze", str(tmp_path / "dumps")]) == 1
    said = capsys.readouterr().out
    assert said.startswith(
        "comm 'world', ranks [0, 1, 2], 1 collectives compared\n  collective #1 was not called by rank 2\n"
    )
    assert f"rank 0: all_reduce(float32[4], SUM), started at {hanging.script}:{line_of(HANGS, 'two call this')}" in said


def test_it_disturbs_nothing(hanging: Running, command: Command) -> None:
    """After all that was done to the job, it is as it was, and has logged nothing."""
    for _ in range(3):
        code, comms = command.comms(hanging.run)
        assert (code, comms["world"]["late"]) == (1, [2])
    assert "stranger" not in (hanging.directory / "output").read_text()


def test_sockets_of_others_are_left_alone(hanging: Running, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_owner", lambda pid: None)  # it is not known: so who listens there is looked at
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    code, _, err = command(hanging.run)
    assert code == 2
    assert "there is no run of yours" in err


# -- other jobs -------------------------------------------------------------------------------------------------------


def test_a_job_that_works_is_fine(start: Start, command: Command) -> None:
    job = start(WORKS, 2, f"works-{os.getpid()}")
    job.launch()
    job.ready()
    for _ in range(5):
        code, out, err = command(job.run)
        assert (code, err) == (0, ""), out
    (job.directory / "stop").touch()


def test_a_rank_that_is_gone(start: Start, command: Command, unused_port: int) -> None:
    """Without a launcher, which would end the others; and so without an id."""
    job = start(LOSES, 3)
    job.by_hand(unused_port)
    job.ready()
    pids = job.pids
    os.kill(pids[1], signal.SIGKILL)
    job.wait_for("why0", "why2")
    code, comms = command.comms(pids[2])
    assert code == 1
    ranks = comms["world"]["ranks"]
    assert comms["world"]["late"] == [0, 1, 2]
    assert [one["gone"] is not None for one in ranks] == [False, True, False]
    assert all(ranks[rank]["state"].startswith("broken: ") for rank in (0, 2))
    text = command(pids[0])[1]
    assert text.startswith("a run without an id, 2 ranks here, ")
    assert "\nrank 1 is gone: " in text


def test_a_rank_that_waits_for_the_others(start: Start, command: Command, unused_port: int) -> None:
    job = start("mark()\n" + WORKS, 2)
    job.by_hand(unused_port, only=0)
    job.wait_for("rank0")
    pid = job.processes[0].pid
    wait_until(lambda: any(door.pid == pid for door in jobs.doors_here()), lambda: "its door")
    code, out, _ = command(pid)
    assert code == 1
    assert f"rank 0 (process {pid}) does not answer: it waits for the others in new_comm, or " in out


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_several_runs(start: Start, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the same id, as torchrun calls them all "none" unless told, and one of another."""
    names = [f"same-{os.getpid()}", f"same-{os.getpid()}", f"other-{os.getpid()}"]
    started = [start(WORKS, 1, name) for name in names]
    for job in started:
        job.launch()
    for job in started:
        job.ready()
    pids = [job.pids[0] for job in started]
    here = jobs.doors_here
    monkeypatch.setattr(jobs, "doors_here", lambda: [door for door in here() if door.pid in pids])

    code, out, err = command()
    assert (code, out) == (2, "")
    assert "argument RUN: say which, by its id or a pid; there are 3:\n" in err
    for name, pid in zip(names, pids, strict=True):
        assert f"\n  run '{name}', 1 rank here, process {pid}\n" in err
    code, _, err = command(names[0])
    assert code == 2
    assert "there are 2:" in err
    assert str(pids[2]) not in err
    for pid in pids:
        code, out, _ = command(pid)
        assert (code, out.partition("\n")[0].rpartition(" ")[2]) == (0, str(pid))
    assert command(names[2])[0] == 0

    monkeypatch.setattr(jobs, "doors_here", lambda: [door for door in here() if door.pid == pids[2]])
    code, out, _ = command()
    assert (code, out.partition(",")[0]) == (0, f"run '{names[2]}'")
    monkeypatch.setattr(jobs, "doors_here", list)
    code, _, err = command()
    assert code == 2
    assert err.endswith("error: there is no run of yours on this host\n")


# -- one that does not behave -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "says",
    [None, b"", b"\xff" * 64, b"\0\0\0\2{}", b"\0\0\0\x0a[1, 2, 33]", b'\0\0\0\x0d{"sockets":7}', b"\0\0"],
    ids=["nothing", "end", "too much", "no end", "no object", "no sockets", "half"],
)
def test_nonsense_is_no_answer(command: Command, monkeypatch: pytest.MonkeyPatch, says: bytes | None) -> None:
    monkeypatch.setattr(jobs, "KNOCK_SECONDS", 0.3)
    run = f"nonsense-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(f"\0asynccomm/{run}/0/{os.getpid()}/0")
        sock.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                other, _ = sock.accept()
                with other:
                    if says is not None:
                        other.sendall(says)
                        other.shutdown(socket.SHUT_WR)
                    while other.recv(1 << 16):
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        code, out, _ = command(run)
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert code == 1
    assert out.endswith("no rank answers\n")


def test_elsewhere_than_on_linux(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose.sys, "platform", "darwin")
    code, out, err = command("run")
    assert (code, out) == (2, "")
    assert "in /proc/net/unix, which darwin does not have" in err


def test_a_name_that_no_file_of_the_system_can_show_as_text(command: Command) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(b"\0asynccomm/\xff\n\x85/%d/x" % os.getpid())
        sock.listen()
        assert command("no-such-run")[0] == 2


@pytest.mark.real_python
def test_it_needs_no_torch() -> None:
    modules = (
        "asynccomm.cli.main, asynccomm.cli.diagnose, asynccomm.observe.analysis, asynccomm.observe.chrome, "
        "asynccomm.control.transport.framing, asynccomm.control.diagnosis"
    )
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout == b"False\n"
    )


# -- what is behind for a moment --------------------------------------------------------------------------------------


def said_of(*counts: int) -> Answer:
    said = Answer()
    for rank, count in enumerate(counts):
        answer = {"comm": "world", "size": len(counts), "state": "open", "collectives": count}
        said.add(RankAnswer(rank, {"key": answer}))
    return said


@pytest.mark.parametrize(
    ("looks", "late", "text"),
    [
        ([(5, 5)], (), "2 ranks, 5 collectives issued\n"),
        ([(5, 4), (9, 8)], (), "behind: ranks [1]\n"),  # another look is taken: by now it has issued what others had
        ([(5, 4), (5, 4)], (1,), "behind: ranks [1]\n"),
        ([(5, 3), (9, 4)], (1,), "behind: ranks [1]\n"),
    ],
)
async def test_who_is_behind_for_a_moment_is_not_late(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[int, ...]], late: tuple[int, ...], text: str
) -> None:
    left = [said_of(*look) for look in looks]

    async def listen(family: ProcessTree, look: Look) -> Answer:
        return left.pop(0)

    monkeypatch.setattr(diagnose, "listen", listen)
    (view,) = await diagnose._examine(ProcessTree(()), False)
    assert not left
    assert view.late == late
    assert text in str(view)
    assert ("none is stuck" in str(view)) == (not late and "behind" in text)


def test_states_that_are_late() -> None:
    states = [
        RankState(0, True, state="open", collectives=3),
        RankState(1, False),
        RankState(2, True, state="broken: so", collectives=3),
        RankState(3, False, gone=""),
        RankState(4, True, state="closed", collectives=3),
        RankState(5, True, state="open", collectives=2),
    ]
    assert diagnose._late(Diagnosis("comm", tuple(states)), 3) == (1, 2, 3, 4, 5)
    assert diagnose._late(Diagnosis("comm", tuple(states)), 2) == (1, 2, 3, 4)
