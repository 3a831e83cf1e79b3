"""Which ranks share memory: found by trying.

Ranks on different machines, in different network namespaces or of different users cannot connect to each other's local
sockets. Each rank publishes these facts; ranks with equal facts are candidates, and try to map one segment. A host is a
set of ranks that succeeded. The others count as hosts of their own.

Rank 0 collects the facts and the results and publishes both as one value, so the store has a number of requests that
is proportional to the number of ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from asynccomm.backends.base import BackendContext
from asynccomm.backends.hierarchical.placement import grouped
from asynccomm.control.runs import RankRuns, compact_ranks, expand_ranks
from asynccomm.control.transport.schema import Message, MessageError, dumps, loads
from asynccomm.errors import BackendError

SHARED: Final = b"ok"


@final
class Hosts(Message, frozen=True):
    """The ranks of each host, in compact form: each rank reads the list."""

    ranks: list[RankRuns]

    def __post_init__(self) -> None:
        numbers = sorted([rank for host in self.expanded() for rank in host])
        if numbers != list(range(len(numbers))) or not all(self.ranks):
            raise ValueError(f"ranks must each be on one host, got {self.ranks}")

    def expanded(self) -> list[list[int]]:
        """The ranks of each host."""
        return [list(expand_ranks(host)) for host in self.ranks]


def place_of(host: str) -> str:
    """Facts about this process on ``host`` that must be equal where processes share memory."""
    facts = [host, str(os.getuid())]
    with contextlib.suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        facts.append(str(Path("/proc/self/ns/net").stat().st_ino))
    return " ".join(facts)


async def candidates(context: BackendContext) -> list[list[int]]:
    """Sets of ranks that may share memory, in the order of their first ranks. Collective."""
    group, store = context.group, context.store
    await store.set(f"place/{group.rank}", place_of(context.members[group.rank].host))
    if group.rank == 0:
        places = await store.multi_get([f"place/{rank}" for rank in range(group.size)], math.inf)
        found = grouped([place.decode(errors="replace") for place in places])
        await store.set("candidates", dumps(Hosts([compact_ranks(host) for host in found])))
        return found
    return _read(await store.get("candidates", math.inf), group.size)


async def agreed(context: BackendContext, tried: Sequence[Sequence[int]], problem: str) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, after each set of candidates has tried to share memory. Collective.

    Args:
        problem: of this rank's set; empty: it shares memory.
    """
    group, store = context.group, context.store
    several = [ranks for ranks in tried if len(ranks) > 1]
    if any(ranks[0] == group.rank for ranks in several):
        await store.set(f"shares/{group.rank}", problem or SHARED)
    if not several:
        hosts = [list(ranks) for ranks in tried]
    elif group.rank == 0:
        said = await store.multi_get([f"shares/{ranks[0]}" for ranks in several], math.inf)
        apart = {ranks[0] for ranks, result in zip(several, said, strict=True) if result != SHARED}
        hosts = [list(ranks) for ranks in tried if ranks[0] not in apart]
        hosts += [[rank] for ranks in tried if ranks[0] in apart for rank in ranks]
        hosts.sort()
        await store.set("hosts", dumps(Hosts([compact_ranks(host) for host in hosts])))
    else:
        hosts = _read(await store.get("hosts", math.inf), group.size)
    return tuple([tuple(host) for host in hosts])


def _read(text: bytes, size: int) -> list[list[int]]:
    with contextlib.suppress(MessageError):
        hosts: Hosts = loads(Hosts, text)
        found = hosts.expanded()
        if sum(map(len, found)) == size:
            return found
    raise BackendError(f"rank 0 has published hosts that cannot be: {text[:100]!r}")
