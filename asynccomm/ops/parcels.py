"""What moves parcels: payloads of which only the sender knows the size.

All that is not tensors of sizes known everywhere is built of these: objects, dicts of tensors, gathering of uneven
tensors.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, final

from asynccomm.ops.base import Op
from asynccomm.ops.validation import MAX_TAG

MAX_HEAD: Final = 64 << 20  # bytes of a parcel's head; a receiver has to take it before it can say no


class MessageSpace(enum.IntEnum):
    """Messages of different channels never meet, whatever their tags."""

    TENSORS = 0
    OBJECTS = 1
    STREAMS = 2
    INTERNAL = 3  #: for backends, between themselves

    def key(self, tag: int) -> int:
        """The tag under which a transport sends a message of this channel; in 30 bits."""
        return self << 28 | tag


assert MAX_TAG < 1 << 28


@final
@dataclass(frozen=True, slots=True)
class Parcels(Op):
    """A collective with parcels.

    Fields:
        what: the method, the same on all ranks.
        shared: the parcel of a rank is for everybody who takes, and there is one; else it gives one to each rank.
        giver: the only rank that gives; None: all do.
        taker: the only rank that takes; None: all do. Nobody is sent its own parcel.
    """

    kind = "parcels"
    what: str
    shared: bool = True
    giver: int | None = None
    taker: int | None = None

    def gives(self, rank: int) -> bool:
        """Whether ``rank`` gives."""
        return self.giver is None or self.giver == rank

    def takes(self, rank: int) -> bool:
        """Whether ``rank`` takes."""
        return self.taker is None or self.taker == rank

    def __str__(self) -> str:
        root = self.giver if self.giver is not None else self.taker
        return self.shown(self.what, *(() if root is None else (f"root={root}",)))


@final
@dataclass(frozen=True, slots=True)
class SendParcel(Op):
    """To ``peer``, under ``tag`` of ``channel``."""

    kind = "send_parcel"
    p2p = True
    what: str
    peer: int
    tag: int
    channel: MessageSpace = MessageSpace.OBJECTS

    def __str__(self) -> str:
        return f"{self.what}(dst={self.peer}, tag={self.tag})"


@final
@dataclass(frozen=True, slots=True)
class RecvParcel(Op):
    """From ``peer``, or from any rank if that is None, under ``tag`` of ``channel``."""

    kind = "recv_parcel"
    p2p = True
    what: str
    peer: int | None
    tag: int
    channel: MessageSpace = MessageSpace.OBJECTS

    def __str__(self) -> str:
        return f"{self.what}(src={'any' if self.peer is None else self.peer}, tag={self.tag})"
