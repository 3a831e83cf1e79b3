"""A queue of frames from one rank to another in shared memory: one writes, the other reads.

The head counts the bytes ever written, the tail those ever read; each is written by one side alone, and they never run
back. A frame is a header of 32 bytes and a payload, together rounded up to cache lines, and never wraps around: where
the end of the ring is too near, a padding frame fills it. The writer publishes by moving the head, the reader gives
room back by moving the tail.

No frame may be larger than a quarter of the ring. With its padding it then needs less than half of it, so a reader that
reports each quarter it has freed (``Reader.publish``) leaves no writer waiting.

What a frame says about its length is not trusted: nothing outside the bytes that were published is ever touched.
"""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import Final, NamedTuple, final

from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import LINE, WORD, Layout
from asynccomm.errors import BackendError

HEADER: Final = 32  # bytes
PADDING: Final = 1  # the kind of a frame that fills the end; a kind of 0 is what untouched memory would say

_header = Struct("=IIIIIxxxxQ")  # bytes of payload, kind, tag, extra, ident, length
_pack, _unpack = _header.pack_into, _header.unpack_from
assert _header.size == HEADER


def framed(nbytes: int) -> int:
    """Bytes that a frame with so many bytes of payload takes in the ring."""
    return (HEADER + nbytes + LINE - 1) & -LINE


def largest_payload(ring: int) -> int:
    """Bytes of payload that a frame may have in a ring of so many bytes."""
    return (ring // 4 & -LINE) - HEADER


class Mapped(NamedTuple):
    """One mapping of the shared memory."""

    layout: Layout
    words: memoryview  #: all of it, in 64-bit words
    raw: memoryview  #: all of it, in bytes
    address: int  #: where it starts in this process


@final
class Writer:
    """The end of a ring that is written."""

    __slots__ = (
        "_address",
        "_at",
        "_end",
        "_head",
        "_head_at",
        "_nbytes",
        "_order",
        "_raw",
        "_ring",
        "_start",
        "_tail",
        "_tail_at",
        "_words",
    )

    def __init__(self, mapped: Mapped, source: int, destination: int, fence: Fence) -> None:
        start = mapped.layout.ring_start(source, destination)
        self._words, self._raw, self._address = mapped.words, mapped.raw, mapped.address
        self._head_at = start // WORD
        self._tail_at = (start + LINE) // WORD
        self._start = start + 2 * LINE
        self._ring = mapped.layout.ring
        self._order = fence.order
        # the memory is new, and both are 0; only what the other side writes later is looked up there
        self._head = 0
        self._tail = 0  # as last seen
        self._at = self._end = self._nbytes = 0  # of the frame that was reserved

    @property
    def run(self) -> int:
        """Bytes of payload that the next frame may have without padding before it; some, always."""
        return self._ring - self._head % self._ring - HEADER

    def put(
        self, kind: int, tag: int = 0, extra: int = 0, ident: int = 0, length: int = 0, source: int = 0, nbytes: int = 0
    ) -> bool:
        """Write and publish a frame; False if there is no room for it now.

        Args:
            source: address of the payload, of ``nbytes`` bytes: at most ``largest_payload``.
        """
        target = self.reserve(nbytes)
        if not target:
            return False
        if nbytes:
            ctypes.memmove(target, source, nbytes)  # without the GIL
        self.publish(kind, tag, extra, ident, length)
        return True

    def reserve(self, nbytes: int) -> int:
        """Where to write the payload of the next frame, before ``publish``; 0 if there is no room for it now."""
        ring, head = self._ring, self._head
        size = (HEADER + nbytes + LINE - 1) & -LINE
        at = head % ring
        end = head + size if size <= ring - at else head + ring - at + size
        if end - self._tail > ring:
            self._tail = self._words[self._tail_at]
            self._order()  # the reader was done with the bytes that are written now
            if end - self._tail > ring:
                return 0
        if size > ring - at:
            _pack(self._raw, self._start + at, ring - at - HEADER, PADDING, 0, 0, 0, 0)
            at = 0
        self._at = at = self._start + at
        self._end, self._nbytes = end, nbytes
        return self._address + at + HEADER

    def publish(self, kind: int, tag: int = 0, extra: int = 0, ident: int = 0, length: int = 0) -> None:
        """Publish the frame whose payload was written to where ``reserve`` said."""
        _pack(self._raw, self._at, self._nbytes, kind, tag, extra, ident, length)
        self._order()
        self._head = self._words[self._head_at] = self._end


@final
class Reader:
    """The end of a ring that is read: ``open``, then ``take`` and ``free`` in turn, then ``publish``."""

    __slots__ = (
        "_head",
        "_order",
        "_raw",
        "_ring",
        "_size",
        "_source",
        "_start",
        "_tail_at",
        "_told",
        "_words",
        "head_at",
        "payload",
        "tail",
    )

    def __init__(self, mapped: Mapped, source: int, destination: int, fence: Fence) -> None:
        start = mapped.layout.ring_start(source, destination)
        self._words, self._raw = mapped.words, mapped.raw
        self.head_at = start // WORD  #: number of the word that differs from ``tail`` when there are frames
        self._tail_at = (start + LINE) // WORD
        self._start = start + 2 * LINE
        self._ring = mapped.layout.ring
        self._order = fence.order
        self._source = source
        self.tail = 0  #: bytes read so far
        self._head = self.tail  # as seen by open
        self._told = self.tail  # the tail when the writer last heard of room
        self._size = 0  # of the frame that take returned
        self.payload = 0  #: where the payload of the frame that ``take`` returned lies in the segment

    def open(self) -> None:
        """See how much there is to read. Raises BackendError."""
        self._head = self._words[self.head_at]
        self._order()
        if not 0 <= self._head - self.tail <= self._ring or self._head % LINE:
            raise BackendError(f"the message ring from rank {self._source} is corrupt: {self._head - self.tail} bytes")

    def take(self) -> tuple[int, int, int, int, int, int] | None:
        """Header of the next frame: bytes of payload, kind, tag, extra, ident, length. None: all are read.

        Raises BackendError for a frame that cannot be.
        """
        while self.tail != self._head:
            at = self.tail % self._ring
            frame: tuple[int, int, int, int, int, int] = _unpack(self._raw, self._start + at)
            size = (HEADER + frame[0] + LINE - 1) & -LINE
            if size > self._head - self.tail or size > self._ring - at:
                raise BackendError(
                    f"the message ring from rank {self._source} is corrupt: a frame with {frame[0]} bytes of payload "
                    f"where {min(self._head - self.tail, self._ring - at) - HEADER} are left"
                )
            if frame[1] != PADDING:
                self._size = size
                self.payload = self._start + at + HEADER
                return frame
            self.tail += size
        return None

    def free(self) -> None:
        """Be done with the frame that ``take`` returned."""
        self.tail += self._size

    def publish(self) -> bool:
        """Give the room back. Returns whether the writer must hear of it: it may be asleep, waiting for room."""
        self._order()
        tail = self._words[self._tail_at] = self.tail
        if tail - self._told < self._ring // 4:
            return False
        self._told = tail
        return True
