"""torch's registry of groups: their stores, names and ranks, and the default group.

torch keeps these in private maps by group, and has no public way to register a group that other code has created. Only
this module reads and writes the maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn, final

from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from asynccomm.interop.torch_collectives import NAME

CONFIG: Final = f"cpu:{NAME},cuda:{NAME}"


@final
class NoStore(dist.Store):
    """Placeholder for the store of a group made over comms, so that torch cannot create more groups over it.

    Raises: RuntimeError, from all methods.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            f"torch group {self._name!r} was made over comms and has no store, so torch cannot make another one of its "
            f"ranks: use Comm.split and group_over"
        )

    set: Any = _refuse
    get: Any = _refuse
    add: Any = _refuse
    check: Any = _refuse
    wait: Any = _refuse
    delete_key: Any = _refuse
    compare_set: Any = _refuse
    num_keys: Any = _refuse


def default() -> Any:
    """The default group, WORLD, or None."""
    return dist.group.WORLD


def make_default(group: Any) -> None:
    """Set the default group, which ``dist.get_rank()`` and all functions called without a group use."""
    distributed_c10d._update_default_pg(group)


def group_called(name: str) -> Any:
    """The group of the given name, or None."""
    for group, known in distributed_c10d._world.pg_names.items():
        if known == name:
            return group
    return None


def store_of(group: Any) -> dist.Store | None:
    """The store that ``group`` was created with; None if unknown."""
    try:
        store = group.get_group_store()
    except (AttributeError, RuntimeError):  # no store, as in all Python groups of torch 2.11
        store = None
    if store is None:
        _, store = distributed_c10d._world.pg_map.get(group, (None, None))
    return store if isinstance(store, dist.Store) and not isinstance(store, NoStore) else None


def add(group: Any, name: Any, ranks: Sequence[int]) -> None:
    """Register ``group`` under ``name``; ``ranks`` are its global ranks, by rank in the group."""
    world: Any = distributed_c10d._world
    world.pg_map[group] = (NAME, NoStore(name))
    world.pg_names[group] = name
    world.pg_backend_config[group] = CONFIG
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    tag = f"ptd:{name}"
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.tags_to_pg.setdefault("", []).append(group)
    world.pg_to_tag[group] = tag
    c10d._register_process_group(name, group)


def drop(group: Any) -> None:
    """Remove a group registered by :func:`add`."""
    dist.destroy_process_group(group)
