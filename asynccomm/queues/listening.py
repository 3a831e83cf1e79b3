"""The sockets at which the other ends of a queue attach.

On one host, an end attaches at an abstract local socket, which leaves no file behind: both sides check the other's
user and token, and the ring's descriptor comes with the reply. The socket stays, as the doorbell. From other hosts an
end attaches over TCP, if the queue listens there, with the same tokens; frames follow on the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

from asynccomm.backends.shm.fd_socket import Datagram, FdSocket
from asynccomm.control.transport.admission import WRONG_TOKEN, Admission
from asynccomm.control.transport.connection import Tokens, close_inherited
from asynccomm.control.transport.framing import HELLO_BYTES, encode
from asynccomm.control.transport.schema import Message, MessageError, dumps, loads
from asynccomm.control.transport.sockets import BACKLOG, connect_in_turn, peer_user, tcp_socket
from asynccomm.core.hosts import host_name
from asynccomm.queues.bridge import Streams
from asynccomm.queues.options import QueueHandle, QueueHello, QueueWelcome

_GARBAGE: Final = "without a hello"


@final
@dataclass(frozen=True, slots=True)
class Admitted:
    """The answer to a hello that has the token."""

    welcome: QueueWelcome
    fd: int = -1  #: of the ring; closed once it is sent
    attach: Callable[[Any], object] | None = None  #: called with the socket, or the streams of TCP; None: refused


@final
class QueueListener:
    """Accepts ends of one queue, on the loop that made it.

    Args:
        admit: called with a hello, and whether it came over TCP.
        expected: ends that may attach at the same time.
    """

    def __init__(self, admit: Callable[[QueueHello, bool], Admitted], expected: int) -> None:
        self.tokens: Tokens = Tokens.random()
        self.name: str = f"asynccomm-queue/{os.getpid()}/{secrets.token_hex(8)}"
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._local: Admission[FdSocket] = Admission("a queue", _close_local, expected, FdSocket.read)
        self._remote: Admission[asyncio.StreamWriter] = Admission("a queue", lambda w, _: w.close(), expected)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._tcp: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._accept)
        _listening.add(self)

    async def listen_tcp(self, address: str) -> int:
        """Listen at the interface that has ``address``, too; returns the port. Raises: OSError."""
        self._tcp = await asyncio.start_server(self._greet, sock=tcp_socket(address))
        return int(self._tcp.sockets[0].getsockname()[1])

    def handle(self, attaches: str, label: str, rank: int, address: str, port: int) -> QueueHandle:
        ask, answer = self.tokens.ask, self.tokens.answer
        return QueueHandle(host_name(), self.name, address, port, ask, answer, attaches, label, rank)

    # -- on this host -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:  # none left, or no descriptors: the loop calls again
            return
        line = FdSocket(sock, lambda message: self._on_hello(line, sock, message))
        self._local.add(line, peer_user(sock))

    def _on_hello(self, line: FdSocket, sock: socket.socket, message: Datagram) -> None:
        for fd in message.fds:
            os.close(fd)
        hello = self._parse(message.data)
        if isinstance(hello, str):
            self._local.refuse(line, hello)
            return
        self._local.remove(line)
        admitted = self._admit(hello, False)
        try:
            line.send_now(dumps(admitted.welcome).encode(), [admitted.fd] if admitted.fd >= 0 else [])
        except OSError:
            pass  # the end of the connection shows that it is lost
        finally:
            if admitted.fd >= 0:
                os.close(admitted.fd)
        if admitted.attach is None:
            line.close()
        else:
            admitted.attach(sock)

    def _parse(self, data: bytes) -> QueueHello | str:
        """A hello with the token, or the reason to refuse it."""
        with contextlib.suppress(MessageError):
            hello: QueueHello = loads(QueueHello, data)
            return hello if self.tokens.may_ask(hello.token) else WRONG_TOKEN
        return _GARBAGE

    # -- over TCP -----------------------------------------------------------------------------------------------------

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._remote.add(writer, None)
        hello = self._parse(await read_message(reader))
        if not self._remote.remove(writer):
            return  # refused for another reason
        if isinstance(hello, str):
            self._remote.count(hello)
            writer.close()
            return
        admitted = self._admit(hello, True)
        with contextlib.suppress(OSError):
            send_message(writer, admitted.welcome)
        if admitted.attach is None:
            writer.close()
        else:
            admitted.attach((reader, writer))

    def close(self) -> None:
        """Accept no more ends; those that have attached stay. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        if self._tcp is not None:
            self._tcp.close()
        for line in list(self._local.waiting):
            self._local.remove(line)
            line.close()
        for writer in list(self._remote.waiting):
            self._remote.remove(writer)
            writer.close()
        self._local.log_refusals()
        self._remote.log_refusals()
        _listening.discard(self)
        self._admit = partial(_admit_none, self.tokens.answer)  # the other one leads to the rings of the queue

    def close_in_child(self) -> None:
        for sock in (self._socket, *(self._tcp.sockets if self._tcp is not None else ())):
            if sock.fileno() >= 0:
                close_inherited(sock.fileno())


