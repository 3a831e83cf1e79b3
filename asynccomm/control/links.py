"""Connections of the control channel: who may listen, connect and be let in.

A rank listens at an abstract local socket, which no file can outlive, and where the ranks are on several hosts at a TCP
port of the interface that leads to the others. Who connects shows a token from the store first, and is shown another
one, so that neither side talks to a stranger; on a local socket both look at the user of the other process, too.

Strangers are kept short: so many at once and no longer than some seconds, a hello of limited size, and nothing said to
them but that they are refused. The first refusal of a listener is logged, and how many there were when it closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, Final, final

from asynccomm.control.frames import MESSAGE_BYTES, Decoder, GarbledError, Message, encode
from asynccomm.control.roster import Contact

__all__ = ["Connection", "Listener", "Tokens", "connect", "listens", "local_socket", "tcp_socket"]

STRANGERS: Final = 64  # connections that have not said who they are, at once; more push out the oldest
HELLO_SECONDS: Final = 5.0  # for a stranger to say it
UNSENT_BYTES: Final = 64 << 20  # towards one that does not read any more: as good as gone
RETRY_SECONDS: Final = 0.005  # until another try to connect to a local socket whose line is full
KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # a silent host is gone after about 11 s
USER_TIMEOUT_MS: Final = 10_000  # for what was sent to be received by a host

ENDED: Final = "its control connection ended"

_credentials = struct.Struct("=iII")  # process, user, group
_log = logging.getLogger("asynccomm")
_open: set[Connection] = set()
_listening: set[Listener] = set()


@final
class Tokens:
    """What the ranks of a job know, and strangers do not."""

    __slots__ = ("answer", "ask")

    def __init__(self, ask: str = "", answer: str = "") -> None:
        self.ask = ask or secrets.token_hex(16)  #: shown by who connects
        self.answer = answer or secrets.token_hex(16)  #: shown by who listens


@final
class Connection(asyncio.Protocol):
    """One connection, either side. On the loop it was made on.

    Args:
        received: called with each message.
        ended: called once, when it is over, with what is known of that.
    """

    def __init__(
        self,
        received: Callable[[Connection, Message], object],
        ended: Callable[[Connection, str], object],
        made: Callable[[Connection], object] | None = None,
    ) -> None:
        self.received = received
        self.ended = ended
        self.decoder = Decoder()
        self._made = made
        self._transport: asyncio.Transport | None = None
        self._how = ENDED
        self._held = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        _open.add(self)
        if sock.family != socket.AF_UNIX:
            _keep_alive(sock)
        if self._made is not None:
            self._made(self)

    @property
    def user(self) -> int | None:
        """Who is on the other side, if the system knows."""
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            return None
        return _user(sock)

    def data_received(self, data: bytes) -> None:
        self.decoder.feed(data)
        self._read()

    def _read(self) -> None:
        try:
            while self._transport is not None and not self._held and (message := self.decoder.next()) is not None:
                self.received(self, message)
        except ValueError as exc:
            self.drop(f"its control connection carried nonsense: {exc}")

    def hold(self) -> None:
        """Keep what follows until those who wait for this connection have run, and know what to do with it."""
        self._held = True
        asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        self._held = False
        self._read()

    def send(self, message: Message) -> None:
        """Put ``message`` on its way."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(encode(message))
        if transport.get_write_buffer_size() > UNSENT_BYTES:
            self.drop("it does not read what is sent to it")

    def close(self) -> None:
        """End it, after what was sent; ``ended`` is not called any more."""
        self.ended = _nothing
        if self._transport is not None:
            self._transport.close()

    def drop(self, how: str) -> None:
        """End it at once."""
        self._how = how
        if self._transport is not None:
            self._transport.abort()

    def close_in_child(self) -> None:
        """This is a forked child: let go of the connection, which is the parent's, without a word over it."""
        if self._transport is not None:
            _replace(self._transport.get_extra_info("socket").fileno())

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, OSError):
            self._read_the_rest()
        self._transport = None
        _open.discard(self)
        if exc is not None and self._how == ENDED:
            self._how = f"{ENDED}: {exc}"
        ended, self.ended = self.ended, _nothing
        self.received = _nothing
        ended(self, self._how)

    def _read_the_rest(self) -> None:
        """Writing failed. What the other side has said before it went may be here still, a goodbye for one."""
        assert self._transport is not None
        fd = self._transport.get_extra_info("socket").fileno()
        with contextlib.suppress(OSError):
            while data := os.read(fd, 1 << 16):
                self.data_received(data)


