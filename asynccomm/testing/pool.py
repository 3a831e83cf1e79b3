"""Warm rank processes: importing torch costs seconds, running a test on processes that have it costs milliseconds.

The pool starts processes when a test needs more than there are, keeps them for the next, and replaces what died or had
to be killed. Every wait has an end: a deadline for the test, and a short grace once a rank has failed, because the
others can then only be waiting for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, final

from asynccomm.store.server import StoreServer, listen, serve
from asynccomm.testing.protocol import (
    Died,
    DumpStacks,
    Failed,
    Passed,
    RankTask,
    Report,
    Setup,
    Skipped,
    StackDump,
    TimedOut,
)

__all__ = ["RankProcess", "RankPool"]

START_SECONDS = 120.0  # for a process to import torch; on a busy machine several do so at once
EXIT_SECONDS = 5.0  # from closing its channel to having ended
GRACE_SECONDS = 5.0  # for the other ranks to end once one has failed
STACKS_SECONDS = 2.0  # for a stuck process to say where it is
SILENT = "(it does not answer: it holds the interpreter lock or is stopped; its output may have the stacks)"


@final
class RankProcess:
    """One process, seen from the parent."""

    def __init__(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asynccomm.testing.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for pytest, which then ends us
                env=env,
            )
        finally:
            theirs.close()
        self.channel = Connection(ours.detach())
        self.channel.send(setup)
        self._seen = 0
        self.ready = False  #: it has imported everything
        self.usable = True  #: for one more test

    def receive(self) -> Any:
        """The next message, or Died."""
        try:
            return self.channel.recv()
        except (EOFError, OSError):
            return Died(self._how_it_died())

    def _how_it_died(self) -> str:
        try:
            code = self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        if code < 0:
            return f"was killed by signal {-code} ({_signal_name(-code)})"
        return f"exited with code {code}"

    def ask_where(self) -> None:
        """Have the process say where it is; it cannot be used for another test then."""
        self.usable = False  # an answer that comes late would be taken for the next test's
        with contextlib.suppress(OSError):
            self.channel.send(DumpStacks())

    def answer(self, deadline: float) -> Report:
        """What it says until ``deadline``; perhaps it has just ended the test after all."""
        if not self.channel.poll(max(0.0, deadline - time.monotonic())):
            return TimedOut(SILENT)
        message = self.receive()
        if isinstance(message, StackDump):
            return TimedOut(message.text)
        assert isinstance(message, (Passed, Skipped, Failed, Died))
        return message

    def new_output(self) -> str:
        """What was printed since the last call."""
        data = b""
        # not read(): the process shares our position in the file, and must not start to write somewhere else
        while chunk := os.pread(self._output.fileno(), 1 << 20, self._seen):
            data += chunk
            self._seen += len(chunk)
        return data.decode(errors="replace")

    def kill(self) -> None:
        """End the process and everything it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()
        self._output.close()


@final
class RankPool:
    """Processes for tests.

    Args:
        setup: given to each new process.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._ranks: list[RankProcess] = []
        self._store: StoreServer | None = None

    @property
    def store(self) -> StoreServer:
        """Where the ranks meet; started when first asked for."""
        if self._store is None:
            self._store = serve("127.0.0.1", listen("127.0.0.1", 0))
        return self._store

    @property
    def pids(self) -> list[int]:
        """The processes there are."""
        return [rank.process.pid for rank in self._ranks]

    def run(self, jobs: Sequence[RankTask], timeout: float) -> tuple[list[Report], list[str]]:
        """Run one job per rank; returns the reports and what was printed, in rank order.

        An exception in here (Ctrl-C, a test time-out) ends the processes that are busy.
        """
        ranks = self._take(len(jobs))
        reports: dict[int, Report] = {}
        try:
            for rank, job in zip(ranks, jobs, strict=True):
                with contextlib.suppress(OSError):  # it died a moment ago: receive() will say how
                    rank.channel.send(job)
            self._collect(ranks, reports, timeout)
        finally:
            output = [rank.new_output() for rank in ranks]
            for number, rank in enumerate(ranks):
                if not rank.usable or not isinstance(reports.get(number), (Passed, Skipped, Failed)):
                    self._ranks.remove(rank)
                    rank.kill()
        return [reports[number] for number in range(len(ranks))], output

    def close(self) -> None:
        """End all processes and the store."""
        while self._ranks:
            self._ranks.pop().kill()
        if self._store is not None:
            self._store.release()
            self._store = None

    def _take(self, count: int) -> list[RankProcess]:
        for rank in [rank for rank in self._ranks if rank.process.poll() is not None]:
            self._ranks.remove(rank)
            rank.kill()
        while len(self._ranks) < count:
            self._ranks.append(RankProcess(self._setup))
        ranks = self._ranks[:count]
        for rank in ranks:
            if not rank.ready:
                message = rank.receive() if rank.channel.poll(START_SECONDS) else Died("did not start")
                if message != "ready":
                    text = rank.new_output()
                    self._ranks.remove(rank)
                    rank.kill()
                    raise RuntimeError(f"a rank process could not start: it {message.how}\n{text}")
                rank.ready = True
        return ranks

    def _collect(self, ranks: Sequence[RankProcess], reports: dict[int, Report], timeout: float) -> None:
        busy = {rank.channel: number for number, rank in enumerate(ranks)}
        deadline = time.monotonic() + timeout
        while busy:
            ready = wait(list(busy), max(0.0, deadline - time.monotonic()))
            if not ready:
                reports.update(_ask({number: ranks[number] for number in busy.values()}))
                return
            for channel in ready:
                assert isinstance(channel, Connection)
                number = busy.pop(channel)
                reports[number] = ranks[number].receive()
                if isinstance(reports[number], (Failed, Died)):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)


def _ask(ranks: Mapping[int, RankProcess]) -> dict[int, Report]:
    """Where busy processes are, as far as they can still tell; all are asked at once."""
    for rank in ranks.values():
        rank.ask_where()
    deadline = time.monotonic() + STACKS_SECONDS
    answers = {number: rank.answer(deadline) for number, rank in ranks.items()}
    _abort([ranks[number] for number, answer in answers.items() if answer == TimedOut(SILENT)])
    return answers


def _abort(ranks: Sequence[RankProcess]) -> None:
    """Have processes that do not answer print their stacks: faulthandler needs no interpreter lock for that."""
    for rank in ranks:
        rank.process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + STACKS_SECONDS
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is stopped, or waits for a device
            rank.process.wait(max(0.0, deadline - time.monotonic()))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "no standard signal"
