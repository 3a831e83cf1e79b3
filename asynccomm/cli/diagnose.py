"""``asynccomm diagnose``: the state of each rank of a running job, from a shell on the job's host.

Each rank listens at a local socket, named after the run and the process. A connection to the socket returns the sockets
of all ranks of the same job (the ranks of one ``new_comm``). The command requests the state of all ranks from one rank,
which requests it from the others over the control channel. If the route to a rank leads over a stopped rank, the
command sends the request to that rank's own socket. The command connects only to processes of the same user.

A rank is late if it has not issued operations that other ranks had issued in an earlier snapshot: in a running job some
rank is always an operation ahead, so a single snapshot is not enough. No wait for a rank lasts longer than
LOOK_SECONDS.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self, final

from asynccomm.cli.dumps import dumps_of, write_dumps
from asynccomm.cli.run import Commands
from asynccomm.control.diagnosis import Diagnosis, RankState
from asynccomm.control.messages import JobOverview, RankAnswer
from asynccomm.control.timing import ANSWER_SECONDS
from asynccomm.control.transport.connection import Look
from asynccomm.control.transport.framing import MESSAGE_BYTES, Decoder, encode
from asynccomm.control.transport.schema import MessageError, decode
from asynccomm.control.transport.sockets import peer_user, run_name

_DESCRIPTION = """\
Show the state of each rank of a running job: its last call and the line of the call, the calls it waits for, and
whether it is behind, silent or gone. Works while the job hangs, and disturbs nothing.

    asynccomm diagnose              the only run that you have on this host
    asynccomm diagnose RUN          its id (as given to run --run-id, or by torchrun), or the pid of a rank or launcher

The exit code is 1 if a rank of a comm is behind, silent, gone or broken, 0 if none is, and 2 if there is no such run.
"""

KNOCK_SECONDS: Final = 1.5  # for a rank to answer with the names of the job's sockets
LOOK_SECONDS: Final = 2 * ANSWER_SECONDS + 3.0  # for a rank to request the states of the other ranks

_LISTENS: Final = 0x10000  # __SO_ACCEPTCON, of a socket in /proc/net/unix
_line = re.compile(r"[0-9a-f]+: \S+ \S+ (?P<flags>[0-9A-F]+) \S+ \S+ +\d+ @(?P<name>asynccomm/.*)")  # of any user


@final
@dataclass(frozen=True, slots=True)
class ProcessSocket:
    """The local socket of one rank."""

    name: str  #: of the abstract socket
    run: str
    rank: int
    pid: int

    @classmethod
    def of_name(cls, name: str) -> Self | None:
        """The socket with this name; None if the name is not of a rank's socket."""
        parts = name.split("/")
        if len(parts) != 5 or parts[0] != "asynccomm" or not (parts[2].isdecimal() and parts[3].isdecimal()):
            return None
        return cls(name, parts[1], int(parts[2]), int(parts[3]))


@final
@dataclass(frozen=True, slots=True)
class ProcessTree:
    """The ranks of one job."""

    doors: tuple[ProcessSocket, ...]  #: on this host, in rank order
    opened: tuple[ProcessSocket, ...] = ()  #: the sockets among ``doors`` that answer


@final
@dataclass(slots=True)
class JobSummary:
    """The process trees that share processes."""

    families: list[ProcessTree]

    @property
    def doors(self) -> list[ProcessSocket]:
        return [door for family in self.families for door in family.doors]

    @property
    def pids(self) -> set[int]:
        return {door.pid for door in self.doors}

    @property
    def run(self) -> str:
        return self.doors[0].run

    @property
    def title(self) -> str:
        return f"run {self.run!r}" if self.run else "a run without an id"

    @property
    def opened(self) -> bool:
        """Whether any rank answers."""
        return any(family.opened for family in self.families)

    def __str__(self) -> str:
        pids = sorted(self.pids)
        return f"{self.title}, {_count(pids, 'rank')} here, {_processes(pids)}"


@final
@dataclass(slots=True)
class Answer:
    """The answers of a job's ranks, by rank in the job."""

    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict)  #: each with an entry per comm key
    silent: dict[int, float | None] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)

    def add(self, message: RankAnswer | JobOverview) -> None:
        if isinstance(message, RankAnswer):
            self.answers[message.rank] = message.comms
        else:
            self.silent |= message.silent
            self.gone |= message.gone


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


# -- finding ranks ----------------------------------------------------------------------------------------------------


