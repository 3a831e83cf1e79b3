"""How a process comes to have little of something: as the kernel has it, not by patching."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from asynccomm.backends.shm import segment

__all__ = ["DIRECTORY", "end_with_parent", "few_descriptors", "full_disks", "own_disk", "small_files"]

DIRECTORY: Final = "/dev/shm"  # where shared memory is looked for if there are no memfds
DISK_BYTES: Final = 64 << 20  # enough for what comms of a few ranks need
SMALL_BYTES: Final = 4096  # less than any segment
PR_SET_PDEATHSIG: Final = 1
SIGKILL: Final = 9
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUSER: Final = 0x10000000


def end_with_parent() -> None:
    """Have this process killed when the one that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)


@contextlib.contextmanager
def _limited(what: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def small_files() -> contextlib.AbstractContextManager[None]:
    """No file gets larger than a page; neither does a memfd."""
    return _limited(resource.RLIMIT_FSIZE, SMALL_BYTES)


def few_descriptors(limit: int) -> contextlib.AbstractContextManager[None]:
    """None from ``limit`` on."""
    return _limited(resource.RLIMIT_NOFILE, limit)


def own_disk(*, only: bool) -> bool:
    """Give this process a small file system of its own as DIRECTORY, and no memfds; whether the system allows it.

    Must be called while there is one thread. No privileges are needed where users may have namespaces.

    Args:
        only: temporary files are there, too.
    """
    del os.memfd_create  # as in a Python that was built for an older system
    mounted = _mount()
    if mounted and only:
        tempfile.tempdir = DIRECTORY
    return mounted


def _mount() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        return False
    end_with_parent()  # which other credentials undo
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError:
        return False
    return libc.mount(b"tmpfs", DIRECTORY.encode(), b"tmpfs", 0, f"size={DISK_BYTES}".encode()) == 0


@contextlib.contextmanager
def full_disks(*, mounted: bool, only: bool) -> Iterator[None]:
    """DIRECTORY is full; where :func:`own_disk` could not do its part, it and perhaps all others seem to be."""
    if not mounted:
        with _seeming_full(only):
            yield
        return
    with tempfile.TemporaryFile(dir=DIRECTORY) as file:
        free = os.statvfs(DIRECTORY)
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
        assert not os.statvfs(DIRECTORY).f_bavail
        yield


@contextlib.contextmanager
def _seeming_full(only: bool) -> Iterator[None]:
    unlinked = segment._unlinked

    def fail(directory: str, nbytes: int) -> Any:
        if only or directory == DIRECTORY:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return unlinked(directory, nbytes)

    segment._unlinked = fail
    try:
        yield
    finally:
        segment._unlinked = unlinked
