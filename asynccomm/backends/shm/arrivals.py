"""Messages that are being received: their bytes are copied to the receive's memory as they arrive.

The memory of a tensor is known from the start; that of a parcel follows from its head, and may be many pieces.
"""

from __future__ import annotations

import ctypes
from typing import Final, Protocol, final

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.shm.vectors import Pieces


class Arrival(Protocol):
    """A message being received; a long message arrives in several DATA frames."""

    @property
    def receive(self) -> Submission:
        """The receive operation that the message was matched to."""

    @property
    def left(self) -> int:
        """Bytes that have not arrived yet."""

    def take(self, address: int, nbytes: int) -> bool:
        """Copy the next bytes in. Returns whether this call determined the destination of the remaining bytes."""

    def span(self) -> tuple[int, int] | None:
        """Address and length of the memory for the next bytes, in one piece; None if it is not known or discarded."""

    def skip(self, nbytes: int) -> None:
        """Count the first ``nbytes`` of ``span`` as copied in."""

    def finish(self, source: int) -> None:
        """Complete the receive after the last byte."""


@final
class TensorArrival:
    """A tensor being received; its destination is known from the start."""

    __slots__ = ("_address", "_land", "_values", "began", "left", "receive")

    def __init__(self, receive: Submission) -> None:
        self.receive: Final = receive
        self.began: float = 0.0  #: time of ``time.perf_counter``; 0: it does not count for ``Ways``
        self._values, self._land = arithmetic.landing(receive.outputs[0])
        self._address = self._values.data_ptr()
        self.left: int = self._values.nbytes  #: bytes that have not arrived yet

    def take(self, address: int, nbytes: int) -> bool:
        """Copy the next bytes in."""
        ctypes.memmove(self._address, address, nbytes)  # without the GIL
        self.skip(nbytes)
        return False

    def span(self) -> tuple[int, int]:
        """Address and length of the memory for the next bytes."""
        return self._address, self.left

    def skip(self, nbytes: int) -> None:
        """Count the first ``nbytes`` of ``span`` as copied in."""
        self._address += nbytes
        self.left -= nbytes

    def finish(self, source: int) -> None:
        """Copy the tensor to its output, unless it is there."""
        if self._land is not None:
            self._land()
        self.receive.work.source = source


@final
class ParcelArrival:
    """A parcel being received: its bytes are copied to their destination as they arrive.

    The head comes first, and its buffer grows only as its bytes arrive. From the complete head, the receive determines
    the destination of the payload. The payload is then copied there, or discarded if the receive refused the parcel.

    Args:
        source: the rank that sends the parcel.
        head: bytes of the head.
        payload: bytes of the payload.
    """

    __slots__ = ("_chunks", "_delivery", "_head_left", "_payload", "_pieces", "_source", "left", "receive")

    def __init__(self, receive: Submission, source: int, head: int, payload: int) -> None:
        self.receive: Final = receive
        self.left: int = head + payload  #: bytes that have not arrived yet
        self._source = source
        self._head_left = head
        self._payload = payload
        # the head so far; None once the head was handed on. Not a list of chunks: a chunk can be as small as a byte
        self._chunks: bytearray | None = bytearray()
        self._pieces: Pieces | None = None  # destination of the payload; None: discarded
        self._delivery = Delivery(receive)

    def take(self, address: int, nbytes: int) -> bool:
        """Copy the next bytes in, or no bytes: an empty head is complete at the first call.

        Returns: whether this call completed the head and handed it to the receive.
        """
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

    def span(self) -> tuple[int, int] | None:
        """Address and length of the memory for the next bytes, in one piece; None if it is not known or discarded."""
        return None if self._pieces is None else self._pieces.span()

    def skip(self, nbytes: int) -> None:
        """Count the first ``nbytes`` of ``span`` as copied in."""
        assert self._pieces is not None, "skipped without a span"
        self._pieces.skip(nbytes)
        self.left -= nbytes

    def finish(self, source: int) -> None:
        """Complete the receive, with the error of its refusal if there is one."""
        self._delivery.finish()
        self.receive.error = self._delivery.error
        self.receive.work.source = source