def doors_in(text: str) -> list[ProcessSocket]:
    """The ranks' sockets among the lines of /proc/net/unix."""
    lines = [_line.fullmatch(line) for line in text.split("\n")]
    doors = [
        ProcessSocket.of_name(line["name"]) for line in lines if line is not None and int(line["flags"], 16) & _LISTENS
    ]
    return [door for door in doors if door is not None]


def _doors_here() -> list[ProcessSocket]:
    """This user's sockets, judged by file owners: other users' ranks would take a connection for an attack."""
    text = Path("/proc/net/unix").read_text(errors="replace")
    return [door for door in doors_in(text) if _owner(door.pid) in (None, os.geteuid())]


def _owner(pid: int) -> int | None:
    """The process's user; None if unknown, as for a non-dumpable process, whose files belong to root."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid or None
    return None


def _status(pid: int) -> tuple[str, int]:
    """A process's state, one letter, and its parent; empty and 0 if the process does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[1])


def _descends(pid: int, ancestor: int) -> bool:
    """Whether process ``pid`` is ``ancestor`` or one of its descendants."""
    while pid != ancestor and pid > 0:
        pid = _status(pid)[1]
    return pid == ancestor


def jobs_of(knocks: Mapping[ProcessSocket, Iterable[str] | None]) -> list[JobSummary]:
    """Group ranks by job.

    Args:
        knocks: by socket, the names of the sockets of its whole process tree; None: no answer.
    """
    by_name = {door.name: door for door in knocks}
    families: dict[frozenset[ProcessSocket], list[ProcessSocket]] = {}
    for door, names in knocks.items():
        if names is not None:
            whole = frozenset(by_name[name] for name in names if name in by_name) | {door}
            families.setdefault(whole, []).append(door)
    known = {door for whole in families for door in whole}
    found = [ProcessTree(_in_order(whole), _in_order(opened)) for whole, opened in families.items()]
    jobs: list[JobSummary] = []
    for family in found:
        pids = {door.pid for door in family.doors}
        kin = [job for job in jobs if job.pids & pids]
        jobs = [job for job in jobs if job not in kin]
        jobs.append(JobSummary([*(other for job in kin for other in job.families), family]))
    for door in _in_order(knocks.keys() - known):
        _place(ProcessTree((door,)), jobs)
    return sorted(jobs, key=lambda job: (job.run, sorted(job.pids)))


def _place(closed: ProcessTree, jobs: list[JobSummary]) -> None:
    """Add a rank that no other rank named to its job: the job of its process, else the only job of its run."""
    door = closed.doors[0]
    kin = [job for job in jobs if door.pid in job.pids] or [job for job in jobs if door.run and job.run == door.run]
    kin = [job for job in kin if not job.opened] or kin
    if len(kin) == 1:
        kin[0].families.append(closed)
    else:
        jobs.append(JobSummary([closed]))


def _in_order(doors: Iterable[ProcessSocket]) -> tuple[ProcessSocket, ...]:
    return tuple(sorted(doors, key=lambda door: (door.rank, door.pid, door.name)))


# -- queries ----------------------------------------------------------------------------------------------------------


