"""A batch of collectives, cut into *bundles*: collectives that fit together in one slot travel in one step.

The cut depends only on the operations, which all ranks know, and so is the same on all ranks. Bundles are filled in
program order, as far as the slot has room. Large operations go alone, and so do operations with sizes unknown to some
ranks. The slot has room for a list of the operations behind the data (``manifest.py``).

Ranks may issue the same collectives, and still differ in the bounds of their batches. Each step therefore carries its
place in its batch, as a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, final

from asynccomm.backends.base import Submission
from asynccomm.backends.shm.layout import rounded_up
from asynccomm.backends.shm.manifest import ROW
from asynccomm.backends.shm.reduction import reduction_for
from asynccomm.ops import GroupedOp, Op, TensorOp
from asynccomm.ops.signature import signature

_COUNT: Final = 20  # bits of a number of operations
MOST: Final = 256  # operations in one bundle: a step is never interrupted, and so many take 1 to 2 ms

Place = tuple[int, int]  # offset in a slot and bytes; of each rank's part, if the slot has a part per rank


@final
class Bundle:
    """Collectives of a batch that travel in one step, or one collective of a batch that goes alone.

    Args:
        submissions: the collectives.
        places: the place of each in the slot; empty for a collective that goes alone.
        used: bytes of the slot that the places take.
        following: the next collective in the batch, if any; listed, too, because the cut depends on it.
        batch: the number of operations in the batch, and the number of operations before this bundle.
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
        self.signatures = [signature(submission.op) for submission in self.listed]  #: signatures of ``listed``
        self.total = batch[0]
        self.place = place_in_batch(*batch)  #: place in its batch, as a number
        self.nbytes = sum([submission.nbytes for submission in submissions])
        self.op: Op = GroupedOp(tuple([submission.op for submission in submissions]))  #: current operation, for errors


def place_in_batch(total: int, before: int) -> int:
    """The place in a batch as a number above 0; 0 is the place of an operation in no batch."""
    most = (1 << _COUNT) - 1
    return min(total, most) << _COUNT | min(before, most)


def size_of_batch(place: int) -> int | None:
    """The number of operations in the batch of ``place``, 1 for no batch; None if ``place`` is no valid place."""
    total, before = place >> _COUNT, place & (1 << _COUNT) - 1
    if not place:
        return 1
    return total if before < total < 1 << _COUNT else None


def extent(op: Op, size: int) -> tuple[int, bool]:
    """The bytes that a rank contributes to a slot (of the largest rank), and whether it contributes them per rank.

    Only for operations with sizes known to all ranks.
    """
    nbytes = op.part_nbytes(size)
    if op.reduction is not None:
        assert isinstance(op, TensorOp)
        travels = reduction_for(op.dtype, op.reduction, size).dtype
        nbytes = op.numel * travels.itemsize * (2 if op.dtype.is_complex else 1)
    return nbytes, op.split


def cut(batch: Sequence[Submission], size: int, chunk: int, whole: int) -> Sequence[Submission | Bundle]:
    """Cut ``batch`` into bundles, in order; messages come first, because they wait for no collective.

    A batch with only one collective is returned as it is.

    Args:
        size: number of ranks.
        chunk: bytes of a slot.
        whole: bytes up to which every rank combines a whole reduction (``reduce_whole``).
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
            if used + nbytes + (end - i + 2) * ROW > chunk:  # with a row for the following operation
                break
            places.append((used, room))
            used += nbytes
            end += 1
        if sum(counts[i:end]) < 2:  # a single operation goes alone: its root need not wait for the others
            places, used, end = [], 0, i + 1
        following = collectives[end] if end < len(collectives) else None
        yield Bundle(collectives[i:end], places, used, following, (total, before))
        before += sum(counts[i:end])
        i = end


def _needs(op: Op, size: int, chunk: int, whole: int) -> tuple[int, int]:
    """Bytes of an operation's :data:`Place`, and of the slot; more than the slot has if the operation goes alone."""
    if not op.sizes_known:
        return 0, chunk
    nbytes, split = extent(op, size)
    if op.reduction is not None and not split and nbytes > whole:
        return 0, chunk
    room = rounded_up(nbytes)
    return room, size * room if split else room
