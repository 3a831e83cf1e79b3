"""The memory of operations that this rank has issued and that the ranks have not agreed on yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from asynccomm.backends.base import Submission
from asynccomm.backends.regions import AccessSet, Region
from asynccomm.batching.batches import planned
from asynccomm.batching.plan import on_all_ranks


@final
class PendingHazards:
    """Finds out which operations must not be decided in one batch, since one of them writes what the other uses.

    Other ranks cannot know that: their tensors may lie otherwise.
    """

    def __init__(self) -> None:
        self._accesses = AccessSet()
        self._there: dict[Submission, tuple[Sequence[Region], Sequence[Region]]] = {}

    def enter(self, submissions: Sequence[Submission]) -> bool:
        """Put ``submissions``, of one call, in; returns whether they conflict with what is there, or one another."""
        found = False
        for submission in submissions:
            _, reads, writes = on_all_ranks(planned(submission))
            found |= self._accesses.conflicts(reads, writes)
            self._accesses.add(reads, writes)
            self._there[submission] = reads, writes
        return found

    def leave(self, submissions: Sequence[Submission]) -> None:
        """They are decided."""
        for submission in submissions:
            self._accesses.remove(*self._there.pop(submission))
