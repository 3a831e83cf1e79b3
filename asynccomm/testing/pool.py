"""A pool of warm rank processes: importing torch takes seconds, running a test after that takes milliseconds.

The pool starts processes when a test needs more, keeps them for the next test, and replaces dead and killed processes.
Every wait is bounded: by a deadline for the test, and by GRACE_SECONDS once a rank has failed, because the other ranks
can then only be waiting for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, final

from asynccomm.store.server import StoreServer, listen, serve
from asynccomm.testing.output import CapturedOutput, LiveOutput, ProcessOutput
from asynccomm.testing.protocol import (
    DebuggerInput,
    DebuggerOutput,
    DebuggerPrompt,
    DebuggerStart,
    DebuggerStop,
    Died,
    DumpStacks,
    Exited,
    Failed,
    Passed,
    Preparation,
    RankTask,
    Report,
    Setup,
    Skipped,
    StackDump,
    Stale,
    TimedOut,
)

__all__ = ["RankProcess", "RankPool"]

START_SECONDS = 120.0  # for a process to import torch, several at once on a busy machine
EXIT_SECONDS = 5.0  # from the end of a process's channel to its exit
GRACE_SECONDS = 5.0  # for the other ranks to end once a rank has failed
STACKS_SECONDS = 2.0  # for a stuck process to send its stacks
DEBUGGER = (DebuggerStart, DebuggerOutput, DebuggerPrompt, DebuggerStop)
SILENT = "(it does not answer: it holds the interpreter lock or is stopped; its output may have the stacks)"


@final
class RankProcess:
    """The parent's handle of one rank process."""

    def __init__(self, setup: Setup, output: ProcessOutput) -> None:
        ours, theirs = socket.socketpair()
        self.output = output
        env = {"OMP_NUM_THREADS": "1", **setup.environ, "PYTHONUNBUFFERED": "1"}
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "asynccomm.testing.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output.fileno(),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to pytest alone, which then kills the process
                env=env,
            )
        finally:
            theirs.close()
        output.started()
        self.channel: Connection[Any, Any] = Connection(ours.detach())
        # a process that this one has forked keeps the channel open after its death
        self._death = _open_pidfd(self.process.pid)
        self.sources: list[Any] = [each for each in (self.channel, self._death) if each is not None]  #: for ``wait``
        self.channel.send(setup)
        self.ready = False  #: whether it has finished its imports
        self.usable: bool = True  #: whether it can run one more test

    def poll(self, seconds: float) -> bool:
        """Whether ``receive`` returns at once, within ``seconds``."""
        return bool(wait(self.sources, seconds))

    def receive(self) -> Any:
        """The next message, or Died."""
        wait(self.sources)
        with contextlib.suppress(EOFError, OSError):
            if self.channel.poll():  # also the last messages of a dead process
                return self.channel.recv()
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
        """Request the process's stacks. The process is not usable for another test after this."""
        self.usable = False  # a late reply would be mistaken for a report of the next test
        with contextlib.suppress(OSError):
            self.channel.send(DumpStacks())

    def answer(self, deadline: float) -> Report:
        """The reply until ``deadline``: stacks, or a report if the test has ended after all."""
        message: Any = DebuggerPrompt()
        while isinstance(message, DEBUGGER):  # a request for the terminal, which comes too late
            if not self.poll(max(0.0, deadline - time.monotonic())):
                return TimedOut(SILENT)
            message = self.receive()
        if isinstance(message, StackDump):
            return TimedOut(message.text)
        assert isinstance(message, (Passed, Skipped, Exited, Failed, Died))
        return message

    def kill(self) -> None:
        """Kill the process group: the process, and the processes it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()
        if self._death is not None:
            os.close(self._death)
        self.output.close()


class TerminalForRanks(Protocol):
    """The terminal of pytest's process, for the debugger of one rank at a time."""

    def start(self, title: str) -> None:
        """Give the terminal to a rank."""

    def write(self, text: str) -> None:
        """Print ``text``."""

    def read(self) -> str:
        """A line of input; empty at its end."""

    def stop(self, message: DebuggerStop) -> None:
        """Take the terminal back; raises an exception to end the run."""


