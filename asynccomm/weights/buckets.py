"""Buckets: the messages in which the transfers of a plan travel.

Small boxes are packed together into one message; a large box has messages of its own, cut along its first dimensions.
Sender and receiver cut alike. A message of one box is its elements in row-major order, so an end that has them
in that order, in the dtype of the server, sends from or receives into that tensor; any other end copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, final

from torch import Tensor

from asynccomm.backends.arithmetic import is_plain, write
from asynccomm.backends.regions import bytes_of
from asynccomm.weights.layout import Layout
from asynccomm.weights.plan import BoxTransfer

__all__ = ["Bucket", "cut", "direct", "pack", "unpack"]

ALONE = 1 << 20  # bytes of a box from which its own message costs less than two more copies of its elements
ALIGN = 16  # bytes; the elements of every dtype are aligned in a message


@final
class Bucket(NamedTuple):
    """One message: boxes, each at an offset in bytes."""

    boxes: tuple[tuple[int, BoxTransfer], ...]
    nbytes: int


def cut(transfers: Sequence[BoxTransfer], limit: int) -> list[Bucket]:
    """Cut ``transfers`` into messages of at most ``limit`` bytes, or of one element if that is larger."""
    buckets: list[Bucket] = []
    boxes: list[tuple[int, BoxTransfer]] = []
    end = 0
    for transfer in transfers:
        for piece in _pieces(transfer, limit):
            if piece.nbytes >= ALONE:
                buckets.append(Bucket(((0, piece),), piece.nbytes))
                continue
            start = -(-end // ALIGN) * ALIGN
            if boxes and start + piece.nbytes > limit:
                buckets.append(Bucket(tuple(boxes), end))
                boxes, start = [], 0
            boxes.append((start, piece))
            end = start + piece.nbytes
    if boxes:
        buckets.append(Bucket(tuple(boxes), end))
    return buckets


def _pieces(transfer: BoxTransfer, limit: int) -> Iterator[BoxTransfer]:
    """``transfer``, cut along its first dimensions into boxes of at most ``limit`` bytes."""
    dim = next((dim for dim, size in enumerate(transfer.sizes) if size > 1), None)
    if transfer.nbytes <= limit or dim is None:
        yield transfer
        return
    row = transfer.nbytes // transfer.sizes[dim]
    rows = max(1, limit // row)
    first, size = transfer.offsets[dim], transfer.sizes[dim]
    for start in range(0, size, rows):
        offsets, sizes = list(transfer.offsets), list(transfer.sizes)
        offsets[dim], sizes[dim] = first + start, min(rows, size - start)
        yield from _pieces(transfer._replace(offsets=tuple(offsets), sizes=tuple(sizes)), limit)


def view(tensor: Tensor, base: Sequence[int], transfer: BoxTransfer) -> Tensor:
    """The box of ``transfer`` in a local tensor that begins at ``base`` of the whole tensor."""
    for dim, (offset, size, start) in enumerate(zip(transfer.offsets, transfer.sizes, base, strict=True)):
        tensor = tensor.narrow(dim, offset - start, size)
    return tensor


def direct(bucket: Bucket, tensors: Mapping[str, Tensor], layout: Layout, *, sending: bool) -> Tensor | None:
    """The elements of a bucket of one box as bytes in the memory of its tensor; None where they must be copied."""
    if len(bucket.boxes) > 1:
        return None
    _, transfer = bucket.boxes[0]
    name = transfer.source if sending else transfer.name
    box = view(tensors[name], layout[name].offsets, transfer)
    return bytes_of(box) if box.dtype == transfer.dtype and is_plain(box) else None


def pack(bucket: Bucket, tensors: Mapping[str, Tensor], layout: Layout, message: Tensor) -> None:
    """Copy the boxes from the trainer's ``tensors`` into ``message``, a tensor of bytes, in the server's dtypes."""
    for start, transfer in bucket.boxes:
        box = view(tensors[transfer.source], layout[transfer.source].offsets, transfer)
        _typed(message, start, transfer).copy_(box)


def unpack(bucket: Bucket, tensors: Mapping[str, Tensor], layout: Layout, message: Tensor) -> None:
    """Copy the boxes from ``message`` into the server's ``tensors``."""
    for start, transfer in bucket.boxes:
        box = view(tensors[transfer.name], layout[transfer.name].offsets, transfer)
        write(box, _typed(message, start, transfer))


def _typed(message: Tensor, start: int, transfer: BoxTransfer) -> Tensor:
    return message[start : start + transfer.nbytes].view(transfer.dtype).view(transfer.sizes)


def largest(buckets: Sequence[Bucket], packed: Sequence[bool]) -> int:
    """Bytes of the largest bucket that is ``packed``; 0: none is."""
    return max((bucket.nbytes for bucket, copied in zip(buckets, packed, strict=True) if copied), default=0)


def total(buckets: Sequence[Bucket]) -> int:
    """Bytes of all tensors in ``buckets``, without the gaps between them."""
    return sum(
        math.prod(transfer.sizes) * transfer.dtype.itemsize for bucket in buckets for _, transfer in bucket.boxes
    )
