"""Ranks and sizes of groups, names of their backends, and the launcher's variables."""

from __future__ import annotations

import os
from typing import Final

import torch

from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.types import NON_GROUP_MEMBER
from asynccomm.compat.c10d.world import Group, default_group, group_or_default, registered, world
from asynccomm.ops.validation import CommInfo, check_rank

CPU: Final = torch.device("cpu")


def get_rank(group: Group = None) -> int:
    """This process's rank in the group; -1 outside the group. Raises: ValueError before ``init_process_group``."""
    default_group()
    return -1 if _is_outside(group) else registered(group).rank()


def get_world_size(group: Group = None) -> int:
    """The number of ranks of the group; -1 outside the group. Raises: ValueError before ``init_process_group``."""
    default_group()
    return -1 if _is_outside(group) else registered(group).size()


def get_group_rank(group: Group, global_rank: int) -> int:
    """The rank in the group of ``global_rank``. Raises: ValueError if the group lacks the rank."""
    pg = group_or_default(group)
    if pg is world().default_pg:
        return global_rank
    ranks = world().pg_group_ranks.get(pg)
    if ranks is None:
        raise ValueError(f"{pg!r} is not registered: it was destroyed, or is of another world")
    found = ranks.get(global_rank)
    if found is None:
        raise ValueError(f"global rank {global_rank} is not in group {pg.group_name!r} of ranks {list(ranks)}")
    return found


def get_global_rank(group: Group, group_rank: int) -> int:
    """The global rank of ``group_rank`` in the group. Raises: ValueError if the group lacks the rank."""
    pg = group_or_default(group)
    if pg is world().default_pg:
        return group_rank
    registered(pg)
    if not 0 <= group_rank < pg.size():
        raise ValueError(f"group rank {group_rank} is not in group {pg.group_name!r} of {pg.size()} ranks")
    return pg.global_ranks[group_rank]


def get_process_group_ranks(group: Group) -> list[int]:
    """The global ranks of the group, by rank in the group."""
    return list(registered(group).global_ranks)


def canonical_rank(
    group: Group,
    global_rank: int | None = None,
    group_rank: int | None = None,
    return_global: bool = False,
    *,
    name: str = "rank",
) -> int:
    """Convert a global rank or a rank in the group to the latter, or with ``return_global`` to the former.

    Args:
        name: of the argument for the global rank, in error messages.

    Raises: ValueError if both or none are given, or if the group lacks the rank.
    """
    if group_rank is not None:
        if global_rank is not None:
            raise ValueError(f"{name} and group_{name} cannot both be given, got {global_rank!r} and {group_rank!r}")
        checked = _checked(group_or_default(group), f"group_{name}", group_rank)
        return get_global_rank(group, checked) if return_global else checked
    if global_rank is None:
        raise ValueError(f"{name} or group_{name} must be given")
    found = _checked(group_or_default(group), name, get_group_rank(group, global_rank))
    return global_rank if return_global else found


def _checked(pg: ProcessGroup, name: str, rank: int) -> int:
    """``rank``, if the group has it. Raises: ValueError, TypeError naming the argument."""
    size = pg.size()
    if type(rank) is int and 0 <= rank < size:
        return rank
    return check_rank(CommInfo(pg.group_name, pg.rank(), size, CPU), name, rank)


def root_rank(pg: ProcessGroup, global_rank: int | None, group_rank: int | None, name: str) -> int:
    """The root's rank in the group; by default of global rank 0. Raises: ValueError if the group lacks the rank."""
    if global_rank is None and group_rank is None:
        global_rank = 0
    return canonical_rank(pg, global_rank, group_rank, name=name)


def get_backend(group: Group = None) -> str:
    """The backend's name, as given by the program. Raises: ValueError if this rank is not in the group."""
    return world().pg_map[registered(group)][0]


def get_backend_config(group: Group = None) -> str:
    """The backends as "device:backend,...". Raises: ValueError if this rank is not in the group."""
    return world().pg_backend_config[registered(group)]


def get_pg_count() -> int:
    """The number of groups with numbered names since ``init_process_group``, including destroyed groups."""
    return world().group_count


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """The variable LOCAL_RANK, which launchers set, or else ``fallback_rank``. Raises: RuntimeError without both."""
    text = os.environ.get("LOCAL_RANK")
    if text is not None:
        return int(text)
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError("environment variable LOCAL_RANK is not set: use a launcher that does, or pass fallback_rank")


def is_torchelastic_launched() -> bool:
    """Whether torchrun started this process; torchrun sets TORCHELASTIC_RUN_ID."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _is_outside(group: Group) -> bool:
    return group is not None and not isinstance(group, ProcessGroup) and group == NON_GROUP_MEMBER
