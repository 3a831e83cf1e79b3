"""Parcels as gloo messages.

The first message, under the first tag, has a fixed length: a header, followed by short data. The rest follows under the
second tag, in messages whose lengths are in the header: the ``front`` (the lengths of the segments, then the head),
then the segments of the payload. No message is therefore received into memory too small for it, which would end the
process.

A segment is a large tensor or a part of it, sent from its own memory, or several small tensors copied together. The
receiver's tensors may be divided differently: a segment that does not lie within one of them is received in staging
memory.

A header or a table of lengths must be one that an :class:`OutboundParcel` could have written, otherwise the receiver
raises BackendError. No number in them makes a receiver allocate more than twice the largest head.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from asynccomm.backends.gloo.staging import collected, room, unpack
from asynccomm.backends.gloo.torch_gloo import GlooGroup, GlooRequest
from asynccomm.backends.regions import bytes_of
from asynccomm.errors import BackendError
from asynccomm.ops import Parcel
from asynccomm.ops.parcels import MAX_HEAD

SHORT: Final = 4096  # bytes that travel in the header's message, which saves a round trip
SEGMENT: Final = 16 << 20  # maximum bytes of a message; an unwanted payload is received into a buffer of this size
SMALL: Final = 256 << 10  # bytes: tensors up to this size are copied together
PACK: Final = 4 << 20  # maximum bytes of a pack of such tensors
MOST_SEGMENTS: Final = MAX_HEAD // 8  # their lengths take no more than a head may; enough for a terabyte at least
WINDOW: Final = 64 << 20  # bytes in flight at the same time

_HEADER: Final = struct.Struct("<qqqI60s")  # bytes of the head, bytes of the payload, number of segments; code and text


class _ParcelHeader(NamedTuple):
    """The fields of a header."""

    head: int
    payload: int
    segments: int  # messages of payload; 0: the payload is in the front
    code: int
    text: bytes

    @property
    def possible(self) -> bool:
        """Whether a sender can have written this header; the maximum length of a head is checked elsewhere."""
        if self.segments:  # packs lie between large tensors, or are full
            most = min(2 * (self.payload // SMALL) + 1, MOST_SEGMENTS)
            return 0 < self.segments <= most and self.head >= 0 and self.head + self.payload > SHORT
        return self.head >= 0 <= self.payload and (not self.payload or self.front <= SHORT)

    @property
    def front(self) -> int:
        return self.head + (8 * self.segments if self.segments else self.payload)


def segments_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The bytes of ``tensors``, divided into the messages to send."""
    segments: list[Tensor] = []
    pack: list[Tensor] = []
    left = PACK
    for tensor in tensors:
        if tensor.nbytes > left or tensor.nbytes > SMALL:
            segments += [collected(pack)] if pack else []
            pack, left = [], PACK
        if tensor.nbytes > SMALL:
            data = bytes_of(tensor.detach())
            segments += [data[i : i + SEGMENT] for i in range(0, len(data), SEGMENT)]
        elif tensor.nbytes:
            pack.append(tensor.detach())
            left -= tensor.nbytes
    return segments + ([collected(pack)] if pack else [])


@final
class OutboundParcel:
    """A parcel prepared for sending, to one rank or to several.

    Args:
        code, text: identify the parcel's operation to the receiver.
    """

    def __init__(self, parcel: Parcel, code: int = 0, text: str = "") -> None:
        head, payload = parcel.head, parcel.nbytes
        short = len(head) + payload <= SHORT
        segments = [] if short else segments_of(parcel.tensors)
        table = struct.pack(f"<{len(segments)}q", *[len(segment) for segment in segments])
        front = _tensor(table + head)
        if short and payload:
            front = torch.cat([front, *[bytes_of(tensor) for tensor in parcel.tensors]])
        header = _tensor(_HEADER.pack(len(head), payload, len(segments), code, text.encode()[:60]))
        along = len(front) <= SHORT
        assert len(segments) <= MOST_SEGMENTS, f"{len(segments)} segments, of which {MOST_SEGMENTS} are taken"
        self._first = torch.cat([header, front]) if along else header
        self._rest = segments if along else [front, *segments]

    def send(self, gloo: GlooGroup, peer: int, key: int) -> list[Callable[[], object]]:
        """Start to send; returns functions that wait for the end. The caller keeps the parcel until then."""
        first = gloo.send(self._first, peer, 2 * key)
        return [first.wait, *[gloo.send(message, peer, 2 * key + 1).wait for message in self._rest]]


