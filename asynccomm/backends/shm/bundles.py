"""A batch of collectives as *bundles*: those whose contributions fit together in one slot travel in one step.

How a batch is cut follows from what all ranks know, the operations, and so is the same everywhere. Bundles are filled
in program order, as far as the slot goes. By themselves go those that are large, and those of whose sizes some ranks
know nothing. Behind the data there is room for a list of the operations (``manifest.py``).

Ranks may issue the same collectives and still differ in where a batch begins and ends. So what travels carries its
place in its batch, as a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, final

from asynccomm.backends.base import Submission
from asynccomm.backends.shm.layout import rounded_up
from asynccomm.backends.shm.manifest import ROW
from asynccomm.backends.shm.reduction import reduction_for
from asynccomm.ops import (
    AllReduce,
    AllToAll,
    AllToAllSingle,
    GroupedOp,
    Op,
    Parcels,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)
from asynccomm.ops.signature import signature

_WHOLE: Final = frozenset({AllReduce, Reduce})  # every rank combines all of them
_REDUCED: Final = frozenset({AllReduce, Reduce, ReduceScatter, ReduceScatterSingle})
_SPLIT: Final = frozenset({ReduceScatter, ReduceScatterSingle, Scatter, AllToAllSingle})
_UNKNOWN: Final = frozenset({AllToAll, Parcels})
_COUNT: Final = 20  # bits
MOST: Final = 256  # in one bundle: a step is not interrupted, and these take a millisecond or two

Place = tuple[int, int]  # from which byte of a slot on, and how many; where there is a part for each rank, of each


@final
class Bundle:
    """Collectives of a batch that travel in one step; or one of a batch that goes by itself.

    Args:
        places: of each in the slot; none for one that goes by itself.
        used: bytes of the slot that these take.
        following: the next one in the batch, if there is one. It is listed, too: where a batch is cut depends on it.
        batch: how many operations the batch has, and how many of those are before this.
    """

    __slots__ = ("listed", "nbytes", "op", "place", "places", "signatures", "submissions", "total", "used")

    def __init__(
        self,
        submissions: Sequence[Submission],
        places: Sequence[Place],
        used: int,
        following: Submission | None,
        batch: tuple[int, int],
    ) -> None:
        self.submissions = submissions
        self.places = places
        self.used = used
        self.listed = submissions if following is None else [*submissions, following]
        self.signatures = [signature(submission.op) for submission in self.listed]  #: of what is listed
        self.total = batch[0]
        self.place = place_in_batch(*batch)  #: in its batch, as a number
        self.nbytes = sum([submission.nbytes for submission in submissions])
        self.op: Op = GroupedOp(tuple([submission.op for submission in submissions]))  #: what it is at, for errors


def place_in_batch(total: int, before: int) -> int:
    """A number that is never 0, which is the place of what is in no batch."""
    most = (1 << _COUNT) - 1
    return min(total, most) << _COUNT | min(before, most)


def size_of_batch(place: int) -> int | None:
    """How many operations the batch has, 1 for what is in none; None if ``place`` is no such number."""
    total, before = place >> _COUNT, place & (1 << _COUNT) - 1
    if not place:
        return 1
    return total if before < total < 1 << _COUNT else None


def extent(op: Op, size: int) -> tuple[int, bool]:
    """Bytes that a rank contributes to a slot, and whether it does so for each rank apart; of the largest rank.

    Of the operations whose sizes all ranks know.
    """
    kind = type(op)
    if kind in _REDUCED:
        reduced: Any = op
        travels = reduction_for(reduced.dtype, reduced.reduction, size).dtype
        nbytes = reduced.numel * travels.itemsize * (2 if reduced.dtype.is_complex else 1)
    else:
        nbytes = op.nbytes // size if kind is AllToAllSingle else op.nbytes
    return nbytes, kind in _SPLIT


def cut(batch: Sequence[Submission], size: int, chunk: int, whole: int) -> Sequence[Submission | Bundle]:
    """What the operations of ``batch`` travel in, in order; messages come first, for nothing holds them up.

    One collective that is alone in its batch is as if there were no batch.

    Args:
        size: of the comm.
        chunk: bytes of a slot.
        whole: bytes up to which a reduction is done by everybody at once.
    """
    collectives = [submission for submission in batch if not submission.op.p2p]
    counts = [len(submission.members) or 1 for submission in collectives]
    if sum(counts) < 2:
        return batch
    messages = [submission for submission in batch if submission.op.p2p]
    return [*messages, *_bundles(collectives, counts, size, chunk, whole)]


def _bundles(
    collectives: Sequence[Submission], counts: Sequence[int], size: int, chunk: int, whole: int
) -> Iterator[Bundle]:
    total = sum(counts)
    i = before = 0
    while i < len(collectives):
        places: list[Place] = []
        used, end = 0, i
        while end < min(len(collectives), i + MOST):
            room, nbytes = _needs(collectives[end].op, size, chunk, whole)
            if used + nbytes + (end - i + 2) * ROW > chunk:  # with a row for the one that follows
                break
            places.append((used, room))
            used += nbytes
            end += 1
        if sum(counts[i:end]) < 2:  # by itself a root need not wait for the others
            places, used, end = [], 0, i + 1
        following = collectives[end] if end < len(collectives) else None
        yield Bundle(collectives[i:end], places, used, following, (total, before))
        before += sum(counts[i:end])
        i = end


def _needs(op: Op, size: int, chunk: int, whole: int) -> tuple[int, int]:
    """Bytes of its :class:`Place`, and of the slot; more than there are if it is to go by itself."""
    if type(op) in _UNKNOWN:
        return 0, chunk
    nbytes, split = extent(op, size)
    if type(op) in _WHOLE and nbytes > whole:
        return 0, chunk
    room = rounded_up(nbytes)
    return room, size * room if split else room
