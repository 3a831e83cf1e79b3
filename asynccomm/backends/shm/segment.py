"""A segment of shared memory without a name, so that a killed rank leaves nothing to clean up.

The segment is a memfd where the system has memfds: memory that is accessible only by descriptors, and not limited by
the size of ``/dev/shm``. The memfd is sealed, so that no process can shrink it; the next access of another process
would be a SIGBUS. Elsewhere the segment is a file that was never linked into its directory, with all its space
reserved, because an access to unreserved space on a full disk would be a SIGBUS, too.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from typing import Final, final

import torch

from asynccomm.errors import BackendError

# Memory that can never be executed; since Linux 6.3. Some systems allow no other memfd, older ones reject the flag.
_MFD_NOEXEC_SEAL: Final = 0x8
_DEV_SHM: Final = "/dev/shm"


def create(nbytes: int) -> int:
    """Create ``nbytes`` of zeroed memory that can be mapped shared; returns its descriptor, which the caller closes.

    Raises: BackendError with the size and the system's error texts.
    """
    return _first_way(nbytes, "; hints 'chunk_bytes' and 'message_bytes' make it smaller")


def _first_way(nbytes: int, hint: str) -> int:
    reasons = []
    ways = (("memfd", _memfd), (_DEV_SHM, _in_dev_shm), ("the directory for temporary files", _in_temporary_files))
    for name, way in ways:
        try:
            return way(nbytes)
        except OSError as exc:
            reasons.append(f"{name}: {exc.strerror}")
    raise BackendError(f"no shared memory of {nbytes} bytes to be had ({'; '.join(reasons)}){hint}")


def growing() -> int:
    """Create a file of no bytes in shared memory that can grow, and not shrink; returns its descriptor.

    Raises: BackendError with the system's error texts.
    """
    return _first_way(0, "")


def grow(fd: int, end: int, nbytes: int) -> None:
    """Extend a file of ``growing``, which ends at ``end``, by ``nbytes``. Raises: OSError."""
    try:
        sealed = bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file on a disk
        sealed = False
    if sealed:
        os.ftruncate(fd, end + nbytes)
    else:
        os.posix_fallocate(fd, end, nbytes)


def _memfd(nbytes: int) -> int:
    if not hasattr(os, "memfd_create"):  # a Python that was built for older systems lacks it
        raise OSError(0, "this Python has no memfd_create")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    name = "asynccomm" if nbytes else "asynccomm-tensors"  # in /proc/*/maps
    try:
        fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create(name, flags)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        grow = fcntl.F_SEAL_GROW if nbytes else 0
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | grow | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _in_dev_shm(nbytes: int) -> int:
    return _unlinked(_DEV_SHM, nbytes)


def _in_temporary_files(nbytes: int) -> int:
    """Create a file that may be on a disk. Without descriptors left, not even the directory is found."""
    return _unlinked(tempfile.gettempdir(), nbytes)


def _unlinked(directory: str, nbytes: int) -> int:
    with tempfile.TemporaryFile(dir=directory, prefix="asynccomm-", buffering=0) as file:  # 0600
        if nbytes:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        return os.dup(file.fileno())


@final
class Segment:
    """A segment mapped into this process; ``fd`` may be closed afterwards.

    There is no ``close``: the mapping ends with the last view of it, in whatever object that view is held. Unmapping it
    earlier would turn views into wild pointers. A forked child inherits the mapping, which is harmless.

    Args:
        fd: from ``create``, on this rank or another.
        nbytes: size of the segment.

    Raises: BackendError if the segment has another size or cannot be mapped.
    """

    __slots__ = ("data", "raw", "words")

    def __init__(self, fd: int, nbytes: int) -> None:
        try:
            there = os.fstat(fd).st_size
            if there != nbytes:
                raise BackendError(f"the shared segment has {there} bytes instead of {nbytes}")
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as exc:
            raise BackendError(f"cannot map a shared segment of {nbytes} bytes: {exc.strerror}") from exc
        self.raw: memoryview[int] = memoryview(mapping)  #: the whole segment as bytes
        self.words: memoryview[int] = self.raw.cast("Q")  #: the whole segment as 64-bit words
        #: the whole segment as a tensor of bytes
        self.data: torch.Tensor = torch.frombuffer(mapping, dtype=torch.uint8)
