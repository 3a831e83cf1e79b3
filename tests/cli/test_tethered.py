"""The command that ends with its parent."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.real_python
def test_the_command_ends_with_its_parent(until, is_running, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time\n"
            "command = [sys.executable, '-m', 'asynccomm.cli.tethered', str(os.getpid()), sys.argv[1]]\n"
            "child = subprocess.Popen([*command, 'run', '-n', '2', '--no-prefix', '-m', 'this', '-h'])\n"
            "assert child.wait() == 0\n"
            "child = subprocess.Popen([*command, 'run', '-n', '1', '-m', 'http.server', '0'])\n"
            "print(child.pid, flush=True)\n"
            "time.sleep(600)\n",
            str(folder),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert parent.stdout is not None
        lines = iter(parent.stdout.readline, b"")
        pid = next(int(line) for line in lines if line.strip().isdigit())
        assert is_running(pid)
        assert folder.exists()
    finally:
        parent.kill()
        parent.communicate()
    until(lambda: not is_running(pid), "the end of the command")
    assert not folder.exists()


def test_the_command_does_not_start_without_its_parent(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-m", "asynccomm.cli.tethered", "1", str(folder), "--version"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 143
    assert not folder.exists()
