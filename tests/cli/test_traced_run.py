"""``asynccomm run --trace``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
