"""The hosts of a comm, seen from one rank. Pure.

The ranks of a host have *positions* in rank order. Position 0 is the host's *leader*. A *rail* connects the ranks of
one position on all hosts; there are as many rails as the smallest host has ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final


@final
@dataclass(frozen=True)
class HostPlacement:
    """The hosts of a comm, seen from ``rank``.

    Args:
        hosts: the ranks of each host, in rank order; the hosts in the order of their first ranks.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return sum([len(host) for host in self.hosts])

    @cached_property
    def host(self) -> int:
        """The number of this rank's host."""
        return self.host_of(self.rank)

    @cached_property
    def local(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return self.hosts[self.host]

    @cached_property
    def position(self) -> int:
        """This rank's position on its host."""
        return self.local.index(self.rank)

    @cached_property
    def leads(self) -> bool:
        """Whether this rank is the leader of its host."""
        return self.position == 0

    @cached_property
    def alone(self) -> bool:
        """Whether this rank is the only one of its host."""
        return len(self.local) == 1

    @cached_property
    def rails(self) -> int:
        """The number of rails."""
        return min([len(host) for host in self.hosts])

    @cached_property
    def even(self) -> bool:
        """Whether all hosts have the same number of ranks: every rank then is on a rail."""
        return len({len(host) for host in self.hosts}) == 1

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All ranks, host by host."""
        return tuple([rank for host in self.hosts for rank in host])

    @cached_property
    def in_order(self) -> bool:
        """Whether the ranks are laid out host by host."""
        return self.order == tuple(range(self.size))

    @cached_property
    def _homes(self) -> dict[int, tuple[int, int]]:
        return {rank: (i, at) for i, host in enumerate(self.hosts) for at, rank in enumerate(host)}

    def host_of(self, rank: int) -> int:
        """The number of the host of ``rank``."""
        return self._homes[rank][0]

    def position_of(self, rank: int) -> int:
        """The position of ``rank`` on its host."""
        return self._homes[rank][1]

    def is_local(self, rank: int) -> bool:
        """Whether ``rank`` is on this rank's host."""
        return self.host_of(rank) == self.host

    def rail(self) -> tuple[int, ...]:
        """The ranks of this rank's position on all hosts; only with a position below ``rails``."""
        return tuple([host[self.position] for host in self.hosts])


def grouped(keys: Sequence[Hashable]) -> list[list[int]]:
    """The indices with equal keys, in order, the groups in the order of their first indices."""
    found: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return list(found.values())
