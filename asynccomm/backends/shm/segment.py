"""Memory that processes share, without a name: nothing to clean up after a rank that was killed.

The segment is a memfd where the system has it: memory that only descriptors lead to, not limited by the size of
``/dev/shm``. It is sealed, so nobody can cut it short under the others, whose next access would be a SIGBUS. Elsewhere
it is a file that was never linked into its directory, with all its space reserved: on a full disk, too, the first
access would be a SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from typing import Final, final

import torch

from asynccomm.errors import BackendError

# Since Linux 6.3: what can never be executed. Some systems allow no other memfd, older ones do not know the flag.
_MFD_NOEXEC_SEAL: Final = 0x8
_DIRECTORIES: Final = ("/dev/shm",)  # before the one for temporary files, which may be on a disk


def create(nbytes: int) -> int:
    """A descriptor, to be closed by the caller, of ``nbytes`` of new zeroed memory that can be mapped shared.

    Raises: BackendError with the size and what the system said.
    """
    reasons = []
    for place in (None, *_DIRECTORIES, tempfile.gettempdir()):
        try:
            return _memfd(nbytes) if place is None else _unlinked(place, nbytes)
        except OSError as exc:
            reasons.append(f"{place or 'memfd'}: {exc.strerror}")
    raise BackendError(
        f"no shared memory of {nbytes} bytes to be had ({'; '.join(reasons)}); "
        f"hints 'chunk_bytes' and 'message_bytes' make it smaller"
    )


def _memfd(nbytes: int) -> int:
    if not hasattr(os, "memfd_create"):  # a Python that was built for older systems has none
        raise OSError(0, "this Python has no memfd_create")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("asynccomm", flags | _MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create("asynccomm", flags)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unlinked(directory: str, nbytes: int) -> int:
    with tempfile.TemporaryFile(dir=directory, prefix="asynccomm-", buffering=0) as file:  # 0600
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return os.dup(file.fileno())


@final
class Segment:
    """Shared memory, mapped into this process; ``fd`` may be closed afterwards.

    There is no ``close``: the mapping ends with the last of the views on it, wherever they were passed on to. Unmapping
    earlier would turn them into wild pointers. A forked child inherits the mapping, which does no harm.

    Args:
        fd: from ``create``, here or on another rank.
        nbytes: its size.

    Raises: BackendError when it has another size or cannot be mapped.
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
        self.raw = memoryview(mapping)  #: all of it as bytes
        self.words = self.raw.cast("Q")  #: as 64-bit words
        self.data = torch.frombuffer(mapping, dtype=torch.uint8)  #: as a tensor of bytes
