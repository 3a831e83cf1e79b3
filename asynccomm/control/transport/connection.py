"""Connections of the control channel, and how to connect to a rank that listens.

A rank listens at an abstract local socket, which no file can outlive, and where the ranks are on several hosts at a TCP
port of the interface that leads to the others. Who connects shows a token from the store first, and is shown another
one, so that neither side talks to a stranger; on a local socket both look at the user of the other process, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, final

from asynccomm.control.transport.framing import MESSAGE_BYTES, ControlMessage, Decoder, GarbledError, encode
from asynccomm.control.transport.topology import RankAddress

UNSENT_BYTES: Final = 64 << 20  # towards one that does not read any more: as good as gone
RETRY_SECONDS: Final = 0.005  # until another try to connect to a local socket whose line is full
KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # a silent host is gone after about 11 s
USER_TIMEOUT_MS: Final = 10_000  # for what was sent to be received by a host

ENDED: Final = "its control connection ended"  # begins how most do

_credentials = struct.Struct("=iII")  # process, user, group
_open: set[Connection] = set()


@final
class Tokens:
    """What the ranks of a job know, and strangers do not."""

    __slots__ = ("answer", "ask")

    def __init__(self, ask: str = "", answer: str = "") -> None:
        self.ask = ask or secrets.token_hex(16)  #: shown by who connects
        self.answer = answer or secrets.token_hex(16)  #: shown by who listens

    def may_ask(self, token: Any) -> bool:
        """Whether who shows ``token`` may connect."""
        return _same(token, self.ask)

    def may_answer(self, token: Any) -> bool:
        """Whether who shows ``token`` may listen."""
        return _same(token, self.answer)


@final
class Connection(asyncio.Protocol):
    """One connection, either side. On the loop it was made on.

    Args:
        received: called with each message.
        ended: called once, when it is over, with what is known of that.
    """

    def __init__(
        self,
        received: Callable[[Connection, ControlMessage], object],
        ended: Callable[[Connection, str], object],
        made: Callable[[Connection], object] | None = None,
    ) -> None:
        self.received = received
        self.ended = ended
        self.decoder = Decoder()
        self._made = made
        self.loop = asyncio.get_running_loop()
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
        self.loop.call_soon(self._release)

    def _release(self) -> None:
        self._held = False
        self._read()

    def send(self, message: ControlMessage) -> None:
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
            close_inherited(self._transport.get_extra_info("socket").fileno())

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


async def connect(
    contact: RankAddress,
    local: bool,
    tokens: Tokens,
    who: int | str,
    received: Callable[[Connection, ControlMessage], object],
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
    received: Callable[[Connection, ControlMessage], object],
    ended: Callable[[Connection, str], object],
) -> Connection:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[None] = loop.create_future()

    def hear(connection: Connection, message: ControlMessage) -> None:
        if answer.done():
            return
        if not tokens.may_answer(message.get("token")):
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


async def listens(contact: RankAddress, local: bool) -> bool:
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


async def end_connections() -> None:
    """End those of this loop at once, and wait until their sockets are closed: the loop ends.

    One that was closed may be open still, as long as the other side does not read what was sent to it.
    """
    loop = asyncio.get_running_loop()
    while mine := [connection for connection in list(_open) if connection.loop is loop]:
        for connection in mine:
            connection.close()
            connection.drop(ENDED)
        await asyncio.sleep(0)


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


def close_inherited(fd: int) -> None:
    """Close what ``fd`` stands for, and leave it to its owner to close ``fd`` itself."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, fd, inheritable=False)
    os.close(null)


def _close_in_child() -> None:
    # as long as the child held them, nobody would see the parent die
    for connection in _open:
        connection.close_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
