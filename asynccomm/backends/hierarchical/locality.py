"""Which ranks share memory: found by trying.

Ranks on different machines, in different network namespaces or of different users cannot connect to each other's local
sockets. Each rank publishes these facts; ranks with equal facts are candidates, and try to map one segment. A host is a
set of ranks that succeeded. The others count as hosts of their own.

Rank 0 collects the facts and the results and publishes both as one value, so the store has a number of requests that
is proportional to the number of ranks. The value is a table with the number of each rank's host: all ranks read it, and
where hosts have equal numbers of ranks it is short.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from asynccomm.backends.base import BackendContext
from asynccomm.backends.hierarchical.placement import grouped
from asynccomm.control.transport.schema import MessageError
from asynccomm.control.transport.tables import pack_table, unpack_table
from asynccomm.errors import BackendError

SHARED: Final = b"ok"
TABLE_BYTES: Final = 4 << 10  # of a table of hosts at most, plus TABLE_BYTES_EACH for each rank
TABLE_BYTES_EACH: Final = 16


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
        await store.set("candidates", _packed(found))
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
        await store.set("hosts", _packed(hosts))
    else:
        hosts = _read(await store.get("hosts", math.inf), group.size)
    return tuple([tuple(host) for host in hosts])


def _packed(hosts: Sequence[Sequence[int]]) -> bytes:
    numbers = {rank: number for number, host in enumerate(hosts) for rank in host}
    return pack_table([(numbers[rank],) for rank in range(len(numbers))])


def _read(table: bytes, size: int) -> list[list[int]]:
    try:
        rows = unpack_table(table, (int,), size, TABLE_BYTES + TABLE_BYTES_EACH * size)
    except MessageError as exc:
        raise BackendError(f"the hosts that rank 0 has published cannot be read: {exc}") from None
    return grouped(rows)
