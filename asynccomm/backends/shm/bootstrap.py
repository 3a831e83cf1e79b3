"""Bootstrap of a shared segment: the ranks exchange descriptors over a local socket.

1. Rank 0 listens at an abstract address (which leaves no file behind) and publishes the address in the store.
2. Each other rank connects. Both sides check the other side's user, and a token from the store. The rank sends its
   descriptors to rank 0: its two doorbells, and one end of a pipe that reads EOF when the rank is lost.
3. Each rank writes its result to the store. All ranks read all results, and so reach the same decision.
4. Rank 0 creates the segment and sends it to all ranks with all other ranks' descriptors. Each rank maps the segment
   and writes its result to the store, as in 3.

Only an attempt shows whether ranks can share memory: host names and environment variables do not reveal containers,
namespaces and users.

The connections stay open until all results are in the store, so a connection that ends earlier means a lost rank.
Callbacks that never block serve the connections, and coroutines await only their results: the bootstrap can therefore
be cancelled at any point.

Any process on the host can connect to rank 0, which admits connections as :mod:`asynccomm.control.transport.admission`
describes. A rank sends its hello as soon as it has connected.

No data from another process is trusted to be well formed, neither in the store nor on a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import math
import os
import resource
import secrets
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NoReturn, TypeAlias, cast, final

from msgspec import Meta

from asynccomm.backends.base import BackendContext, UnsuitableError
from asynccomm.backends.shm.fd_socket import MESSAGE_DESCRIPTORS, Datagram, FdBag, FdSocket
from asynccomm.backends.shm.layout import Layout
from asynccomm.backends.shm.segment import Segment, create
from asynccomm.control.timing import RETRY_SECONDS
from asynccomm.control.transport.admission import CROWDED, LATE, WRONG_TOKEN, Admission
from asynccomm.control.transport.schema import Message, MessageError, dumps, loads
from asynccomm.control.transport.sockets import peer_user
from asynccomm.errors import BackendError, PeerLostError
from asynccomm.ops.validation import CommInfo
from asynccomm.store.base import Store

BACKLOG: Final = 4096  # of the listening socket; the kernel may have a lower limit
ACCEPTS: Final = 64  # connections accepted per loop iteration
TOKEN_BYTES: Final = 16
OK: Final = "ok"
REFUSED: Final = b"refused"  # sent to a connection that is rejected for good

_HexToken: TypeAlias = Annotated[str, Meta(pattern=f"^([0-9a-f]{{{2 * TOKEN_BYTES}}})?$")]
_hello = struct.Struct(f"={TOKEN_BYTES}sI")  # token, rank
_Handed = tuple[int, int, int]  # descriptors that each rank sends to the others: two doorbells and its liveness pipe


@final
@dataclass(frozen=True, slots=True)
class PeerMapping:
    """The segment and the descriptors that a rank shares with its peers."""

    segment: Segment
    bells: list[tuple[int, int]]  #: eventfds by rank; the caller of ``bootstrap_segment`` owns those of this rank
    liveness_fds: list[int]  #: by rank, the end of a pipe that reads EOF when the rank is lost; -1 for this rank
    liveness_fd: int  #: the writing end of this rank's own pipe
    descriptors: FdBag = field(repr=False)  #: the descriptors that ``close`` closes

    def close(self) -> None:
        """Close all descriptors but this rank's own bells; peers then see EOF on its pipe. Idempotent."""
        self.descriptors.close()


def unsupported() -> str:
    """The reason why no rank on this system can share memory; empty if ranks can."""
    return "" if sys.platform == "linux" else f"needs Linux, and this is {sys.platform}"


async def report_unsupported(context: BackendContext, reason: str) -> NoReturn:
    """Take part in the bootstrap only to report that this rank cannot share memory.

    Raises: UnsuitableError, as ``bootstrap_segment`` does on the other ranks.
    """
    problem = f"rank {context.group.rank} cannot share memory: {reason}"
    if context.group.rank == 0:
        await context.store.set("address", dumps(_Address(problem)))
    await _agree(context, "reach", problem, asyncio.get_running_loop().create_future())
    raise AssertionError("agreed to share memory with a rank that declined")


