"""The arena of a process: memory for tensors that the other ranks of the host may read.

All tensors that ``comm.empty`` and ``comm.memory`` make lie in one file without a name, of which each shm comm hands a
descriptor for reading to its peers. The file consists of *extents*: a large tensor has its own, small ones share one.
An extent is mapped here while a tensor lies in it, and has no memory afterwards; no later extent gets its place in the
file. The file only grows, hence an access of a peer can never be a SIGBUS; it would find zeros.

A collective of tensors in the arena publishes where they lie (``programs.py``), and ``peer_memory`` maps the extents of
peers.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from asynccomm.backends.shm.layout import LINE, rounded_up
from asynccomm.backends.shm.mapping import Mapping
from asynccomm.backends.shm.segment import grow, growing
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.core.per_process import PerProcess
from asynccomm.errors import BackendError

PAGE: Final = mmap.PAGESIZE
SHARED_EXTENT: Final = 4 << 20  # bytes of an extent for small tensors
OWN_EXTENT: Final = 256 << 10  # bytes from which a tensor has its own


class Lent(NamedTuple):
    """A place in an arena."""

    start: int  #: of the extent, in the file
    nbytes: int  #: of the extent; 0: no place
    offset: int  #: in the extent


NOT_LENT: Final = Lent(0, 0, 0)


@final
class _Extent:
    """A mapped extent.

    Args:
        start: in the file.
    """

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.mapping = Mapping(fd, start, nbytes, writable=True)
        self.memory = self.mapping.buffer()
        self.address: int = self.mapping.address
        self.used = 0  # bytes given out
        self.tensors = 0  # that lie here


@final
class Arena:
    """Memory for tensors. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: garbage collection inside may free a tensor
        self._fd = -1
        self._reader = -1
        self._end = 0  # of the file
        self._holders = 0
        self._extents: dict[int, _Extent] = {}  # by address
        self._addresses: list[int] = []  # sorted
        self._open: _Extent | None = None  # the extent for small tensors
        core = load_core()
        self._core: Any = None if isinstance(core, CoreUnavailable) else core

    def hold(self) -> int:
        """Keep the arena's file until ``release``; returns a descriptor of it for reading, which the arena owns.

        Raises: OSError, BackendError.
        """
        with self._lock:
            self._make()
            self._holders += 1
            return self._reader

    def release(self) -> None:
        """End one ``hold``. The file is closed with the last, once no tensor is left."""
        with self._lock:
            self._holders -= 1
            self._tidy()

    def bytes(self, nbytes: int) -> Tensor:
        """``nbytes`` of memory, with any content, as a tensor of ``torch.uint8`` at the start of a cache line.

        Raises: MemoryError with the system's error text.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        with self._lock:
            self._holders += 1  # meanwhile: a tensor that is freed by garbage collection may be the last one
            try:
                view = self._take(nbytes)
            except (OSError, BackendError, ValueError, OverflowError) as exc:
                raise MemoryError(f"no shared memory of {nbytes} bytes for a tensor: {exc}") from exc
            finally:
                self._holders -= 1
        return torch.frombuffer(view, dtype=torch.uint8)

    def strided(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with any content. Raises: MemoryError."""
        numel = math.prod(shape)
        last = sum([(n - 1) * step for n, step in zip(shape, stride, strict=True)]) if numel else -1
        flat = self.bytes((last + 1) * dtype.itemsize).view(dtype)
        return flat.as_strided(tuple(shape), tuple(stride))

    def find(self, address: int) -> Lent:
        """Where ``address`` lies in the arena; ``NOT_LENT`` if it lies elsewhere."""
        with self._lock:
            i = bisect_right(self._addresses, address) - 1
            if i >= 0 and address < (extent := self._extents[self._addresses[i]]).address + extent.nbytes:
                return Lent(extent.start, extent.nbytes, address - extent.address)
            return NOT_LENT

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the arena now holds."""
        with self._lock:
            return sum([extent.nbytes for extent in self._extents.values()])

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _make(self) -> None:
        if self._fd < 0:
            fd = growing()
            try:
                self._reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # without /proc, the peers' mappings alone are for reading only
                try:
                    self._reader = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
                except OSError:
                    os.close(fd)
                    raise
            self._fd = fd

    def _tidy(self) -> None:
        """Close the file if it has no use."""
        if self._holders:
            return
        if (extent := self._open) is not None:
            self._open = None
            self._release(extent)
        if not self._extents and self._fd >= 0:
            os.close(self._fd)
            os.close(self._reader)
            self._fd = self._reader = -1
            self._end = 0

    def _take(self, nbytes: int) -> memoryview:
        if nbytes >= OWN_EXTENT:
            return self._give(self._map(rounded_up(nbytes, PAGE)), nbytes)
        extent = self._open
        if extent is None or extent.used + nbytes > extent.nbytes:
            if extent is not None:
                self._open = None
                self._release(extent)
            extent = self._open = self._map(SHARED_EXTENT)
        return self._give(extent, nbytes)

    def _map(self, nbytes: int) -> _Extent:
        self._make()
        if nbytes > os.sysconf("SC_PHYS_PAGES") * PAGE:  # else the system would promise it, and end processes later
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        grow(self._fd, self._end, nbytes)
        extent = _Extent(self._fd, self._end, nbytes)
        self._end += nbytes
        self._extents[extent.address] = extent
        self._addresses = sorted(self._extents)
        if self._core is not None:
            self._core.add_extent(extent.address, extent.nbytes, extent.start)
        return extent

    def _give(self, extent: _Extent, nbytes: int) -> memoryview:
        start = extent.used
        extent.used += rounded_up(nbytes, LINE)  # first: a finalizer may make a tensor, too
        extent.tensors += 1
        view = extent.memory[start : start + nbytes]
        weakref.finalize(view, self._freed, extent, os.getpid()).atexit = False
        return view

    def _freed(self, extent: _Extent, pid: int) -> None:
        """Count a tensor as freed."""
        if os.getpid() != pid:  # a forked child has its own arena, and must not touch its parent's
            return
        with self._lock:
            extent.tensors -= 1
            self._release(extent)

    def _release(self, extent: _Extent) -> None:
        """Free the memory of an extent without tensors, also of tensors to come."""
        if extent.tensors or extent is self._open or self._extents.get(extent.address) is not extent:
            return
        if self._core is not None:  # first: once it is unmapped, other memory may get its addresses
            self._core.remove_extent(extent.address)
        del self._extents[extent.address]
        self._addresses = sorted(self._extents)
        extent.mapping.free()
        self._tidy()

    def forget_in_child(self) -> None:
        """Leave the memory to the parent process."""
        for fd in (self._fd, self._reader):
            if fd >= 0:
                os.close(fd)
        if self._core is not None:
            self._core.forget_extents()  # all: another thread of the parent may have been adding or removing one
        self._fd = self._reader = -1
        self._extents, self._addresses, self._open = {}, [], None


arena: Final = PerProcess(Arena, Arena.forget_in_child)  #: the arena of this process
