"""What comes in for one receive, copied to where it belongs as it comes.

A tensor's place is known. A parcel's is not: first its head is collected, of which memory is taken only as it comes;
with the head the receive says where the payload goes, and from then on that is copied there, or thrown away if it was
refused.
"""

from __future__ import annotations

import ctypes
from typing import Final, final

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.shm.iovec import Pieces


@final
class TensorArrival:
    """A tensor that comes."""

    __slots__ = ("_address", "_land", "_values", "left", "receive")

    def __init__(self, receive: Submission) -> None:
        self.receive: Final = receive
        self._values, self._land = arithmetic.landing(receive.outputs[0])
        self._address = self._values.data_ptr()
        self.left = self._values.nbytes  #: bytes that are still due

    def take(self, address: int, nbytes: int) -> bool:
        """The next bytes."""
        ctypes.memmove(self._address, address, nbytes)  # without the GIL
        self._address += nbytes
        self.left -= nbytes
        return False

    def finish(self, source: int) -> None:
        """Nothing is due any more."""
        if self._land is not None:
            self._land()
        self.receive.work.source = source


@final
class ParcelArrival:
    """A parcel that comes from rank ``source``, of so many bytes of head and payload."""

    __slots__ = ("_chunks", "_delivery", "_head_left", "_payload", "_pieces", "_source", "left", "receive")

    def __init__(self, receive: Submission, source: int, head: int, payload: int) -> None:
        self.receive: Final = receive
        self.left = head + payload  #: bytes that are still due
        self._source = source
        self._head_left = head
        self._payload = payload
        # of the head; None once it was handed on. Not a list of what came: that could be a byte at a time
        self._chunks: bytearray | None = bytearray()
        self._pieces: Pieces | None = None  # where the payload goes; None: away
        self._delivery = Delivery(receive)

    def take(self, address: int, nbytes: int) -> bool:
        """The next bytes; to be called with none, too. Returns whether its receive was asked for a place now."""
        self.left -= nbytes
        chunks = self._chunks
        if chunks is not None:
            size = min(nbytes, self._head_left)
            if size:
                chunks += ctypes.string_at(address, size)
                self._head_left -= size
                address += size
                nbytes -= size
            if self._head_left:
                return False
            self._chunks = None
            tensors = self._delivery.accept(self._source, bytes(chunks), {self._source: self._payload})
            if tensors is not None:
                self._pieces = Pieces(tensors)
        if nbytes and self._pieces is not None:
            self._pieces.copy_from(address, nbytes)
        return chunks is not None

    def finish(self, source: int) -> None:
        """Nothing is due any more."""
        self._delivery.finish()
        self.receive.error = self._delivery.error
        self.receive.work.source = source
