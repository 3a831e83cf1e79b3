"""Hosting a store: torch's own TCPStore server, which other torch processes can use as well."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import final

from torch import distributed as dist

from asynccomm.errors import RendezvousError


@final
class StoreServer:
    """A server in this process with a count of its users; the server ends with the last user, or with the process."""

    def __init__(self, server: dist.TCPStore, host: str) -> None:
        self._server: dist.TCPStore | None = server
        self._users = 1
        self._lock = threading.Lock()
        self.host = host
        self.port: int = server.port
        self.on_end: Callable[[], object] | None = None  #: called after the last user was removed

    def acquire(self) -> bool:
        """Add a user; False if the server has ended."""
        with self._lock:
            if self._server is None:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """Remove a user; the last one ends the server."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            self._server = None
        if self.on_end is not None:
            self.on_end()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at ``host:port`` (0: any free port; host "": all interfaces), for :func:`serve`.

    Clients may connect before :func:`serve`; the server answers them once it runs.

    Raises: RendezvousError naming the address.
    """
    dual = not host and socket.has_dualstack_ipv6()
    try:
        name = "::" if dual else host or "0.0.0.0"
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise RendezvousError(f"cannot resolve {host!r} to listen at {host}:{port}: {exc}") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(512)
    except OSError as exc:
        sock.close()
        raise RendezvousError(f"cannot listen at {host or '*'}:{port}: {exc.strerror or exc}") from exc
    return sock


def serve(host: str, listening: socket.socket, *, shared: bool = False) -> StoreServer:
    """Start a server that takes over the socket ``listening`` (see :func:`listen`); blocks for some milliseconds.

    Args:
        host: the name under which other processes reach the server.
        shared: whether ``init_process_group`` of this process, at the same port, uses this server.

    Raises: RendezvousError.
    """
    address, port = listening.getsockname()[:2]
    # torch connects to its own server once, and a failed attempt blocks for long: avoid a host name that may be wrong
    here = "127.0.0.1" if address in ("::", "0.0.0.0") else address
    try:
        server = dist.TCPStore(
            here,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            multi_tenant=shared,
            timeout=timedelta(seconds=30),
        )
    except RuntimeError as exc:
        raise RendezvousError(f"cannot host the store at {host}:{port}: {str(exc).splitlines()[0]}") from exc
    return StoreServer(server, host)


def share(host: str, port: int) -> StoreServer:
    """The server at ``port`` that ``init_process_group`` has started in this process. Raises: RendezvousError."""
    try:
        server = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timedelta(seconds=30)
        )
    except RuntimeError as exc:
        raise RendezvousError(f"cannot use the store at {host}:{port}: {str(exc).splitlines()[0]}") from exc
    return StoreServer(server, host)
