"""A ring: a single-producer, single-consumer queue of frames in shared memory, from one rank to another.

The head counts all bytes written, the tail all bytes read; each counter has one writer and never decreases. A frame is
a header of 32 bytes and a payload, together rounded up to cache lines. A frame never wraps around: if it does not fit
before the end of the ring, a padding frame fills the end. The writer publishes frames by advancing the head, the reader
frees room by advancing the tail. A writer in C also counts the bytes of a longer frame that it is still writing, in the
word behind the head, and a reader in C may copy them (``_rings.h``). A withdrawn LOAN counts as padding.

A frame takes at most a quarter of the ring, and with its padding less than half. A reader that rings the writer after
each freed quarter (``Reader.publish``) therefore leaves no writer waiting.

The length field of a frame is not trusted: the reader never touches memory outside the published bytes.
"""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import Any, Final, NamedTuple, final

from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import LINE, WORD, Layout
from asynccomm.errors import BackendError

HEADER: Final = 32  # bytes
PADDING: Final = 1  # the kind of a padding frame; 0 is no kind, because untouched memory is 0
LOAN: Final = 6  # of a message that C lends for a moment: its address, and a word with one of these
OPEN, WITHDRAWN = 0, 2

_header = Struct("=IIIIIxxxxQ")  # bytes of payload, kind, tag, extra, ident, length
_pack, _unpack = _header.pack_into, _header.unpack_from
assert _header.size == HEADER


def framed(nbytes: int) -> int:
    """Bytes of the ring that a frame with ``nbytes`` of payload takes."""
    return (HEADER + nbytes + LINE - 1) & -LINE


