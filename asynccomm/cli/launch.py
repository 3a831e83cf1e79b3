"""Start the ranks of a run, pass on their output, and end them together.

The run ends when all ranks have ended. It ends early on

    a rank that fails      the others have a second to end by themselves (they usually get an error that names the
                           culprit), then SIGTERM and ``grace`` seconds, then SIGKILL
    a signal               passed on to the ranks, which have ``grace`` seconds, then SIGKILL; on a second signal
                           SIGKILL at once
    a lost store           as a rank that fails
    another node           that fails, is lost, or gets a signal: see ``nodes``

Before SIGKILL a rank gets one signal at most: a second SIGTERM would end ``asynccomm.run`` at once.

An elastic run goes on after a rank has failed, as long as ``min_ranks`` are left. A newcomer takes the place of the
lost rank, as often as ``restarts`` allows; its environment says so.

The run leaves no process of its ranks' process groups behind: the launcher kills these groups. The launcher has one
thread, beside those that resolve names, does not import torch, and waits only in its event loop, so every signal is
handled promptly.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from asynccomm.cli.environment import Placement, rank_environment
from asynccomm.cli.exit_status import culprit, excerpt, exit_code
from asynccomm.cli.nodes import JOIN_SECONDS, NodeEnd, NodeOptions, Nodes, Plan
from asynccomm.cli.processes import Child, spawn
from asynccomm.cli.rank_output import LogFile, RankOutput, Terminal
from asynccomm.core.exit_records import ExitRecords, describe_exit

GRACE_SECONDS = 10.0  # after SIGTERM and other signals: a checkpoint takes seconds, Kubernetes waits for 30
FAILURE_SECONDS = 1.0  # after a failure, before SIGTERM
DRAIN_SECONDS = 0.5  # after a signal, for a slow terminal to take the last lines

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options of a run, checked."""

    size: int  #: number of ranks
    command: tuple[str, ...]  #: of each rank
    run_id: str
    threads: str  #: OMP_NUM_THREADS of each rank
    cpus: tuple[frozenset[int], ...] = ()  #: by rank; empty: ranks are not pinned
    prefix: bool = True
    log_dir: Path | None = None  #: exists
    tee: bool = False  #: also print the logged output
    grace: float = GRACE_SECONDS
    elastic: bool = False
    min_ranks: int = 1  #: that an elastic run needs
    restarts: int = 0  #: in all, of an elastic run
    nodes: NodeOptions | None = None  #: None: all ranks are on this node


async def launch(options: LaunchOptions, listening: socket.socket | None) -> int:
    """Run all ranks of this node, with the store on ``listening``; return the exit code for the shell.

    Args:
        listening: None: another node hosts the store.

    Call on the main thread, and with no other thread running: see ``processes``.

    Raises: OSError when a process or log file cannot be made, RendezvousError when nodes do not meet. Neither leaves
    a process running.
    """
    return await Launch(options, Terminal()).run(listening)


@final
@dataclass(slots=True)
class LaunchedRank:
    """One rank: its process, its output, and its exit code if it failed by itself."""

    number: int
    child: Child
    output: RankOutput
    restart: int = 0  #: number of the restart that it came with
    failure: int = 0


