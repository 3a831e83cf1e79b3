"""Ranks of one host find the port of their store by a local socket; all ranks have its name.

The socket is an abstract one: it has no file, and ends with its process. Both sides check the user of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from typing import Final, final
from weakref import WeakSet

from asynccomm.control.transport.connection import close_inherited
from asynccomm.control.transport.sockets import local_connection, local_socket, peer_user
from asynccomm.errors import RendezvousError
from asynccomm.store.base import within

FIRST_RETRY: Final = 0.01  # seconds before rank 0 is looked for again; doubles up to LAST_RETRY
LAST_RETRY: Final = 0.2
LEAST_SECONDS: Final = 0.05  # for a rank 0 that is there
END_SECONDS: Final = 1.0  # for the thread to end

_open: WeakSet[PortAnnouncer] = WeakSet()


def meeting_name(job: str) -> str:
    """The name of the socket of a job."""
    return f"asynccomm-meeting/{os.geteuid()}/{job}"


@final
class PortAnnouncer:
    """Answers each connection to the socket ``name`` with ``port``, on a thread. Raises: OSError if it is in use."""

    def __init__(self, name: str, port: int) -> None:
        sock = local_socket(name)
        if sock is None:
            raise OSError(f"this system has no abstract sockets for {name}")
        self._sock = sock
        self._answer = b"%d" % port
        _open.add(self)
        self._thread = threading.Thread(target=self._serve, name="asynccomm meeting", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._sock.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):  # the peer has gone
                if peer_user(connection) == os.geteuid():
                    connection.send(self._answer, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def close(self) -> None:
        """End the socket and the thread. Idempotent."""
        _open.discard(self)
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        except OSError:
            return
        self._thread.join(END_SECONDS)  # the name is in use as long as the thread accepts
        self._sock.close()

    def close_in_child(self) -> None:
        """Close a forked child's copy of the socket, which would keep the name in use."""
        close_inherited(self._sock.fileno())


async def find_port(name: str, timeout: float) -> int:
    """The port that the socket ``name`` announces, once there is one. Cancelling is safe.

    Raises: RendezvousError after ``timeout`` seconds, or if this process cannot ask.
    """
    pause = FIRST_RETRY
    try:
        async with within(max(timeout, LEAST_SECONDS)):
            while True:
                with contextlib.suppress(ConnectionError):  # rank 0 is not there yet, or no more
                    if port := await _ask(name):
                        return port
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_RETRY)
    except TimeoutError:
        message = f"rank 0 did not come to this host within {timeout:g} s (at the socket @{name})"
        raise RendezvousError(message) from None
    except OSError as exc:
        raise RendezvousError(f"cannot ask rank 0 for its store, at the socket @{name}: {exc}") from exc


async def _ask(name: str) -> int:
    """The answer of the socket; 0: none. Raises: OSError."""
    sock = await local_connection(f"\0{name}")  # uvloop takes no abstract names
    if peer_user(sock) != os.geteuid():
        sock.close()
        return 0
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    try:
        text = await reader.read(16)
        return int(text) if text.isdigit() else 0
    finally:
        writer.close()


def _close_in_child() -> None:
    for announcer in _open:
        announcer.close_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
