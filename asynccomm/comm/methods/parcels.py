"""What all methods share that receive something of which only the sender knows the size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, SupportsIndex, final

from torch import Tensor

from asynccomm.comm.methods.base import CommBase
from asynccomm.comm.session import Session
from asynccomm.errors import PayloadError
from asynccomm.ops import Parcel
from asynccomm.ops.validation import as_index
from asynccomm.serialization.objects import IncomingObject, PayloadKind, clone_out, kind_of
from asynccomm.serialization.tensor_dicts import ReceiverSchemaCache, SenderSchemaCache

MAX_BYTES: Final = 1 << 32  # bytes of head and payload that are taken from one sender, unless the caller says otherwise


@final
class ReceivePolicy(NamedTuple):
    """On which terms a receiver takes objects."""

    weights_only: bool
    max_bytes: int

    @classmethod
    def of(cls, weights_only: object, max_bytes: SupportsIndex) -> Self:
        if not isinstance(weights_only, bool):
            raise TypeError(f"weights_only must be True or False, got {weights_only!r}")
        limit = as_index(max_bytes)
        if limit is None:
            raise TypeError(f"max_bytes must be an integer, got {max_bytes!r}")
        if limit < 0:
            raise ValueError(f"max_bytes must not be negative, got {limit}")
        return cls(weights_only, limit)

    def check(self, source: int, nbytes: int) -> None:
        """Raise PayloadError if that is more than is taken."""
        if nbytes > self.max_bytes:
            raise PayloadError(f"rank {source} sent {nbytes} bytes, but max_bytes is {self.max_bytes}")


@final
class ObjectReceiver:
    """Where the objects of one operation come to: its ``place``.

    Args:
        method: that waits for them, for messages.
        rank: this one.
        kind: what they must be.
        missed: is told of every parcel of another kind.
    """

    __slots__ = ("_kind", "_method", "_missed", "_rank", "_terms", "incoming")

    def __init__(
        self,
        method: str,
        rank: int,
        kind: PayloadKind,
        terms: ReceivePolicy,
        missed: Callable[[int, bytes], object] | None = None,
    ) -> None:
        self._method, self._rank, self._kind, self._terms, self._missed = method, rank, kind, terms, missed
        self.incoming: dict[int, IncomingObject] = {}  #: by source

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        length = lengths[source]
        if (kind := kind_of(source, head)) is not self._kind:
            if self._missed is not None:
                self._missed(source, head)
            raise wrong_kind(self._method, self._rank, source, kind)
        self._terms.check(source, len(head) + length)
        incoming = self.incoming[source] = IncomingObject(source, head, length)
        return incoming.places

    def begin(self, parcel: Parcel, *_: object) -> Sequence[Tensor]:
        """The operation takes effect: take ``parcel``, which is this rank's own, as it is now; to the host."""
        self.incoming[self._rank] = clone_out(self._rank, parcel)
        return ()

    def only(self, _: object = None) -> Any:
        """The object of the only sender. Raises: PayloadError."""
        (incoming,) = self.incoming.values()
        return incoming.decode(weights_only=self._terms.weights_only)

    def all(self, _: object = None) -> list[object]:
        """The objects in rank order. Raises: PayloadError."""
        return [incoming.decode(weights_only=self._terms.weights_only) for _, incoming in sorted(self.incoming.items())]


def wrong_kind(method: str, rank: int, source: int, kind: PayloadKind) -> PayloadError:
    """What to raise when a receive gets what it does not wait for."""
    return PayloadError(f"{method}() of rank {rank} got what rank {source} sent by {kind.sender}()")


class ParcelMethods(CommBase):
    """What a comm remembers of the parcels it has sent and received."""

    def __init__(self, session: Session, backend_name: str) -> None:
        super().__init__(session, backend_name)
        self._sent_schemas = SenderSchemaCache()
        self._received_schemas = ReceiverSchemaCache()