@final
class Launch:
    """One run. ``run`` may be called once."""

    def __init__(self, options: LaunchOptions, terminal: Terminal) -> None:
        self._options = options
        self._terminal = terminal
        self._ranks: list[LaunchedRank] = []
        self._store: LaunchedRank | None = None
        self._first: LaunchedRank | None = None  # the rank that ended the run, or was the first to fail
        self._shortage = ""  # of ranks, which has ended an elastic run
        self._failed: list[LaunchedRank] = []  # by themselves, in the order of their ends
        self._restarts = 0
        self._exits = ExitRecords()
        self._host, self._port = "127.0.0.1", 0  # of the store
        self._nodes: Nodes | None = None
        self._elsewhere: NodeEnd | None = None  # why another node has ended the run
        self._plan = Plan(options.run_id, [options.size])
        self._node = 0 if options.nodes is None else options.nodes.number
        self._signal: signal.Signals | None = None
        self._over = False  # all ranks have ended
        self._ending = asyncio.Event()
        self._sent = asyncio.Event()  # set: the ranks have a signal; exit codes from here on are the launcher's doing
        self._hurry = asyncio.Event()  # set: no more grace

    async def run(self, listening: socket.socket | None) -> int:
        with self._handling_signals():
            try:
                with listening or contextlib.nullcontext():
                    await self._start(listening)
                if not self._ending.is_set() or self._ranks:
                    await self._run_ranks()
            finally:
                self._kill()
                if self._nodes is not None:
                    self._nodes.close()
            code = self._report()
            self._over = True  # a signal from here on ends the wait for the terminal
            timeout = None if self._signal is None else DRAIN_SECONDS
            await _either(asyncio.create_task(self._terminal.drain()), self._hurry, timeout)
            return code or int(self._terminal.failed)

    # -- starting

    async def _start(self, listening: socket.socket | None) -> None:
        """Start the store and, once all nodes are there, the ranks."""
        nodes = self._options.nodes
        if nodes is None:
            assert listening is not None
            self._port = listening.getsockname()[1]
            self._spawn_ranks()  # first: the store takes longer
            self._store = self._spawn_store(listening.fileno())
            return
        self._host, self._port = nodes.host, nodes.port
        self._nodes = Nodes(nodes, self._options.size, self._options.run_id, self._on_end)
        if listening is not None:
            self._store = self._spawn_store(listening.fileno())
        meeting = asyncio.create_task(self._meet(self._nodes, nodes))
        await _either(meeting, self._ending)
        if self._ending.is_set():
            meeting.cancel()
            await asyncio.gather(meeting, return_exceptions=True)
        else:
            self._plan = meeting.result()
            self._spawn_ranks()

    async def _meet(self, nodes: Nodes, options: NodeOptions) -> Plan:
        """Wait for the other nodes. On node 0, an unknown name of its own store is reported at once."""
        if options.number == 0:
            try:
                await asyncio.get_running_loop().getaddrinfo(options.host, options.port)
            except socket.gaierror as exc:  # no end yet: Kubernetes gives a pod its name some seconds after its start
                name = f"{options.host}:{options.port}"
                self._terminal.say(f"argument --store: {name}: {exc.strerror}; node 0 tries for {JOIN_SECONDS:g} s")
        return await nodes.meet()

    def _spawn_ranks(self) -> None:
        first = self._plan.first(self._node)
        for number in range(first, first + self._options.size):
            rank = self._spawn_rank(number)
            self._ranks.append(rank)
            if self._store is not None:
                self._store.child.tell(b"+%d\n" % rank.child.pid)

    def _spawn_rank(self, number: int, restart: int = 0) -> LaunchedRank:
        options, terminal, plan = self._options, self._terminal, self._plan
        local = number - plan.first(self._node)
        log = None if options.log_dir is None else LogFile(options.log_dir / log_name(number, restart), terminal)
        prefix = f"[{number}] ".encode() if options.prefix else b""
        place = Placement(
            number, sum(plan.sizes), local, options.size, self._port, self._host, self._node, len(plan.sizes)
        )
        child = spawn(
            options.command,
            rank_environment(os.environ, place, plan.run_id, options.threads, self._exits.path, restart),
            stdin=None if number == 0 else subprocess.DEVNULL,  # one reader, as with mpirun: ranks split no line
            cpus=options.cpus[local] if options.cpus else frozenset(),
        )
        prompts = number == 0 and os.isatty(0)
        output = RankOutput(terminal, number, prefix, log, options.tee or log is None, prompts)
        output.attach(child.stdout, child.stderr)
        return LaunchedRank(number, child, output, restart)

    def _spawn_store(self, listening: int) -> LaunchedRank:
        groups = [str(rank.child.pid) for rank in self._ranks]
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), package)))
        child = spawn(
            # -P: a user's module in the current directory must not shadow a module that the store needs
            [sys.executable, "-P", "-m", "asynccomm.cli.store_process", str(listening), *groups],
            os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            keep=(listening,),
            die_with_parent=False,
        )
        output = RankOutput(self._terminal, -1, b"[store] ")
        output.attach(child.stdout, child.stderr)
        return LaunchedRank(-1, child, output)

    # -- running

    async def _run_ranks(self) -> None:
        ranks = asyncio.gather(*map(self._watch, self._ranks))
        store = asyncio.create_task(self._watch_store())
        finished = asyncio.create_task(self._finish(ranks))
        await _either(finished, self._ending)
        if self._ending.is_set():
            await self._end(ranks)
        await ranks
        finished.cancel()
        store.cancel()

    async def _finish(self, ranks: asyncio.Future[list[None]]) -> None:
        """Wait for the ranks here, and for those of the other nodes."""
        await asyncio.shield(ranks)
        if self._nodes is not None and not self._ending.is_set():
            await self._nodes.finish()

    def _on_end(self, end: NodeEnd) -> None:
        """End the run for a reason on another node."""
        if self._ending.is_set():
            return
        self._elsewhere = end
        self._terminal.say(f"node {end.node}: {end.reason}; the run ends")
        if end.signal:
            self._pass_on(signal.Signals(end.signal))
        self._ending.set()

    async def _watch(self, rank: LaunchedRank) -> None:
        """Wait for the end of a rank, and of the newcomers that take its place one after the other."""
        current: LaunchedRank | None = rank
        while current is not None:
            current = await self._wait_for(current)

    async def _wait_for(self, rank: LaunchedRank) -> LaunchedRank | None:
        """Wait for the end of a rank; returns the newcomer that takes its place, if one does."""
        code = await rank.child.exited
        self._exits.add(rank.child.pid, code)
        failed = code != 0 and not self._sent.is_set()
        replaced = False
        if failed:
            rank.failure = code
            self._failed.append(rank)
            if self._options.elastic and not self._ending.is_set():
                replaced = self._go_on_without(rank)
            elif self._elsewhere is None:
                self._first = self._first or rank
                self._ending.set()
                self._tell_nodes(f"rank {rank.number} {describe_exit(code)}", exit_code(code))
        await rank.child.clear_group()
        rank.output.close()
        if self._store is not None:
            self._store.child.tell(b"%d\n" % rank.child.pid)
        if replaced and not self._ending.is_set():
            try:
                return self._replace(rank)
            except (OSError, subprocess.SubprocessError) as exc:
                self._terminal.say(f"no newcomer takes the place of rank {rank.number}: {exc}")
        return None

    def _go_on_without(self, lost: LaunchedRank) -> bool:
        """End an elastic run if too few ranks are left; otherwise, returns whether a newcomer is due."""
        left, options = sum(not rank.failure for rank in self._ranks), self._options
        if left < options.min_ranks:
            few = f"{left} of {options.size} ranks {'is' if left == 1 else 'are'} left"
            self._shortage = f"{few}, fewer than the {options.min_ranks} of --min-ranks" if left else "no rank is left"
            self._first = lost
            self._ending.set()
            return False
        joinable = self._alive()  # else there is no comm for a newcomer
        replaced = joinable and self._restarts < options.restarts
        self._restarts += replaced
        newcomer = f"; a newcomer takes its place (restart {self._restarts} of {options.restarts})" if replaced else ""
        self._terminal.say(
            f"rank {lost.number} {describe_exit(lost.failure)}; {left} of {options.size} are left{newcomer}"
        )
        return replaced

    def _replace(self, lost: LaunchedRank) -> LaunchedRank:
        newcomer = self._ranks[lost.number] = self._spawn_rank(lost.number, self._restarts)  # all are on this node
        assert self._store is not None
        self._store.child.tell(b"+%d\n" % newcomer.child.pid)
        return newcomer

    def _tell_nodes(self, reason: str, code: int, number: int = 0) -> None:
        if self._nodes is not None:
            self._nodes.end(reason, code, number)

    async def _watch_store(self) -> None:
        if self._store is None:  # on another node, with which this node loses its launcher
            return
        code = await self._store.child.exited
        self._store.output.close()
        if not self._ending.is_set():
            self._store.failure = code or 1
            lost = f"the process that hosts the store {describe_exit(code)}"
            self._terminal.say(lost)
            self._tell_nodes(lost, 1)
            self._ending.set()

    def _poll_children(self) -> None:
        for process in self._processes():
            process.child.poll()

    def _processes(self) -> list[LaunchedRank]:
        return [*self._ranks, self._store] if self._store is not None else self._ranks

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # ignored signals stay ignored: nohup, or a shell that runs the launcher in the background
        numbers = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGCHLD, self._poll_children)
        try:
            yield
        finally:
            for number in (*numbers, signal.SIGCHLD):
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signal is not None or self._over:
            self._hurry.set()
        self._signal = self._signal or number
        self._pass_on(number)
        self._tell_nodes(f"the launcher got {number.name}", 128 + number, number)
        self._ending.set()

    # -- ending

    async def _end(self, ranks: asyncio.Future[list[None]]) -> None:
        grace = self._options.grace
        if not self._sent.is_set():
            by_themselves = min(FAILURE_SECONDS, grace)
            if self._first is not None and self._alive():
                end = describe_exit(self._first.failure)
                self._terminal.say(f"rank {self._first.number} {end}; the others have {by_themselves:g} s to end")
            await _either(ranks, self._sent, by_themselves)
            if not ranks.done() and not self._sent.is_set():
                self._terminal.say(f"SIGTERM; the others have {grace:g} s more")
                self._send(signal.SIGTERM)
        await _either(ranks, self._hurry, grace)
        for rank in self._ranks:
            rank.child.send(signal.SIGKILL, group=False)  # clear_group kills its group after GROUP_SECONDS

    def _pass_on(self, number: signal.Signals) -> None:
        """Pass on a signal that this launcher or another one got, unless the ranks have one."""
        self._terminal.tracebacks.interrupted = True
        if not self._sent.is_set():
            if self._alive():
                self._terminal.say(f"{number.name}; the ranks have {self._options.grace:g} s to end")
            self._send(number)
        elif self._alive() and not self._hurry.is_set():
            self._terminal.say(
                f"{number.name}; the ranks have a signal already; a second one to the launcher kills them"
            )

    def _send(self, number: signal.Signals) -> None:
        """Signal the ranks as the terminal or kill would: SIGTERM goes to the rank alone, not to its helpers."""
        self._sent.set()
        for rank in self._ranks:
            rank.child.send(number, group=number is not signal.SIGTERM)

    def _alive(self) -> bool:
        return any(rank.child.alive for rank in self._ranks)

    def _kill(self) -> None:
        """Leave no process running. Ranks have ended before, unless starting them failed."""
        for process in self._processes():
            process.child.kill()
            process.output.close()
        self._exits.close()

    def _report(self) -> int:
        """Print the failure, if any; return the exit code."""
        blamed: LaunchedRank | None = None
        if self._first is not None:
            failed = [rank for rank in self._failed if rank in self._ranks]  # not those that were replaced
            tails = [(rank.number, rank.output.tail.lines()) for rank in failed]
            blamed = failed[culprit(tails, failed.index(self._first))]
            self._report_failure(blamed)
        if self._signal is not None:
            return 128 + self._signal
        if blamed is not None:
            return exit_code(blamed.failure)
        if self._elsewhere is not None:
            return self._elsewhere.code
        return 1 if self._store is not None and self._store.failure else 0

    def _report_failure(self, rank: LaunchedRank) -> None:
        number = sum(bool(other.failure) for other in self._ranks if other.number != rank.number)
        if self._options.elastic:  # the others may have failed before, while the run went on
            order, failed = f", and {self._shortage}" if self._shortage else "", "failed, too"
        else:
            order, failed = " first", "failed after it"
        others = f" ({number} other{'s' * (number > 1)} {failed})" if number else ""
        log = self._options.log_dir
        where = "" if log is None else f"; all of its output is in {log / log_name(rank.number, rank.restart)}"
        lines = excerpt(rank.output.tail.lines())
        end = "; the end of its stderr:" if lines else "; it wrote nothing to stderr"
        self._terminal.say(f"rank {rank.number} failed{order}: it {describe_exit(rank.failure)}{others}{where}{end}")
        self._terminal.err.write(b"".join(b"[%d] %s\n" % (rank.number, line) for line in lines))


def log_name(number: int, restart: int) -> str:
    """The log file of a rank, or of the newcomer of a restart."""
    return f"rank{number}.{restart}.log" if restart else f"rank{number}.log"


async def _either(future: asyncio.Future[Any], event: asyncio.Event, timeout: float | None = None) -> None:
    """Wait until ``future`` is done or ``event`` is set, for ``timeout`` seconds at most; ignores both results."""
    waiter = asyncio.create_task(event.wait())
    await asyncio.wait({future, waiter}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
