"""``asynccomm diagnose``: the state of each rank of a running job, from a shell on the job's host.

A rank is late if it has not issued operations that other ranks had issued in an earlier snapshot: in a running job some
rank is always an operation ahead, so a single snapshot is not enough. ``jobs`` finds the ranks, and queries them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from asynccomm.cli.dumps import dumps_of, write_dumps
from asynccomm.cli.jobs import Answer, JobSummary, ProcessSocket, ProcessTree, find, listen, status
from asynccomm.cli.run import Commands, path_argument
from asynccomm.control.diagnosis import Diagnosis, RankState
from asynccomm.control.transport.connection import Look

_DESCRIPTION = """\
Show the state of each rank of a running job: its last call and the line of the call, the calls it waits for, and
whether it is behind, silent or gone. Works while the job hangs, and disturbs nothing.

    asynccomm diagnose              the only run that you have on this host
    asynccomm diagnose RUN          its id (as given to run --run-id, or by torchrun), or the pid of a rank or launcher

The exit code is 1 if a rank of a comm is behind, silent, gone or broken, 0 if none is, and 2 if there is no such run.
"""


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one comm."""

    diagnosis: Diagnosis
    late: tuple[int, ...]  #: ranks that stay behind, or are silent, lost or broken

    def as_json(self) -> dict[str, Any]:
        found = self.diagnosis
        ranks = [asdict(state) for state in found.ranks]
        return {"comm": found.comm, "size": len(ranks), "late": list(self.late), "ranks": ranks}

    def __str__(self) -> str:
        text = str(self.diagnosis)
        return (
            text
            if self.late or not self.diagnosis.behind
            else f"{text}\nthe ranks that are behind catch up: none is stuck"
        )


# -- results ----------------------------------------------------------------------------------------------------------


def _diagnoses(family: ProcessTree, said: Answer) -> dict[str, Diagnosis]:
    """Diagnoses by the comm's key, the first comm first."""
    keys = dict.fromkeys(key for _, answer in sorted(said.answers.items()) for key, own in answer.items() if own)
    found = {}
    for key in keys:
        answers = {rank: comms[key] for rank, comms in said.answers.items() if comms.get(key)}
        one = next(iter(answers.values()))
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):  # malformed answer
            jobs = one.get("jobs") or range(int(one["size"]))
            states = tuple(_state(rank, job, key, family, said) for rank, job in enumerate(jobs))
            found[key] = Diagnosis(str(one["comm"]), states)
    return found


def _state(rank: int, job: int, key: str, family: ProcessTree, said: Answer) -> RankState:
    if job in said.answers:
        return RankState.from_answer(rank, said.answers[job].get(key, {}))
    if job in said.gone:
        return RankState(rank, False, gone=said.gone[job])
    pid = next((door.pid for door in family.doors if door.rank == job), 0)
    host = socket.gethostname() if pid else ""
    return RankState(rank, False, silent=said.silent.get(job), host=host, pid=pid)


def _late(found: Diagnosis, bar: int) -> tuple[int, ...]:
    """The late, silent, lost and broken ranks; ``bar``: the number of collectives that all ranks should have issued."""
    return tuple(s.rank for s in found.ranks if not s.answered or s.state != "open" or s.collectives < bar)


async def _examine(family: ProcessTree, stacks: bool) -> list[Snapshot]:
    found = _diagnoses(family, await listen(family, Look(stacks)))
    least = {key: max(state.collectives for state in one.ranks) for key, one in found.items()}
    behind = any(_late(one, least[key]) for key, one in found.items())
    if behind and not any(_late(one, 0) for one in found.values()):  # only behind: take a second snapshot
        found = _diagnoses(family, await listen(family, Look(stacks)))
    return [Snapshot(one, _late(one, least.get(key, 0))) for key, one in found.items()]


async def _report(job: JobSummary, stacks: bool) -> tuple[list[Snapshot], list[tuple[ProcessSocket, str]]]:
    """The comms of a job, and the ranks that do not answer, each with its state as seen from outside."""
    views = await asyncio.gather(*(_examine(family, stacks) for family in job.families if family.opened))
    closed = [door for family in job.families if not family.opened for door in family.doors]
    comms = sorted((view for each in views for view in each), key=lambda view: view.diagnosis.comm)
    return comms, [(door, _outside(door)) for door in closed]


def _outside(door: ProcessSocket) -> str:
    if status(door.pid)[0] in ("T", "t"):
        return "does not answer: it is stopped"
    return "does not answer: it waits for the others in new_comm, or something holds its interpreter lock"


