"""What torch knows of its groups beside the groups themselves: their stores, names and ranks, and which is the default.

torch looks all this up by group in maps of its own, and offers no other way to hand it a group that somebody else has
made. They are read and written here and nowhere else.
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
    """In place of the store of a group that was made over comms, of which torch could make more groups.

    Raises: RuntimeError, whatever is called.
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
    """The default group, WORLD; None if there is none."""
    return dist.group.WORLD


def make_default(group: Any) -> None:
    """``dist.get_rank()``, and all functions of torch that get no group, mean ``group`` from now on."""
    distributed_c10d._update_default_pg(group)


def group_called(name: str) -> Any:
    """The group of that name; None if there is none."""
    for group, known in distributed_c10d._world.pg_names.items():
        if known == name:
            return group
    return None


def store_of(group: Any) -> dist.Store | None:
    """Where the ranks of ``group`` have met; None if that is not known."""
    try:
        store = group.get_group_store()
    except (AttributeError, RuntimeError):  # it has none, as all Python groups of torch 2.11
        store = None
    if store is None:
        _, store = distributed_c10d._world.pg_map.get(group, (None, None))
    return store if isinstance(store, dist.Store) and not isinstance(store, NoStore) else None


def add(group: Any, name: Any, ranks: Sequence[int]) -> None:
    """Have torch find ``group`` by its name, and translate ranks: ``ranks`` are those of the default group."""
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
    """Undo ``add``."""
    dist.destroy_process_group(group)
