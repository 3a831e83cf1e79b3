"""The headers of payloads from one rank to another, as sent over the side channel.

A payload consists of segments, each the bytes of one tensor. Segments on the host travel inline, with the header;
segments on the device are offered under a number, see ``transfers``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from asynccomm.backends.regions import bytes_of
from asynccomm.errors import BackendError
from asynccomm.ops import Parcel

_HEAD: Final = struct.Struct("<QI")  # number of the offer; number of segments, each of which follows as a _SEGMENT
_SEGMENT: Final = struct.Struct("<Q")  # twice its length in bytes, plus one if it is on the device


def packed(number: int, head: bytes, segments: Sequence[tuple[Tensor, bool]]) -> Parcel:
    """A parcel for the side channel, of ``segments``: pairs of bytes and whether they are on the device."""
    table = b"".join([_SEGMENT.pack(len(data) << 1 | on_device) for data, on_device in segments])
    along = tuple([data for data, on_device in segments if not on_device])
    return Parcel(_HEAD.pack(number, len(segments)) + table + head, along)


@final
class Envelope(NamedTuple):
    """The received header of one rank's payload, with the inline segments."""

    number: int
    segments: Sequence[tuple[int, bool]]  # length in bytes, and whether on the device
    head: bytes  # the application's part of the header
    along: Tensor  # the segments on the host, concatenated

    @property
    def nbytes(self) -> int:
        return sum([nbytes for nbytes, _ in self.segments])

    @property
    def on_device(self) -> bool:
        return any(on_device for _, on_device in self.segments)


@final
class HeaderReceiver:
    """Receives the headers of one operation with their inline segments; an allocator for the side channel."""

    def __init__(self) -> None:
        self.envelopes: dict[int, Envelope] = {}  #: by source

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        try:
            number, count = _HEAD.unpack_from(head)
            start = _HEAD.size + count * _SEGMENT.size
            table = [word for (word,) in _SEGMENT.iter_unpack(head[_HEAD.size : start])]
        except struct.error as exc:
            raise BackendError(f"rank {source} sent a head that cannot be read: {exc}") from exc
        along = torch.empty(lengths[source], dtype=torch.uint8, device="cpu")
        segments = [(word >> 1, bool(word & 1)) for word in table]
        if len(segments) != count or sum([nbytes for nbytes, on_device in segments if not on_device]) != len(along):
            raise BackendError(f"rank {source} sent a head that does not fit what came with it")
        self.envelopes[source] = Envelope(number, segments, head[start:], along)
        return (along,)


@final
class ByteCursor:
    """Reads the bytes of plain tensors in sequence."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts: Iterator[Tensor] = iter([bytes_of(tensor) for tensor in tensors if tensor.numel()])
        self._part: Tensor | None = None

    def next(self, nbytes: int) -> list[Tensor]:
        """The next ``nbytes`` bytes, as views, of one or more tensors."""
        pieces: list[Tensor] = []
        while nbytes:
            part = next(self._parts) if self._part is None else self._part
            pieces.append(part[:nbytes])
            self._part = part[nbytes:] if len(part) > nbytes else None
            nbytes -= len(pieces[-1])
        return pieces
