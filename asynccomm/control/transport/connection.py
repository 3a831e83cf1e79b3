"""Connections of the control channel, and the handshake with a listening rank.

A rank listens on an abstract local socket, which leaves no file behind, and, in a job on several hosts, on a TCP port
of the interface that leads to the other hosts. The connecting side first shows a token from the store; the listening
side replies with a second token. Neither side thus talks to a stranger. On a local socket, both sides also check the
user of the other process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import Annotated, Any, Final, Self, TypeAlias, final

from msgspec import Meta

from asynccomm.control.timing import REACH_SECONDS
from asynccomm.control.transport.framing import MESSAGE_BYTES, Decoder, encode
from asynccomm.control.transport.schema import JsonObject, Message, MessageError, TaggedMessage, decode
from asynccomm.control.transport.sockets import local_connection, peer_user
from asynccomm.control.transport.topology import RankAddress

UNSENT_BYTES: Final = 64 << 20  # unsent data after which a peer that does not read counts as lost
KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # a silent host is lost after about 11 s
USER_TIMEOUT_MS: Final = 10_000  # for a host to acknowledge sent data
UNREACHABLE: Final = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}

ENDED: Final = "its control connection ended"  # the prefix of most reasons

Token: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]

_open: set[Connection] = set()
_last: tuple[object, bytes] = (None, b"")  # the last message sent, and its frame: often it goes to many peers


@final
class Tokens(Message, frozen=True):
    """The secrets that the ranks of a job share."""

    ask: Token  #: shown by the connecting side
    answer: Token  #: shown by the listening side

    @classmethod
    def random(cls) -> Self:
        return cls(secrets.token_hex(16), secrets.token_hex(16))

    @property
    def secret(self) -> bytes:
        """32 bytes that follow from both tokens, for names and tokens that the ranks derive."""
        return hashlib.sha256(f"{self.ask}/{self.answer}".encode()).digest()

    def __repr__(self) -> str:
        return "Tokens(...)"  # they are not for logs

    def may_ask(self, token: str) -> bool:
        """Whether ``token`` allows a peer to connect."""
        return _same(token, self.ask)

    def may_answer(self, token: str) -> bool:
        """Whether ``token`` proves that a peer may listen."""
        return _same(token, self.answer)


@final
class Hello(TaggedMessage, frozen=True):
    """The first message of a connecting rank or newcomer."""

    token: str
    who: int | str


@final
class Look(TaggedMessage, frozen=True):
    """The request of a process outside the job for the states of ranks, in place of a token."""

    stacks: bool = False
    ranks: list[int] | None = None  #: None: all
    flight: bool = False  #: the answers have the flight recorders in place of the states


@final
class Welcome(TaggedMessage, frozen=True):
    """The reply of a listening rank."""

    token: str
    refused: str = ""  #: why the rank refuses the connection; empty: the rank accepts it


@final
class Connection(asyncio.Protocol):
    """One connection, on either side. Runs on the loop that created it.

    Args:
        received: called with each message.
        ended: called once, at the end of the connection, with the reason.
        made: called once the transport exists.
    """

    def __init__(
        self,
        received: Callable[[Connection, JsonObject], object],
        ended: Callable[[Connection, str], object],
        made: Callable[[Connection], object] | None = None,
    ) -> None:
        self.received = received
        self.ended = ended
        self.decoder: Decoder = Decoder()
        self._made = made
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._how = ENDED
        self._held = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        _open.add(self)
        if sock.family != socket.AF_UNIX:
            _set_up_tcp(sock)
        if self._made is not None:
            self._made(self)

    @property
    def user(self) -> int | None:
        """The user id of the peer's process; None: unknown, as on TCP."""
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            return None
        return peer_user(sock)

    def data_received(self, data: bytes) -> None:
        self.decoder.feed(data)
        self._read()

    def _read(self) -> None:
        try:
            while self._transport is not None and not self._held and (message := self.decoder.next()) is not None:
                self.received(self, message)
        except ValueError as exc:
            self.drop(f"its control connection carried an invalid message: {exc}")

    def hold(self) -> None:
        """Keep further messages until the tasks that await this connection have run."""
        self._held = True
        self.loop.call_soon(self._release)

    def _release(self) -> None:
        self._held = False
        self._read()

    def send(self, message: object) -> None:
        """Queue ``message``, which does not change any more, for sending."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(_encoded(message))
        if transport.get_write_buffer_size() > UNSENT_BYTES:
            self.drop("it does not read its messages")

    def close(self) -> None:
        """Close the connection after the queued messages, without a call of ``ended``."""
        self.ended = _nothing
        if self._transport is not None:
            self._transport.close()

    def drop(self, how: str) -> None:
        """Abort the connection for the reason ``how``."""
        self._how = how
        if self._transport is not None:
            self._transport.abort()

    def close_in_child(self) -> None:
        """Close a forked child's copy of the connection without sending anything to the parent's peer."""
        if self._transport is not None:
            close_inherited(self._transport.get_extra_info("socket").fileno())

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, OSError):
            self._read_remaining()
        self._transport = None
        _open.discard(self)
        if exc is not None and self._how == ENDED:
            self._how = f"{ENDED}: {exc}"
        ended, self.ended = self.ended, _nothing
        self.received = _nothing
        ended(self, self._how)

    def _read_remaining(self) -> None:
        """Read the remaining data after a failed write: the peer's last messages, such as its leave, may be there."""
        assert self._transport is not None
        fd = self._transport.get_extra_info("socket").fileno()
        with contextlib.suppress(OSError):
            while data := os.read(fd, 1 << 16):
                self.data_received(data)


