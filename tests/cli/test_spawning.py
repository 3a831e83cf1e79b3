"""Functions on several ranks, from a script, a notebook or a test."""

import asyncio
import importlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import asynccomm
from asynccomm import BrokenError, Comm, PeerLostError
from asynccomm.cli.spawning import RankResult, _pass_on, _results, result_file
from tests.cases import cases
from tests.forking import exit_code, fork


async def work(comm: Comm, case: str, *, scale: float = 1.0) -> Any:
    """A case by its name."""
    if case == "mean":
        print("hello", file=sys.stderr if comm.rank else sys.stdout)
        return (await comm.all_reduce(torch.tensor(scale * comm.rank), asynccomm.ReduceOp.AVG)).item(), os.environ[
            "WORLD_SIZE"
        ]
    if comm.rank == 1:
        raise LookupError("no such key")
    try:
        await comm.barrier()
    except BrokenError as exc:
        if case == "wrapped error":
            raise RuntimeError("training failed") from exc
        raise
    return None


def test_results_come_in_rank_order_and_output_with_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    async def caller() -> list[Any]:  # a notebook has a running loop
        return asynccomm.spawn(work, 2, "mean", scale=3.0)

    assert asyncio.run(caller()) == [(1.5, "2")] * 2
    out, err = capsys.readouterr()
    assert (out, err) == ("[0] hello\n", "[1] hello\n")


def test_output_without_a_console_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    assert asynccomm.spawn(work, 2, "mean", scale=3.0) == [(1.5, "2")] * 2
    assert errors == []
    assert capsys.readouterr() == ("", "[1] hello\n")


def test_a_sink_gets_the_characters_that_its_encoding_has() -> None:
    source, raw = io.BytesIO("naïve →\n".encode() + b"later\n"), io.BytesIO()
    with io.TextIOWrapper(raw, encoding="latin-1") as sink:
        _pass_on(source, sink)
        assert raw.getvalue() == b"na\xefve \\u2192\nlater\n"


