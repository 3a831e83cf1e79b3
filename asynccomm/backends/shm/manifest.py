"""What a bundle consists of, written into a slot behind the data, for the error when the ranks' bundles differ.

A list of numbers: for each run of operations that differ in nothing but their sizes the first word of their signature,
how many they are, the second word of each, and the number of each on the comm. Operations that were merged into one
are listed one by one, if there is room.
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

ROW: Final = 4 * WORD  # bytes of an operation that is a run of its own
_form: Final = attrgetter("dtype", "layout", "label")  # all else is the same in operations that were merged


class Listed(NamedTuple):
    """An operation of a list."""

    number: int  #: on the comm
    words: Signature


class Issued(NamedTuple):
    """What a rank has where another has something else."""

    total: int  #: operations of the batch; 1 for one that is in none
    listed: Sequence[Listed]
    ops: Sequence[Op] = ()  #: the same, where they are known better than by their words


def listing(submissions: Sequence[Submission], signatures: Sequence[Signature], room: int) -> array[int]:
    """The list, in at most ``room`` bytes if there is a :data:`ROW` for each of ``submissions``."""
    rows, words = array("Q"), array("Q")
    for submission, (code, size) in zip(submissions, signatures, strict=True):
        row = (code, 1, size, submission.work.seq)
        rows.extend(row)
        words.extend(_runs(submission) or row)
    return words if len(words) * WORD <= room else rows


def _runs(submission: Submission) -> list[int]:
    """Of the members, if there are any."""
    members: Any = submission.members
    words: list[int] = []
    numbers = submission.numbers
    if members and isinstance(members[0], TensorOp):
        for _, run in groupby(members, _form):  # few: the signatures of hundreds of members would take long
            ops = list(run)
            sizes = [signature(op)[1] for op in ops] if ops[0].label else [op.numel for op in ops]  # which is the same
            words += [signature(ops[0])[0], len(ops), *sizes, *numbers[: len(ops)]]
            numbers = numbers[len(ops) :]
    return words


def read_listing(words: Sequence[int]) -> list[Listed]:
    """What is in a list, in the order of the program. Raises: ValueError for what is no list, or an empty one."""
    listed = sorted(_read(words))
    if not listed:
        raise ValueError("it lists nothing")
    return listed


def _read(words: Sequence[int]) -> Iterator[Listed]:
    at = 0
    while at < len(words):
        if at + 2 > len(words) or at + 2 + 2 * words[at + 1] > len(words):
            raise ValueError("it ends in the middle of a run")
        code, n = words[at], words[at + 1]
        sizes, numbers = words[at + 2 : at + 2 + n], words[at + 2 + n : at + 2 + 2 * n]
        for number, size in zip(numbers, sizes, strict=True):
            yield Listed(number, (code, size))
        at += 2 + 2 * n


def difference(mine: Issued, theirs: Issued) -> tuple[int, str, str]:
    """The first operation that differs: its number, what this rank has and what the other one has.

    Where there is none, the batches have different ends.
    """
    if mine.total > 1 < theirs.total:
        for own, other in zip(mine.listed, theirs.listed, strict=False):
            if own.words != other.words:
                otherwise = ", divided otherwise" if differing_layout(other.words, own.words) else ""
                return own.number, _named(mine, own), _named(theirs, other) + otherwise
    here, there = _described(mine), _described(theirs)
    return mine.listed[0].number, here, there if here != there else f"{there}, divided otherwise"


def _described(issued: Issued) -> str:
    first = _named(issued, issued.listed[0])
    return f"{first} alone" if issued.total == 1 else f"a batch of {issued.total} from {first} on"


def _named(issued: Issued, listed: Listed) -> str:
    return next((str(op) for op in issued.ops if signature(op) == listed.words), describe(listed.words))
