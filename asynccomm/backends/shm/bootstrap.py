"""How the ranks come to share a segment: over a local socket, which can carry descriptors.

1. Rank 0 listens at an abstract address (so no file can be left behind) and publishes it in the store.
2. Each other rank connects. Both sides check the other's user and a token from the store. The rank hands over what the
   others need of it: its bells, and an end of a pipe that shows when it is gone.
3. Each rank says in the store whether that worked. All read what all said, and so decide alike.
4. Rank 0 makes the segment and hands it out with everybody's descriptors. Each rank maps it and says so, as in 3.

Whether ranks can share memory is found by trying: host names and environment variables know nothing of containers,
namespaces and users.

The connections stay open until everything has been said, so one that ends earlier is a rank that is gone and cannot
say so. They are served in callbacks that never block, and only for news is there anything to await: that makes it safe
to cancel at any point.

Anybody on the host can connect to rank 0. Whoever has not shown yet to be a rank is a stranger: there may be only so
many at once, and each has only so much time. A rank says who it is as soon as it has connected, so a crowd can at most
make it try again. How many were refused, and why, is logged once, when rank 0 stops listening.

Nothing that another process has written is believed to have the right form, neither in the store nor on a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import logging
import math
import os
import resource
import secrets
import socket
import struct
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn, final

from asynccomm.backends.base import BackendContext, UnsuitableError
from asynccomm.backends.shm.fd_socket import MESSAGE_DESCRIPTORS, Descriptors, Line, Message, user_of
from asynccomm.backends.shm.layout import Layout
from asynccomm.backends.shm.segment import Segment, create
from asynccomm.errors import BackendError, PeerLostError
from asynccomm.ops.validation import CommInfo
from asynccomm.store.base import Store

_log = logging.getLogger("asynccomm")

RETRY_SECONDS: Final = 0.005  # until another try to connect to rank 0, when too many do at once
HELLO_SECONDS: Final = 5.0  # until a stranger must have said which rank it is
STRANGERS: Final = 64  # at once, and as many more as there are ranks: then the oldest has to go
BACKLOG: Final = 4096  # connections that the system keeps until they are taken; it may have a lower limit
ACCEPTS: Final = 64  # connections taken in one turn of the loop
TOKEN_BYTES: Final = 16
OK: Final = "ok"
REFUSED: Final = b"refused"  # to whoever need not try again

_hello = struct.Struct(f"={TOKEN_BYTES}sI")  # token, rank
_Handed = tuple[int, int, int]  # what each rank hands to the others: two bells and its life


@final
@dataclass(frozen=True, slots=True)
class Circle:
    """What a rank shares with the others."""

    segment: Segment
    bells: list[tuple[int, int]]  #: eventfds by rank; this rank's own belong to whoever made them
    lives: list[int]  #: by rank, a pipe's end that reads EOF once the rank is gone; -1 for this rank
    life: int  #: the other end of this rank's pipe
    descriptors: Descriptors = field(repr=False)  #: what ``close`` closes

    def close(self) -> None:
        """Close all descriptors but this rank's own bells; the others see it as gone. Idempotent."""
        self.descriptors.close()


def unsupported() -> str:
    """Why no rank on this system can share memory; empty if it can."""
    return "" if sys.platform == "linux" else f"needs Linux, and this is {sys.platform}"


async def decline(context: BackendContext, reason: str) -> NoReturn:
    """Come to the meeting only to say that this rank cannot take part.

    Raises: UnsuitableError, as ``meet`` does on the other ranks.
    """
    problem = f"rank {context.group.rank} cannot share memory: {reason}"
    if context.group.rank == 0:
        await context.store.set("address", json.dumps({"problem": problem}))
    await _agree(context, "reach", problem, asyncio.get_running_loop().create_future())
    raise AssertionError("agreed to share memory with a rank that declined")


