"""Lists of ranks in messages: three or more ranks at equal distances are a *run*, written ``[first, count, step]``.

The survivors of a loss, the ranks that leave together and the ranks of a split comm are a few runs, however many there
are. Without runs, each of many ranks would send and receive lists of all. Many ranks in order at other distances, such
as those that have left at random times, are a run ``[first, count, bits]``, with a bit for each rank between the first
and the last. A list has one compact form, so the compact forms of equal lists are equal; the order of the list is kept,
and names of newcomers are items of their own.
"""

from __future__ import annotations

import base64
import binascii
import functools
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias, final

from msgspec import Meta

from asynccomm.control.transport.schema import Message

MAX_RANK: Final = 2**31 - 1
MAX_LISTED: Final = 2**16  # participants in a list, after its runs are expanded
MAX_NAME: Final = 256  # characters of a newcomer's name
SHORTEST: Final = 3  # ranks in a run
MAX_BITS: Final = 2**20  # from the first rank to the last
OVERHEAD: Final = 36  # characters of bits at most, beside one for six ranks
REMEMBERED: Final = 16  # lists; the ranks of a job send the same few again and again

Rank: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RANK)]
ParticipantId: TypeAlias = int | Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]  # a rank, or a newcomer's name


@final
class Run(Message, frozen=True, array_like=True):
    """Different ranks. Not a tuple: msgspec crashes on a union of constrained types and a tuple of them."""

    first: Rank
    count: Annotated[int, Meta(ge=SHORTEST, le=MAX_LISTED)]
    #: the distance between the ranks; or bits in base64, which begin at the first rank with the lowest bit of the
    #: first byte
    step: Annotated[int, Meta(ge=-MAX_RANK, le=MAX_RANK)] | Annotated[str, Meta(max_length=MAX_BITS // 6 + 4)]

    def __post_init__(self) -> None:
        if isinstance(self.step, str):
            bits = _number(self.step)
            if not bits & 1 or bits.bit_count() != self.count or self.first + bits.bit_length() - 1 > MAX_RANK:
                raise ValueError(f"bits are of {self.count} ranks from {self.first} up to {MAX_RANK}, got {self.step}")
        elif not self.step or not 0 <= self.first + (self.count - 1) * self.step <= MAX_RANK:
            raise ValueError(f"a run is of different ranks up to {MAX_RANK}, got {self}")

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks, in order."""
        if isinstance(self.step, str):
            bits, at, ranks = f"{_number(self.step):b}"[::-1], 0, []
            while at >= 0:  # not bit by bit: there may be few ranks in many bits
                ranks.append(self.first + at)
                at = bits.find("1", at + 1)
            return ranks
        return range(self.first, self.first + self.count * self.step, self.step)


def _number(bits: str) -> int:
    try:
        return int.from_bytes(base64.b64decode(bits, validate=True), "little")
    except binascii.Error as exc:
        raise ValueError(f"bits must be in base64: {exc}") from None


Runs: TypeAlias = tuple[ParticipantId | Run, ...]
RankRuns: TypeAlias = tuple[Rank | Run, ...]


_NONE: Final = (-1, -1, 0)  # the extent of an item that is not in order


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
    return _Reading(_with_bits(_with_runs(people)), tuple(people), frozenset(people))


def _with_runs(people: Sequence[ParticipantId]) -> list[ParticipantId | Run]:
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
    return found


def _with_bits(items: Sequence[ParticipantId | Run]) -> Runs:
    """The list with bits in place of ranks in order, where the text is shorter then."""
    found: list[ParticipantId | Run] = []
    start = 0
    while start < len(items):
        end, characters, last = start, 0, -1
        while end < len(items):
            first, following, length = _extent(items[end])
            if first <= last:
                break
            end, characters, last = end + 1, characters + length, following
        if end == start:
            found.append(items[start])
            start += 1
            continue
        first = _extent(items[start])[0]
        if last - first < min(MAX_BITS, 6 * (characters - OVERHEAD)):
            found.append(_bits(items[start:end], first))
        else:
            found += items[start:end]
        start = end
    return tuple(found)


def _extent(item: ParticipantId | Run) -> tuple[int, int, int]:
    """The first and the last rank of an item in order, and the length of its text; -1: the item is not in order."""
    if isinstance(item, Run):
        last = item.ranks[-1]
        return (item.first, last, len(f"[{item.first},{item.count},{item.step}],")) if last > item.first else _NONE
    return (item, item, len(f"{item},")) if isinstance(item, int) else _NONE


def _bits(items: Sequence[ParticipantId | Run], first: int) -> Run:
    ranks = [rank for item in items for rank in (item.ranks if isinstance(item, Run) else (item,))]
    data = bytearray((_extent(items[-1])[1] - first) // 8 + 1)
    for rank in ranks:
        assert isinstance(rank, int)
        data[(rank - first) >> 3] |= 1 << ((rank - first) & 7)
    return Run(first, len(ranks), base64.b64encode(data).decode())
