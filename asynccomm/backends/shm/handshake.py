"""Handshake of the ranks that share a segment: the messages, and both ends of the connections.

:mod:`asynccomm.backends.shm.bootstrap` describes the order of the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import os
import resource
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Self, TypeAlias, cast, final

from msgspec import Meta

from asynccomm.backends.shm.fd_socket import MESSAGE_DESCRIPTORS, Datagram, FdBag, FdSocket
from asynccomm.backends.shm.segment import Segment
from asynccomm.control.timing import RETRY_SECONDS
from asynccomm.control.transport.admission import CROWDED, LATE, WRONG_TOKEN, Admission
from asynccomm.control.transport.schema import Message, MessageError, dumps, loads
from asynccomm.control.transport.sockets import connect_in_turn, peer_user
from asynccomm.errors import BackendError, PeerLostError
from asynccomm.ops.validation import CommInfo

BACKLOG: Final = 4096  # of the listening socket; the kernel may have a lower limit
ACCEPTS: Final = 64  # connections accepted per loop iteration
TOKEN_BYTES: Final = 16
REFUSED: Final = b"refused"  # sent to a connection that is rejected for good

HELLO: Final = struct.Struct(f"={TOKEN_BYTES}sI")  # token, rank

# descriptors that each rank sends to the others: two doorbells, its liveness pipe, and perhaps more, the same number on
# all ranks
Handed = tuple[int, ...]

_HexToken: TypeAlias = Annotated[str, Meta(pattern=f"^([0-9a-f]{{{2 * TOKEN_BYTES}}})?$")]


class Address(Message, frozen=True):
    """The announcement of rank 0: its problem, or its settings, address and tokens.

    The tokens are needed because the name is no secret: any process on the host can list the names in use.
    """

    problem: str = ""
    settings: dict[str, Any] = {}  # noqa: RUF012 (msgspec copies it)
    name: Annotated[str, Meta(pattern="^[!-~]*$")] = ""
    ask: _HexToken = ""  #: token that rank 0 expects
    answer: _HexToken = ""  #: token that rank 0 replies with

    def __post_init__(self) -> None:
        if not self.problem and not (self.name and self.ask and self.answer):
            raise ValueError("neither an address nor a problem")

    @classmethod
    def random(cls, settings: Mapping[str, int]) -> Self:
        """An address for ``settings``: hints that must have the same values on all ranks."""
        return cls._of(secrets.token_hex(3 * TOKEN_BYTES), settings)

    @classmethod
    def derived(cls, settings: Mapping[str, int], path: str, secret: bytes) -> Self:
        """The address that each rank can derive which has the same settings and ``secret``, of 32 bytes.

        Args:
            path: different for all segments of ranks that share the secret.
        """
        text = dumps([path, dict(settings)]).encode()
        return cls._of(hashlib.blake2b(text, key=secret, digest_size=3 * TOKEN_BYTES).hexdigest(), settings)

    @classmethod
    def _of(cls, text: str, settings: Mapping[str, int]) -> Self:
        each = 2 * TOKEN_BYTES
        return cls("", dict(settings), f"asynccomm-{text[:each]}", text[each : 2 * each], text[2 * each :])


class _News(Message, frozen=True, omit_defaults=True):
    """A message of rank 0 after its reply, which may carry descriptors."""

    lost: Annotated[int, Meta(ge=0)] = -1  #: a rank
    problem: str = ""  #: the verdict: this problem
    agreed: bool = False  #: the verdict: all ranks have mapped the segment
    consult: bool = False  #: a rank has a problem: all ranks write their results to the store


class _Report(Message, frozen=True):
    """A rank's message to rank 0: whether the rank has mapped the segment."""

    problem: str = ""


def parse_address(said: bytes) -> Address:
    """Rank 0's entry in the store."""
    try:
        return cast(Address, loads(Address, said))
    except MessageError:
        return Address("the address of rank 0 in the store cannot be read")


_UNREADABLE: Final = "rank 0 sends an unreadable message"
_GARBAGE: Final = _News(problem=_UNREADABLE)
_CONSULT: Final = dumps(_News(consult=True)).encode()


