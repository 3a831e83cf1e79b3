"""The error for ranks that issued different collectives at one place; it is the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from asynccomm.backends.base import Submission
from asynccomm.errors import CollectiveMismatchError
from asynccomm.ops.signature import Signature, signature


class Called(NamedTuple):
    """A collective as it was called."""

    number: int  #: its sequence number on the comm
    text: str
    words: Signature


class Issued(NamedTuple):
    """The collectives that a rank has submitted in one batch."""

    called: Sequence[Called]  #: in the order of their numbers, before any were fused
    submitted: Sequence[str]  #: as they were submitted


def issued(batch: Sequence[Submission]) -> Issued:
    """The collectives of ``batch``."""
    called: list[Called] = []
    for submission in batch:
        ops = submission.members or (submission.op,)
        numbers = submission.numbers if submission.members else (submission.work.seq,)
        called += [Called(number, str(op), signature(op)) for number, op in zip(numbers, ops, strict=True)]
    return Issued(sorted(called, key=attrgetter("number")), [str(submission.op) for submission in batch])


def difference(rank: int, mine: Issued, other: int, theirs: Issued) -> CollectiveMismatchError:
    """The error for two ranks that differ; it names the first operation that differs as it was called, if any."""
    for ours, another in zip(mine.called, theirs.called, strict=False):
        if ours.words != another.words:
            text = another.text if another.text != ours.text else f"{another.text}, of other sizes or dtypes"
            return CollectiveMismatchError(ours.number, rank, ours.text, other, text)
    first = mine.called[0]
    if len(mine.called) != len(theirs.called):
        sides = _extent(mine) + _beyond(mine, theirs), _extent(theirs) + _beyond(theirs, mine)
        return CollectiveMismatchError(first.number, rank, sides[0], other, sides[1])
    merged = [f"{_extent(mine)}, merged into {', '.join(side.submitted)}" for side in (mine, theirs)]
    return CollectiveMismatchError(first.number, rank, merged[0], other, merged[1])


def misfit(sends: Sequence[Sequence[int]], receives: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """The first sender and receiver of an uneven all_to_all whose numbers of elements differ."""
    for source, sent in enumerate(sends):
        for rank, received in enumerate(receives):
            if sent[rank] != received[source]:
                return source, rank
    return None


def _extent(side: Issued) -> str:
    first, count = side.called[0].text, len(side.called)
    return f"{first} alone" if count == 1 else f"a batch of {count} from {first} on"


def _beyond(side: Issued, other: Issued) -> str:
    """The first collective that only the longer batch has, for the text of ``side``."""
    count, shared = len(side.called), min(len(side.called), len(other.called))
    if count > shared:
        extra = side.called[shared]
        return f", with #{extra.number} {extra.text}"
    return ", without it" if count > 1 else ""