def _admit_none(token: str, hello: QueueHello, remote: bool) -> Admitted:
    return Admitted(QueueWelcome(token, refused="the queue is closed"))


def _close_local(line: FdSocket, reason: str) -> None:
    line.close()


def send_message(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(encode(message))


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """One short message; empty: there is none."""
    with contextlib.suppress(OSError, EOFError):
        length = int.from_bytes(await reader.readexactly(4), "big")
        if length <= HELLO_BYTES:
            return await reader.readexactly(length)
    return b""


async def connect_local(handle: QueueHandle, hello: QueueHello) -> tuple[socket.socket, QueueWelcome, int]:
    """Attach at the local socket; returns the socket, the reply and the ring's descriptor.

    Raises: OSError: it cannot be reached; PermissionError: it refuses this process.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line: FdSocket | None = None
    reply: asyncio.Future[bytes] = loop.create_future()
    fds: list[int] = []

    def on_reply(message: Datagram) -> None:
        loop.remove_reader(sock.fileno())  # a doorbell reads the later messages
        fds.extend(message.fds)
        if not reply.done():  # not cancelled in this iteration of the loop
            reply.set_result(message.data)

    try:
        await connect_in_turn(sock, f"\0{handle.local}")
        if (user := peer_user(sock)) != os.geteuid():
            raise PermissionError(f"the queue belongs to user {user}")
        line = FdSocket(sock, on_reply)
        line.send_now(dumps(hello).encode())
        data = await reply
        return sock, _check(handle, data, len(fds)), fds[0]
    except BaseException:
        for fd in fds:
            os.close(fd)
        if line is not None:
            line.close()
        sock.close()
        raise


async def connect_tcp(handle: QueueHandle, hello: QueueHello) -> tuple[Streams, QueueWelcome]:
    """Attach over TCP. Raises: OSError: it cannot be reached; PermissionError: it refuses this process."""
    reader, writer = await asyncio.open_connection(handle.address, handle.port)
    try:
        send_message(writer, hello)
        return (reader, writer), _check(handle, await read_message(reader), 1)
    except BaseException:
        writer.close()
        raise


def _check(handle: QueueHandle, data: bytes, descriptors: int) -> QueueWelcome:
    if not data:
        raise PermissionError("it closed the connection")
    try:
        welcome: QueueWelcome = loads(QueueWelcome, data)
    except MessageError as exc:
        raise PermissionError(f"its reply cannot be read: {exc}") from exc
    if not Tokens(handle.ask, handle.answer).may_answer(welcome.token):
        raise PermissionError("its token is wrong")
    if welcome.refused or descriptors != 1:
        raise PermissionError(welcome.refused or "it sent no ring")
    return welcome


_listening: weakref.WeakSet[QueueListener] = weakref.WeakSet()


def _close_in_child() -> None:
    for listener in list(_listening):
        listener.close_in_child()
    _listening.clear()


os.register_at_fork(after_in_child=_close_in_child)
