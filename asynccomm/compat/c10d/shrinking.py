"""Shrinking of groups to a subset of their ranks, in torch's steps.

The package exports the steps under torch's names, with an underscore. Where torch passes on the backend of one device,
these functions pass on the group's comms; and the steps that end groups are awaited.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from typing import Final, TypedDict

import torch

from asynccomm.comm.comm import Comm
from asynccomm.compat.c10d.create import drop_groups, end_groups, give_up
from asynccomm.compat.c10d.init import update_default_pg
from asynccomm.compat.c10d.logs import timed
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.types import SHRINK_ABORT, SHRINK_DEFAULT
from asynccomm.compat.c10d.world import Group, registered, world
from asynccomm.ops.validation import as_index
from asynccomm.store.base import PrefixStore, Store

_log: Final = logging.getLogger("asynccomm")


class ShrinkGroupInfo(TypedDict):
    """The group to shrink."""

    process_group: ProcessGroup
    is_default_group: bool
    group_size: int
    current_rank: int
    group_name: str


class GroupMetadata(TypedDict):
    """The attributes of a group that the shrunk one gets, too."""

    backend_name: str
    store: Store
    backend_config: str
    original_group_name: str
    new_group_name: str
    bound_device_id: torch.device | None


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

    Raises: TypeError and ValueError naming the argument; TypeError if the group has no control channel; RuntimeError if
        this rank is excluded; and the errors of ``Comm.shrink``.
    """
    validate_shrink_inputs(ranks_to_exclude, shrink_flags)
    info = prepare_shrink_target_group(group)
    comms = validate_shrink_backend_requirements(info)
    excluded = validate_and_process_excluded_ranks(ranks_to_exclude, info)
    if info["is_default_group"]:  # before the ranks get new numbers
        await destroy_all_other_groups(info["process_group"])
    if shrink_flags == SHRINK_ABORT:
        for comm in comms:
            comm.abort("shrink_group was called with SHRINK_ABORT")
    made: list[Comm] = []
    async with AsyncExitStack() as unless_made:
        for comm in comms:
            made.append(await comm.shrink(sorted(excluded)))
            unless_made.push_async_callback(give_up, made[-1])
        unless_made.pop_all()
    return await finalize_shrunk_group(info, excluded, made)


def validate_shrink_inputs(ranks_to_exclude: object, shrink_flags: object) -> None:
    """Raise TypeError or ValueError unless there is a list of ranks, and a flag of the two."""
    if not isinstance(ranks_to_exclude, list):
        kind = type(ranks_to_exclude).__name__
        raise TypeError(f"ranks_to_exclude must be a list, got {ranks_to_exclude!r} ({kind})")
    if not ranks_to_exclude:
        raise ValueError("ranks_to_exclude must have at least one rank")
    if isinstance(shrink_flags, bool) or shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(f"shrink_flags must be SHRINK_DEFAULT or SHRINK_ABORT, got {shrink_flags!r}")


def prepare_shrink_target_group(group: Group) -> ShrinkGroupInfo:
    """Describe the group to shrink; None: the default group. Raises: ValueError for a group of one rank."""
    pg = registered(group)
    if pg.size() <= 1:
        raise ValueError(f"a group must have at least 2 ranks to be shrunk, {pg!r} has {pg.size()}")
    return {
        "process_group": pg,
        "is_default_group": pg is world().default_pg,
        "group_size": pg.size(),
        "current_rank": pg.rank(),
        "group_name": world().pg_names[pg],
    }


def validate_shrink_backend_requirements(group_info: ShrinkGroupInfo) -> list[Comm]:
    """The group's comms, which are all to be shrunk. Raises: TypeError if one of them cannot be."""
    pg = group_info["process_group"]
    if not pg.comms:
        raise TypeError(f"{pg!r} has no comm that could be shrunk")
    for comm in pg.comms:
        if (reason := comm._why_fixed()) is not None:
            raise TypeError(f"{pg!r} cannot be shrunk: {reason}")
    return pg.comms


def validate_and_process_excluded_ranks(ranks_to_exclude: Sequence[object], group_info: ShrinkGroupInfo) -> set[int]:
    """The ranks as a set. Raises: TypeError, ValueError; RuntimeError if this rank is among them."""
    size, me = group_info["group_size"], group_info["current_rank"]
    found: set[int] = set()
    for i, rank in enumerate(ranks_to_exclude):
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
    if me in found:
        raise RuntimeError(f"this rank, {me}, is among ranks_to_exclude: only those that are left call this")
    return found


