"""Ranks of one machine that appear as several hosts."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest

from asynccomm import Comm, new_comm
from asynccomm.comm.pending import PendingComm
from asynccomm.core.hosts import PRETENDED

#: the host of each rank, a letter
LAYOUTS: Final = {"2x2": "aabb", "3+1": "aaab", "1+1+1": "abc", "2x3": "aaabbb", "mixed": "abba"}
#: the hosts are no real ones: gloo must be told the network
HINTS: Final = {"hostname": "127.0.0.1"}


def pretend(monkeypatch: pytest.MonkeyPatch, hosts: str) -> None:
    """Put this rank on the host that ``hosts`` has for it, for comms that it makes from now on."""
    monkeypatch.setenv(PRETENDED, f"host-{hosts[int(os.environ['RANK'])]}")


def comm_on(
    monkeypatch: pytest.MonkeyPatch, hosts: str, backend: str = "hierarchical", **arguments: Any
) -> PendingComm[Comm]:
    """A comm on pretended hosts."""
    pretend(monkeypatch, hosts)
    return new_comm(backend, **{"name": "hosts", "timeout": 50, "hints": HINTS} | arguments)
