"""Vectors as memory: the bytes of one tensor, or of several tensors in a row.

Almost every vector is contiguous, and a contiguous vector is just its address, an ``int``: building an object would
take longer than moving the bytes of a small operation. The caller that takes an address keeps the tensor alive. All
other vectors are :class:`Scattered`. Reductions compute on an :data:`Operand`: a flat tensor, or a scattered vector.
:class:`Pieces` is the sequential form: tensors and bytes that are copied once from front to back.

Lengths are in bytes throughout.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import memmove
from operator import sub
from typing import Any, Final, final

from torch import Tensor

from asynccomm.backends.arithmetic import plain

# ctypes' memmove releases the GIL, as torch's operations do. A copy of many small pieces would release it many times,
# and each time another thread may keep it for a whole switch interval.
SMALL: Final = 32 << 10  # bytes that are moved with the GIL held: a few microseconds
hold: Any = ctypes.PyDLL(None).memmove  # memmove that holds the GIL
hold.argtypes, hold.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None

_exhaust = deque[object](maxlen=0).extend  # runs an iterator without a line of Python per piece


@final
class Scattered:
    """A vector in several pieces of memory.

    Args:
        pieces: address and length of each piece, in order; adjacent pieces are joined, and empty pieces are dropped.
        owners: objects that own the memory, kept alive as long as the vector.
    """

    __slots__ = ("addresses", "nbytes", "owners", "starts")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, pieces: Iterable[tuple[int, int]], owners: object) -> None:
        self.owners: object = owners
        self.addresses: list[int] = []
        self.starts: list[int] = []  #: start of each piece in the vector, then the end of the last piece
        total, end = 0, -1
        for address, n in pieces:
            if n:
                if address != end:
                    self.addresses.append(address)
                    self.starts.append(total)
                total += n
                end = address + n
        self.starts.append(total)
        self.nbytes: int = total

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scattered) and self.addresses == other.addresses and self.starts == other.starts

    def address(self, start: int) -> int:
        """The address of byte ``start``."""
        piece = bisect_right(self.starts, start) - 1
        return self.addresses[piece] + start - self.starts[piece]

    def read(self, start: int, n: int, to: int) -> None:
        """Copy ``n`` bytes, starting at byte ``start``, to address ``to``."""
        if n:
            addresses, others, lengths = self._cut(start, n, to)
            _exhaust(map(_mover(n, addresses), others, addresses, lengths))

    def write(self, start: int, n: int, source: int) -> None:
        """Copy ``n`` bytes from address ``source`` into the vector, starting at byte ``start``."""
        if n:
            addresses, others, lengths = self._cut(start, n, source)
            _exhaust(map(_mover(n, addresses), addresses, others, lengths))

    def _cut(self, start: int, n: int, other: int) -> tuple[list[int], Iterable[int], Iterable[int]]:
        """The pieces of ``n`` bytes from ``start`` on: own addresses, addresses on the other side, and lengths."""
        i = bisect_right(self.starts, start) - 1
        j = bisect_left(self.starts, start + n, i)
        bounds = self.starts[i : j + 1]
        addresses = self.addresses[i:j]
        addresses[0] += start - bounds[0]
        bounds[0], bounds[-1] = start, start + n
        return addresses, map((other - start).__add__, bounds), map(sub, bounds[1:], bounds)


def _mover(n: int, pieces: Sequence[int]) -> Callable[[int, int, int], object]:
    """The copy function for ``n`` bytes in ``pieces``: it holds the GIL if the pieces are small on average."""
    return hold if n <= SMALL * len(pieces) else memmove


Vector = int | Scattered
Operand = Tensor | Scattered
Share = tuple[int, Vector, int]  # rank, memory and length of one rank's part of an operation


def scattered(tensors: Sequence[Tensor]) -> Scattered:
    """The vector of the plain ``tensors`` in order; it keeps them alive."""
    return Scattered([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors], tensors)


def share_of(rank: int, tensors: Sequence[Tensor]) -> Share:
    """The plain ``tensors`` as the share of ``rank``."""
    if len(tensors) == 1:
        return rank, tensors[0].data_ptr(), tensors[0].nbytes
    vector = scattered(tensors)
    return rank, vector, vector.nbytes


def where(operand: Operand) -> Vector:
    """The memory of an operand."""
    return operand.data_ptr() if isinstance(operand, Tensor) else operand


def read(vector: Vector, start: int, n: int, to: int) -> None:
    """Copy ``n`` bytes, starting at byte ``start`` of the vector, to address ``to``."""
    if isinstance(vector, int):
        memmove(to, vector + start, n)
    else:
        vector.read(start, n, to)


def write(vector: Vector, start: int, n: int, source: int) -> None:
    """Copy ``n`` bytes from address ``source`` into the vector, starting at byte ``start``."""
    if isinstance(vector, int):
        memmove(vector + start, source, n)
    else:
        vector.write(start, n, source)


def copy_between(source: Vector, start: int, target: Vector, at: int, n: int) -> None:
    """Copy ``n`` bytes, from byte ``start`` of one vector on, to byte ``at`` of another; nothing if in place."""
    if isinstance(source, int):
        if not isinstance(target, int) or source + start != target + at:
            write(target, at, n, source + start)
    elif isinstance(target, int):
        source.read(start, n, target + at)
    elif source != target or start != at:
        for address, first, end in zip(source.addresses, source.starts, source.starts[1:], strict=False):
            low, high = max(first, start), min(end, start + n)
            if low < high:
                target.write(at + low - start, high - low, address + low - first)


# -- pieces -----------------------------------------------------------------------------------------------------------


@final
class Pieces:
    """Tensors and bytes that are copied out or filled once, from front to back, as if they were one block of memory.

    A parcel's payload lies in several tensors. ``Pieces`` copies it from them straight into frames, and out of frames
    straight into the destination tensors; neither end holds a flat copy of the whole. Only a tensor that is not plain
    (strided, conjugated) is packed, when the copy reaches it, and its packed copy is freed when the copy has passed it:
    the peak memory is the largest packed tensor, not their sum, and a message that never gets a CTS packs nothing.
    Callers may not write to the tensors until the operation is done in any case.

    Args:
        parts: the memory, in order; all parts must be plain tensors if they are to be filled.
    """

    __slots__ = ("_address", "_here", "_spans")

    def __init__(self, parts: Iterable[Tensor | bytes]) -> None:
        self._spans = spans(parts)
        self._address = 0
        self._here = 0  # bytes left in the piece at ``_address``

    def span(self) -> tuple[int, int]:
        """Address and length of the next memory in one piece; at least one byte must be left."""
        if not self._here:
            self._address, self._here = next(self._spans)
        return self._address, self._here

    def skip(self, nbytes: int) -> None:
        """Count the first ``nbytes`` of ``span`` as copied."""
        self._address += nbytes
        self._here -= nbytes

    def copy_to(self, target: int, nbytes: int) -> None:
        """Copy the next ``nbytes`` to address ``target``; at least as many must be left."""
        while nbytes > self._here:
            here = self._here
            if here:
                _move(target, self._address, here)
                target += here
                nbytes -= here
            self._address, self._here = next(self._spans)
        _move(target, self._address, nbytes)
        self._address += nbytes
        self._here -= nbytes

    def copy_from(self, source: int, nbytes: int) -> None:
        """Fill the next ``nbytes`` from address ``source``; at least as many must be left."""
        while nbytes > self._here:
            here = self._here
            if here:
                _move(self._address, source, here)
                source += here
                nbytes -= here
            self._address, self._here = next(self._spans)
        _move(self._address, source, nbytes)
        self._address += nbytes
        self._here -= nbytes


def spans(parts: Iterable[Tensor | bytes]) -> Iterator[tuple[int, int]]:
    """Address and length of each non-empty part. An address is valid until the iterator advances."""
    for part in parts:
        if isinstance(part, bytes):
            nbytes = len(part)
            if nbytes:
                yield address_of(part), nbytes
        else:
            nbytes = part.nbytes
            if nbytes:
                values = plain(part)
                yield values.data_ptr(), nbytes
                del values  # before the next part is packed


def address_of(data: bytes) -> int:
    """The address of the bytes of ``data``, valid while ``data`` is alive; for reading only."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _move(target: int, source: int, nbytes: int) -> None:
    (hold if nbytes <= SMALL else memmove)(target, source, nbytes)