async def finalize_shrunk_group(
    group_info: ShrinkGroupInfo, excluded_ranks_set: AbstractSet[int], new_backend: Sequence[Comm]
) -> ProcessGroup:
    """End the old group, and register the new one, of the shrunk comms ``new_backend``.

    If the old group is the default group, so is the new one, and all other groups end.
    """
    pg, is_default = group_info["process_group"], group_info["is_default_group"]
    survivors = list(new_backend[0].parent_ranks)  # ranks that no rank has excluded may be lost, too
    if excluded_ranks_set & set(survivors):
        raise ValueError(f"excluded_ranks_set must not have ranks of new_backend, got {sorted(excluded_ranks_set)}")
    if is_default:
        await destroy_all_other_groups(pg)
    remaining = [pg.global_ranks[rank] for rank in survivors]
    metadata = extract_group_metadata(pg, remaining)
    metadata["store"] = _store_of(metadata["store"], new_backend[0])
    await cleanup_original_group(pg, is_default)
    new = create_shrunk_process_group(pg, new_backend, remaining, metadata, is_default)
    if is_default:
        world().renumbered()
        update_default_pg(new)
    return new


def extract_group_metadata(target_pg: ProcessGroup, remaining_ranks: Sequence[int] | None = None) -> GroupMetadata:
    """The attributes of a group for its shrunk one, with a new name. Each call uses up a name.

    Args:
        remaining_ranks: global ranks of the shrunk group, for the name; None: all of the group.
    """
    known = world()
    backend, store = known.pg_map[registered(target_pg)]
    ranks = target_pg.global_ranks if remaining_ranks is None else remaining_ranks
    return {
        "backend_name": backend,
        "store": store,
        "backend_config": known.pg_backend_config[target_pg],
        "original_group_name": target_pg.group_name,
        "new_group_name": known.hashed_name(ranks, target_pg.group_name),
        "bound_device_id": target_pg.bound_device_id,
    }


async def cleanup_original_group(target_pg: ProcessGroup, is_default_group: bool) -> None:
    """Unregister a group, and close its comms. An error of closing is logged."""
    cleanup_process_group_global_state(target_pg)
    try:
        await end_groups([target_pg], abort=False)
    except Exception:  # the rest of the world goes on with the new group
        kind = "default" if is_default_group else "shrunk"
        _log.warning("the former %s group %r did not end well", kind, target_pg.group_name, exc_info=True)


def create_shrunk_process_group(
    target_pg: ProcessGroup,
    new_backend: Sequence[Comm],
    remaining_ranks: Sequence[int],
    metadata: GroupMetadata,
    is_default_group: bool,
) -> ProcessGroup:
    """Make and register the group of the comms ``new_backend``, in the order of those of ``target_pg``.

    Args:
        remaining_ranks: global ranks in ``target_pg``, by rank in the new group.
    """
    made = {id(comm): new for comm, new in zip(target_pg.comms, new_backend, strict=True)}
    name = metadata["new_group_name"]
    new = ProcessGroup(
        name,
        "default:shrunken" if is_default_group else f"{metadata['original_group_name']}:shrunk",
        range(len(remaining_ranks)) if is_default_group else remaining_ranks,
        new_backend[0].rank,
        metadata["backend_name"],
        target_pg.config,
        {device: made[id(target_pg.comm(device))] for device in target_pg.device_types},
        target_pg.timeout,
        metadata["bound_device_id"],
    )
    new.former_ranks = tuple(remaining_ranks)
    world().add(new, PrefixStore(f"{name}/", metadata["store"]), None)
    return new


async def destroy_all_other_groups(exclude_group: ProcessGroup | None = None) -> None:
    """Abort and unregister all groups but ``exclude_group``, which needs no other rank. Errors are logged."""
    others = [other for other in reversed(world().pg_map) if other is not exclude_group]
    if not others:
        return
    names = ", ".join(other.group_name for other in others)
    _log.warning("the default group is shrunk, which numbers the ranks anew: groups %s are aborted", names)
    await drop_groups(others)


def cleanup_process_group_global_state(pg: ProcessGroup) -> None:
    """Unregister a group: its name, tags, ranks and recorded calls. Idempotent."""
    world().remove(pg)


def _store_of(before: Store, comm: Comm) -> Store:
    """Store of a shrunk group: the old group's store, unless the ranks had to connect to another one."""
    now = comm._session.identity.job.store
    return before if _root(now) is _root(before) else PrefixStore("default_pg", now)


def _root(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying
    return store
