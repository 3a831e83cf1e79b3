"""What one rank gives another, as the head tells it that goes over the side channel.

A payload has segments, each a tensor's bytes. Those on the host come along with the head; those on the device are
offered under a number, see ``transfers``.
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

_HEAD: Final = struct.Struct("<QI")  # number of the offer; how many segments, each of which follows as _SEGMENT
_SEGMENT: Final = struct.Struct("<Q")  # twice its bytes, and one more if it is on the device


def packed(number: int, head: bytes, segments: Sequence[tuple[Tensor, bool]]) -> Parcel:
    """For the side channel: bytes of segments, with whether they are on the device."""
    table = b"".join([_SEGMENT.pack(len(data) << 1 | on_device) for data, on_device in segments])
    along = tuple([data for data, on_device in segments if not on_device])
    return Parcel(_HEAD.pack(number, len(segments)) + table + head, along)


@final
class Envelope(NamedTuple):
    """What came from one rank, but for what is still on its device."""

    number: int
    segments: Sequence[tuple[int, bool]]  # bytes, and whether on the device
    head: bytes  # the sender's own
    along: Tensor  # the segments on the host, one after the other

    @property
    def nbytes(self) -> int:
        return sum([nbytes for nbytes, _ in self.segments])

    @property
    def on_device(self) -> bool:
        return any(on_device for _, on_device in self.segments)


@final
class HeaderReceiver:
    """Takes the heads of one operation, and what comes along with them."""

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
    """Goes through the bytes of plain tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts: Iterator[Tensor] = iter([bytes_of(tensor) for tensor in tensors if tensor.numel()])
        self._part: Tensor | None = None

    def next(self, nbytes: int) -> list[Tensor]:
        """The next so many bytes, in pieces."""
        pieces: list[Tensor] = []
        while nbytes:
            part = next(self._parts) if self._part is None else self._part
            pieces.append(part[:nbytes])
            self._part = part[nbytes:] if len(part) > nbytes else None
            nbytes -= len(pieces[-1])
        return pieces
