"""The processes that do programs, as their driver sees them: started, given cases, watched, and replaced when they end
or do not answer."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socketpair
from typing import Any, Self

from asynccomm.store.server import StoreServer, listen, serve

from .judging import Finding
from .perform import Report
from .program import Program, dumps
from .worlds import IN_PROCESS, TIMEOUT, combined

WINDOW = 8  # cases that processes are given ahead
GRACE = 10.0
START_SECONDS = 120.0  # for a process to import torch
STACKS_SECONDS = 2.0  # for one that does not answer to say where it is
TAIL = 6000  # characters of its output in a finding
LAUNCHED = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "fuzz"}  # the driver has the store
ROOT = Path(__file__).parents[2]


class Process:
    """One of them."""

    def __init__(self, store: StoreServer) -> None:
        ours, theirs = socketpair()
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **LAUNCHED}
        env |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.host", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env=env,
        )
        theirs.close()
        self.channel = Connection(ours.detach())

    def send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended, which is seen when it does not answer
            self.channel.send_bytes(json.dumps(message).encode())

    def tail(self) -> str:
        """The end of its output."""
        size = os.fstat(self.output.fileno()).st_size
        return os.pread(self.output.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace")

    def how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(STACKS_SECONDS)
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return "closed its channel"

    def stacks(self) -> str:
        """Have it print where its threads are, which ends it."""
        self.process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STACKS_SECONDS)
        return self.tail()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()
        self.output.close()


class Fleet:
    """The ranks of one world.

    Args:
        timeout: seconds for one operation; more is a hang.
        grace: seconds in which a process that is not stuck says something after that.
        with_torch: the ranks can call torch's functions, too.
    """

    def __init__(
        self, backend: str, size: int, *, timeout: float = TIMEOUT, grace: float = GRACE, with_torch: bool = False
    ) -> None:
        self._backend, self._size, self._with_torch = backend, size, with_torch
        self.timeout, self.grace = timeout, grace
        self._processes: list[Process] = []
        self._answers: list[collections.deque[dict[str, Any]]] = []  # of each process, in this epoch
        self._store: StoreServer | None = None
        self._epoch = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end_processes()
        if self._store is not None:
            self._store.release()
            self._store = None

    def run(self, programs: Iterable[Program]) -> Iterator[tuple[Program, list[Finding]]]:
        """Do programs one after the other; gives each with its findings.

        Processes are given several ahead, and one of them may be further than another. What may be another program's
        fault is looked at once more with those that were under way, one at a time.
        """
        source = iter(programs)
        pending: collections.deque[Program] = collections.deque()  # those that are given come first
        given = careful = 0
        doubt: list[Finding] = []
        while True:
            pending.extend(itertools.islice(source, max(0, WINDOW - len(pending))))
            if not pending:
                return
            if not self._processes:
                self._open()
            while given < min(len(pending), 1 if careful else WINDOW):
                self._give(pending[given])
                given += 1
            findings, again = self._findings(pending[0])
            before, given = given, 0 if again else given - 1
            if before > 1 and any(_is_doubtful(finding) for finding in findings):
                careful, doubt = before, findings
                continue
            if any(_is_doubtful(finding) for finding in findings):
                doubt = []
            careful -= bool(careful)
            if not careful:
                findings = [*findings, *(finding for finding in doubt if not finding.secondary)]
                doubt = []
            yield pending.popleft(), findings

    def _findings(self, program: Program) -> tuple[list[Finding], bool]:
        """Of the oldest program; and whether the others must be given again."""
        problem = self._collect()
        if problem is not None:
            self._end_processes()
            return [problem], True
        each = [_report(queue.popleft()) for queue in self._answers]
        broken = any(report.broken for report in each)
        if broken:
            self._renew()
        return combined(program, each), broken

    def _give(self, program: Program) -> None:
        for process in self._processes:
            process.send({"epoch": self._epoch, "case": 0, "program": dumps(program)})

    def _collect(self) -> Finding | None:
        """Wait until each process has answered the oldest case; returns what is wrong if one does not."""
        answers = self._answers
        limit = 2 * self.timeout + self.grace
        while any(not queue for queue in answers):
            waiting = {
                p.channel: i for i, (p, queue) in enumerate(zip(self._processes, answers, strict=True)) if not queue
            }
            ready = wait(list(waiting), limit)
            if not ready:
                rank = next(iter(waiting.values()))
                return Finding("hang", -1, rank, f"no answer within {limit:g} s\n{self._processes[rank].stacks()}")
            for channel in ready:
                rank = waiting[channel]  # type: ignore[index]
                try:
                    message = json.loads(self._processes[rank].channel.recv_bytes())
                except (EOFError, OSError):
                    how = self._processes[rank].how_it_ended()
                    return Finding("crash", -1, rank, f"{how}\n{self._processes[rank].tail()}", how)
                if message["epoch"] == self._epoch:
                    answers[rank].append(message)
        return None

    # -- starting and ending ------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._store is None:
            self._store = serve("127.0.0.1", listen("127.0.0.1", 0))
        count = 1 if self._backend in IN_PROCESS else self._size
        self._processes = [Process(self._store) for _ in range(count)]
        self._renew(START_SECONDS)

    def _renew(self, limit: float | None = None) -> None:
        """Have the processes make a new world; if they cannot, with new processes."""
        self._epoch += 1
        self._answers = [collections.deque() for _ in self._processes]
        for rank, process in enumerate(self._processes):
            world = {"backend": self._backend, "size": self._size, "rank": rank, "name": f"fuzz{self._epoch}"}
            settings = {"timeout": self.timeout, "with_torch": self._with_torch}
            process.send({"epoch": self._epoch, "open": {**world, **settings}})
        deadline = time.monotonic() + (limit or 3 * self.timeout + self.grace)
        for process in self._processes:
            if not self._opened(process, deadline):
                text = process.tail()
                self._end_processes()
                if limit is not None:
                    raise RuntimeError(f"the ranks of a world on {self._backend} do not start:\n{text}")
                return  # the next case starts others

    def _opened(self, process: Process, deadline: float) -> bool:
        while process.channel.poll(max(0.0, deadline - time.monotonic())):
            try:
                message = json.loads(process.channel.recv_bytes())
            except (EOFError, OSError):
                return False
            if message["epoch"] == self._epoch:
                return bool(message.get("opened"))
        return False

    def _end_processes(self) -> None:
        while self._processes:
            self._processes.pop().kill()


def _is_doubtful(finding: Finding) -> bool:
    """Whether it may come of what another rank did in a later program."""
    return finding.secondary or (finding.kind in ("crash", "hang") and finding.step < 0)


def _report(answer: dict[str, Any]) -> Report:
    findings = [Finding(**finding) for finding in answer["findings"]]
    return Report(findings, answer["digests"], answer["broken"], answer["refused"])
