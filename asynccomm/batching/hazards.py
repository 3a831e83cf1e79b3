"""The memory of operations that this rank has issued and the ranks have not yet agreed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from asynccomm.backends.base import Submission
from asynccomm.backends.regions import AccessSet, Region
from asynccomm.batching.batches import planned
from asynccomm.batching.plan import on_all_ranks


@final
class PendingHazards:
    """Detects operations that must not be in one batch, since one of them writes memory that another uses.

    Other ranks cannot detect it: their tensors may lie otherwise.
    """

    def __init__(self) -> None:
        self._accesses = AccessSet()
        self._there: dict[Submission, tuple[Sequence[Region], Sequence[Region]]] = {}

    def enter(self, submissions: Sequence[Submission]) -> bool:
        """Add ``submissions`` of one call; returns whether they conflict with pending operations or with each other."""
        found = False
        for submission in submissions:
            _, reads, writes = on_all_ranks(planned(submission))
            found |= self._accesses.conflicts(reads, writes)
            self._accesses.add(reads, writes)
            self._there[submission] = reads, writes
        return found

    def leave(self, submissions: Sequence[Submission]) -> None:
        """Remove submissions that are decided."""
        for submission in submissions:
            self._accesses.remove(*self._there.pop(submission))
