"""The manifest of a bundle: a list of its operations, behind the data in a slot, for errors when bundles differ.

The list consists of numbers. A run of operations that differ only in their sizes takes: the first word of their
signature, the length of the run, the second word of each signature, and the sequence number of each operation on the
comm. Operations that were merged into one are listed one by one, if there is room.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

from asynccomm.backends.base import Submission
from asynccomm.backends.shm.layout import WORD
from asynccomm.ops import Op, TensorOp
from asynccomm.ops.signature import Signature, describe, differing_layout, signature

ROW: Final = 4 * WORD  # bytes of a run of one operation
_form: Final = attrgetter("dtype", "layout", "label")  # merged operations are equal in all else


class ManifestRow(NamedTuple):
    """An operation in a list."""

    number: int  #: sequence number on the comm
    words: Signature


class ManifestEntry(NamedTuple):
    """The operations that a rank has issued in a step, to be compared with another rank's."""

    total: int  #: number of operations in the batch; 1 without a batch
    listed: Sequence[ManifestRow]
    ops: Sequence[Op] = ()  #: the operations themselves, for better texts, where they are known


def listing(submissions: Sequence[Submission], signatures: Sequence[Signature], room: int) -> array[int]:
    """The list of ``submissions``, in at most ``room`` bytes, which must hold a :data:`ROW` for each."""
    rows, words = array("Q"), array("Q")
    for submission, (code, size) in zip(submissions, signatures, strict=True):
        row = (code, 1, size, submission.work.seq)
        rows.extend(row)
        words.extend(_runs(submission) or row)
    return words if len(words) * WORD <= room else rows


def _runs(submission: Submission) -> list[int]:
    """The runs of a merged operation's members; empty without members."""
    members: Any = submission.members
    words: list[int] = []
    numbers = submission.numbers
    if members and isinstance(members[0], TensorOp):
        for _, run in groupby(members, _form):  # few runs; signatures of hundreds of members would take long
            ops = list(run)
            sizes = [signature(op)[1] for op in ops] if ops[0].label else [op.numel for op in ops]  # the same numbers
            words += [signature(ops[0])[0], len(ops), *sizes, *numbers[: len(ops)]]
            numbers = numbers[len(ops) :]
    return words


def read_listing(words: Sequence[int]) -> list[ManifestRow]:
    """The operations in a list, in program order. Raises: ValueError if the list is corrupt or empty."""
    listed = sorted(_read(words))
    if not listed:
        raise ValueError("it lists nothing")
    return listed


def _read(words: Sequence[int]) -> Iterator[ManifestRow]:
    at = 0
    while at < len(words):
        if at + 2 > len(words) or at + 2 + 2 * words[at + 1] > len(words):
            raise ValueError("it ends in the middle of a run")
        code, n = words[at], words[at + 1]
        sizes, numbers = words[at + 2 : at + 2 + n], words[at + 2 + n : at + 2 + 2 * n]
        for number, size in zip(numbers, sizes, strict=True):
            yield ManifestRow(number, (code, size))
        at += 2 + 2 * n


def difference(mine: ManifestEntry, theirs: ManifestEntry) -> tuple[int, str, str]:
    """The first operation that differs: its number, and the texts of this rank's and the other rank's operation.

    If all listed operations are equal, the texts describe the batches, which differ in their bounds.
    """
    if mine.total > 1 < theirs.total:
        for own, other in zip(mine.listed, theirs.listed, strict=False):
            if own.words != other.words:
                otherwise = ", divided otherwise" if differing_layout(other.words, own.words) else ""
                return own.number, _named(mine, own), _named(theirs, other) + otherwise
    here, there = _described(mine), _described(theirs)
    return mine.listed[0].number, here, there if here != there else f"{there}, divided otherwise"


def _described(issued: ManifestEntry) -> str:
    first = _named(issued, issued.listed[0])
    return f"{first} alone" if issued.total == 1 else f"a batch of {issued.total} from {first} on"


def _named(issued: ManifestEntry, listed: ManifestRow) -> str:
    return next((str(op) for op in issued.ops if signature(op) == listed.words), describe(listed.words))
