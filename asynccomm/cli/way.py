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
    parts = urlsplit(url)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError(f"must be tcp://host:port, got {url!r}")
    return parts.hostname, parts.port


def find_way(host: str, port: int, environ: Mapping[str, str]) -> Way:
    """The address that this host would use in a comm with other hosts that meets at ``host:port``."""
    towards = address_towards(host, port) or ""
    me = RankInfo(0, socket.gethostname(), os.getpid(), network_id(), towards if is_reachable(towards) else "")
    other = RankInfo(1, "any other", 0, "any other")
    facts: dict[str, object] = {
        "store": f"{host}:{port}",
        "answers": _answers(host, port),
        "local_address_towards_it": towards or None,
        "addresses": [str(each) for each in reachable_addresses()],
    }
    try:
        choice = choose_address({}, environ, 0, [me, other])
    except BackendError as exc:
        return Way({**facts, "address": None}, str(exc))
    chosen = {"address": choice.address, "interface": interface_of(choice.address), "because": choice.reason}
    return Way(facts | chosen)


def _answers(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), ANSWER_SECONDS).close()
    except OSError as exc:
        return f"no: {exc.strerror or exc}"
    return "yes"
