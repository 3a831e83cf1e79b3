"""Who this is: ranks in groups and in the world, and what the launcher says."""

from __future__ import annotations

import os

from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.types import NON_GROUP_MEMBER
from asynccomm.compat.c10d.world import Group, default_group, group_or_default, registered, world

__all__ = [
    "canonical_rank",
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "is_torchelastic_launched",
    "root_rank",
]


def get_rank(group: Group = None) -> int:
    """This process's rank in the group; -1 if it is not in it. Raises: ValueError before ``init_process_group``."""
    default_group()
    return -1 if _is_outside(group) else registered(group).rank()


def get_world_size(group: Group = None) -> int:
    """How many ranks the group has; -1 if this one is not in it. Raises: ValueError before ``init_process_group``."""
    default_group()
    return -1 if _is_outside(group) else registered(group).size()


def get_group_rank(group: Group, global_rank: int) -> int:
    """What ``global_rank`` is called in the group. Raises: ValueError if it is not in it."""
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
    """The global rank of ``group_rank`` in the group. Raises: ValueError if there is none."""
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
    """One rank, given either way, as a rank in the group; or with ``return_global`` as a global one.

    Args:
        name: of the argument for the global rank, for errors.

    Raises: ValueError if both or none are given, or the rank is not in the group.
    """
    if group_rank is not None:
        if global_rank is not None:
            raise ValueError(f"{name} and group_{name} cannot both be given, got {global_rank!r} and {group_rank!r}")
        return get_global_rank(group, group_rank) if return_global else group_rank
    if global_rank is None:
        raise ValueError(f"{name} or group_{name} must be given")
    return global_rank if return_global else get_group_rank(group, global_rank)


def root_rank(pg: ProcessGroup, global_rank: int | None, group_rank: int | None, name: str) -> int:
    """The same where none means global rank 0. Raises: ValueError if that is not in the group."""
    if global_rank is None and group_rank is None:
        global_rank = 0
    return canonical_rank(pg, global_rank, group_rank, name=name)


def get_backend(group: Group = None) -> str:
    """The name by which the backend was asked for. Raises: ValueError if this rank is not in the group."""
    return world().pg_map[registered(group)][0]


def get_backend_config(group: Group = None) -> str:
    """The backends as "device:backend,...". Raises: ValueError if this rank is not in the group."""
    return world().pg_backend_config[registered(group)]


def get_pg_count() -> int:
    """How many groups were given a number for a name since ``init_process_group``; destroyed ones count."""
    return world().group_count


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """LOCAL_RANK, as launchers set it, or else ``fallback_rank``. Raises: RuntimeError without either."""
    text = os.environ.get("LOCAL_RANK")
    if text is not None:
        return int(text)
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError("environment variable LOCAL_RANK is not set: use a launcher that does, or pass fallback_rank")


def is_torchelastic_launched() -> bool:
    """Whether torchrun started this process: it sets TORCHELASTIC_RUN_ID."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _is_outside(group: Group) -> bool:
    return group is not None and not isinstance(group, ProcessGroup) and group == NON_GROUP_MEMBER
