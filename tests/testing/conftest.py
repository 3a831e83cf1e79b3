"""pytest inside of pytest: projects of a few files, run in a process of their own, with a record of every report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DEADLINE = 60.0  # seconds until a condition counts as never met; importing torch takes a few on a busy machine

# in every inner project: what pytest reports, which processes ran tests, and whether any child is left at the very end
RECORDER = """
import atexit, json, os, pathlib, pytest

HERE = pathlib.Path(__file__).parent
if "RANK" not in os.environ and os.environ.get("RECORDING") == str(os.getppid()):
    def record(kind, **entry):
        with open(HERE / "record", "a") as file:
            file.write(json.dumps({"kind": kind, **entry}) + "\\n")

    def pytest_runtest_logreport(report):
        record("report", id=report.nodeid, when=report.when, outcome=report.outcome, text=report.longreprtext,
               output=[text for name, text in report.sections])

    def pytest_collectreport(report):
        if report.failed:
            record("report", id=report.nodeid, when="collect", outcome="failed", text=report.longreprtext, output=[])

    @atexit.register
    def last():
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # not even a zombie
            record("childless")
"""


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.01)


def running(pid: int) -> bool:
    """Whether ``pid`` still runs; a zombie that nobody reaps does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


class Project:
    """A directory with tests, and pytest runs in it."""

    def __init__(self, directory: Path, files: Mapping[str, str]) -> None:
        self.directory = directory
        for name, source in {"conftest.py": "", **files}.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text((RECORDER if name == "conftest.py" else "") + textwrap.dedent(source))

    def start(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """pytest in the background."""
        ours = {"PYTEST_ADDOPTS", "PYTHONWARNINGS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "--color=no", "-rs", "-p", "no:randomly", *arguments],
            cwd=self.directory,
            env={name: value for name, value in os.environ.items() if name not in ours}
            | {"RECORDING": str(os.getpid()), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, typed: str = "") -> Run:
        """pytest to its end; ``typed`` is the input of its terminal."""
        (self.directory / "record").unlink(missing_ok=True)
        process = self.start(*arguments, stdin=subprocess.PIPE if typed else subprocess.DEVNULL)
        try:
            output, _ = process.communicate(typed, timeout=2 * DEADLINE)
        finally:
            process.kill()
        return Run(self, process.returncode, output)

    @property
    def record(self) -> list[dict[str, Any]]:
        path = self.directory / "record"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self, name: str = "pids") -> list[int]:
        """What tests wrote to that file, one line each."""
        path = self.directory / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []


class Run:
    """What one pytest run said."""

    def __init__(self, project: Project, status: int, output: str) -> None:
        self.status, self.output = status, output
        self.childless = {"kind": "childless"} in project.record
        self.reports = [entry for entry in project.record if entry["kind"] == "report"]

    def outcomes(self) -> dict[str, str]:
        """Of all tests that were called, by their ids."""
        return {entry["id"]: entry["outcome"] for entry in self.reports if entry["when"] == "call"}

    def only(self, name: str) -> dict[str, Any]:
        """The report that decided about the test (or file) whose id ends with ``name``."""
        found = [entry for entry in self.reports if entry["id"].endswith(name)]
        assert found, f"no {name} in\n{self.output}"
        decisive = [entry for entry in found if entry["outcome"] != "passed"] or found
        return decisive[0]

    def text(self, name: str, outcome: str = "failed") -> str:
        """What is said about that test, which must have ended like that."""
        entry = self.only(name)
        assert entry["outcome"] == outcome, entry["text"] or self.output
        return str(entry["text"])

    def printed(self, name: str) -> str:
        return "\n".join(self.only(name)["output"])
