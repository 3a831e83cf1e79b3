"""The memory of a queue's ring: a few words for the writer, a line for each reader, and the bytes of the ring.

The head counts all bytes written, a tail all bytes that its reader has read; neither decreases. A frame is a header of
32 bytes and a payload, together rounded up to cache lines, and never wraps around: a padding frame fills the end of
the ring. A frame takes at most a quarter of the ring, so with padding less than half. An item is one frame or more; its
first frame has the lengths of the item.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from asynccomm.backends.shm.segment import Segment

LINE: Final = 64  # bytes of a cache line
HEADER: Final = 32  # bytes of a frame's header
SLOTS: Final = 64  # readers of one ring at once
LEAST: Final = 4096  # bytes of the smallest ring

# words: of the writer
HEAD, FLOOR, WAITING, STATE = 0, 8, 16, 17
# words: of a reader's slot
_FIRST_SLOT, _SLOT_WORDS = 24, 16
TAIL, SLEEPING = 0, 8

DATA: Final = 16384  # bytes before the ring; a multiple of the pages of all systems that we know

OPEN, ENDED, FAILED = 0, 1, 2  # the state of the writer
PADDING, BYTES, OBJECT = 1, 2, 3  # kinds of frames; 0 is no kind, because untouched memory is 0

header = Struct("=IIIIQQ")  # bytes of payload, kind, whether first, bytes of the item's head, of the item, its number
assert header.size == HEADER
assert (_FIRST_SLOT + SLOTS * _SLOT_WORDS) * 8 <= DATA


def slot_word(slot: int) -> int:
    """Index of the first word of a reader's slot."""
    return _FIRST_SLOT + slot * _SLOT_WORDS


def framed(nbytes: int) -> int:
    """Bytes of the ring that a frame with ``nbytes`` of payload takes."""
    return (HEADER + nbytes + LINE - 1) & -LINE


def largest_payload(ring: int) -> int:
    """The largest payload of a frame, in bytes."""
    return (ring // 4 & -LINE) - HEADER


def ring_bytes(capacity: int) -> int:
    """Bytes of the ring of a queue with ``capacity`` bytes."""
    return max(LEAST, (capacity + 4 * LINE - 1) & -(4 * LINE))


def map_ring(fd: int, ring: int) -> Segment:
    """Map the memory of a ring. Raises: BackendError."""
    return Segment(fd, DATA + ring)
