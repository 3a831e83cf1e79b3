"""Functions that torch has under private names and programs use: state of groups, and argument checks.

The package exports these functions under torch's names, with the underscore.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from asynccomm.backends.base import Backend as Transport
from asynccomm.comm.comm import Comm
from asynccomm.compat.c10d import validation
from asynccomm.compat.c10d.backends import Backend, BackendConfig, accelerator, is_gloo_available
from asynccomm.compat.c10d.p2p import irecv, isend
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.ranks import get_backend, get_global_rank, get_process_group_ranks
from asynccomm.compat.c10d.types import NON_GROUP_MEMBER
from asynccomm.compat.c10d.world import Group, default_group, registered, world
from asynccomm.errors import AsyncCommError
from asynccomm.store.base import Store


def default_store() -> Store:
    """The default group's store, under its prefix. Raises: ValueError before ``init_process_group``."""
    return world().pg_map[default_group()][1]


def group_store(pg: ProcessGroup) -> Store:
    """The group's store, under its prefix."""
    return world().pg_map[registered(pg)][1]


def name_of(pg: object) -> str:
    """The group's name; "None" unless ``pg`` is a group of this world."""
    return world().pg_names.get(pg, "None")  # type: ignore[call-overload,no-any-return]


def group_uid(pg: ProcessGroup) -> int:
    """Number of the group's NCCL communicator, equal on all ranks; -1 for other backends, and after the group's end."""
    try:
        return max((comm.unsafe_get_backend().uid for comm in pg.comms), default=-1)
    except AsyncCommError:
        return -1


def group_tag(pg: ProcessGroup) -> str:
    """The group's tag; ``"ptd:"`` and the name for a group created without a tag."""
    return world().pg_to_tag[pg].removeprefix("user:")


def group_size(group: Group) -> int:
    """The number of ranks, as ``get_world_size``, but only for groups with this rank."""
    return registered(group).size()


def group_size_by_name(name: str) -> int:
    """The number of ranks of the group with this name. Raises: ValueError if there is none."""
    return resolve_group(name).size()


def pg_config(group: Group = None) -> dict[str, Any]:
    """Description of one group."""
    pg = registered(group)
    return {
        "pg_name": name_of(pg),
        "pg_desc": pg.group_desc,
        "backend_config": world().pg_backend_config[pg],
        "pg_size": pg.size(),
        "ranks": get_process_group_ranks(pg),
    }


def all_pg_configs() -> list[dict[str, Any]]:
    """Descriptions of all groups; see :func:`pg_config`."""
    return [pg_config(pg) for pg in world().pg_map]


def resolve_group(group_name: str) -> ProcessGroup:
    """The group of this world with this name. Raises: ValueError if there is none."""
    for pg, known in world().pg_names.items():
        if known == group_name:
            return pg
    raise ValueError(f"there is no group of the name {group_name!r}")


def get_backend_impl(group: Group | str = None, device: str | torch.device | None = None) -> Transport:
    """The backend object behind a group: an escape hatch, without promises of compatibility.

    Args:
        group: also a group's name.
        device: type of device that the backend serves; None: the bound device's, or the only backend.

    Raises: ValueError if this rank is not in the group, or several backends serve it and no device is given;
        RuntimeError if the group does not serve the device.
    """
    pg = resolve_group(group) if isinstance(group, str) else registered(group)
    if device is None:
        device = pg.bound_device_id
    if device is None and len(pg.comms) > 1:
        raise ValueError(f"device must be given: {pg!r} has several backends")
    if device is not None and torch.device(device).type not in pg.device_types:
        raise RuntimeError(f"device must be of a type in {pg.device_types}, which {pg!r} serves, got {device}")
    return pg.comm(device).unsafe_get_backend()


def split_source(pg: ProcessGroup, requested_backend: str | None = None) -> Comm | None:
    """The comm that groups are split off: of the bound device, or of the default group's accelerator; else None.

    Args:
        requested_backend: of the new group; with another one than the comm's, the result is None. None: any (torch
            before 2.15 has no such argument).
    """
    kind = None if pg.bound_device_id is None else pg.bound_device_id.type
    if kind is None and pg is world().default_pg:
        kind = accelerator()
    if kind is None or kind not in pg.device_types:
        return None
    comm = pg.comm(kind)
    if requested_backend is None:
        return comm
    requested = BackendConfig(requested_backend).get_device_backend_map().get(kind)
    return comm if requested in ("auto", comm.backend) else None


