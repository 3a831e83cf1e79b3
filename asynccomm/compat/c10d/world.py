"""The groups of this process: the default group and others, with their names, tags and ranks.

A process has one world, as in torch, unless a program selects another with :func:`use_world`. The selection holds for
the calling task and the tasks started by it. So several ranks can run in one process, each in its own task.
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

Group: TypeAlias = ProcessGroup | int | None  # argument type: an int is NON_GROUP_MEMBER, None the default group
Member: TypeAlias = ProcessGroup | int  # return type: an int is NON_GROUP_MEMBER

Ending: TypeAlias = Callable[[int], Awaitable[None]]


@final
class World(Handle):
    """Registry of the groups of this process.

    Attributes:
        default_pg: the group of all ranks; None before ``init_process_group``.
        pg_map: the backend's name and the store, by group.
        pg_names: names by group.
        pg_group_ranks: the ranks in the group by global rank, by group.
        pg_backend_config: "device:backend,..." by group.
        group_count: the number of groups with numbered names so far.
        tags_to_pg, pg_to_tag: groups by tag, and tags by group.
        pg_coalesce_state: recorded calls of tasks, not submitted yet, by group: see ``coalescing``.
        backend, init_method: arguments of ``init_process_group``.
        starting: whether ``init_process_group`` is running.
        recorder: the flight recorder of the groups.
        endings: async functions to call after the end of the default group, last first, with the number of ranks to
            wait for, including this rank.
    """

    _instead = "call init_process_group() there"

    def __init__(self) -> None:
        self.default_pg: ProcessGroup | None = None
        self.pg_map: dict[ProcessGroup, tuple[str, Store]] = {}
        self.pg_names: dict[ProcessGroup, str] = {}
        self.pg_group_ranks: dict[ProcessGroup, dict[int, int]] = {}
        self.pg_backend_config: dict[ProcessGroup, str] = {}
        self.group_count: int = 0
        self.tags_to_pg: dict[str, list[ProcessGroup]] = {}
        self.pg_to_tag: dict[ProcessGroup, str] = {}
        self.pg_coalesce_state: dict[ProcessGroup, dict[Any, Any]] = {}
        self.backend: str | None = None
        self.init_method: str | None = None
        self.starting = False
        self.recorder: FlightRecorder = FlightRecorder()
        self.endings: list[Ending] = []
        self._hashed: Counter[str] = Counter()  # number of hashed names by ranks

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """Descriptions of all groups; ``ranks`` is empty for a group of all ranks."""
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
        """A numbered name, which is equal on all ranks because all ranks create all groups."""
        name = str(self.group_count)
        self.group_count += 1
        return name

    def hashed_name(self, ranks: Sequence[int], parent: str = "") -> str:
        """A name that ``ranks`` can compute without other ranks: a hash of the ranks and their count of earlier groups.

        Args:
            parent: name of the group that the new group comes from, so that groups of different parents differ.
        """
        key = "_".join(map(str, ranks)) + (f"/{parent}" if parent else "")  # a slash, as names may be numbers
        number = self._hashed[key]
        self._hashed[key] += 1
        return sha1(f"{key}_{number}".encode(), usedforsecurity=False).hexdigest()

    def renumbered(self) -> None:
        """Reset the counts of hashed names after the ranks got new numbers; the counts may differ between ranks."""
        self._hashed.clear()

    # -- groups -------------------------------------------------------------------------------------------------------

    def add(self, pg: ProcessGroup, store: Store, tag: str | None, *, listed: bool = True) -> None:
        """Register a group. ``listed``: :meth:`find` finds a group without a tag by its ranks alone."""
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
        """Unregister a group."""
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
        """Reset the world, including the counts for names."""
        vars(self).update(vars(World()))

    def find(self, tag: str, ranks: Sequence[int]) -> ProcessGroup | None:
        """The group of these ranks (in any order) under ``tag``; None if there is none."""
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
    """Select ``other`` as the world of this task, and of the tasks it starts inside the block."""
    token = _world.set(other)
    try:
        yield other
    finally:
        _world.reset(token)


def is_initialized() -> bool:
    """Whether there is a default group."""
    return _world.get().default_pg is not None


def default_group() -> ProcessGroup:
    """The default group. Raises: ValueError if ``init_process_group`` was not called."""
    pg = _world.get().default_pg
    if pg is None:
        raise ValueError("there is no default process group: await init_process_group() first")
    return pg


def group_or_default(group: Group) -> ProcessGroup:
    """``group``, or the default group for None. Raises: ValueError for NON_GROUP_MEMBER; TypeError."""
    if group is None:
        return default_group()
    if isinstance(group, ProcessGroup):
        return group
    if group == NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group")
    raise TypeError(f"group must be a ProcessGroup, got {group!r} ({type(group).__name__})")


def registered(group: Group) -> ProcessGroup:
    """The group, as :func:`group_or_default`. Raises: also ValueError for a destroyed group."""
    pg = group_or_default(group)
    if pg not in _world.get().pg_map:
        raise ValueError(f"{pg!r} is not registered: it was destroyed, or is of another world")
    return pg


class _WorldMeta(type):
    """Metaclass with the property ``WORLD``, the current default group."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        return _world.get().default_pg

    @WORLD.setter
    def WORLD(cls, pg: ProcessGroup | None) -> None:
        _world.get().default_pg = pg


class group(metaclass=_WorldMeta):
    """Namespace: ``group.WORLD`` is the default group, or None."""


class GroupMember(metaclass=_WorldMeta):
    """Namespace: ``GroupMember.WORLD`` is the default group, or None."""

    NON_GROUP_MEMBER: Final = NON_GROUP_MEMBER
