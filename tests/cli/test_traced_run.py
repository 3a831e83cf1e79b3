"""``asynccomm run --trace``."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asynccomm.cli import traced_run
from asynccomm.cli.main import main
from asynccomm.cli.traced_run import traced
from tests.observe.test_chrome import check_format

SCRIPT = """
import asynccomm, torch

async def main():
    async with asynccomm.new_comm(name="main") as comm:
        for _ in range(3):
            await comm.all_reduce(torch.ones(4))

asynccomm.run(main())
"""


def test_the_launcher_writes_one_trace_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", "2", "--trace", "out.json", "script.py"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "script.py"]
    trace = json.loads((tmp_path / "out.json").read_text())
    check_format(trace)
    calls = [event for event in trace["traceEvents"] if event["name"] == "all_reduce"]
    assert sorted((event["pid"], event["args"]["seq"]) for event in calls) == [(r, s) for r in (0, 1) for s in range(3)]


def test_a_file_that_is_no_part_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with traced(tmp_path / "out.json"):
        (directory,) = tmp_path.iterdir()
        (directory / "1-0.json").write_text("{")
    assert "1-0.json is no trace of a single rank" in capsys.readouterr().err
    check_format(json.loads((tmp_path / "out.json").read_text()))


def test_the_folder_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "-n", "1", "--trace", str(tmp_path / "none" / "out.json"), __file__])
    assert "argument --trace: the folder" in capsys.readouterr().err


def test_the_place_must_not_be_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "-n", "1", "--trace", str(tmp_path), __file__])
    assert f"argument --trace: must be a file, and {str(tmp_path)!r} is a folder" in capsys.readouterr().err


def test_a_folder_that_was_deleted_is_an_error_of_the_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(SystemExit) as exited:
        main(["run", "-n", "1", "--trace", "out.json", __file__])
    assert exited.value.code == 2
    assert "argument --trace: cannot write to 'out.json': No such file or directory" in capsys.readouterr().err


def test_a_pipe_gets_the_trace_and_the_folder_of_a_link_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, links = tmp_path / "temporary", tmp_path / "links"
    temporary.mkdir()
    links.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    out = tmp_path / "pipe"
    os.mkfifo(out)
    (links / "link").symlink_to(out)
    reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with traced(links / "link"):
            assert len(list(temporary.iterdir())) == 1
        check_format(json.loads(os.read(reader, 10_000)))
    finally:
        os.close(reader)
    assert out.is_fifo()
    assert not list(temporary.iterdir())
    assert [path.name for path in links.iterdir()] == ["link"]


@pytest.mark.parametrize("remover", ["true", "no such program"])
def test_a_run_is_traced_without_the_process_that_removes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remover: str
) -> None:
    monkeypatch.setattr(traced_run, "_REMOVER", (remover,))
    for _ in range(20):  # `true` may end before or after it gets the name
        with traced(tmp_path / "out.json"):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_killed_launcher_leaves_no_folder_behind(launcher, until) -> None:  # type: ignore[no-untyped-def]
    script = launcher.script("import sys; print('begun', flush=True); sys.stdin.read()")
    started = launcher.start("run", "-n", "1", "--trace", "out.json", script)
    started.sees("begun")
    assert len(list(launcher.directory.iterdir())) == 2
    started.process.kill()
    until(lambda: [path.name for path in launcher.directory.iterdir()] == ["script.py"], "the end of the folder")


@pytest.mark.real_python  # a fork has chosen the folder of temporary files
def test_a_signal_while_the_trace_is_written_leaves_no_folder_behind(  # type: ignore[no-untyped-def]
    launcher, until, tmp_path: Path
) -> None:
    os.mkfifo(launcher.directory / "pipe")  # without a reader the trace is written for ever
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = launcher.script("import sys; print('begun', flush=True); sys.stdin.read()")
    started = launcher.start("run", "-n", "1", "--trace", "pipe", script, environment={"TMPDIR": str(temporary)})
    started.sees("begun")
    assert [path.name[:11] for path in temporary.iterdir() if path.name.startswith(".")] == [".asynccomm-"]

    def ended() -> bool:  # the first signal ends the run, and a later one the launcher
        started.process.send_signal(signal.SIGTERM)
        return started.process.poll() is not None

    until(ended, "the end of the launcher")
    assert started.process.returncode == -signal.SIGTERM
    until(lambda: not [path for path in temporary.iterdir() if path.name.startswith(".")], "the end of the folder")
