"""Mappings of files in shared memory. Python's own keep a descriptor each, and do not tell their address."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, Final, final

import torch
from torch import Tensor

_libc: Any = ctypes.CDLL(None, use_errno=True)
_mmap: Any = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap: Any = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise: Any = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED: Final = ctypes.c_void_p(-1).value


@final
class Mapping:
    """A part of a file as memory, shared with all processes that map it; unmapped with this object. Raises: OSError.

    Args:
        start: a multiple of the size of a page.
    """

    def __init__(self, fd: int, start: int, nbytes: int, *, writable: bool) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        address = _mmap(None, nbytes, access, mmap.MAP_SHARED, fd, start)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address: int = address
        self.nbytes: int = nbytes
        weakref.finalize(self, _munmap, address, nbytes).atexit = False  # a tensor may still lie here at exit

    def free(self) -> None:
        """Give the memory back to the system, as far as the file system can; it is zero from now on."""
        _madvise(self.address, self.nbytes, mmap.MADV_REMOVE)

    def buffer(self) -> memoryview[int]:
        """The memory; the mapping must outlive the buffer."""
        array: Any = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        return memoryview(array).cast("B")


def memory_at(address: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    """Memory as a vector of ``dtype``, valid as long as it is mapped."""
    array: Any = ctypes.c_ubyte * nbytes
    return torch.frombuffer(array.from_address(address), dtype=dtype)
