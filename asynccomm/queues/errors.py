"""The errors of queues, beside those of :mod:`asynccomm.errors`.

A lost rank is a ``PeerLostError``; a process that has attached by a handle has no rank, and is named by its label.
"""

from __future__ import annotations

from typing import final

from asynccomm.errors import AsyncCommError


class QueueError(AsyncCommError):
    """The queue cannot be used any more."""


@final
class EndOfQueueError(QueueError):
    """The writers have closed the queue, and all items have been read."""


@final
class ParticipantLostError(QueueError):
    """A process that had attached by a handle was lost, or the process that it had attached to.

    Args:
        label: the lost process.
        detail: the evidence.
    """

    label: str
    detail: str

    def __init__(self, label: str, detail: str) -> None:
        super().__init__(label, detail)
        self.label, self.detail = label, detail

    def __str__(self) -> str:
        return f"{self.label} was lost: {self.detail}"
