import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asynccomm.cli import doctor
from asynccomm.cli.main import main
from asynccomm.version import __version__


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"asynccomm {__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "run a script on N ranks" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["walk"]])
def test_a_command_is_required(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_an_unknown_option_shows_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "-n", "2", "--frob", "x.py"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: asynccomm run [--nodes N --node-rank K --store HOST:PORT] -n N [options]")
    assert err.endswith("error: unrecognized arguments: --frob\n")


@pytest.mark.real_python
def test_it_is_a_module_and_may_be_cut_off() -> None:
    code = f"{sys.executable} -m asynccomm --help | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout in ("u0\n", "u141\n")  # 0 if the pipe took it all first
    assert done.stderr == ""


def test_a_reader_that_has_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert main(["run", "-n", "1", "--help"]) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("buffered", [False, True])
def test_output_that_cannot_be_written_is_an_error(buffered: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "wb", buffering=-1 if buffered else 0) as full, pytest.MonkeyPatch.context() as patch:
        stdout = io.TextIOWrapper(full, write_through=True)
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(doctor, "_doctor", lambda arguments: print("line") or 0)
        assert main(["doctor"]) == 1
        stdout.close()
    assert capsys.readouterr().err == "asynccomm: cannot write the output: No space left on device\n"


def test_a_full_disk_under_another_file_is_no_error_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")

    monkeypatch.setattr(doctor, "_doctor", fill)
    with pytest.raises(OSError, match="No space left on device: 'file'"):
        main(["doctor"])


def test_characters_that_the_output_does_not_encode_are_escaped(tmp_path: Path) -> None:
    file = tmp_path / "output"
    with file.open("w", encoding="ascii") as stdout, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(doctor, "_doctor", lambda arguments: print("b\u00fccher") or 0)
        assert main(["doctor"]) == 0
    assert file.read_text() == "b\\xfccher\n"


@pytest.mark.real_python
def test_a_run_without_standard_streams_succeeds(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; os.write(1, b'text'); os.write(2, b'text')")
    command = f"{sys.executable} -m asynccomm run -n 2 script.py <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=60).returncode == 0


@pytest.mark.real_python
def test_no_file_of_a_rank_is_its_stdin_where_that_is_closed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print(open(os.devnull).fileno() > 2)")
    command = f"{sys.executable} -m asynccomm run -n 1 script.py <&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[0] True\n", 0), done.stderr


@pytest.mark.real_python
def test_starting_imports_no_torch(launcher) -> None:
    launcher.script("import asynccomm.cli.main, sys; print('torch' in sys.modules)", "look.py")
    assert launcher.run("run", "-n", "1", "look.py")[1] == "[0] False\n"