def largest_payload(ring: int) -> int:
    """The largest payload of a frame, in bytes, in a ring of ``ring`` bytes."""
    return (ring // 4 & -LINE) - HEADER


class Mapped(NamedTuple):
    """The shared segment as it is mapped in this process."""

    layout: Layout
    words: memoryview  #: the whole segment, as 64-bit words
    raw: memoryview  #: the whole segment, as bytes
    address: int  #: start of the segment in this process


@final
class LinkState:
    """The counters of the two rings between this rank and a peer; ``_core.LinkState`` where C is in use.

    The memory is new, so all counters begin at 0.
    """

    __slots__ = ("came", "gone", "head", "matched", "next_ident", "sent", "tail", "taken", "told", "waiting")

    def __init__(self) -> None:
        self.head: int = 0  #: bytes written so far
        self.taken: int = 0  #: bytes of these that the peer has read, as last seen
        self.sent: int = 0  #: bytes of short frames written so far
        self.tail: int = 0  #: bytes read so far
        self.told: int = 0  #: ``tail`` when the peer was last rung because of room
        self.came: int = 0  #: bytes of short frames received so far
        self.matched: int = 0  #: bytes of received short frames that were matched
        self.next_ident: int = 0  #: of the next offer, which takes it modulo 2**32
        self.waiting: Any = None  #: the messages without their first frame in the ring
        self.gone: bool = False  #: whether the peer has left and writes nothing more


@final
class Writer:
    """The writing end of a ring."""

    __slots__ = (
        "_address",
        "_at",
        "_end",
        "_head_at",
        "_nbytes",
        "_order",
        "_raw",
        "_ring",
        "_start",
        "_state",
        "_tail_at",
        "_words",
    )

    def __init__(
        self, mapped: Mapped, source: int, destination: int, fence: Fence, state: LinkState | None = None
    ) -> None:
        start = mapped.layout.ring_start(source, destination)
        self._words, self._raw, self._address = mapped.words, mapped.raw, mapped.address
        self._head_at = start // WORD
        self._tail_at = (start + LINE) // WORD
        self._start = start + 2 * LINE
        self._ring = mapped.layout.ring
        self._order = fence.order
        self._state = LinkState() if state is None else state
        self._at = self._end = self._nbytes = 0  # of the reserved frame

    @property
    def run(self) -> int:
        """The largest payload of the next frame that needs no padding, in bytes; always more than 0."""
        return self._ring - self._state.head % self._ring - HEADER

    def put(
        self, kind: int, tag: int = 0, extra: int = 0, ident: int = 0, length: int = 0, source: int = 0, nbytes: int = 0
    ) -> bool:
        """Write and publish a frame; False if the ring has no room now.

        Args:
            source: address of the payload.
            nbytes: length of the payload, at most ``largest_payload``.
        """
        target = self.reserve(nbytes)
        if not target:
            return False
        if nbytes:
            ctypes.memmove(target, source, nbytes)  # without the GIL
        self.publish(kind, tag, extra, ident, length)
        return True

    def reserve(self, nbytes: int) -> int:
        """The address for the payload of the next frame, to be filled before ``publish``; 0 if the ring has no room."""
        state, ring = self._state, self._ring
        head = state.head
        size = (HEADER + nbytes + LINE - 1) & -LINE
        at = head % ring
        end = head + size if size <= ring - at else head + ring - at + size
        if end - state.taken > ring:
            state.taken = self._words[self._tail_at]
            self._order()  # the reader has finished with the bytes that will be overwritten
            if end - state.taken > ring:
                return 0
        if size > ring - at:
            _pack(self._raw, self._start + at, ring - at - HEADER, PADDING, 0, 0, 0, 0)
            at = 0
        self._at = at = self._start + at
        self._end, self._nbytes = end, nbytes
        return self._address + at + HEADER

    def publish(self, kind: int, tag: int = 0, extra: int = 0, ident: int = 0, length: int = 0) -> None:
        """Publish the reserved frame, after its payload was written."""
        _pack(self._raw, self._at, self._nbytes, kind, tag, extra, ident, length)
        self._order()
        self._state.head = self._words[self._head_at] = self._end


@final
class Reader:
    """The reading end of a ring. Call ``open``, then ``take`` and ``free`` for each frame, then ``publish``."""

    __slots__ = (
        "_head",
        "_order",
        "_raw",
        "_ring",
        "_size",
        "_source",
        "_start",
        "_tail_at",
        "_words",
        "head_at",
        "payload",
        "state",
    )

    def __init__(
        self, mapped: Mapped, source: int, destination: int, fence: Fence, state: LinkState | None = None
    ) -> None:
        start = mapped.layout.ring_start(source, destination)
        self._words, self._raw = mapped.words, mapped.raw
        self.head_at: int = start // WORD  #: index of the head, which differs from ``state.tail`` when frames are there
        self._tail_at = (start + LINE) // WORD
        self._start = start + 2 * LINE
        self._ring = mapped.layout.ring
        self._order = fence.order
        self._source = source
        self.state: LinkState = LinkState() if state is None else state
        self._head = 0  # as read by open
        self._size = 0  # of the current frame
        self.payload: int = 0  #: offset in the segment of the current frame's payload

    def open(self) -> None:
        """Read the head. Raises BackendError if it is corrupt."""
        self._head = self._words[self.head_at]
        self._order()
        if not 0 <= self._head - self.state.tail <= self._ring or self._head % LINE:
            raise BackendError(
                f"the message ring from rank {self._source} is corrupt: {self._head - self.state.tail} bytes"
            )

    def take(self) -> tuple[int, int, int, int, int, int] | None:
        """The header of the next frame: bytes of payload, kind, tag, extra, ident, length; None if all are read.

        Raises BackendError if the frame is larger than the published bytes.
        """
        while self.state.tail != self._head:
            at = self.state.tail % self._ring
            frame: tuple[int, int, int, int, int, int] = _unpack(self._raw, self._start + at)
            size = (HEADER + frame[0] + LINE - 1) & -LINE
            if size > self._head - self.state.tail or size > self._ring - at:
                raise BackendError(
                    f"the message ring from rank {self._source} is corrupt: a frame with {frame[0]} bytes of payload "
                    f"where {min(self._head - self.state.tail, self._ring - at) - HEADER} are left"
                )
            payload = self._start + at + HEADER
            claim = self._words[payload // WORD + 1] if frame[1] == LOAN and frame[0] == 2 * WORD else None
            if claim == OPEN:  # another frame follows as soon as the sender withdraws it
                return None
            if frame[1] != PADDING and claim != WITHDRAWN:
                self._size = size
                self.payload = payload
                return frame
            self.state.tail += size
        return None

    def free(self) -> None:
        """Finish the frame that ``take`` returned."""
        self.state.tail += self._size

    def publish(self) -> bool:
        """Free the room of finished frames. Returns whether to ring the writer, which may sleep for lack of room."""
        self._order()
        tail = self._words[self._tail_at] = self.state.tail
        if tail - self.state.told < self._ring // 4:
            return False
        self.state.told = tail
        return True
