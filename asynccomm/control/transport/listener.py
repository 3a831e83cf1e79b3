"""Accepts connections on the sockets of one rank.

``admission`` limits the connections that have not authenticated: their hello has a limited size, and the only reply to
them is the reason for a refusal.

The listener calls ``accept`` itself, because a server of asyncio loses the sockets that it has just accepted when the
loop ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Final, final

from asynccomm.control.transport.admission import WRONG_TOKEN, Admission
from asynccomm.control.transport.connection import ENDED, Connection, Hello, Look, Tokens, Welcome, close_inherited
from asynccomm.control.transport.framing import MESSAGE_BYTES
from asynccomm.control.transport.schema import JsonObject, decode

AT_ONCE: Final = 128  # connections accepted before other callbacks run
OTHER_HOST: Final = "a diagnosis from another host"
PAUSE_SECONDS: Final = 1.0  # before accepting again after an error, such as a lack of descriptors

_log = logging.getLogger("asynccomm")
_listening: set[Listener] = set()


@final
class Listener:
    """Accepts connections on the sockets of one rank. Runs on the control thread's loop.

    Args:
        refusal: called with the identity that an authenticated peer claims; returns the reason to refuse it, or "".
        welcome: called with the identity and the connection of an accepted peer.
        look: called with the connection and the request of a diagnosing process (same user, same host, no token).
        expected: ranks that may connect at the same time.
    """

    def __init__(
        self,
        tokens: Tokens,
        refusal: Callable[[int | str], str],
        welcome: Callable[[int | str, Connection], object],
        look: Callable[[Connection, Look], object],
        expected: int = 0,
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None  #: None before the first ``listen``
        self._tokens = tokens
        self._refusal = refusal
        self._welcome = welcome
        self._look = look
        self._socks: list[socket.socket] = []
        self._coming: dict[asyncio.Task[None], socket.socket] = {}  # accepted, not a connection yet
        self.admission: Admission[Connection] = Admission("the control channel", _drop, expected)
        self._closed = False

    def listen(self, sock: socket.socket) -> None:
        """Accept connections on ``sock``, which the listener then owns."""
        self.loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._socks.append(sock)
        _listening.add(self)
        self.loop.add_reader(sock.fileno(), self._take, sock)

    def _take(self, sock: socket.socket) -> None:
        assert self.loop is not None
        for _ in range(AT_ONCE):
            try:
                taken, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                _log.warning("the control channel could not accept a connection: %s", exc)
                self.loop.remove_reader(sock.fileno())  # the socket would stay readable
                self.loop.call_later(PAUSE_SECONDS, self._take_again, sock)
                return
            task = self.loop.create_task(self._connect(taken))
            self._coming[task] = taken
            task.add_done_callback(self._on_accepted)

    def _take_again(self, sock: socket.socket) -> None:
        if not self._closed:
            assert self.loop is not None
            self.loop.add_reader(sock.fileno(), self._take, sock)

    async def _connect(self, taken: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: Connection(self._on_hello, self._ended, self._on_connected), taken)

    def _on_accepted(self, task: asyncio.Task[None]) -> None:
        taken = self._coming.pop(task)
        if task.cancelled() or task.exception() is not None:
            taken.close()  # a task cancelled before its start closes nothing

    def close_in_child(self) -> None:
        """Close a forked child's copies of the parent's sockets."""
        for sock in (*self._socks, *self._coming.values()):
            close_inherited(sock.fileno())

    def _on_connected(self, connection: Connection) -> None:
        if self._closed:  # accepted before the listener closed
            connection.drop("the listener has closed")
            return
        self.admission.add(connection, connection.user)

    def _on_hello(self, connection: Connection, data: JsonObject) -> None:
        if connection not in self.admission.waiting:
            return  # already refused
        hello: Hello | Look = decode(Hello | Look, data)
        self.admission.remove(connection)
        if isinstance(hello, Look):
            if connection.user is None:
                self.admission.refuse(connection, OTHER_HOST)
            else:
                connection.ended = _nothing
                self._look(connection, hello)
            return
        if not self._tokens.may_ask(hello.token):
            self.admission.refuse(connection, WRONG_TOKEN)
            return
        problem = self._refusal(hello.who)
        connection.send(Welcome(self._tokens.answer, problem))
        if problem:
            connection.close()
        else:
            connection.decoder.limit = MESSAGE_BYTES
            self._welcome(hello.who, connection)

    def _ended(self, connection: Connection, how: str) -> None:
        if self.admission.remove(connection) and not how.startswith(ENDED):  # else the peer only disconnected
            self.admission.count(how)

    def close(self) -> None:
        """Stop accepting, and close all unauthenticated connections."""
        if self._closed:
            return
        self._closed = True
        _listening.discard(self)
        for sock in self._socks:
            assert self.loop is not None
            self.loop.remove_reader(sock.fileno())
            sock.close()
        for connection in list(self.admission.waiting):
            self.admission.remove(connection)
            connection.close()
        self.admission.log_refusals()


def end_listening() -> None:
    """Close the listeners of the running loop, which is about to end."""
    loop = asyncio.get_running_loop()
    for listener in [listener for listener in list(_listening) if listener.loop is loop]:
        listener.close()


def _drop(connection: Connection, reason: str) -> None:
    connection.ended = connection.received = _nothing
    connection.drop(reason)


def _nothing(*_: object) -> None:
    pass


def _close_in_child() -> None:
    # a connecting peer would wait for an answer while the child holds the sockets
    for listener in _listening:
        listener.close_in_child()
    _listening.clear()


os.register_at_fork(after_in_child=_close_in_child)
