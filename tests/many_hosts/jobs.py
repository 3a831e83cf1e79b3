"""Ranks on hosts, and the events that they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.hosts import ROOT, Host

PROGRAM = "tests/many_hosts/program.py"
PORT = 29500
SECONDS = 60.0  # for a condition; failures of hosts are found within some ten


class Rank:
    """A process on a host."""

    def __init__(self, host: Host, output: Path, process: subprocess.Popen[bytes]) -> None:
        self.host = host
        self._output = output
        self.process = process

    @property
    def text(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines() if line.startswith('{"event"')]

    def find(self, event: str) -> dict[str, Any] | None:
        return next((each for each in self.events if each["event"] == event), None)

    def sees(self, event: str, seconds: float = SECONDS) -> dict[str, Any]:
        """The first ``event`` of this rank, once it has come."""
        until(lambda: self.find(event) is not None or self.process.poll() is not None, seconds, event, self)
        found = self.find(event)
        assert found is not None, f"no {event!r}: {self.text}"
        return found

    def ends(self, seconds: float = SECONDS) -> int:
        until(lambda: self.process.poll() is not None, seconds, "end", self)
        return self.process.returncode

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


def until(condition: Callable[[], object], seconds: float, event: str, *ranks: Rank) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{event} did not come in {seconds} s: {[rank.text for rank in ranks]}"
        time.sleep(0.01)


class Job:
    """Ranks that a test starts, all killed at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: list[Rank] = []

    def start(
        self, host: Host, *arguments: str, environment: Mapping[str, str] | None = None, directory: Path = ROOT
    ) -> Rank:
        """A process with these arguments of Python."""
        path = self._folder / f"output{len(self._ranks)}"
        with path.open("wb") as output:
            process = host.start(*arguments, environment=environment, output=output, directory=directory)
        self._ranks.append(Rank(host, path, process))
        return self._ranks[-1]

    def world(
        self,
        placing: Sequence[Host],
        *steps: str,
        environment: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        master: str = "",
    ) -> list[Rank]:
        """A rank on each host of ``placing``, with these steps; rank 0 hosts the store."""
        common = {
            "WORLD_SIZE": str(len(placing)),
            "MASTER_ADDR": master or placing[0].address,
            "MASTER_PORT": str(PORT),
            "OPTIONS": json.dumps({"timeout": 30} | dict(options or {})),
            **(environment or {}),
        }
        return [
            self.start(host, PROGRAM, *steps, environment={**common, "RANK": str(rank)})
            for rank, host in enumerate(placing)
        ]

    def close(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()


def jobs(folder: Path) -> Iterator[Job]:
    """The job of one test."""
    job = Job(folder)
    try:
        yield job
    finally:
        job.close()
