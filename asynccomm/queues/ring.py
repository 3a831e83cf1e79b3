"""Both ends of a ring in shared memory: one writer, and readers of which each gets every frame.

The ends are in C (``_ring.c``), and in Python where C was not built. Both give the same bytes, and may be mixed.

The writer overwrites a frame when all readers have read it. With ``drops`` it does not wait: it raises the floor first,
below which frames may be overwritten. A reader then checks the floor after each copy, drops a frame that was below it,
and goes on at the floor.

The other process is not trusted: counters and lengths are checked, and memory outside of the ring is never touched.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any, Final, NamedTuple, final

from asynccomm.backends.shm.fence import Fence
from asynccomm.core.native import CoreUnavailable, load
from asynccomm.core.state import ReentrantLock
from asynccomm.errors import BackendError
from asynccomm.queues.layout import (
    BYTES,
    DATA,
    FLOOR,
    HEAD,
    HEADER,
    LINE,
    OBJECT,
    PADDING,
    SLEEPING,
    TAIL,
    WAITING,
    framed,
    header,
    slot_word,
)

FULL, PUBLISHED, WAKE = 0, 1, 2  # results of ``put``

_core: Final[Any] = load("asynccomm.queues._ring")


class RingFrame(NamedTuple):
    """The header of a frame, and the address of its payload."""

    nbytes: int
    kind: int
    first: int
    head: int
    total: int
    number: int
    address: int


@final
class PythonWriter:
    """The writing end, in Python."""

    def __init__(self, memory: memoryview, address: int, ring: int, drops: bool) -> None:
        self._raw, self._words = memory, memory.cast("Q")
        self._address, self._ring, self._drops = address, ring, drops
        self._fence = Fence()
        self._slots: tuple[int, ...] = ()
        self._taken = 0
        self.head = 0  #: bytes written
        self.number = 0  #: of the next item of ``put_bytes``
        self.held = False  #: whether items wait, or the end has failed: ``put_short`` is to put nothing
        self.lock = ReentrantLock()  #: of the end

    def set_slots(self, slots: tuple[int, ...]) -> None:
        """Wait for these readers, and wake them."""
        self._slots = slots

    def put(self, kind: int, first: int, head: int, total: int, number: int, source: bytes | int, nbytes: int) -> int:
        """Write and publish a frame; returns FULL, PUBLISHED, or WAKE if the caller has to wake a reader.

        Raises: BackendError.
        """
        ring, at, size = self._ring, self.head % self._ring, framed(nbytes)
        end = self.head + (size if size <= ring - at else ring - at + size)
        if end - self._taken > ring and not self._make_room(end):
            return FULL
        if size > ring - at:
            header.pack_into(self._raw, DATA + at, ring - at - HEADER, PADDING, 0, 0, 0, 0)
            at = 0
        if nbytes:
            ctypes.memmove(self._address + DATA + at + HEADER, source, nbytes)
        header.pack_into(self._raw, DATA + at, nbytes, kind, first, head, total, number)
        self._fence.order()
        self.head = self._words[HEAD] = end
        self._fence.full()
        return WAKE if any(self._words[slot_word(slot) + SLEEPING] for slot in self._slots) else PUBLISHED

    def put_bytes(self, item: bytes) -> int:
        """As :meth:`put`, for an item of bytes in one frame, which is counted in ``number``."""
        result = self.put(BYTES, 1, 0, len(item), self.number, item, len(item))
        self.number += result != FULL
        return result

    def put_short(self, item: object) -> bool:
        """As :meth:`put_bytes`, for short items while the lock is free; False: use another way, as always in Python."""
        return False

    def set_bell(self, slot: int, fd: int) -> None:
        """Let C wake the reader of ``slot`` by a byte to this socket; -1: the caller does, as always in Python."""

    def _make_room(self, end: int) -> bool:
        if self._drops:
            while end - self._taken > self._ring:
                at = self._taken % self._ring
                size = framed(header.unpack_from(self._raw, DATA + at)[0])
                if size > min(self._ring - at, self.head - self._taken):
                    raise BackendError("the ring of a queue is corrupt")
                self._taken += size
            self._words[FLOOR] = self._taken
            self._fence.full()
            return True
        self._taken = min((self._words[slot_word(slot) + TAIL] for slot in self._slots), default=self.head)
        self._fence.order()
        if not self.head - self._ring <= self._taken <= self.head:
            raise BackendError(f"a reader's counter in the ring of a queue is corrupt: {self._taken}")
        return end - self._taken <= self._ring


@final
class PythonReader:
    """The reading end, in Python."""

    def __init__(self, memory: memoryview, address: int, ring: int, slot: int, drops: bool) -> None:
        self._raw, self._words = memory, memory.cast("Q")
        self._address, self._ring, self._drops = address, ring, drops
        self._fence = Fence()
        self._slot = slot_word(slot)
        self.tail = self._words[self._slot + TAIL]  #: bytes read
        self.expected = -1  #: number of the next item; -1: any
        self.dropped = 0  #: items that were overwritten before they were read
        self._size = 0
        self._frame: tuple[int, ...] = ()

    def peek(self) -> tuple[int, int, int, int, int, int, int] | None:
        """The next frame as a tuple of ``RingFrame``, None: there is none. Raises: BackendError."""
        ring = self._ring
        while True:
            if self._drops and (floor := self._words[FLOOR]) > self.tail:
                self.tail = floor
            self._fence.order()
            head = self._words[HEAD]
            self._fence.order()
            if head == self.tail:
                return None
            at, left = self.tail % ring, head - self.tail
            if left < 0 or (left > ring and not self._drops) or head % LINE or self.tail % LINE:
                raise BackendError(f"the ring of a queue is corrupt: {left} bytes")
            self._frame = frame = header.unpack_from(self._raw, DATA + at)
            self._size = framed(frame[0])
            if self._drops and not self.valid():
                continue
            if self._size > min(left, ring - at) or not PADDING <= frame[1] <= OBJECT:
                raise BackendError(f"the ring of a queue is corrupt: a frame with {frame[0]} bytes of payload")
            if frame[1] != PADDING:
                return (*frame, self._address + DATA + at + HEADER)
            self.tail += self._size

    def poll(self, seconds: float) -> bool:
        """Look for a frame for ``seconds``, offering the core to others; returns whether there is one."""
        end = time.monotonic() + seconds
        while self._words[HEAD] == self.tail:
            if time.monotonic() >= end:
                return False
            os.sched_yield()
        return True

    def valid(self) -> bool:
        """Whether the frame of ``peek`` was intact while its payload was copied."""
        if not self._drops:
            return True
        self._fence.full()
        return self._words[FLOOR] <= self.tail

    def free(self) -> int:
        """Finish the frame of ``peek``; returns whether the writer waits for room. Raises: BackendError."""
        self._count()
        return self.publish()

    def _count(self) -> None:
        self.tail += self._size
        _, _, first, _, _, number = self._frame
        if first:
            missed = number - self.expected if self.expected >= 0 else 0
            if missed < 0 or (missed and not self._drops):
                raise BackendError(f"the ring of a queue is corrupt: item {number} in place of {self.expected}")
            self.dropped += missed
            self.expected = number + 1

    def publish(self) -> int:
        """Publish the tail; returns whether the writer waits for room."""
        self._fence.order()
        self._words[self._slot + TAIL] = self.tail
        self._fence.full()
        return int(bool(self._words[WAITING]))

    def take(self, source: object, items: int, nbytes: int) -> list[bytes | tuple[object, bytes]]:
        """Read items of one frame without tensors: the bytes of BYTES, and of OBJECT ``source`` with the bytes.

        Ends before a frame of any other item, after ``items``, and after ``nbytes``. Publish the tail afterwards.
        """
        taken: list[bytes | tuple[object, bytes]] = []
        while len(taken) < items and nbytes > 0 and (found := self.peek()) is not None:
            frame = RingFrame(*found)
            if not frame.first or frame.nbytes != frame.total or (frame.kind == OBJECT and frame.head != frame.total):
                break
            data = ctypes.string_at(frame.address, frame.nbytes)
            if self.valid():
                taken.append(data if frame.kind == BYTES else (source, data))
                self._count()
                nbytes -= frame.nbytes
        return taken


RingWriter: Final[Any] = PythonWriter if isinstance(_core, CoreUnavailable) else _core.Writer
RingReader: Final[Any] = PythonReader if isinstance(_core, CoreUnavailable) else _core.Reader
