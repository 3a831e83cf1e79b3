"""What comms hand to their backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from asynccomm import Comm
from asynccomm.backends.base import Submission


@final
class Recorder:
    """Takes notes of each batch that a comm hands on, and passes it on."""

    def __init__(self, comm: Comm) -> None:
        self._backend: Any = comm.unsafe_get_backend()
        self._submit = self._backend.submit
        self._backend.submit = self._note
        self.batches: list[list[Submission]] = []
        self.failure: Exception | None = None  #: to be raised in place of handing on

    def _note(self, batch: Sequence[Submission]) -> None:
        if self.failure is not None:
            raise self.failure
        self.batches.append(list(batch))
        self._submit(batch)

    @property
    def sizes(self) -> list[int]:
        """How many operations each batch had for the backend."""
        return [len(batch) for batch in self.batches]

    @property
    def kinds(self) -> list[list[str]]:
        return [[submission.op.kind for submission in batch] for batch in self.batches]

    @property
    def collectives(self) -> list[list[tuple[str, tuple[str, ...], tuple[int, ...]]]]:
        """What must be the same on all ranks: of each batch the collectives, what they do, and their numbers."""
        found = [
            [
                (str(s.op), tuple([str(op) for op in s.members]), s.numbers or (s.work.seq,))
                for s in batch
                if not s.op.p2p
            ]
            for batch in self.batches
        ]
        return [batch for batch in found if batch]
