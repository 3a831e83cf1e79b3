"""The groups of this process: the default one, those made of it, their names, tags and ranks.

There is one world, as in torch, unless a program asks for another with :func:`use_world`. It holds for the task that
does, and for tasks that this starts: several ranks can live in one process so, each in a task.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from hashlib import sha1
from typing import Any, Final, TypeAlias, final

from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.recorder import FlightRecorder
from asynccomm.compat.c10d.types import NON_GROUP_MEMBER
from asynccomm.core.handles import Handle
from asynccomm.store.base import Store

__all__ = [
    "Ending",
    "Group",
    "GroupMember",
    "Member",
    "World",
    "default_group",
    "group",
    "group_or_default",
    "is_initialized",
    "registered",
    "use_world",
    "world",
]

Group: TypeAlias = "ProcessGroup | int | None"  # what functions take: an int is NON_GROUP_MEMBER, None the default
Member: TypeAlias = "ProcessGroup | int"  # what functions give: an int is NON_GROUP_MEMBER

Ending: TypeAlias = "Callable[[int], Awaitable[None]]"


@final
class World(Handle):
    """What this process knows of its groups.

    Attributes:
        default_pg: the group of all ranks; None before ``init_process_group``.
        pg_map: the name of the backend, and the store, by group.
        pg_names: by group.
        pg_group_ranks: the ranks in the group by global rank, by group.
        pg_backend_config: "device:backend,..." by group.
        group_count: how many groups were given a number for a name.
        tags_to_pg, pg_to_tag: which groups have which tag.
        pg_coalesce_state: what tasks have recorded and not sent yet, by group: see ``coalescing``.
        backend, init_method: what ``init_process_group`` was told.
        starting: it is under way.
        recorder: what the groups did last.
        endings: to be awaited when the default group has ended, last first, with how many ranks this one waits for,
            itself included.
    """

    _instead = "call init_process_group() there"

    def __init__(self) -> None:
        self.default_pg: ProcessGroup | None = None
        self.pg_map: dict[ProcessGroup, tuple[str, Store]] = {}
        self.pg_names: dict[ProcessGroup, str] = {}
        self.pg_group_ranks: dict[ProcessGroup, dict[int, int]] = {}
        self.pg_backend_config: dict[ProcessGroup, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[ProcessGroup]] = {}
        self.pg_to_tag: dict[ProcessGroup, str] = {}
        self.pg_coalesce_state: dict[ProcessGroup, dict[Any, Any]] = {}
        self.backend: str | None = None
        self.init_method: str | None = None
        self.starting = False
        self.recorder = FlightRecorder()
        self.endings: list[Ending] = []
        self._hashed: Counter[str] = Counter()  # how often ranks have got a hashed name

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """What there is to say of each group; ``ranks`` is empty for one of all ranks."""
        everybody = 0 if self.default_pg is None else self.default_pg.size()
        return [
            {
                "pg_name": self.pg_names[pg],
                "pg_desc": pg.group_desc,
                "backend_config": self.pg_backend_config[pg],
                "ranks": [] if len(ranks) == everybody else list(ranks),
                "group_size": len(ranks),
                "group_count": self.group_count,
            }
            for pg, ranks in self.pg_group_ranks.items()
        ]

    # -- names --------------------------------------------------------------------------------------------------------

    def next_name(self) -> str:
        """A number, which is the same on all ranks as all ranks make all groups."""
        name = str(self.group_count)
        self.group_count += 1
        return name

    def hashed_name(self, ranks: Sequence[int], parent: str = "") -> str:
        """A name that ``ranks`` can find without the others: how often these have made a group counts.

        Args:
            parent: the group they come from, so that groups of other groups have other names.
        """
        key = "_".join(map(str, ranks)) + (f"/{parent}" if parent else "")  # which may be a number, as ranks are
        number = self._hashed[key]
        self._hashed[key] += 1
        return sha1(f"{key}_{number}".encode(), usedforsecurity=False).hexdigest()

    def renumbered(self) -> None:
        """The ranks have new numbers: how often the old ones made groups, which differs, counts no more."""
        self._hashed.clear()

    # -- what there is ------------------------------------------------------------------------------------------------

    def add(self, pg: ProcessGroup, store: Store, tag: str | None, *, listed: bool = True) -> None:
        """Register a group. ``listed``: without a tag, it can be found by its ranks alone."""
        self.pg_map[pg] = pg.backend, store
        self.pg_names[pg] = pg.group_name
        self.pg_group_ranks[pg] = {rank: i for i, rank in enumerate(pg.global_ranks)}
        self.pg_backend_config[pg] = repr(pg.config)
        if tag in (None, ""):
            tag = f"ptd:{pg.group_name}"
            if listed:
                self.tags_to_pg.setdefault("", []).append(pg)
        elif not str(tag).startswith("user:"):
            tag = f"user:{tag}"
        self.tags_to_pg.setdefault(str(tag), []).append(pg)
        self.pg_to_tag[pg] = str(tag)
        self.recorder.attach(pg)

    def remove(self, pg: ProcessGroup) -> None:
        """Forget a group."""
        for known in (self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config, self.pg_to_tag):
            known.pop(pg, None)
        self.pg_coalesce_state.pop(pg, None)
        self.recorder.forget(pg)
        for tag, groups in list(self.tags_to_pg.items()):
            if pg in groups:
                groups.remove(pg)
            if not groups:
                del self.tags_to_pg[tag]
        if pg is self.default_pg:
            self.default_pg = None

    def clear(self) -> None:
        """Forget everything, so that names begin anew."""
        vars(self).update(vars(World()))

    def find(self, tag: str, ranks: Sequence[int]) -> ProcessGroup | None:
        """The group of these ranks, in any order, under ``tag``."""
        if tag and not tag.startswith(("ptd:", "user:")):
            tag = f"user:{tag}"
        wanted = set(ranks)
        for pg in self.tags_to_pg.get(tag, []):
            if pg.size() == len(ranks) and wanted == set(pg.global_ranks):
                return pg
        return None


_everywhere: Final = World()
_world: Final[ContextVar[World]] = ContextVar("asynccomm.compat.c10d.world", default=_everywhere)


def world() -> World:
    """The world of this task."""
    return _world.get()


@contextlib.contextmanager
def use_world(other: World) -> Iterator[World]:
    """Have this task, and those that it starts inside, use ``other`` in place of the process's world."""
    token = _world.set(other)
    try:
        yield other
    finally:
        _world.reset(token)


