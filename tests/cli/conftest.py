"""The launcher as its users meet it: a process of its own, started on small scripts that need no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

DEADLINE = 60.0  # seconds until a condition counts as never met

VARIABLES = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def wait_until(condition: Callable[[], bool], what: str) -> None:
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


def process_tree(pid: int, indent: str = "") -> str:
    """The processes below ``pid``, each with its state and its signal masks."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        waits = Path(f"/proc/{pid}/wchan").read_text()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError as exc:
        return f"{indent}{pid}: {exc}"
    facts = " ".join(line.replace("\t", "") for line in status if line.startswith(("State", "Sig", "Threads")))
    below = [process_tree(child, indent + "  ") for child in children]
    return "\n".join([f"{indent}{pid} {command} {facts} {waits}", *below])


class Running:
    """A launcher in the background, its output collected as it comes."""

    def __init__(
        self, command: list[str], directory: Path, environment: dict[str, str], stdin: int = subprocess.PIPE
    ) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.out, self.err = bytearray(), bytearray()
        self._threads = [
            threading.Thread(target=self._collect, args=(self.process.stdout, self.out)),
            threading.Thread(target=self._collect, args=(self.process.stderr, self.err)),
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _collect(pipe, into: bytearray) -> None:
        while data := os.read(pipe.fileno(), 1 << 16):
            into += data

    def sees(self, text: str | bytes, times: int = 1) -> None:
        """Wait until ``text`` was printed on stdout."""
        wanted = text.encode() if isinstance(text, str) else text
        wait_until(lambda: self.out.count(wanted) >= times, f"{wanted!r} in {bytes(self.out)!r} {bytes(self.err)!r}")

    def sees_error(self, text: str) -> None:
        """Wait until ``text`` was printed on stderr."""
        wait_until(lambda: text.encode() in self.err, f"{text!r} in {bytes(self.out)!r} {bytes(self.err)!r}")

    def words_after(self, word: str) -> list[int]:
        """The numbers printed behind ``word`` so far."""
        words = bytes(self.out).decode().split()
        return [int(value) for name, value in pairwise(words) if name == word]

    def finish(self) -> int:
        try:
            code = self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            tree = process_tree(self.process.pid)
            pytest.fail(f"the launcher did not end; its processes:\n{tree}\n{self.out.decode()}\n{self.err.decode()}")
        self._join()
        return code

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.finish()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class Launcher:
    """Starts the launcher in ``directory``; scripts are given as source."""

    def __init__(self, directory: Path, resources: contextlib.ExitStack) -> None:
        self.directory = directory
        self._resources = resources

    def script(self, source: str, name: str = "script.py") -> str:
        (self.directory / name).write_text(textwrap.dedent(source))
        return name

    def start(
        self, *arguments: str, environment: Mapping[str, str] | None = None, stdin: int = subprocess.PIPE
    ) -> Running:
        clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        command = [sys.executable, "-m", "asynccomm.cli.main", *arguments]
        started = Running(command, self.directory, clean | dict(environment or {}), stdin)
        self._resources.callback(started.close)
        return started

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a run that ends by itself."""
        started = self.start(*arguments, environment=environment)
        code = started.finish()
        return code, started.out.decode(errors="replace"), started.err.decode(errors="replace")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with contextlib.ExitStack() as resources:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup; a started process would inherit it
                resources.callback(signal.signal, number, signal.SIG_IGN)
                signal.signal(number, signal.SIG_DFL)
        yield Launcher(tmp_path, resources)


@pytest.fixture
def until() -> Callable[[Callable[[], bool], str], None]:
    return wait_until


@pytest.fixture
def is_running() -> Callable[[int], bool]:
    return running


@pytest.fixture
def leftovers() -> Iterator[list[int]]:
    """Pids to kill after the test, should it fail to."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