def _connect(door: ProcessSocket) -> socket.socket:
    """A connection to the socket. Raises: OSError; PermissionError if another user listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(f"\0{door.name}")  # immediate: succeeds or fails
        if (user := peer_user(sock)) != os.geteuid():
            raise PermissionError(f"a process of user {user} listens there")
    except BaseException:
        sock.close()
        raise
    return sock


async def _ask(door: ProcessSocket, look: Look, seconds: float) -> tuple[list[RankAnswer | JobOverview], JobOverview]:
    """All messages of the answer, and the last. Raises: OSError, TimeoutError being one; MessageError."""
    reader, writer = await asyncio.open_unix_connection(sock=_connect(door))
    messages: list[RankAnswer | JobOverview] = []
    try:
        writer.write(encode(look))
        decoder = Decoder(limit=MESSAGE_BYTES)
        async with asyncio.timeout(seconds):
            while data := await reader.read(1 << 20):
                decoder.feed(data)
                while (message := decoder.next()) is not None:
                    messages.append(decode(RankAnswer | JobOverview, message))
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if not messages or not isinstance(messages[-1], JobOverview):
        raise ConnectionResetError("the answer is incomplete")
    return messages, messages[-1]


async def _knock(door: ProcessSocket) -> tuple[bool, list[str] | None]:
    """Whether the socket exists and is this user's; the names of its process tree's sockets, if it answers."""
    try:
        _, overview = await _ask(door, Look(ranks=[]), KNOCK_SECONDS)
        return True, list(overview.sockets.values())
    except (PermissionError, ConnectionRefusedError):  # refused: the socket has just closed
        return False, None
    except (OSError, MessageError):
        return True, None


async def _find(wanted: str | None) -> list[JobSummary]:
    """The jobs that ``wanted`` may mean: the jobs of a run of that name, else the job of a process."""
    doors = _doors_here()
    pid = 0
    if wanted is not None:
        named = [door for door in doors if door.run == run_name(wanted)]
        if not named and wanted.isdecimal():
            pid = int(wanted)
            runs = {door.run for door in doors if _descends(door.pid, pid)}
            named = [door for door in doors if door.run in runs]
        doors = named
    knocks = dict(zip(doors, await asyncio.gather(*map(_knock, doors)), strict=True))
    jobs = jobs_of({door: names for door, (ours, names) in knocks.items() if ours})
    return [job for job in jobs if not pid or any(_descends(each, pid) for each in job.pids)]


async def _listen(family: ProcessTree, look: Look) -> Answer:
    """The answers of all ranks of the process tree, as far as any answering rank can find out."""
    said = Answer()

    async def ask(door: ProcessSocket, ranks: list[int] | None = None) -> bool:
        try:
            messages, _ = await _ask(door, Look(look.stacks, ranks, look.flight), LOOK_SECONDS)
        except (OSError, MessageError):
            return False
        for message in messages:
            said.add(message)
        return True

    for door in family.opened:
        if await ask(door):
            break
    await asyncio.gather(*(ask(door, [door.rank]) for door in family.opened if door.rank not in said.answers))
    return said


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
    found = _diagnoses(family, await _listen(family, Look(stacks)))
    least = {key: max(state.collectives for state in one.ranks) for key, one in found.items()}
    behind = any(_late(one, least[key]) for key, one in found.items())
    if behind and not any(_late(one, 0) for one in found.values()):  # only behind: take a second snapshot
        found = _diagnoses(family, await _listen(family, Look(stacks)))
    return [Snapshot(one, _late(one, least.get(key, 0))) for key, one in found.items()]


async def _report(job: JobSummary, stacks: bool) -> tuple[list[Snapshot], list[tuple[ProcessSocket, str]]]:
    """The comms of a job, and the ranks that do not answer, each with its state as seen from outside."""
    views = await asyncio.gather(*(_examine(family, stacks) for family in job.families if family.opened))
    closed = [door for family in job.families if not family.opened for door in family.doors]
    comms = sorted((view for each in views for view in each), key=lambda view: view.diagnosis.comm)
    return comms, [(door, _outside(door)) for door in closed]


def _outside(door: ProcessSocket) -> str:
    if _status(door.pid)[0] in ("T", "t"):
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
    add("--stacks", action="store_true", help="also show the stacks of each rank's main thread and tasks")
    add("--comm", metavar="NAME", help="show this comm only")
    add("--json", action="store_true", help="print it for machines")
    add("--dump", type=Path, metavar="DIR", help="write the flight recorder of each rank to DIR, for trace analyze")
    parser.set_defaults(command=lambda arguments: _diagnose(parser, arguments), parser=parser)


def job_of(parser: argparse.ArgumentParser, wanted: str | None) -> JobSummary:
    """The one job that ``wanted`` means; else the command ends with an error."""
    if sys.platform != "linux":
        parser.error(f"runs are found by their abstract sockets in /proc/net/unix, which {sys.platform} does not have")
    jobs = asyncio.run(_find(wanted))
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
    answers = await asyncio.gather(*(_listen(family, Look()) for family in opened))
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
    """Write the flight recorders. The exit code is 1 if a rank has not sent its own."""

    async def ask() -> list[Answer]:
        return await asyncio.gather(*(_listen(family, Look(flight=True)) for family in job.families if family.opened))

    dumps = dumps_of([answer.answers for answer in asyncio.run(ask())])
    try:
        paths = write_dumps(dumps, directory)
    except OSError as exc:
        parser.error(f"argument --dump: cannot write to {str(directory)!r}: {exc.strerror}")
    missing = sorted({door.rank for door in job.doors} - dumps.keys())
    if missing:
        print(f"no flight recorder came from ranks {missing}", file=sys.stderr)
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


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}{'s' * (len(items) != 1)}"


def _processes(pids: Sequence[int]) -> str:
    return f"process{'es' * (len(pids) != 1)} {' '.join(map(str, pids))}"