def _news_from(data: bytes, size: int) -> _News:
    """A message of rank 0 after its reply."""
    if not data:
        return _News(lost=0)
    with contextlib.suppress(MessageError):
        news: _News = loads(_News, data)
        if news.lost < size:
            return news
    return _GARBAGE


@final
class Entrance:
    """The listening socket of rank 0 at ``address``, for ``size`` ranks. Raises: OSError."""

    def __init__(self, address: Address, size: int) -> None:
        self.address = address
        self.ask, self.answer = bytes.fromhex(address.ask), bytes.fromhex(address.answer)
        self.listener: socket.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.listener.bind(f"\0{address.name}")
            self.listener.listen(max(size, BACKLOG))
        except OSError:
            self.listener.close()
            raise
        self.listener.setblocking(False)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self.listener.close()


@final
class RootSide:
    """Rank 0's side of the connections.

    Args:
        entrance: closed when no more ranks may come; None: there are no others.
        ours: owns the descriptors that are received.
        mine: the descriptors that this rank sends to the others.
    """

    def __init__(self, group: CommInfo, entrance: Entrance | None, ours: FdBag, mine: Handed) -> None:
        self.ours = ours
        self.handed: dict[int, Handed] = {0: mine}  #: descriptors by rank
        self.segment: Segment | None = None  #: dropped by ``close``: the frames of an error would keep its mapping
        self.gone: asyncio.Future[PeerLostError] = asyncio.get_running_loop().create_future()
        self._comm, self._size, self._each = group.name, group.size, len(mine)
        self._loop = asyncio.get_running_loop()
        self.problem: str = ""  #: why rank 0 could not connect all ranks
        #: done when all ranks have connected, or not all of them can; raises PeerLostError, or an announcement's error
        self.came: asyncio.Future[None] = self._loop.create_future()
        self._lines: dict[int, FdSocket] = {}  # by rank
        self._reports: dict[int, str] = {}  # problems by rank; empty: the rank has mapped the segment
        self._mapped: asyncio.Future[None] = self._loop.create_future()  # all ranks have reported
        self._asked = False  # for results in the store
        self._over = False  # the verdict is on its way
        self._admission = Admission(f"rank 0 of comm {group.name!r}", self._refuse, group.size, FdSocket.read)
        self.entrance: Entrance | None = entrance  #: None: no rank may come any more
        if entrance is None:
            self.came.set_result(None)
            self._mapped.set_result(None)
        else:
            self._loop.add_reader(entrance.listener.fileno(), self._accept)

    def _accept(self) -> None:
        """Accept up to ``ACCEPTS`` connections; the loop calls again if more are waiting."""
        for _ in range(ACCEPTS):
            if self.entrance is None:
                return
            try:
                sock, _ = self.entrance.listener.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:
                return
            except OSError as exc:
                if self._admission.waiting:  # their descriptors may be the ones too many
                    self._admission.drop_oldest()
                    continue
                self._end_wait(f"rank 0 cannot share memory: it cannot take connections: {exc.strerror}")
                self.stop_listening()
                return
            self._watch(sock)

    def _watch(self, sock: socket.socket) -> None:
        line = FdSocket(sock, lambda message: self._on_hello(line, message))
        self._admission.add(line, peer_user(sock))
        if line in self._admission.waiting:
            line.read()  # mostly the hello has come with the connection

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
        self.handed[rank] = tuple([self.ours.add(fd) for fd in message.fds])
        self._lines[rank] = line
        line.receive = functools.partial(self._on_report, rank)
        assert self.entrance is not None
        with contextlib.suppress(OSError):  # the connection reports its own end
            line.send_now(self.entrance.answer)
            if self._asked:
                line.send_now(_CONSULT)
        self._send_loss()
        if self.complete:
            self._end_wait()

    @property
    def complete(self) -> bool:
        """Whether all ranks have connected."""
        return len(self._lines) == self._size - 1

    def _end_wait(self, problem: str = "") -> None:
        self.problem = self.problem or problem
        if not self.came.done():
            self.came.set_result(None)

    def on_watched(self, watching: asyncio.Task[None]) -> None:
        """Take it that a rank has a problem, since the task that watches the store is done; or raise its error."""
        error = None if watching.cancelled() else watching.exception()
        if error is not None:
            _raise_from(self.came, error)
        elif not watching.cancelled():
            self._end_wait()

    def _check_hello(self, message: Datagram) -> tuple[int, str]:
        """The rank of a hello, and the reason to reject it (empty: none)."""
        if not message.data:
            return 0, "closed without a hello"
        if len(message.data) != HELLO.size:
            return 0, "without a hello"
        token, rank = HELLO.unpack(message.data)
        if self.entrance is None or not secrets.compare_digest(token, self.entrance.ask):
            return 0, WRONG_TOKEN
        if not 0 < rank < self._size or rank in self._lines:
            return 0, "as a rank that has come already or does not exist"
        if not message.whole:  # an error, and no reason to try another backend, which may need as many descriptors
            problem = f"rank 0 cannot share memory: {_too_many(self._each * self._size)}"
            _raise_from(self.came, BackendError(f"comm {self._comm!r}: {problem}"))
        if not message.whole or len(message.fds) != self._each:
            return 0, "without the descriptors of a rank"
        return rank, ""

    def _on_report(self, rank: int, message: Datagram) -> None:
        """Handle a later message of a rank: its report, the end of its connection, or garbage, which also ends it."""
        for fd in message.fds:
            os.close(fd)
        if message.data and rank not in self._reports:
            with contextlib.suppress(MessageError):
                self._reports[rank] = cast(_Report, loads(_Report, message.data)).problem
                if len(self._reports) == self._size - 1 and not self._mapped.done():
                    self._mapped.set_result(None)
                return
        self._lines[rank].close()
        if not self.gone.done() and not self._over:
            lost = _lost(rank)
            self.gone.set_result(lost)
            _raise_from(self.came, lost)
            _raise_from(self._mapped, lost)
            self._send_loss()

    def _send_loss(self) -> None:
        """Report a lost rank to the others, which would otherwise take the end of this side for the loss of rank 0.

        Repeated reports are harmless.
        """
        if self.gone.done():
            for line in self._lines.values():
                with contextlib.suppress(OSError):
                    line.send_now(dumps(_News(lost=self.gone.result().rank)).encode())

    def ask_for_results(self) -> None:
        """Ask all ranks for their results in the store, also those that connect later."""
        self._asked = True
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # the connection reports its own end
                line.send_now(_CONSULT)

    async def verdict(self, problem: str = "") -> str:
        """Wait for the reports of all ranks, unless rank 0 has a ``problem``, and send the verdict to all.

        Returns: the problem of the lowest rank that has one; empty: all have mapped the segment. Raises: PeerLostError.
        """
        if not problem:
            await self._mapped
            problem = next((self._reports[rank] for rank in sorted(self._reports) if self._reports[rank]), "")
        self._over = True
        news = dumps(_News(problem=problem, agreed=not problem)).encode()
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # the rank is gone, which its pipe shows
                await line.send(news)
        return problem

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
        if self.entrance is not None:
            self._loop.remove_reader(self.entrance.listener.fileno())
            self.entrance.close()
            self.entrance = None
        self._admission.log_refusals()

    def close(self) -> None:
        self.stop_listening()
        self.segment = None
        for line in self._lines.values():
            line.close()