def process_group_wrapper(
    wrapped_pg: ProcessGroup | Comm,
    store_prefix: str,
    store: object,
    rank: int,
    world_size: int,
    timeout: object = None,
) -> ProcessGroup | Comm:
    """``wrapped_pg`` itself: the calls of all ranks are always compared, without a wrapper.

    Args:
        store_prefix, store, timeout: not needed, as no second group is made for comparing.

    Raises: AssertionError if torch was built without gloo, as in torch; TypeError; ValueError for a rank or a size that
        ``wrapped_pg`` does not have.
    """
    if not is_gloo_available():
        raise AssertionError("process groups cannot be wrapped without gloo")
    if isinstance(wrapped_pg, ProcessGroup):
        has = wrapped_pg.rank(), wrapped_pg.size()
    elif isinstance(wrapped_pg, Comm):
        has = wrapped_pg.rank, wrapped_pg.size
    else:
        raise TypeError(f"wrapped_pg must be a ProcessGroup or a Comm, got {wrapped_pg!r}")
    if has != (rank, world_size):
        raise ValueError(f"wrapped_pg is rank {has[0]} of {has[1]}, got rank {rank} and world_size {world_size}")
    return wrapped_pg


def backend_from_str(backend: str | None = None) -> str:
    """A backend's name in lower case; for None or "", the default group's backend."""
    return Backend(backend) if backend else get_backend(default_group())


def find_group(tag: str, ranks: Sequence[int]) -> ProcessGroup | None:
    """The group of these global ranks (in any order) under ``tag``; None if there is none."""
    return world().find(tag, ranks)


def resolve_name(ranks: Sequence[int], tag: str) -> str:
    """The name of the group of these global ranks under ``tag``. Raises: ValueError if there is none."""
    pg = find_group(tag, ranks)
    if pg is None:
        raise ValueError(f"there is no group of ranks {list(ranks)} under the tag {tag!r}")
    return name_of(pg)


def process_group_name(ranks: Sequence[int], use_hashed_name: bool) -> str:
    """Name for the next group: a number, or a hash of the ranks, which needs no agreement with other ranks."""
    return world().hashed_name(ranks) if use_hashed_name else world().next_name()


def hash_ranks(ranks: Sequence[int]) -> str:
    """A hashed name for a group of ``ranks``; each call returns a new name."""
    return world().hashed_name(ranks)


def is_not_in_group(group: object) -> bool:
    """Whether ``group`` is NON_GROUP_MEMBER, the value on ranks outside a group."""
    return not isinstance(group, ProcessGroup) and group == NON_GROUP_MEMBER


def warn_not_in_group(op_name: str) -> None:
    """Warn that ``op_name`` does nothing on this rank."""
    validation.warn_outside(op_name, 3)


def check_not_self_rank(group: Group, rank: int, rank_type: str) -> None:
    """Raise ValueError if ``rank`` in the group is this process's rank."""
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
    """Return a list unchanged, and another object in a tuple."""
    return obj if isinstance(obj, list) else (obj,)


def validate_output_list(my_rank: int, dst: int, gather_list: object) -> None:
    """Raise ValueError unless a list is given on rank ``dst`` and on no other rank."""
    if (my_rank == dst) != bool(gather_list):
        raise ValueError(f"gather_list must be given on rank {dst}, and only there; rank {my_rank} has {gather_list!r}")


def deprecated_global_rank(group: Group, rank: int) -> int:
    """Old name of ``get_global_rank``."""
    warnings.warn("_get_global_rank is deprecated: use get_global_rank", FutureWarning, stacklevel=2)
    return get_global_rank(group, rank)


def dump_fr_trace(
    includeCollectives: bool | None = None, includeStackTraces: bool | None = None, onlyActive: bool | None = None
) -> bytes:
    """Pickled dump of the calling task's flight recorder: see ``recorder``. Callable from any thread.

    Args:
        includeCollectives: include the operations; None: True.
        includeStackTraces: include the call sites of operations; None: True.
        onlyActive: include only operations in flight; None: False.
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
    """Dump of the flight recorder as JSON, without call sites."""
    dump = world().recorder.dump(
        collectives=includeCollectives is not False, frames=False, only_active=bool(onlyActive)
    )
    return json.dumps(dump).encode()


def reset_fr_trace() -> None:
    """Delete the flight recorder's records."""
    world().recorder.reset()
