"""Runs cases on children of the nursery, and sees to it that none of them waits for ever."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final, final

from asynccomm.core.hosts import PRETENDED
from asynccomm.store.server import StoreServer, listen, serve

from .inventory import sockets_named
from .plans import HOSTS, LOCAL, Case
from .reports import Born, Ended, Order, Outcome, Report, Struck

__all__ = ["Child", "Nursery"]

ROOT: Final = Path(__file__).parent.parent.parent
OUTER_SECONDS: Final = 60.0  # for a whole case, which takes some seconds, or twenty among other busy processes
START_SECONDS: Final = 100.0  # for a process to import torch on a busy machine
END_SECONDS: Final = 5.0  # for a process that has reported to end
STACKS_SECONDS: Final = 1.0  # for processes to print where they are
MESSAGE_BYTES: Final = 1 << 16


@final
class Child:
    """One process of a case."""

    def __init__(self, number: int, rank: int, channel: Connection) -> None:
        self.number, self.rank, self.channel = number, rank, channel
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.pid = 0
        self.status: int | None = None
        self.born, self.ended = threading.Event(), threading.Event()

    def send(self, number: signal.Signals) -> None:
        """Unless it has ended; the nursery tells so before another process can have the pid."""
        if not self.ended.is_set() and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def death(self) -> str:
        """How it ended; empty if in good order."""
        if self.status is None:
            return "did not end"
        if os.WIFSIGNALED(self.status):
            return signal.Signals(os.WTERMSIG(self.status)).name
        code = os.WEXITSTATUS(self.status)
        return f"exit code {code}" if code else ""

    def printed(self) -> str:
        """All that it has printed."""
        text = os.pread(self.output.fileno(), 1 << 20, 0).decode(errors="replace")
        return f"--- rank {self.rank}, pid {self.pid}\n{text}" if text else ""

    def close(self) -> None:
        self.channel.close()
        self.output.close()


@final
class Nursery:
    """The process that forks, and the store that ranks meet at."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock = ours
        self._children: dict[int, Child] = {}
        self._orders = 0
        self._lock = threading.Lock()
        self._store: StoreServer = serve("127.0.0.1", listen("127.0.0.1", 0))
        one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forkserver", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **one},
            start_new_session=True,
        )
        theirs.close()
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, name="nursery", daemon=True)
        self._reader.start()
        if not self._ready.wait(START_SECONDS):
            self.close()
            raise RuntimeError("the process that forks did not start")

    def close(self) -> None:
        """End everything."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
        self._sock.close()
        self._store.release()

    def _read(self) -> None:
        while data := self._sock.recv(MESSAGE_BYTES):
            match pickle.loads(data):
                case "ready":
                    self._ready.set()
                case Born(number, pid):
                    self._children[number].pid = pid
                    self._children[number].born.set()
                case Ended(number, status):
                    child = self._children.pop(number)
                    child.status = status
                    child.ended.set()

    def _fork(self, case: Case, rank: int, environment: dict[str, str]) -> Child:
        ours, theirs = socket.socketpair()
        with self._lock:
            self._orders += 1
            child = self._children[self._orders] = Child(self._orders, rank, Connection(ours.detach()))
            data = pickle.dumps(Order(child.number, case, rank, environment))
            socket.send_fds(self._sock, [data], [theirs.fileno(), child.output.fileno()])
        theirs.close()
        return child

    def run(self, case: Case) -> Outcome:
        """Run a case to its end, or end it. From any thread."""
        run = f"faults-{os.getpid()}-{case.number}"
        ranks = [-1] if case.backend in LOCAL else range(case.size)
        children = [self._fork(case, rank, self._environment(case, rank, run)) for rank in ranks]
        watch = _Watch(case, children)
        try:
            watch.until_over(time.monotonic() + OUTER_SECONDS)
            left = sockets_named(f"/{run}/")
            return watch.outcome(tuple(left))
        finally:
            for child in children:
                child.born.wait(OUTER_SECONDS)
                child.send(signal.SIGKILL)
                child.ended.wait(OUTER_SECONDS)
                child.close()

    def _environment(self, case: Case, rank: int, run: str) -> dict[str, str]:
        placed = {PRETENDED: f"host-{HOSTS[rank]}"} if case.backend == "hierarchical" else {}
        return placed | {
            "RANK": str(max(rank, 0)),
            "LOCAL_RANK": str(max(rank, 0)),
            "WORLD_SIZE": str(case.size),
            "LOCAL_WORLD_SIZE": str(case.size),
            "MASTER_ADDR": self._store.host,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": run,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


@final
class _Watch:
    """Over the processes of one case."""

    def __init__(self, case: Case, children: Sequence[Child]) -> None:
        self._case = case
        self._children = children
        self._struck: float | None = None
        self._reports: dict[int, Report] = {}
        self._stacks = ""

    def until_over(self, deadline: float) -> None:
        """Wait until all have reported or died."""
        listening = {child.channel: child for child in self._children}
        stopped = self._case.fault == "stop"
        while listening:
            if stopped and {child.rank for child in listening.values()} == {self._case.victim}:
                victim = next(iter(listening.values()))
                if self._struck is not None:  # the others are through with it
                    victim.send(signal.SIGCONT)
                    stopped = False
            ready = wait(list(listening), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._ask_for_stacks(list(listening.values()))
                return
            for channel in ready:
                assert isinstance(channel, Connection)
                try:
                    self._hear(channel.recv())
                except (EOFError, OSError):
                    del listening[channel]
        for child in self._children:
            child.ended.wait(END_SECONDS)

    def _hear(self, message: object) -> None:
        match message:
            case Struck(at):
                self._struck = at if self._struck is None else self._struck
            case Report(rank):
                self._reports[rank] = message

    def _ask_for_stacks(self, children: Sequence[Child]) -> None:
        for child in children:
            child.send(signal.SIGCONT)
            child.send(signal.SIGUSR1)
            child.send(signal.SIGUSR2)
        time.sleep(STACKS_SECONDS)
        self._stacks = "".join(child.printed() for child in children) or "(nothing printed)"

    def outcome(self, left: tuple[str, ...]) -> Outcome:
        deaths = {child.rank: child.death for child in self._children if child.death}
        output = "".join(child.printed() for child in self._children)
        return Outcome(self._struck, self._reports, deaths, self._stacks, left, output)
