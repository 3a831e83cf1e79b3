"""Memory in pieces, gone through once from front to back, as if it were one.

What a parcel carries lies in several tensors. It is copied from them straight into frames, and out of frames straight
to where it belongs: there is no flat copy of the whole at either end. Only a tensor that is not plain (strided,
conjugated) is packed first, when its turn comes, and let go when it is through: the largest of them counts for memory,
not their sum, and nothing is packed for a message that is never cleared. Until its operation is over nobody may write
to it anyway.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any, Final, final

from torch import Tensor

from asynccomm.backends.arithmetic import plain

# ctypes' memmove gives up the interpreter's lock, as torch's operations do. Between many small pieces that would be
# many chances for another thread to keep it for a whole switch interval.
SMALL: Final = 32 << 10  # bytes that are moved with the lock held: a few microseconds
hold: Any = ctypes.PyDLL(None).memmove  # is memmove that holds it
hold.argtypes, hold.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None


@final
class Pieces:
    """Tensors and bytes, to be copied away or to be filled, in order.

    Args:
        parts: to be filled they must be plain tensors.
    """

    __slots__ = ("_address", "_here", "_spans")

    def __init__(self, parts: Iterable[Tensor | bytes]) -> None:
        self._spans = spans(parts)
        self._address = 0
        self._here = 0  # bytes of the piece at ``_address`` that are left

    def copy_to(self, target: int, nbytes: int) -> None:
        """Copy the next bytes to an address. There must be so many."""
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
        """Copy from an address to the next bytes. There must be so many."""
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
    """Address and length of what is not empty. Each is good until the next one is asked for."""
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
                del values  # before the next one is packed


def address_of(data: bytes) -> int:
    """Where ``data`` has its bytes, as long as it is kept. They are not to be written."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _move(target: int, source: int, nbytes: int) -> None:
    (hold if nbytes <= SMALL else ctypes.memmove)(target, source, nbytes)