async def meet(context: BackendContext, settings: Mapping[str, int], layout: Layout, bells: tuple[int, int]) -> Circle:
    """Share a segment with all ranks. Collective, without a limit of time; cancelling it closes everything.

    Args:
        settings: hints whose values must be the same on all ranks.
        layout: of the segment; follows from the settings.
        bells: eventfds that ring this rank's event loop and its worker thread.

    Raises:
        UnsuitableError: on all ranks: some of them cannot share memory, or their settings differ.
        PeerLostError: a rank went away meanwhile.
    """
    if reason := unsupported():
        await decline(context, reason)
    rank, size = context.group.rank, context.group.size
    with contextlib.ExitStack() as unless_shared:
        ours = Descriptors()
        unless_shared.callback(ours.close)
        try:
            there, life = (ours.add(fd) for fd in os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
            mine = (*bells, there)
            side = _Host(context.group, ours, mine) if rank == 0 else _Guest(size, ours, mine)
        except OSError as exc:
            await decline(context, str(exc.strerror))
        with contextlib.closing(side):
            if isinstance(side, _Host):
                segment, handed = await _receive_guests(context, settings, layout, side)
            else:
                segment, handed = await _visit(context, settings, layout, side)
        ours.close_one(there)  # the others have theirs; this one would read EOF only when nobody cares any more
        unless_shared.pop_all()
    handed[rank] = (*bells, -1)
    return Circle(
        segment=segment,
        bells=[handed[r][:2] for r in range(size)],
        lives=[handed[r][2] for r in range(size)],
        life=life,
        descriptors=ours,
    )


async def _receive_guests(
    context: BackendContext, settings: Mapping[str, int], layout: Layout, host: _Host
) -> tuple[Segment, dict[int, _Handed]]:
    """Rank 0's part; returns the segment and what the ranks handed over."""
    await context.store.set("address", host.address(settings).written())
    await _hear(context.store, "reach", range(1, context.group.size), host.gone)
    host.stop_listening()
    await _agree(context, "reach", host.problem, host.gone)
    problem = ""
    try:
        fd = host.ours.add(create(layout.total))
        segment = Segment(fd, layout.total)
        await host.hand_out(fd)
        host.ours.close_one(fd)
    except BackendError as exc:
        problem = f"rank 0 cannot share memory: {exc}"
        await host.tell({"problem": problem})
    await _agree(context, "mapped", problem, host.gone)
    return segment, host.handed


async def _visit(
    context: BackendContext, settings: Mapping[str, int], layout: Layout, guest: _Guest
) -> tuple[Segment, dict[int, _Handed]]:
    """Any other rank's part; returns the segment and what the ranks handed over."""
    rank, hosts = context.group.rank, [member.host for member in context.members]
    address = _address_from(await context.store.get("address", math.inf))
    problem = address if isinstance(address, str) else _difference(settings, address.settings, rank)
    if not problem and isinstance(address, _Address):
        try:
            await guest.introduce(rank, address)
        except OSError as exc:
            problem = (
                f"rank {rank} on host {hosts[rank]!r} cannot reach rank 0 on host {hosts[0]!r} by a local socket: "
                f"{exc.strerror or exc}"
            )
    await _agree(context, "reach", problem, guest.gone)
    try:
        fd, handed = await guest.take([r for r in range(context.group.size) if r != rank])
        segment = Segment(fd, layout.total)
        guest.ours.close_one(fd)
    except BackendError as exc:
        problem = f"rank {rank} cannot share memory: {exc}"
    await _agree(context, "mapped", problem, guest.gone)
    return segment, handed


class _Address(NamedTuple):
    """What the other ranks need to know of rank 0."""

    settings: Mapping[str, object]
    name: str
    ask: bytes  # tokens: what rank 0 asks for, and what it answers
    answer: bytes

    def written(self) -> str:
        tokens = {"ask": self.ask.hex(), "answer": self.answer.hex()}
        return json.dumps({"problem": "", "settings": dict(self.settings), "name": self.name, **tokens})


def _address_from(said: bytes) -> _Address | str:
    """What rank 0 said in the store; if that is a problem, or no address at all, its text."""
    try:
        match json.loads(said):
            case {"problem": str(problem)} if problem:
                return problem
            case {"settings": dict(settings), "name": str(name), "ask": str(ask), "answer": str(answer)}:
                address = _Address(settings, name, bytes.fromhex(ask), bytes.fromhex(answer))
                if name.isascii() and len(address.ask) == len(address.answer) == TOKEN_BYTES:
                    return address
    except (ValueError, RecursionError):
        pass
    return "the address of rank 0 in the store cannot be read"


def _difference(mine: Mapping[str, int], host: Mapping[str, object], rank: int) -> str:
    for key in sorted({*mine, *host}):
        if mine.get(key) != host.get(key):
            return f"hint {key!r} differs: rank 0 has {host.get(key)}, rank {rank} has {mine.get(key)}"
    return ""


async def _agree(context: BackendContext, what: str, problem: str, gone: asyncio.Future[PeerLostError]) -> None:
    """Say how it went here (an empty ``problem``: well), hear how it went elsewhere.

    Raises: UnsuitableError with the first rank's problem if there is any, on all ranks the same.
    """
    await context.store.set(f"{what}/{context.group.rank}", problem or OK)
    for said in await _hear(context.store, what, range(context.group.size), gone):
        if said != OK:
            raise UnsuitableError(f"comm {context.group.name!r}: {said}")


async def _hear(store: Store, what: str, ranks: Iterable[int], gone: asyncio.Future[PeerLostError]) -> list[str]:
    """What ``ranks`` say in the store; if one will not, because it is gone, raises that."""
    keys = [f"{what}/{rank}" for rank in ranks]
    asking = asyncio.ensure_future(store.multi_get(keys, math.inf))
    either: set[asyncio.Future[Any]] = {asking, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        # whoever leaves in good order has read it all before, so then it is all there
        if not asking.done() and not await store.check(keys):
            raise gone.result()
        return [said.decode(errors="replace") for said in await asking]
    finally:
        asking.cancel()


@final
class _Host:
    """Rank 0's side of the connections.

    Args:
        ours: what is received is added here.
        mine: what this rank hands to the others.
    """

    def __init__(self, group: CommInfo, ours: Descriptors, mine: _Handed) -> None:
        self.ours = ours
        self.handed = {0: mine}  #: by rank
        self.problem = ""  #: why no more ranks could be received
        self.gone: asyncio.Future[PeerLostError] = asyncio.get_running_loop().create_future()
        self._comm, self._size = group.name, group.size
        self._loop = asyncio.get_running_loop()
        self._name = f"asynccomm-{secrets.token_hex(16)}"
        self._ask, self._answer = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(TOKEN_BYTES)
        self._lines: dict[int, Line] = {}  # by rank
        self._strangers: dict[Line, asyncio.TimerHandle] = {}  # with the end of their time; the oldest first
        self._refused: Counter[str] = Counter()  # strangers, by what was wrong with them
        self._listener: socket.socket | None = None
        if group.size > 1:
            self._listen()

    def address(self, settings: Mapping[str, int]) -> _Address:
        """What the others need to know."""
        # the name alone is no secret: anybody on the host can list the names in use
        return _Address(settings, self._name, self._ask, self._answer)

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(f"\0{self._name}")
            listener.listen(max(self._size, BACKLOG))
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self._listener = listener
        self._loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        """Take some of those who have connected; if there are more, the loop calls again."""
        for _ in range(ACCEPTS):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:
                return
            except OSError as exc:
                if self._strangers:  # they may be what there is no room for
                    self._drop_oldest()
                    continue
                self.problem = f"rank 0 cannot share memory: it cannot take connections: {exc.strerror}"
                self.stop_listening()
                return
            if user_of(sock) != os.geteuid():
                self._refused["of another user"] += 1
                with contextlib.suppress(OSError):
                    sock.send(REFUSED, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                sock.close()
                continue
            while len(self._strangers) >= STRANGERS + self._size:
                self._drop_oldest()
            self._watch(sock)

    def _watch(self, sock: socket.socket) -> None:
        line = Line(sock, lambda message: self._greet(line, message))

        def too_late() -> None:
            line.read()
            if line in self._strangers:
                self._refuse(line, f"silent for {HELLO_SECONDS:g} s")

        self._strangers[line] = self._loop.call_later(HELLO_SECONDS, too_late)

    def _drop_oldest(self) -> None:
        """Make room for another stranger, unless the oldest turns out to be none."""
        line = next(iter(self._strangers))
        line.read()
        if line in self._strangers:
            self._refuse(line, "too many at once")

    def _refuse(self, line: Line, reason: str) -> None:
        self._strangers.pop(line).cancel()
        self._refused[reason] += 1
        line.close()

    def _greet(self, line: Line, message: Message) -> None:
        """Welcome a rank and keep what it hands over; drop anybody else."""
        rank, wrong = self._look_at(message)
        if wrong:
            for fd in message.fds:
                os.close(fd)
            with contextlib.suppress(OSError):
                line.send_now(REFUSED)
            self._refuse(line, wrong)
            return
        self._strangers.pop(line).cancel()
        bell, second_bell, life = (self.ours.add(fd) for fd in message.fds)
        self.handed[rank] = (bell, second_bell, life)
        self._lines[rank] = line
        line.receive = functools.partial(self._leaves, rank)
        with contextlib.suppress(OSError):  # if it is gone again, its line says so
            line.send_now(self._answer)
        self._tell_who_is_gone()

    def _look_at(self, message: Message) -> tuple[int, str]:
        """Which rank says hello; or what is wrong with that."""
        if not message.data:
            return 0, "gone without a word"
        if len(message.data) != _hello.size:
            return 0, "without a hello"
        token, rank = _hello.unpack(message.data)
        if not secrets.compare_digest(token, self._ask):
            return 0, "with a wrong token"
        if not 0 < rank < self._size or rank in self._lines:
            return 0, "as a rank that has come already or does not exist"
        if not message.whole:
            self.problem = f"rank 0 cannot share memory: {_too_many(self._size)}"
        if not message.whole or len(message.fds) != 3:
            return 0, "without the descriptors of a rank"
        return rank, ""

    def _leaves(self, rank: int, message: Message) -> None:
        """A rank's line has ended; or it talks nonsense, which is the end as well."""
        for fd in message.fds:
            os.close(fd)
        self._lines[rank].close()
        if not self.gone.done():
            self.gone.set_result(_lost(rank))
            self._tell_who_is_gone()

    def _tell_who_is_gone(self) -> None:
        """Or they would take it for rank 0 when this ends. More than once does no harm."""
        if self.gone.done():
            for line in self._lines.values():
                with contextlib.suppress(OSError):
                    line.send_now(json.dumps({"lost": self.gone.result().rank}).encode())

    async def tell(self, news: dict[str, Any]) -> None:
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # if it is gone, its line says so
                await line.send(json.dumps(news).encode())

    async def hand_out(self, segment: int) -> None:
        """Give everybody the segment, then by rank what the others handed over."""
        for rank, line in self._lines.items():
            fds = [segment, *(fd for r in range(self._size) if r != rank for fd in self.handed[r])]
            with contextlib.suppress(OSError):  # if it is gone, its line says so
                for i in range(0, len(fds), MESSAGE_DESCRIPTORS):
                    await line.send(b"{}", fds[i : i + MESSAGE_DESCRIPTORS])

    def stop_listening(self) -> None:
        for line in list(self._strangers):
            self._refuse(line, "silent")
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        if self._refused:
            reasons = ", ".join([f"{count} {reason}" for reason, count in self._refused.items()])
            total = self._refused.total()
            _log.warning("comm %r: rank 0 refused %d connections of strangers: %s", self._comm, total, reasons)
            self._refused.clear()

    def close(self) -> None:
        self.stop_listening()
        for line in self._lines.values():
            line.close()


@final
class _Guest:
    """Any other rank's side of the connection; arguments as for ``_Host``."""

    def __init__(self, size: int, ours: Descriptors, mine: _Handed) -> None:
        self.ours = ours
        self.gone: asyncio.Future[PeerLostError] = asyncio.get_running_loop().create_future()
        self._size = size
        self._mine = mine
        self._sock = _socket()
        self._line: Line | None = None
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._inbox: deque[tuple[str, Message]] = deque()  # problems, and messages with descriptors
        self._welcome = b""
        self._due = 1 + 3 * (size - 1)  # descriptors that are to come
        self._garbled = False
        self._news = asyncio.Event()

    async def introduce(self, rank: int, address: _Address) -> None:
        """Connect to rank 0, hand over, and be welcomed. Raises: OSError."""
        self._welcome = address.answer
        while not await self._try(rank, address):  # strangers may have crowded us out
            await asyncio.sleep(RETRY_SECONDS)
            self.close()
            self._sock = _socket()
            self._answer = asyncio.get_running_loop().create_future()

    async def _try(self, rank: int, address: _Address) -> bool:
        """Whether rank 0 has said anything. Raises: OSError if that is no welcome."""
        try:
            self._sock.connect(f"\0{address.name}")
        except BlockingIOError:  # unlike TCP, it does not go on by itself
            return False
        if (user := user_of(self._sock)) != os.geteuid():
            raise PermissionError(errno.EPERM, f"it runs as user {user}, this rank as user {os.geteuid()}")
        self._line = Line(self._sock, self._receive)
        try:
            await self._line.send(_hello.pack(address.ask, rank), self._mine)
        except OSError as exc:
            # it has left, and may have said something before
            if not (self._answer.done() or isinstance(exc, (BrokenPipeError, ConnectionResetError))):
                raise
        await asyncio.wait([self._answer])  # which leaves it alone when cancelled
        answer = self._answer.result()
        if answer and answer != address.answer:
            raise ConnectionResetError(errno.ECONNRESET, "it hung up")
        return bool(answer)

    def _receive(self, message: Message) -> None:
        if not self._answer.done():
            for fd in message.fds:
                os.close(fd)
            self._answer.set_result(message.data)  # if that is a refusal, rank 0 may still say why in the store
            if message.data and not secrets.compare_digest(message.data, self._welcome) and self._line is not None:
                self._line.close()  # its end would count as that of rank 0
            return
        self._due -= len(message.fds)
        for fd in message.fds:
            self.ours.add(fd)
        lost, problem = _news_from(message.data, self._size)
        if lost is not None:
            if not self.gone.done():
                self.gone.set_result(_lost(lost))
        elif not self._garbled:  # nothing is believed after that
            if problem is None or self._due < 0:
                problem, self._garbled = "rank 0 sends what cannot be read", True
            if problem or message.fds:
                self._inbox.append((problem, message))
        if self._due < 0:
            for fd in message.fds:
                self.ours.close_one(fd)
            self._due += len(message.fds)
        self._news.set()

    async def take(self, others: Sequence[int]) -> tuple[int, dict[int, _Handed]]:
        """The segment's descriptor, and what each of ``others`` handed over. Raises: BackendError, PeerLostError."""
        fds: list[int] = []
        while len(fds) < 1 + 3 * len(others):
            while not self._inbox:
                if self.gone.done():
                    raise self.gone.result()
                self._news.clear()
                await self._news.wait()
            problem, message = self._inbox.popleft()
            if problem or not message.whole:
                raise BackendError(problem or _too_many(len(others) + 1))
            fds += message.fds
        handed = {rank: (fds[i], fds[i + 1], fds[i + 2]) for rank, i in zip(others, range(1, len(fds), 3), strict=True)}
        return fds[0], handed

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._sock.close()


def _news_from(data: bytes, size: int) -> tuple[int | None, str | None]:
    """What rank 0 says after its welcome: which rank is lost, if one is, and what the problem is.

    An empty problem: there is none; None: it makes no sense.
    """
    if not data:
        return 0, None
    try:
        match json.loads(data):
            case {"lost": int(rank)} if 0 <= rank < size:
                return rank, None
            case {"problem": str(problem)}:
                return None, problem
            case {**others} if not others:
                return None, ""
    except (ValueError, RecursionError):
        pass
    return None, None


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    return sock


def _lost(rank: int) -> PeerLostError:
    return PeerLostError(rank, "it left while the ranks were meeting")


def _too_many(size: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"{3 * size} more open files than now exceed the limit of {limit} (ulimit -n)"
