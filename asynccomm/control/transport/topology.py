"""Who belongs to a job, where each can be reached, and to whom each connects. Pure.

The connections form a tree: each rank to the leader of its host, each leader to the root. A host's leader is the lowest
of its ranks that is not gone, and the root is the lowest of all. So all know who comes next when one is gone, and each
connects to a lower rank, whatever it knows: there are no circles.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self, final


@final
@dataclass(frozen=True, slots=True)
class RankAddress:
    """One rank, and where it listens."""

    rank: int
    host: str
    pid: int
    local: str = ""  #: name of its abstract local socket; empty: it has none
    address: str = ""  #: of its TCP socket, if it has one
    port: int = 0

    @property
    def listens(self) -> bool:
        """Whether it has a control channel at all."""
        return bool(self.local or self.port)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, data: Any) -> Self:
        """Raises: ValueError for what is no contact."""
        try:
            contact = cls(**data)
        except TypeError as exc:
            raise ValueError(f"no contact: {data!r}") from exc
        texts, numbers = (contact.host, contact.local, contact.address), (contact.rank, contact.pid, contact.port)
        if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
            raise ValueError(f"no contact: {data!r}")
        return contact


@final
class Topology:
    """The ranks of a job that have a control channel."""

    def __init__(self, contacts: Iterable[RankAddress]) -> None:
        self.contacts = {contact.rank: contact for contact in contacts if contact.listens}

    def root(self, gone: Collection[int]) -> int:
        """The rank in the middle. Raises: ValueError if all are gone."""
        return min(rank for rank in self.contacts if rank not in gone)

    def above(self, rank: int, gone: Collection[int]) -> int | None:
        """Whom ``rank`` connects to; None if it is the root."""
        root = self.root(gone)
        if rank == root:
            return None
        host = self.contacts[rank].host
        leader = min(r for r, contact in self.contacts.items() if contact.host == host and r not in gone)
        return root if leader == rank else leader

    def below(self, rank: int) -> list[int]:
        """The higher ranks of the same host, which may be connected to ``rank`` if no lower one is there."""
        host = self.contacts[rank].host
        return [r for r, contact in self.contacts.items() if r > rank and contact.host == host]
