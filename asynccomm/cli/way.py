"""The way from this host to a store, and the address that gloo and the control channel take between hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from asynccomm.backends.addresses import choose_address
from asynccomm.backends.base import RankInfo
from asynccomm.errors import BackendError
from asynccomm.store.routes import address_towards, interface_of, is_reachable, network_id, reachable_addresses

ANSWER_SECONDS = 2.0  # for the store to accept a connection


class Way(NamedTuple):
    """The facts of a report, and the problem with them; empty: there is none."""

    facts: Mapping[str, object]
    problem: str = ""


def store_address(url: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``. Raises: ValueError."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if scheme != "tcp" or not host or not port:
        raise ValueError(f"must be tcp://host:port, got {url!r}")
    return host, port


def find_way(host: str, port: int, environ: Mapping[str, str]) -> Way:
    """The address that this host would use in a comm with other hosts that meets at ``host:port``."""
    towards = address_towards(host, port) or ""
    me = RankInfo(0, socket.gethostname(), os.getpid(), network_id(), towards if is_reachable(towards) else "")
    other = RankInfo(1, "any other", 0, "any other")
    refused = _refusal(host, port)
    problem = ""
    if isinstance(refused, socket.gaierror):  # any other error is none yet: the store may start later
        problem = f"the store's host {host!r} does not resolve: {refused.strerror}"
    facts: dict[str, object] = {
        "store": f"{host}:{port}",
        "answers": "yes" if refused is None else f"no: {refused.strerror or refused}",
        "local_address_towards_it": towards or None,
        "addresses": [str(each) for each in reachable_addresses()],
    }
    try:
        choice = choose_address({}, environ, 0, [me, other])
    except BackendError as exc:
        return Way({**facts, "address": None}, problem or str(exc))
    chosen = {"address": choice.address, "interface": interface_of(choice.address), "because": choice.reason}
    return Way(facts | chosen, problem)


def _refusal(host: str, port: int) -> OSError | None:
    """The error of connecting to the store, if there is one."""
    try:
        socket.create_connection((host, port), ANSWER_SECONDS).close()
    except OSError as exc:
        return exc
    return None
