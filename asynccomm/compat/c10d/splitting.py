"""Groups that are split off another one, over its own connections."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from hashlib import sha1
from typing import Final

from asynccomm.comm.comm import Comm
from asynccomm.compat.c10d.backends import Backend
from asynccomm.compat.c10d.create import give_up, options_of
from asynccomm.compat.c10d.logs import timed
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.types import NON_GROUP_MEMBER, check_valid_timeout, default_timeout
from asynccomm.compat.c10d.validation import member_of
from asynccomm.compat.c10d.world import Group, Member, default_group, registered, world
from asynccomm.ops.validation import as_index
from asynccomm.store.base import PrefixStore

__all__ = ["is_safe_to_split", "process_group_color", "split_group"]

COLOR_BITS: Final = 31  # a colour is a C int that is not negative


def process_group_color(ranks: Sequence[int]) -> int:
    """A number for ``ranks``, the same in every process of any Python, that fits into a C int."""
    digest = sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") % (1 << COLOR_BITS)


def is_safe_to_split() -> bool:
    """Whether a device is bound to the default group, which a split on an accelerator needs."""
    return default_group().bound_device_id is not None


@timed
async def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
) -> Member:
    """Split groups off ``parent_pg``. All its ranks call this, with the same lists.

    Args:
        split_ranks: lists of ranks in the parent, without one in common; their order in a group is ascending. Ranks may
            be left out.
        timeout: None: that of the backend.
        pg_options: ``asynccomm.CommOptions``, whose hints count; None: the parent's.
        group_desc: what they are for; None: the parent's, ``":split:"`` and a number.

    Returns: the group that this rank is in; NON_GROUP_MEMBER if in none.

    Raises: ValueError for lists that are no groups, and a parent that is not registered; RuntimeError if the parent is
        on an accelerator and none is bound to the default group; and what ``Comm.split`` raises.

    Cancelling is safe.
    """
    if not split_ranks:
        raise ValueError("split_ranks must have at least one list of ranks")
    default = default_group()
    if member_of(parent_pg, "split_group", 5) is None:
        raise ValueError("this rank is not in parent_pg")
    parent = registered(parent_pg)
    real = parent.backend != Backend.FAKE
    if real and not is_safe_to_split() and any(comm.device.type != "cpu" for comm in parent.comms):
        raise RuntimeError("no device is bound to the default group: pass device_id= to init_process_group")
    limit = default_timeout(parent.backend) if timeout is None else timeout
    check_valid_timeout(limit)
    lists = _checked(split_ranks, parent.size())
    desc = f"{parent.group_desc}:split:{parent.splits}" if group_desc is None else group_desc
    hints = options_of(parent.name(), pg_options, limit).get("hints")
    parent.splits += 1
    mine = next((ranks for ranks in lists if parent.rank() in ranks), None)
    if mine is None:
        return NON_GROUP_MEMBER
    known = world()
    ranks = [parent.global_ranks[rank] for rank in mine]
    name = known.hashed_name(ranks, parent.group_name)
    made: dict[int, Comm] = {}
    async with AsyncExitStack() as unless_made:
        for comm in parent.comms:
            split = await comm.split(mine, name, hints=hints, timeout=limit)
            assert split is not None, "this rank is in it"
            made[id(comm)] = split
            unless_made.push_async_callback(give_up, split)
        unless_made.pop_all()
    pg = ProcessGroup(
        name,
        desc,
        ranks,
        mine.index(parent.rank()),
        parent.backend,
        parent.config,
        {device: made[id(parent.comm(device))] for device in parent.device_types},
        limit,
        default.bound_device_id,
    )
    known.add(pg, PrefixStore(f"{name}/", known.pg_map[parent][1]), None, listed=False)
    return pg


def _checked(split_ranks: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """All lists, each sorted. Raises: ValueError."""
    seen: set[int] = set()
    lists: list[list[int]] = []
    for ranks in split_ranks:
        if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Sequence) or not ranks:
            raise ValueError(f"each of split_ranks must be a list of at least one rank, got {ranks!r}")
        if len(ranks) > size:
            raise ValueError(f"a split has at most the {size} ranks of its parent, got {list(ranks)}")
        numbers = [as_index(rank) for rank in ranks]
        for number, rank in zip(numbers, ranks, strict=True):
            if number is None or not 0 <= number < size:
                raise ValueError(f"split_ranks must be ranks of the parent, in [0, {size}), got {rank!r} in {ranks!r}")
            if number in seen:
                raise ValueError(f"split_ranks must have no rank twice, got {number} in {ranks!r}")
            seen.add(number)
        lists.append(sorted(number for number in numbers if number is not None))
    return lists
