"""Lists of ranks in messages: three or more ranks at equal distances are a *run*, written ``[first, count, step]``.

The survivors of a loss, the ranks that leave together and the ranks of a split comm are a few runs, however many there
are. Without runs, each of many ranks would send and receive lists of all. A list has one compact form, so the
compact forms of equal lists are equal; the order of the list is kept, and names of newcomers are items of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias, final

from msgspec import Meta

from asynccomm.control.transport.schema import Message

MAX_RANK: Final = 2**31 - 1
MAX_LISTED: Final = 2**16  # participants in a list, after its runs are expanded
MAX_NAME: Final = 256  # characters of a newcomer's name
SHORTEST: Final = 3  # ranks in a run
REMEMBERED: Final = 16  # lists; the ranks of a job send the same few again and again

Rank: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RANK)]
ParticipantId: TypeAlias = int | Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]  # a rank, or a newcomer's name


@final
class Run(Message, frozen=True, array_like=True):
    """Ranks at equal distances. Not a tuple: msgspec crashes on a union of constrained types and a tuple of them."""

    first: Rank
    count: Annotated[int, Meta(ge=SHORTEST, le=MAX_LISTED)]
    step: Annotated[int, Meta(ge=-MAX_RANK, le=MAX_RANK)]

    def __post_init__(self) -> None:
        if not self.step or not 0 <= self.first + (self.count - 1) * self.step <= MAX_RANK:
            raise ValueError(f"a run is of different ranks up to {MAX_RANK}, got {self}")

    @property
    def ranks(self) -> range:
        """The ranks, in order."""
        return range(self.first, self.first + self.count * self.step, self.step)


Runs: TypeAlias = tuple[ParticipantId | Run, ...]
RankRuns: TypeAlias = tuple[Rank | Run, ...]


class _Reading(NamedTuple):
    compact: Runs
    people: tuple[ParticipantId, ...]
    distinct: frozenset[ParticipantId]


def compact(people: Iterable[ParticipantId | Run]) -> Runs:
    """The compact form of a list that may have runs already. Raises: ValueError: it is too long."""
    return _read(tuple(people)).compact


def compact_ranks(ranks: Iterable[Rank | Run]) -> RankRuns:
    """As :func:`compact`, of ranks alone."""
    return compact(ranks)  # type: ignore[return-value]


def expand(runs: Iterable[ParticipantId | Run]) -> tuple[ParticipantId, ...]:
    """The list. Raises: ValueError: it is too long."""
    return _read(tuple(runs)).people


def distinct(runs: Iterable[ParticipantId | Run]) -> frozenset[ParticipantId]:
    """The participants in the list. Raises: ValueError: it is too long."""
    return _read(tuple(runs)).distinct


def distinct_ranks(runs: Iterable[Rank | Run]) -> frozenset[int]:
    """As :func:`distinct`, of ranks alone."""
    return distinct(runs)  # type: ignore[return-value]


def expand_ranks(runs: Iterable[Rank | Run]) -> tuple[int, ...]:
    """As :func:`expand`, of ranks alone."""
    return expand(runs)  # type: ignore[return-value]


@functools.lru_cache(REMEMBERED)
def _read(items: Runs) -> _Reading:
    people: list[ParticipantId] = []
    for item in items:
        ranks = item.ranks if isinstance(item, Run) else (item,)
        if len(people) + len(ranks) > MAX_LISTED:
            raise ValueError(f"a list has at most {MAX_LISTED} participants")
        people += ranks
    return _Reading(_compact(people), tuple(people), frozenset(people))


def _compact(people: Sequence[ParticipantId]) -> Runs:
    found: list[ParticipantId | Run] = []
    start = 0
    while start < len(people):
        first = people[start]
        end = start + 1
        if isinstance(first, int) and end < len(people) and isinstance(second := people[end], int) and second != first:
            step, following = second - first, second
            while following == people[end]:
                end += 1
                following += step
                if end == len(people):
                    break
        if end - start >= SHORTEST:
            assert isinstance(first, int)
            found.append(Run(first, end - start, step))
            start = end
        else:
            found.append(first)
            start += 1
    return tuple(found)
