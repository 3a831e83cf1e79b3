"""Items as frames: bytes as they are, all other objects as parcels of the safe format."""

from __future__ import annotations

import ctypes
from typing import Any, Final, final

import torch
from torch import Tensor

from asynccomm.backends.arithmetic import plain
from asynccomm.errors import PayloadError, PayloadTypeError
from asynccomm.queues.layout import BYTES, OBJECT, framed
from asynccomm.queues.options import QueueOptions
from asynccomm.queues.ring import FULL, WAKE, RingFrame
from asynccomm.serialization.objects import IncomingObject, PayloadKind, encode

_SOURCE: Final = -1  # an end may be no rank: its label is in the error


@final
class OutgoingItem:
    """An item on its way into the ring. It refers to the memory of its tensors."""

    __slots__ = ("_at", "_head", "_kind", "_part", "_parts", "total")

    def __init__(self, item: object, *, weights_only: bool) -> None:
        if type(item) is bytes:
            self._kind, self._head, self.total = BYTES, 0, len(item)
            self._parts: list[bytes | Tensor] = [item]
        else:
            parcel = encode(PayloadKind.ITEM, item, "item", weights_only=weights_only)
            self._kind, self._head, self.total = OBJECT, len(parcel.head), len(parcel.head) + parcel.nbytes
            self._parts = [parcel.head, *(plain(tensor) for tensor in parcel.tensors if tensor.numel())]
        self._part = self._at = 0

    @property
    def begun(self) -> bool:
        """Whether frames of it are in the ring."""
        return self._part > 0 or self._at > 0

    def frames(self, most: int) -> int:
        """Bytes of the ring that the item's frames take, at most, with payloads of up to ``most`` bytes."""
        sizes = [framed(most) * (_nbytes(part) // most) + framed(_nbytes(part) % most) for part in self._parts]
        return sum(sizes) + framed(most)  # padding is less than a frame, for each lap of the ring

    def write(self, ring: Any, number: int, most: int, budget: int) -> tuple[bool, bool, int]:
        """Write frames while the ring has room, for ``budget`` bytes.

        Returns: whether the item is complete; whether a reader sleeps; the bytes written. Raises: BackendError.
        """
        sleeping, moved = False, 0
        while self._part < len(self._parts):
            part = self._parts[self._part]
            left = _nbytes(part) - self._at
            nbytes = min(left, most)
            first = int(self._part == 0 and self._at == 0)
            source: bytes | int
            if isinstance(part, Tensor):
                source = part.data_ptr() + self._at
            else:
                source = part if not self._at else part[self._at : self._at + nbytes]
            result = ring.put(self._kind, first, self._head, self.total, number, source, nbytes)
            if result == FULL:
                return False, sleeping, moved
            sleeping = sleeping or result == WAKE
            moved += nbytes
            self._at += nbytes
            if self._at == _nbytes(part):
                self._part, self._at = self._part + 1, 0
            if moved >= budget:
                break
        return self._part == len(self._parts), sleeping, moved


def _nbytes(part: bytes | Tensor) -> int:
    return part.nbytes if isinstance(part, Tensor) else len(part)


@final
class IncomingItem:
    """An item of several frames that is being read into its final memory."""

    __slots__ = ("_at", "_error", "_kind", "_left", "_options", "_part", "_parts", "_rest", "number", "object")

    def __init__(self, frame: RingFrame, options: QueueOptions) -> None:
        self.number = frame.number
        self.object: IncomingObject | None = None
        self._kind, self._left, self._rest = frame.kind, frame.total, frame.total - frame.head
        self._options = options
        self._error = ""
        self._part = self._at = 0
        self._parts: list[Tensor] = []
        if frame.total > options.max_bytes:
            self._error = f"it has {frame.total} bytes, but max_bytes is {options.max_bytes}"
        elif frame.kind == OBJECT and not 0 < frame.head <= frame.total:
            self._error = "its head does not fit its length"
        else:
            nbytes = frame.total if frame.kind == BYTES else frame.head
            self._parts = [torch.empty(nbytes, dtype=torch.uint8, device="cpu")]

    def feed(self, address: int, nbytes: int) -> bool:
        """Copy the payload of a frame; False if the item has fewer bytes."""
        if nbytes > self._left:
            return False
        self._left -= nbytes
        while nbytes and self._parts:
            part = self._parts[self._part]
            size = min(nbytes, part.nbytes - self._at)
            ctypes.memmove(part.data_ptr() + self._at, address, size)  # without the GIL
            address, nbytes, self._at = address + size, nbytes - size, self._at + size
            if self._at == part.nbytes:
                self._part, self._at = self._part + 1, 0
                if self._part == 1 and self._kind == OBJECT:
                    self._open()
                if nbytes and self._part == len(self._parts):
                    return False
        return True

    def _open(self) -> None:
        """The head is there: make the memory of the rest."""
        head = _bytes_of(self._parts[0])
        try:
            self.object = IncomingObject(_SOURCE, head, self._rest)
            self._parts += [place for place in self.object.places if place.numel()]
        except PayloadError as exc:
            self._error, self._parts = str(exc.__cause__ or exc), []

    @property
    def done(self) -> bool:
        return not self._left

    def decode(self) -> Any:
        """The item. Raises: PayloadError."""
        if self._error:
            raise PayloadError(self._error)
        if self._kind == BYTES:
            return _bytes_of(self._parts[0])
        assert self.object is not None
        return self.object.decode(weights_only=self._options.weights_only)


def _bytes_of(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def decode(found: bytes | IncomingItem, label: str, options: QueueOptions) -> Any:
    """The object of the head of a small item, or of an ``IncomingItem``. Raises: PayloadError."""
    try:
        if isinstance(found, IncomingItem):
            item = found.decode()
        else:
            item = IncomingObject(_SOURCE, found, 0).decode(weights_only=options.weights_only)
    except PayloadError as exc:
        raise PayloadError(f"an item of {label} cannot be read: {exc.__cause__ or exc}") from exc
    check_class(item, label, options)
    return item


def check_class(item: object, label: str, options: QueueOptions) -> None:
    """Raises: PayloadTypeError."""
    if options.expect is not None and not isinstance(item, options.expect):
        raise PayloadTypeError(
            f"a {options.expect.__qualname__} was expected, but {label} put a {type(item).__qualname__}"
        )
