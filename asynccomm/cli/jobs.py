"""The jobs of this host, as seen from outside: found by the local sockets of their ranks, and queried there.

Each rank listens at a local socket, named after the run and the process. A connection to the socket returns the sockets
of all ranks of the same job (the ranks of one ``new_comm``). The state of all ranks is requested from one rank, which
requests it from the others over the control channel. If the route to a rank leads over a stopped rank, the request goes
to that rank's own socket. No wait for a rank lasts longer than LOOK_SECONDS. Only processes of the same user are
connected to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, final

from asynccomm.control.messages import JobOverview, RankAnswer
from asynccomm.control.timing import ANSWER_SECONDS
from asynccomm.control.transport.connection import Look
from asynccomm.control.transport.framing import MESSAGE_BYTES, Decoder, encode
from asynccomm.control.transport.schema import MessageError, decode
from asynccomm.control.transport.sockets import peer_user, run_name

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


# -- finding ranks ----------------------------------------------------------------------------------------------------


def doors_in(text: str) -> list[ProcessSocket]:
    """The ranks' sockets among the lines of /proc/net/unix."""
    lines = [_line.fullmatch(line) for line in text.split("\n")]
    doors = [
        ProcessSocket.of_name(line["name"]) for line in lines if line is not None and int(line["flags"], 16) & _LISTENS
    ]
    return [door for door in doors if door is not None]


def doors_here() -> list[ProcessSocket]:
    """This user's sockets, judged by file owners: other users' ranks would take a connection for an attack."""
    text = Path("/proc/net/unix").read_text(errors="replace")
    return [door for door in doors_in(text) if _owner(door.pid) in (None, os.geteuid())]


def _owner(pid: int) -> int | None:
    """The process's user; None if unknown: the files of a non-dumpable process belong to root."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid or None
    return None


def status(pid: int) -> tuple[str, int]:
    """A process's state, one letter, and its parent; empty and 0 if the process does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[1])


def _descends(pid: int, ancestor: int) -> bool:
    """Whether process ``pid`` is ``ancestor`` or one of its descendants."""
    while pid != ancestor and pid > 0:
        pid = status(pid)[1]
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


async def find(wanted: str | None) -> list[JobSummary]:
    """The jobs that ``wanted`` may mean: the jobs of a run of that name, else the job of a process."""
    doors = doors_here()
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


async def listen(family: ProcessTree, look: Look) -> Answer:
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


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}{'s' * (len(items) != 1)}"


def _processes(pids: Sequence[int]) -> str:
    return f"process{'es' * (len(pids) != 1)} {' '.join(map(str, pids))}"
