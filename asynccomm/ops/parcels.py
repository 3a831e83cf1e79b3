"""The operations that move parcels: payloads of a size that only the sender knows.

All data other than tensors of known sizes travels in parcels: objects, dicts of tensors, and tensors of unknown sizes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, final

from asynccomm.ops.base import Op, PeerOp
from asynccomm.ops.validation import MAX_TAG

MAX_HEAD: Final = 64 << 20  # bytes; a receiver must receive a head before it can refuse the parcel


TAG_BITS: Final = 27


class MessageSpace(enum.IntEnum):
    """Separate spaces of tags: messages of different spaces never match, even under equal tags."""

    TENSORS = 0
    OBJECTS = 1
    STREAMS = 2
    INTERNAL = 3  #: for messages between backends
    HEADERS = 4  #: of tensors that travel by another transport

    def key(self, tag: int) -> int:
        """The tag, in 30 bits, under which a transport sends a message of this space."""
        return self << TAG_BITS | tag

    @classmethod
    def of_key(cls, key: int) -> tuple[MessageSpace, int]:
        """The space and the tag of ``key``."""
        return cls(key >> TAG_BITS), key & (1 << TAG_BITS) - 1


assert MAX_TAG < 1 << TAG_BITS


@final
@dataclass(frozen=True, slots=True)
class Parcels(Op):
    """A collective with parcels. No rank sends a parcel to itself.

    Fields:
        method: its name, the same on all ranks.
        shared: True: a rank sends one parcel, to all receiving ranks; False: it sends a parcel to each rank.
        giver: the only sending rank; None: all ranks send.
        taker: the only receiving rank; None: all ranks receive.
        form: an argument that tells the call from other calls of the method, as texts show it.
    """

    kind = "parcels"
    sizes_known = False
    one_sided = True
    method: str
    shared: bool = True
    giver: int | None = None
    taker: int | None = None
    form: str = ""

    def gives(self, rank: int) -> bool:
        """Whether ``rank`` sends."""
        return self.giver is None or self.giver == rank

    def takes(self, rank: int) -> bool:
        """Whether ``rank`` receives."""
        return self.taker is None or self.taker == rank

    def __str__(self) -> str:
        root = self.giver if self.giver is not None else self.taker
        form = (self.form,) if self.form else ()
        return self.shown(self.name, *form, *(() if root is None else (f"root={root}",)))


@dataclass(frozen=True, slots=True)
class PeerParcel(PeerOp):
    """A parcel to or from ``peer``, under ``tag`` of ``channel``."""

    method: str
    peer: int | None
    tag: int
    channel: MessageSpace = MessageSpace.OBJECTS

    @property
    def key(self) -> int:
        return self.channel.key(self.tag)


@final
@dataclass(frozen=True, slots=True)
class SendParcel(PeerParcel):
    """A parcel to ``peer``."""

    kind = "send_parcel"
    is_send = True
    peer: int


@final
@dataclass(frozen=True, slots=True)
class RecvParcel(PeerParcel):
    """A parcel from ``peer``; None: from any rank."""

    kind = "recv_parcel"
    is_send = False

    @property
    def open_ended(self) -> bool:
        return self.channel is MessageSpace.STREAMS
