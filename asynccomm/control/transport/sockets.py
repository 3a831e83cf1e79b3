"""Where a rank listens before it is known who the others are, and what its sockets are called."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from typing import Final, final

from asynccomm.control.transport.topology import RankAddress

MAX_NAME: Final = 40  # characters; the system takes names of about a hundred bytes
BACKLOG: Final = 512  # connections that wait to be taken


def run_name(run: str) -> str:
    """What a run is called in the names of its ranks' sockets."""
    text = run.encode("ascii", "replace").decode()
    return "".join(char if char.isprintable() else "?" for char in text).replace("/", "-")[:MAX_NAME]


def local_socket(name: str) -> socket.socket | None:
    """A listening socket of that abstract name; None where the system has no such thing."""
    if sys.platform != "linux":
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{name}")
        sock.listen(BACKLOG)
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
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


@final
class ListeningSockets:
    """Where one rank listens, from before it is known who the others are.

    Args:
        rank: of the job.
        name: shown to who lists the sockets of the system.
    """

    def __init__(self, rank: int, name: str) -> None:
        self._socks: list[socket.socket] = []
        local = f"asynccomm/{run_name(name)}/{rank}/{os.getpid()}/{secrets.token_hex(8)}"
        sock = local_socket(local)
        if sock is not None:
            self._socks.append(sock)
        self.contact = RankAddress(rank, socket.gethostname(), os.getpid(), local if sock is not None else "")

    def open_tcp(self, address: str) -> None:
        """Listen on TCP, too, for ranks on other hosts. Raises: OSError."""
        sock = tcp_socket(address)
        self._socks.append(sock)
        contact = self.contact
        port = sock.getsockname()[1]
        self.contact = RankAddress(contact.rank, contact.host, contact.pid, contact.local, address, port)

    def take(self) -> list[socket.socket]:
        """The listening sockets, whose owner the caller becomes."""
        socks, self._socks = self._socks, []
        return socks

    def close(self) -> None:
        """Close what nobody has taken."""
        for sock in self.take():
            sock.close()