async def connect(
    contact: RankAddress,
    local: bool,
    tokens: Tokens,
    who: int | str,
    received: Callable[[Connection, JsonObject], object],
    ended: Callable[[Connection, str], object],
    farewell: Callable[[], object] = lambda: None,
) -> Connection:
    """Connect to a rank and complete the handshake.

    Args:
        local: whether the rank is on this host; then its local socket is tried before its TCP port.
        farewell: makes the last message to the rank, or None, when the wait for its answer is cancelled.

    Raises: OSError: the rank cannot be reached; PermissionError, with the peer's reason: the rank refuses this rank.
    """
    problem: OSError | None = None
    if local and contact.local:
        try:
            return await _connect(f"\0{contact.local}", tokens, who, received, ended, farewell)
        except PermissionError:
            raise
        except OSError as exc:
            problem = exc
    if contact.port:
        return await _connect((contact.address, contact.port), tokens, who, received, ended, farewell)
    raise problem or OSError(errno.EHOSTUNREACH, f"rank {contact.rank} has no address that can be reached from here")


async def _connect(
    address: str | tuple[str, int],
    tokens: Tokens,
    who: int | str,
    received: Callable[[Connection, JsonObject], object],
    ended: Callable[[Connection, str], object],
    farewell: Callable[[], object],
) -> Connection:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[None] = loop.create_future()

    def on_answer(connection: Connection, data: JsonObject) -> None:
        if answer.done():
            return
        welcome: Welcome = decode(Welcome, data)
        if not tokens.may_answer(welcome.token):
            raise MessageError("its token is wrong")
        if welcome.refused:
            answer.set_exception(PermissionError(errno.EACCES, welcome.refused))
            return
        connection.decoder.limit = MESSAGE_BYTES
        connection.received, connection.ended = received, ended
        answer.set_result(None)
        connection.hold()

    def on_end(connection: Connection, how: str) -> None:
        if not answer.done():
            answer.set_exception(ConnectionResetError(errno.ECONNRESET, how))

    connection = Connection(on_answer, on_end)
    sock = None
    if isinstance(address, str):
        sock = await local_connection(address)
        user = peer_user(sock)
        if user != os.geteuid():
            sock.close()
            # the rank is gone, and another user's process has its name: read nothing from that process
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"a process of user {user} listens there")
    try:
        if sock is not None:
            await loop.create_unix_connection(lambda: connection, sock=sock)
        else:
            assert not isinstance(address, str)
            async with asyncio.timeout(REACH_SECONDS):  # the system's own limit is about two minutes
                await loop.create_connection(lambda: connection, *address)
        connection.send(Hello(tokens.ask, who))
        await answer
        return connection
    except BaseException as exc:
        answer.cancel()
        if not answer.cancelled():
            answer.exception()  # marks the exception as retrieved
        elif (last := farewell()) is not None:
            connection.send(last)
        connection.close()
        if isinstance(exc, TimeoutError) and not exc.errno:
            raise OSError(errno.ETIMEDOUT, f"no answer within {REACH_SECONDS:g} s") from None
        raise


async def listens(contact: RankAddress, local: bool) -> bool | None:
    """Whether a rank may still listen.

    Returns: False: the system of its host refuses the connection; None: its host cannot be reached.
    """
    loop = asyncio.get_running_loop()
    address: Any = f"\0{contact.local}" if local and contact.local else (contact.address, contact.port)
    try:
        if isinstance(address, str):
            with await local_connection(address) as sock:
                return peer_user(sock) == os.geteuid()
        async with asyncio.timeout(REACH_SECONDS):
            transport, _ = await loop.create_connection(asyncio.Protocol, *address)
    except ConnectionRefusedError:
        return False
    except OSError as exc:
        return None if isinstance(exc, TimeoutError) or exc.errno in UNREACHABLE else True
    transport.abort()
    return True


async def end_connections() -> None:
    """Abort the connections of the running loop, which is about to end, and wait until their sockets are closed.

    A closed connection may still have an open socket, as long as the peer does not read the data sent to it.
    """
    loop = asyncio.get_running_loop()
    while mine := [connection for connection in list(_open) if connection.loop is loop]:
        for connection in mine:
            connection.close()
            connection.drop(ENDED)
        await asyncio.sleep(0)


def _same(token: str, expected: str) -> bool:
    return secrets.compare_digest(token.encode(errors="replace"), expected.encode())


def _set_up_tcp(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # of accepted sockets, asyncio does not set it
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def _nothing(*_: object) -> None:
    pass


def close_inherited(fd: int) -> None:
    """Close the resource behind ``fd``; the owner of ``fd`` still closes the descriptor itself."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, fd, inheritable=False)
    os.close(null)


def _close_in_child() -> None:
    # no peer would see the parent die while the child holds its connections
    for connection in _open:
        connection.close_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _encoded(message: object) -> bytes:
    global _last
    last, frame = _last
    if message is not last:
        frame = encode(message)
        _last = message, frame
    return frame
