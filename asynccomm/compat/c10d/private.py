"""What programs use of torch's that has no public name: state by group, and checks, by torch's arguments.

The package shows them with the underscore that they have there.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from asynccomm.compat.c10d import validation
from asynccomm.compat.c10d.backends import Backend
from asynccomm.compat.c10d.p2p import irecv, isend
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.ranks import get_backend, get_global_rank, get_process_group_ranks
from asynccomm.compat.c10d.types import NON_GROUP_MEMBER
from asynccomm.compat.c10d.world import Group, default_group, registered, world
from asynccomm.errors import AsyncCommError
from asynccomm.store.base import Store

__all__ = [
    "all_pg_configs",
    "as_iterable",
    "backend_from_str",
    "check_not_self_rank",
    "check_op",
    "check_single_tensor",
    "check_tensor_list",
    "default_store",
    "deprecated_global_rank",
    "dump_fr_trace",
    "dump_fr_trace_json",
    "find_group",
    "group_size",
    "group_size_by_name",
    "group_store",
    "group_tag",
    "group_uid",
    "hash_ranks",
    "is_not_in_group",
    "name_of",
    "pg_config",
    "process_group_name",
    "reset_fr_trace",
    "resolve_name",
    "validate_output_list",
    "warn_not_in_group",
]


def default_store() -> Store:
    """The default group's store, under its prefix. Raises: ValueError before ``init_process_group``."""
    return world().pg_map[default_group()][1]


def group_store(pg: ProcessGroup) -> Store:
    """The group's store, under its prefix."""
    return world().pg_map[registered(pg)][1]


def name_of(pg: object) -> str:
    """The group's name; "None" for what is no group of this world."""
    return world().pg_names.get(pg, "None")  # type: ignore[call-overload,no-any-return]


def group_uid(pg: ProcessGroup) -> int:
    """A number of the group's NCCL communicator, the same on all its ranks; -1 for other backends, and at its end."""
    try:
        return max((comm.unsafe_get_backend().uid for comm in pg.comms), default=-1)
    except AsyncCommError:
        return -1


def group_tag(pg: ProcessGroup) -> str:
    """The tag that the group was made with; one that was made without has ``"ptd:"`` and its name."""
    return world().pg_to_tag[pg].removeprefix("user:")


def group_size(group: Group) -> int:
    """As ``get_world_size``, but only for groups that this rank is in."""
    return registered(group).size()


def group_size_by_name(name: str) -> int:
    """How many ranks the group of this name has. Raises: ValueError if there is none."""
    for pg, known in world().pg_names.items():
        if known == name:
            return pg.size()
    raise ValueError(f"there is no group of the name {name!r}")


def pg_config(group: Group = None) -> dict[str, Any]:
    """What there is to say of one group."""
    pg = registered(group)
    return {
        "pg_name": name_of(pg),
        "pg_desc": pg.group_desc,
        "backend_config": world().pg_backend_config[pg],
        "pg_size": pg.size(),
        "ranks": get_process_group_ranks(pg),
    }


def all_pg_configs() -> list[dict[str, Any]]:
    """:func:`pg_config` of all groups."""
    return [pg_config(pg) for pg in world().pg_map]


def backend_from_str(backend: str | None = None) -> str:
    """The name of a backend in lower case; None or empty: the default group's."""
    return Backend(backend) if backend else get_backend(default_group())


def find_group(tag: str, ranks: Sequence[int]) -> ProcessGroup | None:
    """The group of these global ranks, in any order, under ``tag``; None if there is none."""
    return world().find(tag, ranks)


def resolve_name(ranks: Sequence[int], tag: str) -> str:
    """The name of that group. Raises: ValueError if there is none."""
    pg = find_group(tag, ranks)
    if pg is None:
        raise ValueError(f"there is no group of ranks {list(ranks)} under the tag {tag!r}")
    return name_of(pg)


def process_group_name(ranks: Sequence[int], use_hashed_name: bool) -> str:
    """The name of the next group: a number, or a hash of the ranks that they find without the others."""
    return world().hashed_name(ranks) if use_hashed_name else world().next_name()


def hash_ranks(ranks: Sequence[int]) -> str:
    """A hashed name; the next call for the same ranks gives another one."""
    return world().hashed_name(ranks)


def is_not_in_group(group: object) -> bool:
    """Whether ``group`` is what ranks have that are not in it; None is the default group."""
    return not isinstance(group, ProcessGroup) and group == NON_GROUP_MEMBER


def warn_not_in_group(op_name: str) -> None:
    """Warn that ``op_name`` does nothing here."""
    validation.member_of(NON_GROUP_MEMBER, op_name, 3)


def check_not_self_rank(group: Group, rank: int, rank_type: str) -> None:
    """Raise ValueError if ``rank`` of the group is this process."""
    validation.check_not_self(registered(group), rank, rank_type)


def check_single_tensor(param: object, param_name: str) -> None:
    """Raise TypeError unless ``param`` is a tensor."""
    validation.check_tensor(param_name, param)


def check_tensor_list(param: object, param_name: str) -> None:
    """Raise TypeError unless ``param`` is a list of tensors."""
    validation.check_tensor_list(param_name, param)


def check_op(op: object) -> None:
    """Raise ValueError unless ``op`` is ``isend`` or ``irecv``."""
    if op not in (isend, irecv):
        raise ValueError(f"op must be isend or irecv, got {op!r}")


def as_iterable(obj: Any) -> Iterable[Any]:
    """``obj`` if it is a list, else a tuple of it."""
    return obj if isinstance(obj, list) else (obj,)


def validate_output_list(my_rank: int, dst: int, gather_list: object) -> None:
    """Raise ValueError unless a list is given on rank ``dst``, and only there."""
    if (my_rank == dst) != bool(gather_list):
        raise ValueError(f"gather_list must be given on rank {dst}, and only there; rank {my_rank} has {gather_list!r}")


def deprecated_global_rank(group: Group, rank: int) -> int:
    """``get_global_rank``, by its old name."""
    warnings.warn("_get_global_rank is deprecated: use get_global_rank", FutureWarning, stacklevel=2)
    return get_global_rank(group, rank)


def dump_fr_trace(
    includeCollectives: bool | None = None, includeStackTraces: bool | None = None, onlyActive: bool | None = None
) -> bytes:
    """What the flight recorder has, pickled: see ``recorder``. From any thread; the world is the calling task's.

    Args:
        includeCollectives: with the operations; None: True.
        includeStackTraces: with where they were called; None: True.
        onlyActive: without those that are done; None: False.
    """
    recorder = world().recorder
    return pickle.dumps(
        recorder.dump(
            collectives=includeCollectives is not False,
            frames=includeStackTraces is not False,
            only_active=bool(onlyActive),
        )
    )


def dump_fr_trace_json(includeCollectives: bool | None = None, onlyActive: bool | None = None) -> bytes:
    """The same as JSON, without where the operations were called."""
    dump = world().recorder.dump(
        collectives=includeCollectives is not False, frames=False, only_active=bool(onlyActive)
    )
    return json.dumps(dump).encode()


def reset_fr_trace() -> None:
    """Have the flight recorder forget what was called so far."""
    world().recorder.reset()
