"""The connection between a writer and a reader of one ring: it wakes, and its end shows the other end's loss.

A sleeper sets its word in the ring and looks once more; the other side, after a publication, clears the word and sends
one byte. So only sleepers are woken, and many publications wake once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import weakref
from collections.abc import Callable
from typing import final

from asynccomm.control.transport.connection import close_inherited

WAKE, BYE = b"w", b"b"


@final
class Doorbell:
    """One side of the connection, on the loop that made it.

    Args:
        on_wake: called when the other side has published something.
        on_end: called once when the connection ends, with whether the other side has left in order.
    """

    def __init__(self, sock: socket.socket, on_wake: Callable[[], object], on_end: Callable[[bool], object]) -> None:
        self.on_wake, self.on_end = on_wake, on_end
        #: called before the descriptor is closed, which is then another one's
        self.before_close: Callable[[], object] = _nothing
        self._sock = sock
        self._bye = self._closed = False
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._receive)
        _open.add(self)

    @property
    def fileno(self) -> int:
        return self._sock.fileno()

    def _receive(self) -> None:
        reset = False
        while not self._closed:
            try:
                data = self._sock.recv(1)
            except BlockingIOError:
                return
            except ConnectionResetError:  # the other side has left before it read all: its BYE follows
                reset = True
                continue
            except OSError:
                data = b""
            self._bye = self._bye or data == BYE
            if not data:
                on_end = self.on_end
                self.close()
                on_end(self._bye)
            else:
                self.on_wake()
                if not reset:  # libuv watches a socket no more once it had an error: the rest is read now
                    return

    def ring(self) -> None:
        """Wake the other side. From any thread."""
        with contextlib.suppress(OSError):  # lost, or full of rings that have not been read
            self._sock.send(WAKE, socket.MSG_NOSIGNAL)

    def leave(self) -> None:
        """End the connection in order."""
        if not self._closed:
            with contextlib.suppress(OSError):
                self._sock.send(BYE, socket.MSG_NOSIGNAL)
            self.close()

    def close(self) -> None:
        """End the connection as a loss. Idempotent."""
        if not self._closed:
            self._closed = True
            self.before_close()
            _open.discard(self)
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            # these lead to the ring: the cycles of references would keep its memory until a garbage collection
            self.on_wake = self.on_end = self.before_close = _nothing


def _nothing(*_: object) -> None:
    pass


_open: weakref.WeakSet[Doorbell] = weakref.WeakSet()


def _close_in_child() -> None:
    # no other end would see the parent die while the child holds its connections
    for bell in list(_open):
        if bell.fileno >= 0:
            close_inherited(bell.fileno)


os.register_at_fork(after_in_child=_close_in_child)