# -- the command ------------------------------------------------------------------------------------------------------


def add_command(commands: Commands) -> None:
    """Register ``diagnose`` with the command line."""
    parser = commands.add_parser(
        "diagnose",
        help="show the states of the ranks of a running job",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="asynccomm diagnose [RUN] [options]",
    )
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="a run's id, or the pid of a rank or launcher (default: the only one)")
    add("--stacks", action="store_true", help="also show the stacks of each rank's main thread, event loop and tasks")
    add("--comm", metavar="NAME", help="show this comm only")
    add("--json", action="store_true", help="print it for machines")
    add(
        "--dump",
        type=path_argument,
        metavar="DIR",
        help="write the flight recorder of each rank to DIR, for trace analyze",
    )
    parser.set_defaults(command=lambda arguments: _diagnose(parser, arguments), parser=parser)


def job_of(parser: argparse.ArgumentParser, wanted: str | None) -> JobSummary:
    """The one job that ``wanted`` means; else the command ends with an error."""
    if sys.platform != "linux":
        parser.error(f"runs are found by their abstract sockets in /proc/net/unix, which {sys.platform} does not have")
    jobs = asyncio.run(find(wanted))
    if not jobs:
        which = "" if wanted is None else f" that is called {wanted!r} or has such a process"
        parser.error(f"there is no run of yours on this host{which}")
    if len(jobs) > 1:
        parser.error(
            "\n  ".join([f"argument RUN: say which, by its id or a pid; there are {len(jobs)}:", *map(str, jobs)])
        )
    return jobs[0]


async def states_of(job: JobSummary) -> list[Diagnosis]:
    """The states of a job's ranks by comm, sorted by name; empty once all comms are closed."""
    opened = [family for family in job.families if family.opened]
    answers = await asyncio.gather(*(listen(family, Look()) for family in opened))
    found = [each for family, said in zip(opened, answers, strict=True) for each in _diagnoses(family, said).values()]
    return sorted(found, key=lambda each: each.comm)


def _diagnose(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    job = job_of(parser, arguments.run)
    if arguments.dump is not None:
        return _dump(parser, job, arguments.dump)
    views, closed = asyncio.run(_report(job, arguments.stacks))
    if arguments.comm is not None:
        names = sorted({view.diagnosis.comm for view in views})
        views = [view for view in views if view.diagnosis.comm == arguments.comm]
        if not views and not closed:
            there = ", ".join(map(repr, names)) or "none"
            parser.error(f"argument --comm: {job.title} has no open comm {arguments.comm!r}; there are: {there}")
    fine = not closed and not any(view.late for view in views)
    print(_as_json(job, views, closed, fine) if arguments.json else _as_text(job, views, closed))
    return 0 if fine else 1


def _dump(parser: argparse.ArgumentParser, job: JobSummary, directory: Path) -> int:
    """Write the flight recorders. The exit code is 1 if a process has not sent its own."""
    opened = [family for family in job.families if family.opened]

    async def ask() -> list[Answer]:
        return await asyncio.gather(*(listen(family, Look(flight=True)) for family in opened))

    said = [answer.answers for answer in asyncio.run(ask())]
    dumps = dumps_of(said)
    try:
        paths = write_dumps(dumps, directory)
    except OSError as exc:
        parser.error(f"argument --dump: cannot write to {str(directory)!r}: {exc.strerror}")
    sent = {
        door.pid
        for family, by_rank in zip(opened, said, strict=True)
        for door in family.doors
        if by_rank.get(door.rank)
    }
    missing = sorted(job.pids - sent)
    if missing:
        print(f"no flight recorder came from processes {missing}", file=sys.stderr)
    print("\n".join(map(str, paths)))
    return int(bool(missing))


def _as_json(
    job: JobSummary, views: Sequence[Snapshot], closed: Sequence[tuple[ProcessSocket, str]], fine: bool
) -> str:
    silent = [{"rank": door.rank, "pid": door.pid, "how": how} for door, how in closed]
    comms = [view.as_json() for view in views]
    return json.dumps({"run": job.run, "ok": fine, "comms": comms, "silent": silent}, indent=2)


def _as_text(job: JobSummary, views: Sequence[Snapshot], closed: Sequence[tuple[ProcessSocket, str]]) -> str:
    parts = [str(view) for view in views]
    if closed:
        parts.append("\n".join(f"rank {door.rank} (process {door.pid}) {how}" for door, how in closed))
    if not views:
        parts.append("no rank answers" if not job.opened else "no comm is open")
    return "\n\n".join([str(job), *parts])