@cases("error", [ValueError("I/O operation on closed file"), BrokenPipeError()])
def test_a_sink_that_has_closed_costs_its_output_alone(error: Exception) -> None:
    tried = []

    class Sink(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise error

    _pass_on(io.BytesIO(b"one\ntwo\n"), Sink())
    assert tried == ["one\n", "two\n"]  # the source is read to its end: the launcher waits for its reader


def test_a_function_of_a_script_runs_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asynccomm\n"
        "class Answer:\n"
        "    def __init__(self, rank): self.rank = rank\n"
        "factor = 7\n"
        "async def main(comm): return Answer(factor * comm.rank)\n"
        "found = asynccomm.spawn(main, 2)\n"
        "assert [type(each) for each in found] == [Answer, Answer]\n"
        "print([each.rank for each in found])\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("[0, 7]\n", 0), done.stderr


@pytest.mark.real_python
def test_the_current_directory_shadows_no_module_of_the_ranks_and_has_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a caller by ``python -c`` or ``-m``, here without its start: the function is found, after the start."""
    (tmp_path / "queue.py").write_text("raise ImportError('not the standard library')\n")
    (tmp_path / "neighbour_of_spawn.py").write_text("async def main(comm): return comm.rank\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    neighbour = importlib.import_module("neighbour_of_spawn")
    try:
        assert asynccomm.spawn(neighbour.main, 1) == [0]
    finally:
        del sys.modules["neighbour_of_spawn"]


@pytest.mark.exhaustive
@pytest.mark.real_python
def test_a_script_s_ranks_know_nothing_of_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "queue.py").write_text("raise ImportError('not the standard library')\n")
    script = tmp_path / "script.py"
    script.write_text("import asynccomm\nasync def main(comm): return comm.rank\nprint(asynccomm.spawn(main, 1))\n")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("[0]\n", 0), done.stderr


@pytest.mark.exhaustive
@pytest.mark.real_python
@pytest.mark.parametrize("command", [["-c", "import caller"], ["-m", "caller"]])
def test_ranks_import_from_the_current_directory_as_the_caller_does(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("async def main(comm): return comm.rank\n")
    (tmp_path / "caller.py").write_text("import asynccomm, neighbour\nprint(asynccomm.spawn(neighbour.main, 1))\n")
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("[0]\n", 0), done.stderr


async def fork_and_wait(comm: Comm, end: str) -> int:
    child = fork()
    if child == 0:
        if end == "exit":
            sys.exit(3)
        return -1
    return exit_code(child)


@pytest.mark.parametrize(("end", "code"), [("exit", 3), ("return", 0)])
def test_a_forked_child_of_the_function_has_no_outcome(end: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert asynccomm.spawn(fork_and_wait, 1, end) == [code]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("case", ["error", "wrapped error"])
def test_the_first_cause_is_raised(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LookupError, match="no such key") as caught:
        asynccomm.spawn(work, 2, case)
    assert 'raise LookupError("no such key")' in caught.value.__notes__[0]
    assert caught.value.__notes__[0].startswith("On rank 1:\nTraceback")


def test_a_rank_without_an_outcome_is_named(tmp_path: Path) -> None:
    lost = RankResult(None, PeerLostError(1, "its connection ended"), "trace", caused=True)
    result_file(tmp_path, 0).write_bytes(cloudpickle.dumps(lost))
    with pytest.raises(
        RuntimeError, match=r"ranks \[1\] gave no result; the launcher ended with exit code 137"
    ) as caught:
        _results(2, tmp_path, 137)
    assert isinstance(caught.value.__cause__, PeerLostError)
    cause = RankResult(None, KeyError("x"), "trace")
    result_file(tmp_path, 2).write_bytes(cloudpickle.dumps(cause))
    with pytest.raises(KeyError) as found:
        _results(3, tmp_path, 1)
    assert found.value.__notes__ == ["On rank 2:\ntrace"]


def test_arguments_are_checked() -> None:
    for size in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match=f"size must be a positive integer, got {size}"):
            asynccomm.spawn(work, size, "mean")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fn must be a coroutine function, got 3"):
        asynccomm.spawn(3, 1)  # type: ignore[call-overload, arg-type]

    async def generator(comm: Comm) -> AsyncIterator[int]:
        yield comm.rank

    with pytest.raises(TypeError, match=r"fn must be a coroutine function, got <function .*\.generator at"):
        asynccomm.spawn(generator, 1)  # type: ignore[arg-type]


def test_ctrl_c_ends_the_ranks_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, os, sys\n"
        "import asynccomm\n"
        "async def main(comm):\n"
        "    await comm.barrier()\n"
        "    print('ready', flush=True)\n"
        "    try:\n"
        "        await asyncio.sleep(600)\n"
        "    finally:\n"
        "        print('cleaned', flush=True)\n"
        "try:\n"
        "    asynccomm.spawn(main, 2)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-u", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line.decode().strip())
        if lines[-2:] in (["[0] ready", "[1] ready"], ["[1] ready", "[0] ready"]):
            child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert sorted(lines[2:4]) == ["[0] cleaned", "[1] cleaned"]
    assert lines[4:] == ["interrupted"]
    assert child.returncode == 0


def test_a_second_ctrl_c_ends_the_ranks_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, time\n"
        "import asynccomm\n"
        "async def main(comm):\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
        "asynccomm.spawn(main, 1)\n"
    )
    child = subprocess.Popen([sys.executable, "-u", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.readline() == b"[0] ready\n"
    child.send_signal(signal.SIGINT)
    assert child.stderr.readline() == b"asynccomm: SIGINT; the ranks have 10 s to end\n"
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=8)
    assert child.returncode == -signal.SIGINT


def test_an_exception_where_sigint_is_ignored_ends_the_ranks_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, signal, sys\n"
        "import asynccomm\n"
        "async def main(comm):\n"
        "    print('ready', flush=True)\n"
        "    try:\n"
        "        await asyncio.sleep(600)\n"
        "    finally:\n"
        "        print('cleaned', flush=True)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "asynccomm.spawn(main, 1)\n"
    )
    child = subprocess.Popen([sys.executable, "-u", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"[0] ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=20)[0] == b"[0] cleaned\n"
    assert child.returncode == 7


def test_an_interrupt_stays_if_the_ranks_do_not_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "import asynccomm\n"
        "from asynccomm.cli import spawning\n"
        "async def main(comm):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
        "spawning._END_SECONDS = 0.01\n"
        "asynccomm.spawn(main, 1)\n"
    )
    child = subprocess.Popen([sys.executable, "-u", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"[0] ready\n"
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert child.returncode == -signal.SIGINT
