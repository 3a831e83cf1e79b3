"""Accepts connections on the sockets of one rank.

Unauthenticated connections are limited: at most ``STRANGERS`` at once, at most ``HELLO_SECONDS`` long, with a hello of
limited size, and with no reply but the refusal. A listener logs its first refusal, and the number of refusals when it
closes.

The listener calls ``accept`` itself, because a server of asyncio loses the sockets that it has just accepted when the
loop ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Final, final

from asynccomm.control.transport.connection import ENDED, Connection, Tokens, close_inherited
from asynccomm.control.transport.framing import MESSAGE_BYTES, ControlMessage

STRANGERS: Final = 64  # unauthenticated connections at once; a further connection pushes out the oldest
HELLO_SECONDS: Final = 5.0  # for a new connection to authenticate
AT_ONCE: Final = 128  # connections accepted before other callbacks run
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
    """

    def __init__(
        self,
        tokens: Tokens,
        refusal: Callable[[Any], str],
        welcome: Callable[[Any, Connection], object],
        look: Callable[[Connection, ControlMessage], object],
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None  #: None before the first ``listen``
        self._tokens = tokens
        self._refusal = refusal
        self._welcome = welcome
        self._look = look
        self._socks: list[socket.socket] = []
        self._coming: dict[asyncio.Task[None], socket.socket] = {}  # accepted, not a connection yet
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}
        self._refused = 0
        self._closed = False

    def listen(self, sock: socket.socket) -> None:
        """Accept connections on ``sock``, which the listener then owns."""
        self.loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._socks.append(sock)
        _listening.add(self)
        self.loop.add_reader(sock, self._take, sock)

    def _take(self, sock: socket.socket) -> None:
        assert self.loop is not None
        for _ in range(AT_ONCE):
            try:
                taken, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                _log.warning("a connection to the control socket could not be taken: %s", exc)
                self.loop.remove_reader(sock)  # the socket would stay readable
                self.loop.call_later(PAUSE_SECONDS, self._take_again, sock)
                return
            task = self.loop.create_task(self._connect(taken))
            self._coming[task] = taken
            task.add_done_callback(self._on_accepted)

    def _take_again(self, sock: socket.socket) -> None:
        if not self._closed:
            assert self.loop is not None
            self.loop.add_reader(sock, self._take, sock)

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
            connection.drop("nobody listens any more")
            return
        if connection.user not in (None, os.geteuid()):
            self._refuse(connection, f"it is user {connection.user}'s")
            return
        if len(self._strangers) >= STRANGERS:
            self._refuse(next(iter(self._strangers)), "too many came at once")
        late = connection.loop.call_later(HELLO_SECONDS, self._refuse, connection, "it did not say hello")
        self._strangers[connection] = late

    def _on_hello(self, connection: Connection, message: ControlMessage) -> None:
        timer = self._strangers.pop(connection, None)
        if timer is None:
            return  # already refused
        timer.cancel()
        if "look" in message and connection.user is not None:
            connection.ended = _nothing
            self._look(connection, message)
            return
        if not self._tokens.may_ask(message.get("token")):
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
            if not how.startswith(ENDED):  # else the peer only disconnected
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
        """Stop accepting, and close all unauthenticated connections."""
        if self._closed:
            return
        self._closed = True
        _listening.discard(self)
        for sock in self._socks:
            assert self.loop is not None
            self.loop.remove_reader(sock)
            sock.close()
        for connection in list(self._strangers):
            self._strangers.pop(connection).cancel()
            connection.close()
        if self._refused > 1:
            _log.warning("%d strangers at the control socket were refused", self._refused)


def end_listening() -> None:
    """Close the listeners of the running loop, which is about to end."""
    loop = asyncio.get_running_loop()
    for listener in [listener for listener in list(_listening) if listener.loop is loop]:
        listener.close()


def _nothing(*_: object) -> None:
    pass


def _close_in_child() -> None:
    # a connecting peer would wait for an answer while the child holds the sockets
    for listener in _listening:
        listener.close_in_child()
    _listening.clear()


os.register_at_fork(after_in_child=_close_in_child)
