"""``asynccomm top``: a live table of the ranks of a running job, by the channel of ``asynccomm diagnose``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, final

from asynccomm.cli.diagnose import job_of, states_of
from asynccomm.cli.jobs import JobSummary
from asynccomm.cli.run import Commands
from asynccomm.control.diagnosis import Diagnosis, RankState

_DESCRIPTION = """\
Show the ranks of a running job as a live table: the operation of each rank, operations and GB per second, and the
ranks that it waits for. Needs the extra "top" (rich), but not for --json.

    asynccomm top            the only run that you have on this host
    asynccomm top RUN        its id, or the pid of a rank or launcher
"""

INTERVAL: Final = 1.0  # seconds between two snapshots


class JobSnapshot(NamedTuple):
    """The states of a job's comms at one time."""

    when: float
    comms: Sequence[Diagnosis]


@final
@dataclass(frozen=True, slots=True)
class RankLine:
    """One rank of a comm, between two snapshots."""

    comm: str
    rank: int
    pid: int
    op: str  #: the oldest operation in flight, else the last one; or the reason why it is unknown
    busy: bool  #: whether it is in flight
    per_second: float  #: collectives and messages
    gb_per_second: float  #: of the operations sent, in units of 1e9 bytes
    waits_for: tuple[int, ...]  #: ranks that have not called the oldest collective in flight
    straggler: int  #: the rank that came last the most, by the comm's metrics; -1: none, or no metrics


def lines_of(before: JobSnapshot, now: JobSnapshot) -> list[RankLine]:
    """A line for each rank of each comm."""
    # disjoint groups may share a name, but not a process
    earlier = {(comm.comm, state.host, state.pid): state for comm in before.comms for state in comm.ranks}
    seconds = max(1e-9, now.when - before.when)
    return [
        _line(comm, state, earlier.get((comm.comm, state.host, state.pid)), seconds)
        for comm in now.comms
        for state in comm.ranks
    ]


def _line(comm: Diagnosis, state: RankState, before: RankState | None, seconds: float) -> RankLine:
    calls = nbytes = 0
    if before is not None and before.answered and state.answered:
        calls = state.collectives + state.messages - before.collectives - before.messages
        nbytes = state.nbytes - before.nbytes
    pending = state.pending[0] if state.pending else None
    shown = pending or state.last
    waits_for: tuple[int, ...] = ()
    if pending is not None and pending.seq >= 0 and not pending.p2p:
        waits_for = tuple(each.rank for each in comm.ranks if each.collectives <= pending.seq)
    text = state.doing if not state.answered else "" if shown is None else f"{shown.op} #{shown.seq}"
    rates = max(0, calls) / seconds, max(0, nbytes) / seconds / 1e9
    return RankLine(comm.comm, state.rank, state.pid, text, pending is not None, *rates, waits_for, state.straggler)


def add_command(commands: Commands) -> None:
    """Register ``top`` with the command line."""
    parser = commands.add_parser(
        "top",
        help="a live table of a running job",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="asynccomm top [RUN] [options]",
    )
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="a run's id, or the pid of a rank or launcher (default: the only one)")
    add("--interval", type=float, default=INTERVAL, metavar="SECONDS", help="between snapshots (default: 1)")
    add("--once", action="store_true", help="print one table, and end")
    add("--json", action="store_true", help="print lines for machines: a list for each interval")
    parser.set_defaults(command=lambda arguments: _top(parser, arguments), parser=parser)


def _top(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if not 0 < arguments.interval < 1e6:
        parser.error(f"argument --interval: must be positive seconds, got {arguments.interval}")
    if not arguments.json:
        try:
            import rich.live  # noqa: F401, PLC0415 (an extra)
        except ImportError:
            parser.error("the table needs rich: pip install 'asynccomm[top]', or use --json")
    job = job_of(parser, arguments.run)
    try:
        asyncio.run(_show(job, arguments))
    except KeyboardInterrupt:
        return 0
    return 0


async def _snapshot(job: JobSummary) -> JobSnapshot:
    return JobSnapshot(time.monotonic(), await states_of(job))


async def _show(job: JobSummary, arguments: argparse.Namespace) -> None:
    """Show the job until its comms are closed."""
    screen = None if arguments.json or arguments.once else _screen()
    try:
        before = await _snapshot(job)
        while before.comms:
            await asyncio.sleep(arguments.interval)
            now = await _snapshot(job)
            lines = lines_of(before, now)
            if arguments.json:
                print(json.dumps([asdict(line) for line in lines]), flush=True)
            elif screen is not None:
                screen.update(table_of(job.title, lines), refresh=True)
            else:
                _print(table_of(job.title, lines))
            if arguments.once:
                return
            before = now
    finally:
        if screen is not None:
            screen.stop()


def _screen() -> Any:
    from rich.live import Live  # noqa: PLC0415 (an extra)

    screen = Live(auto_refresh=False, screen=sys.stdout.isatty())
    screen.start()
    return screen


def _print(table: Any) -> None:
    from rich.console import Console  # noqa: PLC0415 (an extra)

    console = Console()
    console.width = max(console.width, 110)  # a pipe counts as 80 columns
    console.print(table)


def table_of(title: str, lines: Sequence[RankLine]) -> Any:
    """The table of rich."""
    from rich.table import Table  # noqa: PLC0415 (an extra)

    table = Table(title=title)
    for column in ("comm", "rank", "operation", "ops/s", "GB/s", "waits for", "last the most"):
        table.add_column(column, justify="right" if column in ("rank", "ops/s", "GB/s") else "left")
    for line in lines:
        table.add_row(
            line.comm,
            str(line.rank),
            line.op if line.busy or not line.op else f"{line.op} (done)",
            f"{line.per_second:.1f}",
            f"{line.gb_per_second:.3f}",
            ", ".join(f"rank {rank}" for rank in line.waits_for),
            "" if line.straggler < 0 else f"rank {line.straggler}",
        )
    return table
