"""The ranks of a job, their addresses, and the tree of their connections. Pure.

Each rank connects to the leader of its host, and each leader to the root. The leader of a host is its lowest rank that
is not gone, and the root is the lowest such rank of all. All ranks therefore agree on the successor of a rank that is
gone. A rank always connects to a lower rank, even if it has missed a loss, so the connections form no cycles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Annotated, Final, TypeAlias, final

from msgspec import Meta

from asynccomm.control.transport.schema import Message

TEXT_CHARACTERS: Final = 1024  # at most, of a text in a message
Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_CHARACTERS)]


@final
class RankAddress(Message, frozen=True):
    """One rank, and the addresses of its listening sockets."""

    rank: int
    host: Text
    pid: int
    local: Text = ""  #: name of the abstract local socket; empty: none
    address: Text = ""  #: of the TCP socket; empty: none
    port: Annotated[int, Meta(ge=0, le=65535)] = 0

    @property
    def listens(self) -> bool:
        """Whether the rank has a control channel at all."""
        return bool(self.local or self.port)


@final
class Topology:
    """The ranks of a job that have a control channel."""

    def __init__(self, contacts: Iterable[RankAddress]) -> None:
        self.contacts: dict[int, RankAddress] = {contact.rank: contact for contact in contacts if contact.listens}
        self._ranks = sorted(self.contacts)
        self._hosts: dict[str, list[int]] = {}  # the ranks of each, in order
        for rank in self._ranks:
            self._hosts.setdefault(self.contacts[rank].host, []).append(rank)

    def root(self, gone: Collection[int], beyond: int = -1) -> int:
        """The root of the tree, if no rank up to ``beyond`` is. Raises: ValueError: all ranks are gone."""
        for at in range(bisect_right(self._ranks, beyond), len(self._ranks)):
            if self._ranks[at] not in gone:
                return self._ranks[at]
        raise ValueError("all ranks are gone")

    def above(self, rank: int, gone: Collection[int], root: int | None = None) -> int | None:
        """The rank that ``rank`` connects to; None: ``rank`` is the root. ``root``: if it is known."""
        root = self.root(gone) if root is None else root
        if rank == root:
            return None
        leader = _first(self._hosts[self.contacts[rank].host], gone)
        return root if leader == rank else leader

    def between(self, rank: int, other: int, gone: Collection[int]) -> list[int]:
        """The ranks that pass messages on between two ranks."""
        path, way = self._way_up(rank, gone), self._way_up(other, gone)
        while len(path) > 1 and len(way) > 1 and path[-2] == way[-2]:
            del path[-1], way[-1]
        return [each for each in dict.fromkeys([*path, *way[-2::-1]]) if each not in (rank, other)]

    def _way_up(self, rank: int, gone: Collection[int]) -> list[int]:
        """``rank``, the ranks above it, and the root at the end."""
        way, root = [rank], self.root(gone)
        while (above := self.above(way[-1], gone, root)) is not None:
            way.append(above)
        return way

    def next_leader(self, rank: int, gone: Collection[int]) -> int | None:
        """The leader of the host of ``rank``, its leader, once that is gone; None: there is no other rank."""
        return next((r for r in self._hosts[self.contacts[rank].host] if r > rank and r not in gone), None)

    def below(self, rank: int, gone: Collection[int]) -> Iterator[int]:
        """The ranks that connect to ``rank``."""
        host = self.contacts[rank].host
        if _first(self._hosts[host], gone) == rank:
            yield from (other for other in self._hosts[host] if other != rank and other not in gone)
        if self.root(gone) == rank:
            for other, ranks in self._hosts.items():
                leader = next((each for each in ranks if each not in gone), None)
                if other != host and leader is not None:
                    yield leader


def _first(ranks: Sequence[int], gone: Collection[int]) -> int:
    """The lowest of ``ranks``, which are in order, that is not gone. Raises: ValueError: all are."""
    for rank in ranks:
        if rank not in gone:
            return rank
    raise ValueError("all ranks are gone")
