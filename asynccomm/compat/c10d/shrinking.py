"""Shrinking of groups to a subset of their ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

from asynccomm.comm.comm import Comm
from asynccomm.compat.c10d.create import drop_groups, give_up
from asynccomm.compat.c10d.init import update_default_pg
from asynccomm.compat.c10d.logs import timed
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.types import SHRINK_ABORT, SHRINK_DEFAULT
from asynccomm.compat.c10d.world import Group, registered, world
from asynccomm.ops.validation import as_index
from asynccomm.store.base import PrefixStore, Store

_log: Final = logging.getLogger("asynccomm")


@timed
async def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: Group = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: object | None = None,
) -> ProcessGroup:
    """Replace a group by one without some ranks, which may be dead. Only the surviving ranks call this.

    The old group ends. If it is the default group, the new group becomes the default group, with new rank numbers;
    ``former_ranks`` has the old numbers. All other groups are aborted in this case, as their global ranks are invalid.

    Args:
        ranks_to_exclude: ranks in the group, not global ranks.
        shrink_flags: SHRINK_ABORT: operations in flight fail; else the call waits for them, unless the group is broken.
        pg_options: ignored by all backends.

    Raises: TypeError and ValueError naming the argument; RuntimeError if this rank is excluded, or has no control
        channel; and the errors of ``Comm.shrink``.
    """
    _check_input(ranks_to_exclude, shrink_flags)
    known = world()
    pg = registered(group)
    excluded = _excluded(ranks_to_exclude, pg)
    is_default = pg is known.default_pg
    if is_default:
        await _end_others(pg)
    if shrink_flags == SHRINK_ABORT:
        for comm in pg.comms:
            comm.abort("shrink_group was called with SHRINK_ABORT")
    made: dict[int, Comm] = {}
    async with AsyncExitStack() as unless_made:
        for comm in pg.comms:
            made[id(comm)] = left = await comm.shrink(excluded)
            unless_made.push_async_callback(give_up, left)
        unless_made.pop_all()
    first = next(iter(made.values()))
    survivors = list(first.parent_ranks)  # ranks that no rank has excluded may be lost, too
    store = _store_of(known.pg_map[pg][1], first)
    known.remove(pg)
    ranks = [pg.global_ranks[rank] for rank in survivors]
    name = known.hashed_name(ranks, pg.group_name)
    new = ProcessGroup(
        name,
        "default:shrunken" if is_default else f"{pg.group_name}:shrunk",
        range(len(ranks)) if is_default else ranks,
        survivors.index(pg.rank()),
        pg.backend,
        pg.config,
        {device: made[id(pg.comm(device))] for device in pg.device_types},
        pg.timeout,
        pg.bound_device_id,
    )
    new.former_ranks = tuple(ranks)
    known.add(new, PrefixStore(f"{name}/", store), None)
    if is_default:
        known.renumbered()
        update_default_pg(new)
    return new


def _check_input(ranks: object, flags: object) -> None:
    if not isinstance(ranks, list):
        raise TypeError(f"ranks_to_exclude must be a list, got {ranks!r} ({type(ranks).__name__})")
    if not ranks:
        raise ValueError("ranks_to_exclude must have at least one rank")
    if isinstance(flags, bool) or flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(f"shrink_flags must be SHRINK_DEFAULT or SHRINK_ABORT, got {flags!r}")


def _excluded(ranks: Sequence[object], pg: ProcessGroup) -> list[int]:
    """Sorted ranks. Raises: TypeError, ValueError; RuntimeError if this rank is excluded."""
    size = pg.size()
    if size <= 1:
        raise ValueError(f"a group must have at least 2 ranks to be shrunk, {pg!r} has {size}")
    found: set[int] = set()
    for i, rank in enumerate(ranks):
        number = as_index(rank)
        if number is None:
            raise TypeError(f"ranks_to_exclude must be integers, got {rank!r} at index {i}")
        if not 0 <= number < size:
            raise ValueError(f"ranks_to_exclude must be in [0, {size}), got {number} at index {i}")
        if number in found:
            raise ValueError(f"ranks_to_exclude must be different, got {number} again at index {i}")
        found.add(number)
    if len(found) == size:
        raise ValueError(f"ranks_to_exclude must leave at least one of the {size} ranks")
    if pg.rank() in found:
        raise RuntimeError(f"this rank, {pg.rank()}, is among ranks_to_exclude: only those that are left call this")
    return sorted(found)


def _store_of(before: Store, comm: Comm) -> Store:
    """Store of a shrunk group: the old group's store, unless the ranks had to connect to another one."""
    now = comm._session.identity.job.store
    return before if _root(now) is _root(before) else PrefixStore("default_pg", now)


def _root(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying
    return store


async def _end_others(pg: ProcessGroup) -> None:
    known = world()
    others = [other for other in reversed(known.pg_map) if other is not pg]
    if not others:
        return
    names = ", ".join(other.group_name for other in others)
    _log.warning("the default group is shrunk, which numbers the ranks anew: groups %s are aborted", names)
    await drop_groups(others)
