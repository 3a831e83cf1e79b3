"""Groups of some ranks: new groups, and splits over the connections of another group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from hashlib import sha1
from typing import Final

import torch
from torch import distributed as dist

from asynccomm.comm.comm import Comm
from asynccomm.compat.c10d.backends import Backend
from asynccomm.compat.c10d.create import BackendPlan, drop_groups, give_up, make_group, options_of
from asynccomm.compat.c10d.init import barrier_after_init
from asynccomm.compat.c10d.logs import timed
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.ranks import get_process_group_ranks, get_rank, get_world_size
from asynccomm.compat.c10d.rendezvous_handlers import as_store, store_based_barrier
from asynccomm.compat.c10d.types import NON_GROUP_MEMBER, check_reconfigure, check_valid_timeout, default_timeout
from asynccomm.compat.c10d.validation import member_of
from asynccomm.compat.c10d.world import Group, Member, default_group, registered, world
from asynccomm.core.tasks import shielded
from asynccomm.ops.validation import as_index
from asynccomm.store.base import PrefixStore, Store

COLOR_BITS: Final = 31  # a colour is a non-negative C int


async def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object | None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> Member:
    """Create a group of some ranks. All ranks of the world call this, members or not, and in the same order.

    Args:
        ranks: global ranks. None: all ranks.
        timeout: None: the backend's default, also if the default group has another timeout.
        backend: None: the default group's.
        pg_options: see ``init_process_group``.
        use_local_synchronization: only the ranks of the group call this. Ranks of several overlapping groups must
            create them in one order.
        group_desc: a description of the group's purpose.
        device_id: this rank's accelerator; None: the default group's.
        sort_ranks: the group has its ranks in ascending order; False: in the order of ``ranks``, the same on all.

    A refused call counts as a call.

    Returns: the group; NON_GROUP_MEMBER on ranks outside the group.

    Raises: ValueError before ``init_process_group``, and for invalid ranks; AssertionError for a device other than the
        default group's; and the errors of ``init_process_group``.

    Cancelling is safe.
    """
    return await new_group_with_tag(
        ranks,
        timeout,
        backend,
        pg_options,
        None,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
        device_id=device_id,
        sort_ranks=sort_ranks,
    )


@timed
async def new_group_with_tag(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    backend_options: object | None = None,
    pg_tag: str | None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> Member:
    """Create a group as :func:`new_group`, under a tag; equal tags and ranks give the same group."""
    known, default = world(), default_group()
    # a refused call takes a name, too, as the other ranks go on with the next one
    group_name = "" if use_local_synchronization else known.next_name()
    members = list(range(default.size())) if ranks is None else _checked(ranks, default.size(), sort_ranks)
    me = default.rank()
    if use_local_synchronization and me in members:
        group_name = known.hashed_name(members)
    if device_id is None:
        device_id = default.bound_device_id
    elif default.bound_device_id not in (None, device_id):
        raise AssertionError(f"device_id is {device_id}, but {default.bound_device_id} is bound to the default group")
    default_backend, store = known.pg_map[default]
    name = Backend(backend) if backend else default_backend
    limit = default_timeout(name) if timeout is None else timeout
    check_valid_timeout(limit)
    if use_local_synchronization and name == Backend.MPI:
        raise ValueError("backend 'mpi' cannot make groups with use_local_synchronization")
    if use_local_synchronization and me not in members:
        return NON_GROUP_MEMBER
    pg: Member = NON_GROUP_MEMBER
    room = store
    if me in members:
        found = known.find(pg_tag, members) if pg_tag else None
        pg = found or await make_group(
            BackendPlan(
                name=group_name,
                ranks=members,
                rank=members.index(me),
                backend=name,
                store=store,
                timeout=limit,
                options=backend_options,
                tag=pg_tag,
                desc=group_desc,
                device=device_id,
                parent=default,
            )
        )
        if use_local_synchronization:
            room = known.pg_map[pg][1]
    if barrier_after_init() and name != Backend.FAKE:
        count = len(members) if use_local_synchronization else default.size()
        try:
            await store_based_barrier(me, room, group_name, count, limit)
        except BaseException:
            if isinstance(pg, ProcessGroup) and pg.group_name == group_name:  # made by this call
                await shielded(drop_groups([pg]))
            raise
    return pg


async def new_process_group_helper(
    group_size: int,
    group_rank: int,
    global_ranks_in_group: Sequence[int],
    backend: str,
    store: Store | dist.Store,
    group_name: str,
    backend_options: object | None = None,
    timeout: timedelta | None = None,
    pg_tag: str | None = None,
    device_id: torch.device | None = None,
    group_desc: str | None = None,
    enable_reconfigure: bool = False,
) -> tuple[ProcessGroup, Store]:
    """Create a group of processes that meet in ``store``, beside the default group or without one.

    Programs use it for a second world: of trainers and inference servers, for example.

    Args:
        global_ranks_in_group: the global rank of each rank; empty: the ranks in the group are global ranks.
        backend_options: as ``pg_options`` of ``init_process_group``.

    Returns: the group and its store. Raises: as ``init_process_group``. Cancelling is safe.
    """
    check_reconfigure(enable_reconfigure)
    number = as_index(group_rank)
    if number is None or not 0 <= number < group_size:
        raise ValueError(f"group_rank must be in [0, {group_size}), got {group_rank!r}")
    ranks = list(global_ranks_in_group) or list(range(group_size))
    if len(ranks) != group_size:
        raise ValueError(f"global_ranks_in_group must have {group_size} ranks or none, got {ranks}")
    name = Backend(backend)
    plan = BackendPlan(
        name=group_name,
        ranks=ranks,
        rank=number,
        backend=name,
        store=as_store(store),
        timeout=default_timeout(name) if timeout is None else timeout,
        options=backend_options,
        tag=pg_tag,
        desc=group_desc,
        device=device_id,
    )
    pg = await make_group(plan)
    return pg, world().pg_map[pg][1]


def _checked(ranks: Sequence[int], size: int, sort: bool = True) -> list[int]:
    """The ranks, sorted if ``sort``. Raises: ValueError."""
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Sequence) or not ranks:
        raise ValueError(f"ranks must be a list of at least one rank, got {ranks!r}")
    found: list[int] = []
    for rank in ranks:
        number = as_index(rank)
        if number is None or not 0 <= number < size:
            raise ValueError(f"ranks must be in [0, {size}), got {rank!r} in {ranks!r}")
        if number in found:
            raise ValueError(f"ranks must be different, got {number} twice in {ranks!r}")
        found.append(number)
    return sorted(found) if sort else found


async def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
) -> tuple[Member, list[Member]]:
    """Create groups of ``group_size`` consecutive ranks of ``group`` each. All ranks of the world call this.

    Args:
        group_size: a divisor of the group's size; None: the number of CUDA devices of this process.

    Returns: this rank's group, and a list of all groups; see :func:`new_subgroups_by_enumeration`.
    """
    if group_size is None:
        if not torch.cuda.is_available():
            raise ValueError("group_size must be given where there is no CUDA device")
        group_size = torch.cuda.device_count()
    if as_index(group_size) is None:
        raise TypeError(f"group_size must be an integer, got {group_size!r}")
    if group_size <= 0:
        raise ValueError(f"group_size must be positive, got {group_size}")
    size = get_world_size(group)
    if group_size > size:
        raise ValueError(f"group_size must be at most the {size} ranks there are, got {group_size}")
    if size % group_size:
        raise ValueError(f"group_size must divide the {size} ranks there are, got {group_size}")
    ranks = get_process_group_ranks(group)
    chunks = [ranks[i : i + group_size] for i in range(0, size, group_size)]
    return await new_subgroups_by_enumeration(chunks, timeout, backend, pg_options, group_desc)


async def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
) -> tuple[Member, list[Member]]:
    """Create a group of each list of global ranks. All ranks of the world call this.

    Args:
        ranks_per_subgroup_list: disjoint lists, which need not contain all ranks.

    Returns: this rank's group, and a list of all groups in order; NON_GROUP_MEMBER in place of a group without this
        rank.

    Raises: ValueError, before any group is made; and the errors of :func:`new_group`.
    """
    if not ranks_per_subgroup_list or not isinstance(ranks_per_subgroup_list, Sequence):
        raise ValueError(
            f"ranks_per_subgroup_list must be a list of at least one list of ranks, got {ranks_per_subgroup_list!r}"
        )
    size = default_group().size()
    seen: dict[int, Sequence[int]] = {}
    for ranks in ranks_per_subgroup_list:
        for rank in _checked(ranks, size):
            if rank in seen:
                raise ValueError(f"rank {rank} is both in subgroup {seen[rank]} and in {ranks}")
            seen[rank] = ranks
    mine: Member = NON_GROUP_MEMBER
    groups: list[Member] = []
    for ranks in ranks_per_subgroup_list:
        made = await new_group(ranks, timeout, backend, pg_options, group_desc=group_desc)
        groups.append(made)
        if isinstance(made, ProcessGroup):
            mine = made
    return mine, groups


async def find_or_create_group(tag: str, ranks: Sequence[int], stride: int) -> ProcessGroup:
    """Find or create the group under ``tag`` of the chunk of ``ranks`` with this rank; chunks have ``stride`` ranks.

    Only the ranks of the chunk need to call this. A new group has a hashed name.

    Raises: ValueError if ``stride`` does not divide the number of ranks, or if there is no such group and ``tag`` is
        empty; AssertionError if ``ranks`` lacks this rank.
    """
    if stride <= 0 or len(ranks) % stride:
        raise ValueError(f"stride must divide the {len(ranks)} ranks, got {stride}")
    me = get_rank()
    chunks = (list(ranks[i : i + stride]) for i in range(0, len(ranks), stride))
    mine = next((chunk for chunk in chunks if me in chunk), None)
    if mine is None:
        raise AssertionError(f"ranks must have this rank, {me}, got {list(ranks)}")
    found = world().find(tag, mine)
    if found is not None:
        return found
    if not tag:
        raise ValueError(f"there is no group of ranks {sorted(mine)}, and none can be made without a tag")
    # the ranks of other chunks create their own groups at the same time: a numbered name would be the same for all
    made = await new_group_with_tag(sorted(mine), pg_tag=tag, use_local_synchronization=True)
    assert isinstance(made, ProcessGroup), "this rank is in it"
    return made


def process_group_color(ranks: Sequence[int]) -> int:
    """A hash of ``ranks`` that fits into a C int, and is equal in all processes and Python versions."""
    digest = sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") % (1 << COLOR_BITS)


def is_safe_to_split() -> bool:
    """Whether the default group has a bound device, as a split on an accelerator requires."""
    return default_group().bound_device_id is not None


@timed
async def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> Member:
    """Split groups off ``parent_pg``. All ranks of the parent call this, with the same lists.

    Args:
        split_ranks: disjoint lists of ranks in the parent, which need not contain all ranks. Ranks of a group are in
            ascending order.
        timeout: None: the backend's default.
        pg_options: ``asynccomm.CommOptions``, of which only the hints are used; None: the parent's.
        group_desc: a description; None: the parent's, ``":split:"`` and a number.
        backend: the parent's, or None, which means the same.

    Returns: this rank's group; NON_GROUP_MEMBER if no list has this rank.

    Raises: ValueError for invalid lists, and for a parent that is not registered; RuntimeError if the parent is on an
        accelerator and the default group has no bound device; and the errors of ``Comm.split``.

    Cancelling is safe.
    """
    if not split_ranks or not isinstance(split_ranks, Sequence):
        raise ValueError(f"split_ranks must be a list of at least one list of ranks, got {split_ranks!r}")
    default = default_group()
    if member_of(parent_pg, "split_group", 5) is None:
        raise ValueError("this rank is not in parent_pg")
    parent = registered(parent_pg)
    lists = _checked_splits(split_ranks, parent.size())
    mine = next((ranks for ranks in lists if parent.rank() in ranks), [])
    known, ranks = world(), [parent.global_ranks[rank] for rank in mine]
    # a call that is refused below takes a name, too, as the other ranks go on with the next one
    name = known.hashed_name(ranks, parent.group_name)
    desc = f"{parent.group_desc}:split:{parent.splits}" if group_desc is None else group_desc
    parent.splits += 1
    if backend is not None and Backend(backend) != parent.backend:
        raise ValueError(f"backend must be that of the parent, {parent.backend!r}, or None, got {backend!r}")
    real = parent.backend != Backend.FAKE
    if real and not is_safe_to_split() and any(comm.device.type != "cpu" for comm in parent.comms):
        raise RuntimeError("no device is bound to the default group: pass device_id= to init_process_group")
    limit = default_timeout(parent.backend) if timeout is None else timeout
    check_valid_timeout(limit)
    hints = options_of(parent.name(), pg_options, limit).get("hints")
    if not mine:
        return NON_GROUP_MEMBER
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


def _checked_splits(split_ranks: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """The lists, each sorted. Raises: ValueError."""
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
