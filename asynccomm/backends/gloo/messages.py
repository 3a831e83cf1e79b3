"""The headers of messages: their kinds, the limits, and the check of a header from another rank."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, Self, final

from asynccomm.errors import BackendError
from asynccomm.ops import MessageSpace
from asynccomm.ops.dtypes import BY_CODE
from asynccomm.ops.parcels import MAX_HEAD

SHORT: Final = 256 << 10  # bytes: up to this size, a copy costs less than a reply of the receiving rank
WINDOW: Final = 1 << 20  # bytes of short messages, with their headers, that no operation has taken
REPORT: Final = WINDOW // 8  # bytes taken until the receiver reports them

_HEADER: Final = struct.Struct("<BxxxIQqq")
HEADER_BYTES: Final = _HEADER.size


@final
class Kind:
    """The kinds of frames, as plain numbers. CLEAR and TAKEN go from the receiving rank to the sending rank."""

    TENSOR: Final = 1  #: a short tensor; ``first`` is the number of elements, ``second`` the code of the dtype
    PARCEL: Final = 2  #: a short parcel; ``first`` is the length of the head, ``second`` that of the payload
    TENSOR_OFFER: Final = 3  #: the same for a long tensor, without the data
    PARCEL_OFFER: Final = 4
    DATA: Final = 5  #: the data of an offered message
    CLEAR: Final = 6  #: permission to send the data of an offered message
    FRAME: Final = 8  #: the frame of a collective; ``first`` is its length
    TAKEN: Final = 7  #: ``first`` more bytes of short messages have been received by operations


class Header(NamedTuple):
    """The fixed part of a frame."""

    kind: int
    key: int = 0
    number: int = 0  #: of an offered message, counted by its sender
    first: int = 0
    second: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(*self)

    @classmethod
    def unpack_from(cls, data: memoryview[int], start: int) -> Self:
        return cls(*_HEADER.unpack_from(data, start))

    @property
    def offered(self) -> bool:
        """Whether the data of the message waits for permission."""
        return self.kind in (Kind.TENSOR_OFFER, Kind.PARCEL_OFFER)


OFFERED: Final = Kind.TENSOR_OFFER - Kind.TENSOR  #: between the kinds of a short and of a long message


def check(peer: int, header: Header) -> int:
    """The number of bytes of the message that a header describes.

    Raises: BackendError for a header that no sender writes.
    """
    kind, key, _, first, second = header
    tensors = key < MessageSpace.OBJECTS.key(0)
    if kind in (Kind.TENSOR, Kind.TENSOR_OFFER) and tensors:
        if second in BY_CODE and first >= 0:
            nbytes = first * BY_CODE[second].itemsize
            if kind == Kind.TENSOR_OFFER or nbytes <= SHORT:
                return nbytes
    elif (
        kind in (Kind.PARCEL, Kind.PARCEL_OFFER)
        and not tensors
        and key < len(MessageSpace) * MessageSpace.OBJECTS.key(0)
    ):
        if first > MAX_HEAD:
            raise BackendError(f"rank {peer} sent a head of {first} bytes; {MAX_HEAD} are allowed")
        if min(first, second) >= 0 and (kind == Kind.PARCEL_OFFER or first + second <= SHORT):
            return first + second
    raise impossible(peer, header)


def impossible(peer: int, header: Header) -> BackendError:
    """The error for a header that no sender writes."""
    return BackendError(f"rank {peer} sent a header that cannot be: {tuple(header)}")


def describe(source: int, header: Header) -> str:
    """A message in words, for a warning."""
    space, tag = MessageSpace.of_key(header.key)
    content = "an item of a stream"
    if space is MessageSpace.TENSORS:
        content = f"{str(BY_CODE[header.second]).removeprefix('torch.')}[{header.first}]"
    elif space is MessageSpace.OBJECTS:
        content = f"an object of {header.first + header.second} bytes"
    elif space is MessageSpace.HEADERS:
        content = "a tensor"
    return f"{content} of rank {source}" + (f", tag={tag}" if tag else "")
