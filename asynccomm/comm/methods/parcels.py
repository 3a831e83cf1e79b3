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
from asynccomm.serialization.objects import Incoming, Kind, kind_of, own
from asynccomm.serialization.tensor_dicts import ReceivedSchemas, SentSchemas

MAX_BYTES: Final = 1 << 32  # bytes of head and payload that are taken from one sender, unless the caller says otherwise


@final
class Terms(NamedTuple):
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
class Inbox:
    """Where the objects of one operation come to: its ``place``.

    Args:
        method: that waits for them, for messages.
        rank: this one.
        kind: what they must be.
        missed: is told of every parcel of another kind.
    """

    __slots__ = ("_kind", "_method", "_missed", "_rank", "_terms", "incoming")

    def __init__(
        self, method: str, rank: int, kind: Kind, terms: Terms, missed: Callable[[int, bytes], object] | None = None
    ) -> None:
        self._method, self._rank, self._kind, self._terms, self._missed = method, rank, kind, terms, missed
        self.incoming: dict[int, Incoming] = {}  #: by source

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        length = lengths[source]
        if (kind := kind_of(source, head)) is not self._kind:
            if self._missed is not None:
                self._missed(source, head)
            raise mistaken(self._method, self._rank, source, kind)
        self._terms.check(source, len(head) + length)
        incoming = self.incoming[source] = Incoming(source, head, length)
        return incoming.places

    def begin(self, parcel: Parcel, *_: object) -> Sequence[Tensor]:
        """The operation takes effect: take ``parcel``, which is this rank's own, as it is now; to the host."""
        self.incoming[self._rank] = own(self._rank, parcel)
        return ()

    def only(self, _: object = None) -> Any:
        """The object of the only sender. Raises: PayloadError."""
        (incoming,) = self.incoming.values()
        return incoming.decode(weights_only=self._terms.weights_only)

    def all(self, _: object = None) -> list[object]:
        """The objects in rank order. Raises: PayloadError."""
        return [incoming.decode(weights_only=self._terms.weights_only) for _, incoming in sorted(self.incoming.items())]


def mistaken(method: str, rank: int, source: int, kind: Kind) -> PayloadError:
    """What to raise when a receive gets what it does not wait for."""
    return PayloadError(f"{method}() of rank {rank} got what rank {source} sent by {kind.sender}()")


class ParcelMethods(CommBase):
    """What a comm remembers of the parcels it has sent and received."""

    def __init__(self, session: Session, backend_name: str) -> None:
        super().__init__(session, backend_name)
        self._sent_schemas = SentSchemas()
        self._received_schemas = ReceivedSchemas()