async def bootstrap_segment(
    context: BackendContext, settings: Mapping[str, int], layout: Layout, bells: tuple[int, int]
) -> PeerMapping:
    """Bootstrap a segment that all ranks share. Collective, without a timeout; cancellation closes all descriptors.

    Args:
        settings: hints that must have the same values on all ranks.
        layout: the layout of the segment, which follows from the settings.
        bells: eventfds that wake this rank's event loop and its progress thread.

    Raises:
        UnsuitableError: on all ranks, if some of them cannot share memory or their settings differ.
        PeerLostError: if a rank is lost during the bootstrap.
    """
    if reason := unsupported():
        await report_unsupported(context, reason)
    rank, size = context.group.rank, context.group.size
    with contextlib.ExitStack() as unless_shared:
        ours = FdBag()
        unless_shared.callback(ours.close)
        try:
            there, liveness_fd = (ours.add(fd) for fd in os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
            mine = (*bells, there)
            side = _RootSide(context.group, ours, mine) if rank == 0 else _PeerSide(size, ours, mine)
        except OSError as exc:
            await report_unsupported(context, str(exc.strerror))
        with contextlib.closing(side):
            if isinstance(side, _RootSide):
                segment, handed = await _accept_peers(context, settings, layout, side)
            else:
                segment, handed = await _connect_to_root(context, settings, layout, side)
        ours.close_one(there)  # the peers have duplicates, and a rank does not watch itself
        unless_shared.pop_all()
    handed[rank] = (*bells, -1)
    return PeerMapping(
        segment=segment,
        bells=[handed[r][:2] for r in range(size)],
        liveness_fds=[handed[r][2] for r in range(size)],
        liveness_fd=liveness_fd,
        descriptors=ours,
    )


async def _accept_peers(
    context: BackendContext, settings: Mapping[str, int], layout: Layout, host: _RootSide
) -> tuple[Segment, dict[int, _Handed]]:
    """Rank 0's side; returns the segment and all ranks' descriptors."""
    await context.store.set("address", dumps(host.address(settings)))
    await _read_results(context.store, "reach", range(1, context.group.size), host.gone)
    host.stop_listening()
    await _agree(context, "reach", host.problem, host.gone)
    problem = ""
    try:
        fd = host.ours.add(create(layout.total))
        segment = Segment(fd, layout.total)
        await host.distribute_fds(fd)
        host.ours.close_one(fd)
    except BackendError as exc:
        problem = f"rank 0 cannot share memory: {exc}"
        await host.send(_News(problem=problem))
    await _agree(context, "mapped", problem, host.gone)
    return segment, host.handed


async def _connect_to_root(
    context: BackendContext, settings: Mapping[str, int], layout: Layout, peer: _PeerSide
) -> tuple[Segment, dict[int, _Handed]]:
    """Any other rank's side; returns the segment and all other ranks' descriptors."""
    rank, hosts = context.group.rank, [member.host for member in context.members]
    address = _address_from(await context.store.get("address", math.inf))
    problem = address.problem or _difference(settings, address.settings, rank)
    if not problem:
        try:
            await peer.connect(rank, address)
        except OSError as exc:
            problem = (
                f"rank {rank} on host {hosts[rank]!r} cannot reach rank 0 on host {hosts[0]!r} by a local socket: "
                f"{exc.strerror or exc}"
            )
    await _agree(context, "reach", problem, peer.gone)
    try:
        fd, handed = await peer.receive_fds([r for r in range(context.group.size) if r != rank])
        segment = Segment(fd, layout.total)
        peer.ours.close_one(fd)
    except BackendError as exc:
        problem = f"rank {rank} cannot share memory: {exc}"
    await _agree(context, "mapped", problem, peer.gone)
    return segment, handed


class _Address(Message, frozen=True):
    """Rank 0's entry in the store: its problem, or its settings, address and tokens."""

    problem: str = ""
    settings: dict[str, Any] = {}  # noqa: RUF012 (msgspec copies it)
    name: Annotated[str, Meta(pattern="^[!-~]*$")] = ""
    ask: _HexToken = ""  #: token that rank 0 expects
    answer: _HexToken = ""  #: token that rank 0 replies with

    def __post_init__(self) -> None:
        if not self.problem and not (self.name and self.ask and self.answer):
            raise ValueError("neither an address nor a problem")


class _News(Message, frozen=True):
    """A message of rank 0 after its reply, which may carry descriptors."""

    lost: Annotated[int, Meta(ge=0)] = -1  #: a rank
    problem: str = ""


def _address_from(said: bytes) -> _Address:
    """Rank 0's entry in the store."""
    try:
        return cast(_Address, loads(_Address, said))
    except MessageError:
        return _Address("the address of rank 0 in the store cannot be read")


def _difference(mine: Mapping[str, int], host: Mapping[str, object], rank: int) -> str:
    for key in sorted({*mine, *host}):
        if mine.get(key) != host.get(key):
            return f"hint {key!r} differs: rank 0 has {host.get(key)}, rank {rank} has {mine.get(key)}"
    return ""


async def _agree(context: BackendContext, what: str, problem: str, gone: asyncio.Future[PeerLostError]) -> None:
    """Write this rank's result to the store (no problem: empty), and read the results of all ranks.

    Raises: UnsuitableError, the same on all ranks, with the problem of the lowest rank that has one.
    """
    await context.store.set(f"{what}/{context.group.rank}", problem or OK)
    for said in await _read_results(context.store, what, range(context.group.size), gone):
        if said != OK:
            raise UnsuitableError(f"comm {context.group.name!r}: {said}")


async def _read_results(
    store: Store, what: str, ranks: Iterable[int], gone: asyncio.Future[PeerLostError]
) -> list[str]:
    """The results of ``ranks`` in the store. Raises: PeerLostError if a rank is lost before it has written one."""
    keys = [f"{what}/{rank}" for rank in ranks]
    asking = asyncio.ensure_future(store.multi_get(keys, math.inf))
    either: set[asyncio.Future[Any]] = {asking, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        # an orderly rank closes its connection only after it has read all results, so then all are in the store
        if not asking.done() and not await store.check(keys):
            raise gone.result()
        return [said.decode(errors="replace") for said in await asking]
    finally:
        asking.cancel()


@final
class _RootSide:
    """Rank 0's side of the connections.

    Args:
        ours: owns the descriptors that are received.
        mine: the descriptors that this rank sends to the others.
    """

    def __init__(self, group: CommInfo, ours: FdBag, mine: _Handed) -> None:
        self.ours = ours
        self.handed = {0: mine}  #: descriptors by rank
        self.problem = ""  #: why rank 0 could not connect all ranks
        self.gone: asyncio.Future[PeerLostError] = asyncio.get_running_loop().create_future()
        self._comm, self._size = group.name, group.size
        self._loop = asyncio.get_running_loop()
        self._name = f"asynccomm-{secrets.token_hex(16)}"
        self._ask, self._answer = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(TOKEN_BYTES)
        self._lines: dict[int, FdSocket] = {}  # by rank
        self._admission = Admission(f"rank 0 of comm {group.name!r}", self._refuse, group.size, FdSocket.read)
        self._listener: socket.socket | None = None
        if group.size > 1:
            self._listen()

    def address(self, settings: Mapping[str, int]) -> _Address:
        """The entry of rank 0 in the store."""
        # tokens are needed because the name is no secret: any process on the host can list the names in use
        return _Address("", dict(settings), self._name, self._ask.hex(), self._answer.hex())

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
        """Accept up to ``ACCEPTS`` connections; the loop calls again if more are waiting."""
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
                if self._admission.waiting:  # their descriptors may be the ones too many
                    self._admission.drop_oldest()
                    continue
                self.problem = f"rank 0 cannot share memory: it cannot take connections: {exc.strerror}"
                self.stop_listening()
                return
            self._watch(sock)

    def _watch(self, sock: socket.socket) -> None:
        line = FdSocket(sock, lambda message: self._on_hello(line, message))
        self._admission.add(line, peer_user(sock))

    def _refuse(self, line: FdSocket, reason: str) -> None:
        if reason not in (LATE, CROWDED):  # else a rank may connect again
            with contextlib.suppress(OSError):
                line.send_now(REFUSED)
        line.close()

    def _on_hello(self, line: FdSocket, message: Datagram) -> None:
        """Handle the first message of a connection: register a rank and its descriptors, reject anything else."""
        rank, wrong = self._check_hello(message)
        if wrong:
            for fd in message.fds:
                os.close(fd)
            self._admission.refuse(line, wrong)
            return
        self._admission.remove(line)
        bell, second_bell, liveness_fd = (self.ours.add(fd) for fd in message.fds)
        self.handed[rank] = (bell, second_bell, liveness_fd)
        self._lines[rank] = line
        line.receive = functools.partial(self._on_end, rank)
        with contextlib.suppress(OSError):  # the connection reports its own end
            line.send_now(self._answer)
        self._send_loss()

    def _check_hello(self, message: Datagram) -> tuple[int, str]:
        """The rank of a hello, and the reason to reject it (empty: none)."""
        if not message.data:
            return 0, "closed without a hello"
        if len(message.data) != _hello.size:
            return 0, "without a hello"
        token, rank = _hello.unpack(message.data)
        if not secrets.compare_digest(token, self._ask):
            return 0, WRONG_TOKEN
        if not 0 < rank < self._size or rank in self._lines:
            return 0, "as a rank that has come already or does not exist"
        if not message.whole:
            self.problem = f"rank 0 cannot share memory: {_too_many(self._size)}"
        if not message.whole or len(message.fds) != 3:
            return 0, "without the descriptors of a rank"
        return rank, ""

    def _on_end(self, rank: int, message: Datagram) -> None:
        """Handle a later message of a rank: the end of its connection, or garbage, which also ends the connection."""
        for fd in message.fds:
            os.close(fd)
        self._lines[rank].close()
        if not self.gone.done():
            self.gone.set_result(_lost(rank))
            self._send_loss()

    def _send_loss(self) -> None:
        """Report a lost rank to the others, which would otherwise take the end of this side for the loss of rank 0.

        Repeated reports are harmless.
        """
        if self.gone.done():
            for line in self._lines.values():
                with contextlib.suppress(OSError):
                    line.send_now(dumps(_News(lost=self.gone.result().rank)).encode())

    async def send(self, news: _News) -> None:
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # the connection reports its own end
                await line.send(dumps(news).encode())

    async def distribute_fds(self, segment: int) -> None:
        """Send each rank the segment, then the other ranks' descriptors in rank order."""
        for rank, line in self._lines.items():
            fds = [segment, *(fd for r in range(self._size) if r != rank for fd in self.handed[r])]
            with contextlib.suppress(OSError):  # the connection reports its own end
                for i in range(0, len(fds), MESSAGE_DESCRIPTORS):
                    await line.send(b"{}", fds[i : i + MESSAGE_DESCRIPTORS])

    def stop_listening(self) -> None:
        for line in list(self._admission.waiting):
            self._admission.refuse(line, "silent")
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        self._admission.log_refusals()

    def close(self) -> None:
        self.stop_listening()
        for line in self._lines.values():
            line.close()


@final
class _PeerSide:
    """Any other rank's side of the connection; arguments as for ``_RootSide``."""

    def __init__(self, size: int, ours: FdBag, mine: _Handed) -> None:
        self.ours = ours
        self.gone: asyncio.Future[PeerLostError] = asyncio.get_running_loop().create_future()
        self._size = size
        self._mine = mine
        self._sock = _socket()
        self._line: FdSocket | None = None
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._inbox: deque[tuple[str, Datagram]] = deque()  # problems, and messages that carry descriptors
        self._welcome = b""
        self._due = 1 + 3 * (size - 1)  # descriptors that have not arrived yet
        self._garbled = False
        self._news = asyncio.Event()

    async def connect(self, rank: int, address: _Address) -> None:
        """Connect to rank 0, send this rank's descriptors and wait for the reply. Raises: OSError."""
        self._welcome = bytes.fromhex(address.answer)
        while not await self._connect_once(rank, address):  # a flood of connections may have closed this one
            await asyncio.sleep(RETRY_SECONDS)
            self.close()
            self._sock = _socket()
            self._answer = asyncio.get_running_loop().create_future()

    async def _connect_once(self, rank: int, address: _Address) -> bool:
        """Connect once; returns whether rank 0 has replied. Raises: OSError if the reply is a rejection."""
        try:
            self._sock.connect(f"\0{address.name}")
        except BlockingIOError:  # unlike TCP's, the connection does not continue in the background
            return False
        if (user := peer_user(self._sock)) != os.geteuid():
            raise PermissionError(errno.EPERM, f"it runs as user {user}, this rank as user {os.geteuid()}")
        self._line = FdSocket(self._sock, self._receive)
        try:
            await self._line.send(_hello.pack(bytes.fromhex(address.ask), rank), self._mine)
        except OSError as exc:
            # rank 0 has closed the connection, perhaps after a reply
            if not (self._answer.done() or isinstance(exc, (BrokenPipeError, ConnectionResetError))):
                raise
        await asyncio.wait([self._answer])  # wait() does not cancel the future when it is cancelled itself
        answer = self._answer.result()
        if answer and answer != self._welcome:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        return bool(answer)

    def _receive(self, message: Datagram) -> None:
        if not self._answer.done():
            for fd in message.fds:
                os.close(fd)
            self._answer.set_result(message.data)  # after a rejection, rank 0 may still write the reason to the store
            if message.data and not secrets.compare_digest(message.data, self._welcome) and self._line is not None:
                self._line.close()  # the end of this connection would count as the loss of rank 0
            return
        self._due -= len(message.fds)
        for fd in message.fds:
            self.ours.add(fd)
        news = _news_from(message.data, self._size)
        if news.lost >= 0:
            if not self.gone.done():
                self.gone.set_result(_lost(news.lost))
        elif not self._garbled:  # after garbage, all messages are ignored
            self._garbled = news is _GARBAGE or self._due < 0
            problem = _GARBAGE.problem if self._garbled else news.problem
            if problem or message.fds:
                self._inbox.append((problem, message))
        if self._due < 0:
            for fd in message.fds:
                self.ours.close_one(fd)
            self._due += len(message.fds)
        self._news.set()

    async def receive_fds(self, others: Sequence[int]) -> tuple[int, dict[int, _Handed]]:
        """Receive the segment's descriptor and those of each of ``others``. Raises: BackendError, PeerLostError."""
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


_GARBAGE: Final = _News(problem="rank 0 sends an unreadable message")


def _news_from(data: bytes, size: int) -> _News:
    """A message of rank 0 after its reply."""
    if not data:
        return _News(lost=0)
    with contextlib.suppress(MessageError):
        news: _News = loads(_News, data)
        if news.lost < size:
            return news
    return _GARBAGE


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    return sock


def _lost(rank: int) -> PeerLostError:
    return PeerLostError(rank, "it left while the ranks were connecting")


def _too_many(size: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"{3 * size} more open files than now exceed the limit of {limit} (ulimit -n)"