@final
class Listener:
    """Takes connections on the sockets of one rank. On the control thread's loop.

    Args:
        refusal: asked of one that has shown the token, with who it says it is: why it cannot be let in, or nothing.
        welcome: called with one that can.
        look: called with one that only wants to look, of the same user on the same host, and its question.
    """

    def __init__(
        self,
        tokens: Tokens,
        refusal: Callable[[Any], str],
        welcome: Callable[[Any, Connection], object],
        look: Callable[[Connection, Message], object],
    ) -> None:
        self._tokens = tokens
        self._refusal = refusal
        self._welcome = welcome
        self._look = look
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}
        self._servers: list[asyncio.Server] = []
        self._refused = 0
        self._closed = False

    async def listen(self, sock: socket.socket) -> None:
        """Take connections on ``sock``, which becomes ours."""
        loop = asyncio.get_running_loop()
        make = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
        _listening.add(self)
        server = await make(lambda: Connection(self._greet, self._ended, self._arrived), sock=sock)
        self._servers.append(server)
        if self._closed:  # meanwhile
            self.close()

    def close_in_child(self) -> None:
        """This is a forked child: as for a connection."""
        for server in self._servers:
            for sock in server.sockets:
                _replace(sock.fileno())

    def _arrived(self, connection: Connection) -> None:
        if self._closed:  # it had been taken already
            connection.drop("nobody listens any more")
            return
        if connection.user not in (None, os.geteuid()):
            self._refuse(connection, f"it is user {connection.user}'s")
            return
        if len(self._strangers) >= STRANGERS:
            self._refuse(next(iter(self._strangers)), "too many came at once")
        late = asyncio.get_running_loop().call_later(HELLO_SECONDS, self._refuse, connection, "it did not say hello")
        self._strangers[connection] = late

    def _greet(self, connection: Connection, message: Message) -> None:
        timer = self._strangers.pop(connection, None)
        if timer is None:
            return  # it was refused
        timer.cancel()
        if "look" in message and connection.user is not None:
            connection.ended = _nothing
            self._look(connection, message)
            return
        if not _same(message.get("token"), self._tokens.ask):
            self._refuse(connection, "it does not know the token")
            return
        who = message.get("who")
        problem = self._refusal(who)
        connection.send({"token": self._tokens.answer, "refused": problem})
        if problem:
            connection.close()
        else:
            connection.decoder.limit = MESSAGE_BYTES
            self._welcome(who, connection)

    def _ended(self, connection: Connection, how: str) -> None:
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
            if not how.startswith(ENDED):  # else it has changed its mind
                self._count(how)

    def _refuse(self, connection: Connection, reason: str) -> None:
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        connection.ended = _nothing
        connection.received = _nothing
        connection.drop(reason)
        self._count(reason)

    def _count(self, reason: str) -> None:
        self._refused += 1
        if self._refused == 1:
            _log.warning("a stranger at the control socket was refused: %s; others are only counted", reason)

    def close(self) -> None:
        """Take no more connections."""
        self._closed = True
        for server in self._servers:
            loop = server.get_loop()
            for sock in server.sockets:
                loop.remove_reader(sock.fileno())
            # one that was just taken needs the server for another turn, or asyncio would lose its socket
            loop.call_soon(loop.call_soon, server.close)
        _listening.discard(self)
        for connection in list(self._strangers):
            self._strangers.pop(connection).cancel()
            connection.close()
        if self._refused > 1:
            _log.warning("%d strangers at the control socket were refused", self._refused)