@final
class PeerSide:
    """Any other rank's side of the connection; ``ours`` and ``mine`` as for ``RootSide``."""

    def __init__(self, size: int, ours: FdBag, mine: Handed) -> None:
        self.ours = ours
        self.segment: Segment | None = None  #: as in ``RootSide``
        self.gone: asyncio.Future[PeerLostError] = asyncio.get_running_loop().create_future()
        self._size = size
        self._mine = mine
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line: FdSocket | None = None
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._inbox: deque[Datagram] = deque()  # messages that carry descriptors
        self._verdict: str | None = None  # of rank 0; empty: all ranks have mapped the segment
        self._asked = False  # for a result in the store
        self._welcome = b""
        self._due = 1 + len(mine) * (size - 1)  # descriptors that have not arrived yet
        self._garbled = False
        self._news = asyncio.Event()

    async def connect(self, rank: int, address: Address) -> None:
        """Connect to rank 0, send this rank's descriptors and wait for the reply. Raises: OSError."""
        self._welcome = bytes.fromhex(address.answer)
        self._renew()
        while not await self._connect_once(rank, address):  # a flood of connections may have closed this one
            await asyncio.sleep(RETRY_SECONDS)
            self._renew()

    def _renew(self) -> None:
        """Make a new socket in place of one that was connected."""
        if self._line is not None:
            self._disconnect()
            self._line = None
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._answer = asyncio.get_running_loop().create_future()

    async def _connect_once(self, rank: int, address: Address) -> bool:
        """Connect once; returns whether rank 0 has replied. Raises: OSError if the reply is a rejection."""
        await connect_in_turn(self._sock, f"\0{address.name}")
        self._line = FdSocket(self._sock, self._receive)
        if (user := peer_user(self._sock)) != os.geteuid():
            raise PermissionError(errno.EPERM, f"it runs as user {user}, this rank as user {os.geteuid()}")
        try:
            await self._line.send(HELLO.pack(bytes.fromhex(address.ask), rank), self._mine)
        except OSError as exc:
            # rank 0 has closed the connection, perhaps after a reply
            if not (self._answer.done() or isinstance(exc, (BrokenPipeError, ConnectionResetError))):
                raise
        answer = await self._answer
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
            self._asked = self._asked or news.consult
            if not self._garbled:
                if (news.problem or news.agreed) and self._verdict is None:
                    self._verdict = news.problem
                if message.fds or not message.whole:  # the system may have dropped all descriptors
                    self._inbox.append(message)
        if self._due < 0:
            for fd in message.fds:
                self.ours.close_one(fd)
            self._due += len(message.fds)
        self._news.set()

    async def is_asked(self) -> bool:
        """Wait for a message of rank 0; returns whether it asks for a result in the store. Raises: PeerLostError."""
        await self._wait_until(lambda: bool(self._inbox) or self._garbled or self._asked or self._verdict is not None)
        return self._asked

    async def receive_fds(self, others: Sequence[int]) -> tuple[int, dict[int, Handed]]:
        """Receive the segment's descriptor and those of each of ``others``. Raises: BackendError, PeerLostError."""
        fds: list[int] = []
        each = len(self._mine)
        while len(fds) < 1 + each * len(others):
            await self._wait_until(lambda: bool(self._inbox) or self._garbled or self._verdict is not None)
            if not self._inbox:
                raise BackendError(_UNREADABLE)
            message = self._inbox.popleft()
            if not message.whole:
                raise BackendError(_too_many(each * (len(others) + 1)))
            fds += message.fds
        starts = range(1, len(fds), each)
        return fds[0], {rank: tuple(fds[i : i + each]) for rank, i in zip(others, starts, strict=True)}

    async def report(self, problem: str) -> None:
        """Report ``problem`` to rank 0; empty: this rank has mapped the segment."""
        if self._verdict is None and not self._garbled and self._line is not None:
            with contextlib.suppress(OSError):  # the connection reports its own end
                await self._line.send(dumps(_Report(problem)).encode())

    async def verdict(self, problem: str = "") -> str:
        """Wait for the verdict after ``report``: a problem, or empty.

        Raises: BackendError if a message of rank 0 cannot be read, PeerLostError; neither if this rank has a problem.
        """
        if self._verdict is None and not self._garbled:
            try:
                await self._wait_until(lambda: self._garbled or self._verdict is not None)
            except PeerLostError:
                if not problem:
                    raise
        if self._verdict is None and not problem:
            raise BackendError(_UNREADABLE)
        return self._verdict or problem

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for messages of rank 0. Raises: PeerLostError."""
        while not condition():
            if self.gone.done():
                raise self.gone.result()
            self._news.clear()
            await self._news.wait()

    def _disconnect(self) -> None:
        if self._line is not None:
            self._line.close()
        self._sock.close()

    def close(self) -> None:
        self._disconnect()
        self.segment = None


def _raise_from(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # nothing may wait for it: not logged then


def _lost(rank: int) -> PeerLostError:
    return PeerLostError(rank, "it left while the ranks were connecting")


def _too_many(files: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"{os.strerror(errno.EMFILE)}: {files} more exceed the limit of {limit} (ulimit -n)"
