"""The listening sockets of a rank, opened before the other ranks are known, and the names of the sockets."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import struct
import sys
import zlib
from pathlib import Path
from typing import Final, final

import anyio
import anyio.to_thread
from msgspec.structs import replace

from asynccomm.control.transport.topology import RankAddress
from asynccomm.core.hosts import host_name

MAX_NAME: Final = 40  # characters; the system's limit is about a hundred bytes
BACKLOG: Final = 512  # connections waiting to be accepted

_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RESERVED: Final = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")

_numbers = itertools.count(1)  # of the local sockets of this process
_credentials = struct.Struct("=iII")  # process, user, group
_ROUND: Final = struct.pack("@ll", 0, 100_000)  # 0.1 s for SO_SNDTIMEO
_FOREVER: Final = struct.pack("@ll", 0, 0)


def peer_user(sock: socket.socket) -> int:
    """The user of the process at the other end of a local socket; 65534 for a user of another namespace."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size)
    return int(_credentials.unpack(data)[1])


async def connect_in_turn(sock: socket.socket, address: str) -> None:
    """Connect a local socket, which does not block afterwards.

    While the backlog of ``address`` is full, a thread waits in the kernel's queue for it: of attempts that do not wait,
    other processes that keep the backlog full would leave none a chance. Safe to cancel: the thread ends within 0.1 s.

    Raises: OSError.
    """
    sock.setblocking(False)
    try:
        sock.connect(address)
        return
    except BlockingIOError:  # unlike TCP's, the connection does not continue in the background
        pass
    begun = given_up = False
    same = sock.dup()  # the caller may close its descriptor during the wait

    def wait() -> None:
        nonlocal begun
        begun = True
        with same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _ROUND)
            same.setblocking(True)
            while not given_up:
                try:
                    same.connect(address)
                    break
                except BlockingIOError:
                    continue
            same.setblocking(False)
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _FOREVER)

    try:
        # a limiter of its own: other work of this loop in threads may be needed for the backlog to get shorter
        await anyio.to_thread.run_sync(wait, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
    finally:
        given_up = True
        if not begun:
            same.close()


async def local_connection(address: str) -> socket.socket:
    """A connected local socket that does not block; see ``connect_in_turn``. Raises: OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        await connect_in_turn(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def run_name(run: str) -> str:
    """The name of a run within the names of its ranks' sockets."""
    text = run.encode("ascii", "replace").decode()
    if not text.isprintable():
        text = "".join(char if char.isprintable() else "?" for char in text)
    return text.replace("/", "-")[:MAX_NAME]


def local_socket(name: str) -> socket.socket | None:
    """A listening socket with an abstract name; None: the system has no abstract sockets."""
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


def derived_port(job: str, rank: int) -> int:
    """A port that follows from the job and the rank, so that a list of all ranks' ports is short; 0: there is none.

    The port is one of those that the system gives to sockets without a port, unless some of them are reserved.
    """
    try:
        low, high = map(int, _PORTS.read_text().split())
        if low > high or _RESERVED.read_text().strip():
            return 0
    except (OSError, ValueError):
        return 0
    return low + (zlib.crc32(job.encode()) + rank) % (high - low + 1)


def tcp_socket(address: str, port: int = 0) -> socket.socket:
    """A listening TCP socket at ``port``, or else any free port, of the interface that has ``address``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound = False
        if port:
            with contextlib.suppress(OSError):  # the port is in use
                sock.bind((address, port))
                bound = True
        if not bound:
            sock.bind((address, 0))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


@final
class ListeningSockets:
    """The listening sockets of one rank, opened before the other ranks are known.

    Args:
        rank: of the job.
        name: part of the socket names, for tools that list the sockets of the system.
    """

    def __init__(self, rank: int, name: str) -> None:
        self._socks: list[socket.socket] = []
        prefix = f"asynccomm/{run_name(name)}/{rank}/{os.getpid()}"
        local = f"{prefix}/{next(_numbers)}"  # not random: a list of all ranks' names is short
        try:
            sock = local_socket(local)
        except OSError:  # a process of another container with this network has the name
            local = f"{prefix}/{secrets.token_hex(8)}"
            sock = local_socket(local)
        if sock is not None:
            self._socks.append(sock)
        self.contact: RankAddress = RankAddress(rank, host_name(), os.getpid(), local if sock is not None else "")

    def open_tcp(self, address: str, host: str, port: int = 0) -> None:
        """Listen on TCP, too, for ranks on other hosts, which call this host ``host``. Raises: OSError.

        Args:
            port: if it is free, else any port.
        """
        sock = tcp_socket(address, port)
        self._socks.append(sock)
        self.contact = replace(self.contact, host=host, address=address, port=sock.getsockname()[1])

    def take(self) -> list[socket.socket]:
        """The listening sockets; the caller becomes their owner."""
        socks, self._socks = self._socks, []
        return socks

    def close(self) -> None:
        """Close the sockets that were not taken."""
        for sock in self.take():
            sock.close()
