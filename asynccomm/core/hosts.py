"""The name of this process's host, as its peers see it."""

from __future__ import annotations

import os
import socket

PRETENDED = "ASYNCCOMM_HOST"  #: environment variable: another name, for tests of several hosts on one machine


def host_name() -> str:
    """The name of this host, or the name that the process pretends to run on."""
    return os.environ.get(PRETENDED) or socket.gethostname()


def pretends() -> bool:
    """Whether the process pretends to be on another host: it then shares no memory with processes of other names."""
    return bool(os.environ.get(PRETENDED))