@final
class InboundParcel:
    """A parcel from ``peer``. The methods block; call ``read`` first, then ``take``."""

    def __init__(self, gloo: GlooGroup, peer: int, key: int) -> None:
        self._gloo = gloo
        self._peer = peer
        self._key = key
        self._memory = bytearray(_HEADER.size + SHORT)
        self._arrival = gloo.recv(torch.frombuffer(self._memory, dtype=torch.uint8), peer, 2 * key)
        self._lengths: Sequence[int] = ()  # lengths of the segments
        self._along: Tensor | None = None  # a short payload
        self.head: bytes = b""
        self.nbytes: int = 0  #: bytes of the payload

    def read(self, check: Callable[[int, str], object] | None = None) -> None:
        """Wait for the head. ``check`` gets code and text before any further data is received.

        Raises: BackendError for a head that is too long, and for a header that no sender writes.
        """
        self._arrival.wait()
        note = _ParcelHeader(*_HEADER.unpack_from(self._memory))
        if check is not None:
            check(note.code, note.text.rstrip(b"\0").decode(errors="replace"))
        if note.head > MAX_HEAD:
            raise BackendError(f"rank {self._peer} sent a head of {note.head} bytes; {MAX_HEAD} are allowed")
        if not note.possible:
            raise BackendError(
                f"rank {self._peer} sent a header that cannot be: {note.payload} bytes in {note.segments} segments "
                f"behind a head of {note.head} bytes"
            )
        front = memoryview(self._memory)[_HEADER.size :]
        if note.front > SHORT:
            memory = bytearray(note.front)
            self._receive(torch.frombuffer(memory, dtype=torch.uint8)).wait()
            front = memoryview(memory)
        table = 8 * note.segments
        self._lengths = struct.unpack_from(f"<{note.segments}q", front)
        if note.segments and not (0 < min(self._lengths) <= max(self._lengths) <= SEGMENT):
            raise BackendError(f"rank {self._peer} sent a segment of a length that cannot be")
        if note.segments and sum(self._lengths) != note.payload:
            raise BackendError(f"rank {self._peer} sent segments of other lengths than it has announced")
        self.head = bytes(front[table : table + note.head])
        self.nbytes = note.payload
        if note.payload and not note.segments:
            self._along = torch.frombuffer(front[note.head : note.front], dtype=torch.uint8)

    def take(self, tensors: Sequence[Tensor] | None) -> None:
        """Receive the payload into plain ``tensors``; None: discard it."""
        if self._along is not None:
            if tensors is not None:
                unpack(self._along, tensors)
        elif tensors is None:
            scratch = room(max(self._lengths, default=0))
            for length in self._lengths:
                self._receive(scratch[:length]).wait()
        else:
            self._take_segments(_ByteCursor(tensors))

    def _take_segments(self, cursor: _ByteCursor) -> None:
        coming: deque[tuple[GlooRequest, Callable[[], object] | None, int]] = deque()
        on_the_way = 0

        def land() -> int:
            work, finish, length = coming.popleft()
            work.wait()
            if finish is not None:
                finish()
            return length

        for length in self._lengths:
            while coming and on_the_way + length > WINDOW:
                on_the_way -= land()
            memory, finish = cursor.next(length)
            coming.append((self._receive(memory), finish, length))
            on_the_way += length
        while coming:
            land()

    def _receive(self, memory: Tensor) -> GlooRequest:
        return self._gloo.recv(memory, self._peer, 2 * self._key + 1)


@final
class _ByteCursor:
    """Iterates over the bytes of plain tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts: Iterator[Tensor] = iter([bytes_of(tensor) for tensor in tensors if tensor.numel()])
        self._part = room(0)

    def next(self, length: int) -> tuple[Tensor, Callable[[], object] | None]:
        """Memory for the next bytes, and, if that is staging memory, a function that copies them to their places."""
        if not len(self._part):
            self._part = next(self._parts)
        if length <= len(self._part):
            return self._cut(length), None
        pieces = []
        left = length
        while left:
            if not len(self._part):
                self._part = next(self._parts)
            pieces.append(self._cut(min(left, len(self._part))))
            left -= len(pieces[-1])
        memory = room(length)
        return memory, partial(unpack, memory, pieces)

    def _cut(self, length: int) -> Tensor:
        cut, self._part = self._part[:length], self._part[length:]
        return cut


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else room(0)