def is_initialized() -> bool:
    """Whether there is a default group."""
    return _world.get().default_pg is not None


def default_group() -> ProcessGroup:
    """Raises: ValueError if ``init_process_group`` was not called."""
    pg = _world.get().default_pg
    if pg is None:
        raise ValueError("there is no default process group: await init_process_group() first")
    return pg


def group_or_default(group: Group) -> ProcessGroup:
    """``group``, or the default one for None. Raises: ValueError for NON_GROUP_MEMBER; TypeError."""
    if group is None:
        return default_group()
    if isinstance(group, ProcessGroup):
        return group
    if group == NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group")
    raise TypeError(f"group must be a ProcessGroup, got {group!r} ({type(group).__name__})")


def registered(group: Group) -> ProcessGroup:
    """The same for groups that were not destroyed. Raises also: ValueError."""
    pg = group_or_default(group)
    if pg not in _world.get().pg_map:
        raise ValueError(f"{pg!r} is not registered: it was destroyed, or is of another world")
    return pg


class _WorldMeta(type):
    """Gives the classes the property ``WORLD``, which is always current."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        return _world.get().default_pg

    @WORLD.setter
    def WORLD(cls, pg: ProcessGroup | None) -> None:
        _world.get().default_pg = pg


class group(metaclass=_WorldMeta):
    """``group.WORLD`` is the default group, None if there is none."""


class GroupMember(metaclass=_WorldMeta):
    """``GroupMember.WORLD`` is the default group, None if there is none."""

    NON_GROUP_MEMBER: Final = NON_GROUP_MEMBER