async def connect(
    contact: Contact,
    local: bool,
    tokens: Tokens,
    who: int | str,
    received: Callable[[Connection, Message], object],
    ended: Callable[[Connection, str], object],
) -> Connection:
    """Connect to a rank and be let in.

    Args:
        local: whether it is on this host: by its local socket then, if it can be reached so.

    Raises: OSError; PermissionError with what the other side says if it refuses this rank.
    """
    problem: OSError | None = None
    if local and contact.local:
        try:
            return await _connect(f"\0{contact.local}", tokens, who, received, ended)
        except PermissionError:
            raise
        except OSError as exc:
            problem = exc
    if contact.port:
        return await _connect((contact.address, contact.port), tokens, who, received, ended)
    raise problem or OSError(errno.EHOSTUNREACH, f"rank {contact.rank} has no address that can be reached from here")


async def _connect(
    address: str | tuple[str, int],
    tokens: Tokens,
    who: int | str,
    received: Callable[[Connection, Message], object],
    ended: Callable[[Connection, str], object],
) -> Connection:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[None] = loop.create_future()

    def hear(connection: Connection, message: Message) -> None:
        if answer.done():
            return
        if not _same(message.get("token"), tokens.answer):
            raise GarbledError("it does not know the answer")
        if refused := message.get("refused"):
            answer.set_exception(PermissionError(errno.EACCES, str(refused)))
            return
        connection.decoder.limit = MESSAGE_BYTES
        connection.received, connection.ended = received, ended
        answer.set_result(None)
        connection.hold()

    def over(connection: Connection, how: str) -> None:
        if not answer.done():
            answer.set_exception(ConnectionResetError(errno.ECONNRESET, how))

    connection = Connection(hear, over)
    sock = None
    if isinstance(address, str):
        sock = await _local(address)
        user = _user(sock)
        if user != os.geteuid():
            sock.close()
            # not that rank, which is gone, and not a word of it is to be believed
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"who listens there is user {user}'s")
    try:
        if sock is not None:
            await loop.create_unix_connection(lambda: connection, sock=sock)
        else:
            assert not isinstance(address, str)
            await loop.create_connection(lambda: connection, *address)
        connection.send({"token": tokens.ask, "who": who})
        await answer
        return connection
    except BaseException:
        answer.cancel()
        if not answer.cancelled():
            answer.exception()  # nobody will look at it
        connection.close()
        raise


async def listens(contact: Contact, local: bool) -> bool:
    """Whether a rank still listens, for all that can be told: False if the system of its host refuses to connect."""
    loop = asyncio.get_running_loop()
    address: Any = f"\0{contact.local}" if local and contact.local else (contact.address, contact.port)
    try:
        if isinstance(address, str):
            with await _local(address) as sock:
                return _user(sock) == os.geteuid()
        transport, _ = await loop.create_connection(asyncio.Protocol, *address)
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    transport.abort()
    return True


def _user(sock: socket.socket) -> int:
    """Who is on the other side of a local socket."""
    return int(_credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size))[1])


def _same(token: Any, expected: str) -> bool:
    return isinstance(token, str) and secrets.compare_digest(token.encode(errors="replace"), expected.encode())


async def _local(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        while True:
            try:
                sock.connect(address)
                return sock
            except BlockingIOError:  # its line is full; unlike TCP, this does not go on by itself
                await asyncio.sleep(RETRY_SECONDS)
    except BaseException:
        sock.close()
        raise


def local_socket(name: str) -> socket.socket | None:
    """A listening socket of that abstract name; None where the system has no such thing."""
    if sys.platform != "linux":
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{name}")
        sock.listen(512)
    except OSError:
        sock.close()
        raise
    return sock


def tcp_socket(address: str) -> socket.socket:
    """A listening TCP socket at any free port of the interface that has ``address``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((address, 0))
        sock.listen(512)
    except OSError:
        sock.close()
        raise
    return sock


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def _nothing(*_: object) -> None:
    pass


def _replace(fd: int) -> None:
    """Close what ``fd`` stands for, and leave it to its owner to close ``fd`` itself."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, fd, inheritable=False)
    os.close(null)


def _close_in_child() -> None:
    # as long as the child held them, nobody would see the parent die
    for connection in _open:
        connection.close_in_child()
    for listener in _listening:
        listener.close_in_child()
    _open.clear()
    _listening.clear()


os.register_at_fork(after_in_child=_close_in_child)