@final
class RankPool:
    """A pool of rank processes for tests.

    Args:
        setup: sent to each new process.
        terminal: for debuggers in the processes.
        live: show the output of the processes at once, instead of returning it.
    """

    def __init__(self, setup: Setup, terminal: TerminalForRanks, *, live: bool = False) -> None:
        self._setup = setup
        self._terminal = terminal
        self._live = live
        self._ranks: list[RankProcess] = []
        self._store: StoreServer | None = None

    @property
    def store(self) -> StoreServer:
        """The store for the rendezvous of the ranks; started on first use."""
        if self._store is None:
            self._store = serve("127.0.0.1", listen("127.0.0.1", 0))
        return self._store

    @property
    def pids(self) -> list[int]:
        """The process ids of the pool."""
        return [rank.process.pid for rank in self._ranks]

    def run(self, jobs: Sequence[RankTask], timeout: float) -> tuple[list[Report], list[str]]:
        """Run one job per rank; returns the reports and the printed output, in rank order.

        An exception during this call (Ctrl-C, a test timeout) kills the busy processes.
        """
        ranks = self._take(len(jobs))
        for number, rank in enumerate(ranks):
            rank.output.rank = number
        reports: dict[int, Report] = {}
        try:
            for rank, job in zip(ranks, jobs, strict=True):
                with contextlib.suppress(OSError):  # the process is dead: receive() returns Died
                    rank.channel.send(job)
            self._collect(ranks, reports, timeout)
        finally:
            output = [rank.output.take() for rank in ranks]
            for number, rank in enumerate(ranks):
                if not rank.usable or not isinstance(reports.get(number), (Passed, Skipped, Exited, Failed)):
                    self._ranks.remove(rank)
                    rank.kill()
        return [reports[number] for number in range(len(ranks))], output

    def prepare(self, preparation: Preparation, count: int) -> None:
        """Start ``count`` processes, unless they run already, and have them import a test's file.

        Processes that would import other files than a new process are replaced.

        Raises: RuntimeError if a new process ends.
        """
        for last in (False, True):
            asked = self._take(count)
            replies: list[Any] = []
            try:
                for rank in asked:
                    with contextlib.suppress(OSError):  # the process is dead: receive() returns Died
                        rank.channel.send(preparation)
                for rank in asked:
                    message = self._reply(rank)
                    replies.append(message)
                    if last and isinstance(message, Died):
                        text = rank.output.take()
                        raise RuntimeError(f"a rank process {message.how} while importing {preparation.path}\n{text}")
            finally:  # also at Ctrl-C and at a time limit
                for number, rank in enumerate(asked):
                    if replies[number : number + 1] != ["ready"]:
                        self._ranks.remove(rank)
                        rank.kill()
            if replies == ["ready"] * count:
                return

    def _reply(self, rank: RankProcess) -> Any:
        while True:
            if not rank.poll(START_SECONDS):
                return Died(f"did not answer within {START_SECONDS:g} s")
            message = rank.receive()
            if not isinstance(message, DebuggerStart):
                assert message == "ready" or isinstance(message, (Stale, Died)), message
                return message
            self._debug(rank, message)

    def _debug(self, rank: RankProcess, message: Any) -> None:
        """Serve the debugger of one rank until it gives the terminal back, or the process ends."""
        self._terminal.start(message.title)
        stop = DebuggerStop(quit=False)
        try:
            while not isinstance(message, Died):
                message = rank.receive()
                match message:
                    case DebuggerOutput(text):
                        self._terminal.write(text)
                    case DebuggerPrompt():
                        with contextlib.suppress(OSError):
                            rank.channel.send(DebuggerInput(self._terminal.read()))
                    case DebuggerStop():
                        stop = message
                        break
        finally:
            self._terminal.stop(stop)

    def close(self) -> None:
        """Kill all processes and stop the store."""
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
            self._ranks.append(RankProcess(self._setup, LiveOutput() if self._live else CapturedOutput()))
        ranks = self._ranks[:count]
        for rank in ranks:
            if not rank.ready:
                message = rank.receive() if rank.poll(START_SECONDS) else Died("did not start")
                if message != "ready":
                    text = rank.output.take()
                    self._ranks.remove(rank)
                    rank.kill()
                    raise RuntimeError(f"a rank process could not start: it {message.how}\n{text}")
                rank.ready = True
        return ranks

    def _collect(self, ranks: Sequence[RankProcess], reports: dict[int, Report], timeout: float) -> None:
        busy = dict(enumerate(ranks))
        deadline = time.monotonic() + timeout
        while busy:
            left = max(0.0, deadline - time.monotonic())
            sources = {source: number for number, rank in busy.items() for source in rank.sources}
            ready = wait(list(sources), None if left == math.inf else left)
            if not ready:
                reports.update(_ask(busy))
                return
            for number in sorted({sources[source] for source in ready}):
                message = busy[number].receive()
                if isinstance(message, DebuggerStart):
                    began = time.monotonic()
                    self._debug(busy[number], message)
                    deadline += time.monotonic() - began
                    continue
                del busy[number]
                reports[number] = message
                if isinstance(reports[number], (Exited, Failed, Died)):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)


def _ask(ranks: Mapping[int, RankProcess]) -> dict[int, Report]:
    """The stacks of busy processes, or their late reports; requests all of them at once."""
    for rank in ranks.values():
        rank.ask_where()
    deadline = time.monotonic() + STACKS_SECONDS
    answers = {number: rank.answer(deadline) for number, rank in ranks.items()}
    _abort([ranks[number] for number, answer in answers.items() if answer == TimedOut(SILENT)])
    return answers


def _abort(ranks: Sequence[RankProcess]) -> None:
    """Make unresponsive processes print their stacks: faulthandler needs no interpreter lock for that."""
    for rank in ranks:
        rank.process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + STACKS_SECONDS
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the process is stopped, or waits for a device
            rank.process.wait(max(0.0, deadline - time.monotonic()))


def _open_pidfd(pid: int) -> int | None:
    """A descriptor that can be read once the process has ended; None where the system or Python has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "no standard signal"
