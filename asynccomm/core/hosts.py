"""The name of this process's host, as its peers see it, and the names of loopback addresses."""

from __future__ import annotations

import ipaddress
import os
import socket

PRETENDED = "ASYNCCOMM_HOST"  #: environment variable: another name, for tests of several hosts on one machine


def host_name() -> str:
    """The name of this host, or the name that the process pretends to run on."""
    return os.environ.get(PRETENDED) or socket.gethostname()


def pretends() -> bool:
    """Whether the process pretends to be on another host: it then shares no memory with processes of other names."""
    return bool(os.environ.get(PRETENDED))


def loopback_address(host: str) -> str:
    """The loopback address that ``host`` names, in its usual spelling; empty if ``host`` names another one.

    "localhost" is 127.0.0.1 here, since the resolver's answer may differ between the ranks of one host. Other names are
    not resolved.
    """
    if host.lower() == "localhost":
        return "127.0.0.1"
    try:  # the system, unlike ipaddress, knows short forms such as 127.1
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        address = ipaddress.ip_address(found[0][4][0])
    except (OSError, ValueError):
        return ""
    address = getattr(address, "ipv4_mapped", None) or address
    return str(address) if address.is_loopback else ""
