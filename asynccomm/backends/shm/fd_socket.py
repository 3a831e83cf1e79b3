"""Local sockets that carry file descriptors, and ownership of the descriptors."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, final

from asynccomm.control.timing import RETRY_SECONDS

MESSAGE_DESCRIPTORS: Final = 198  # in one message; Linux allows 253
MESSAGE_BYTES: Final = 4096
_ROOM: Final = socket.CMSG_SPACE(MESSAGE_DESCRIPTORS * array.array("i").itemsize)
_TRUNCATED: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


@final
class FdBag:
    """File descriptors that are closed together, once.

    A forked child closes its copies at once: while the child held its parent's end of the liveness pipe, no rank would
    notice the parent's death. The child has no use for them, because a comm does not survive a fork.
    """

    __slots__ = ("__weakref__", "_fds")

    def __init__(self) -> None:
        self._fds: list[int] = []
        _alive.add(self)

    def add(self, fd: int) -> int:
        """Take ownership of ``fd``; returns it."""
        self._fds.append(fd)
        return fd

    def close_one(self, fd: int) -> None:
        """Close ``fd`` before the others, unless it is closed already."""
        if fd in self._fds:
            self._fds.remove(fd)
            os.close(fd)

    def close(self) -> None:
        """Close all descriptors. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())


_alive: weakref.WeakSet[FdBag] = weakref.WeakSet()


def _close_in_child() -> None:
    for descriptors in list(_alive):
        descriptors.close()


os.register_at_fork(after_in_child=_close_in_child)


class Datagram(NamedTuple):
    """A received datagram; the receiver closes its descriptors."""

    data: bytes  #: content; empty: the connection has ended
    fds: list[int]
    whole: bool  #: whether nothing was truncated


@final
class FdSocket:
    """A connection that preserves message boundaries and calls ``receive`` with each message as it arrives."""

    def __init__(self, sock: socket.socket, receive: Callable[[Datagram], object]) -> None:
        self.receive = receive
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self.read)

    def read(self) -> None:
        """Receive the next message now, if there is one."""
        fds = array.array("i")
        data, flags = b"", 0
        ancillary: list[tuple[int, int, bytes]] = []
        for _ in range(2):
            try:  # socket.recv_fds ignores its argument ``flags``
                data, ancillary, flags, _ = self._sock.recvmsg(MESSAGE_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # the peer left data unread; the kernel reports that before the data that the peer had sent
            except OSError:
                pass
            break
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
        if not data:
            self._loop.remove_reader(self._sock.fileno())
        self.receive(Datagram(data, list(fds), not flags & _TRUNCATED))

    async def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message, waiting for room. Raises: OSError if the peer has closed the connection."""
        while True:
            try:
                self.send_now(data, fds)
            except BlockingIOError:
                pass
            except OSError as exc:
                if exc.errno != errno.ETOOMANYREFS:  # the kernel limits the descriptors that a user has in flight
                    raise
            else:
                return
            await asyncio.sleep(RETRY_SECONDS)

    def send_now(self, data: bytes, fds: Sequence[int] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
