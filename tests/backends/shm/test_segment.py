"""Shared memory without a name."""

import errno
import fcntl
import gc
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asynccomm import BackendError
from asynccomm.backends.shm import segment as segment_module
from asynccomm.backends.shm.segment import Segment, create
from tests.forking import fork

SIZE = 3 * 4096 + 64


@pytest.fixture
def no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(errno.EPERM, "no memfd for you")

    monkeypatch.setattr(os, "memfd_create", refuse)


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def check(fd: int) -> None:
    info = os.fstat(fd)
    assert info.st_size == SIZE
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_nlink == 0
    assert not os.get_inheritable(fd)
    one, other = Segment(fd, SIZE), Segment(fd, SIZE)
    os.close(fd)
    assert not one.data.any()
    one.words[2] = 2**64 - 1
    other.data[-1] = 7
    other.raw[0] = 1
    assert one.data[16:24].tolist() == [255] * 8
    assert (one.raw[-1], one.words[0]) == (7, 1)
    assert len(one.raw) == SIZE == one.data.numel() == 8 * len(one.words)


def test_two_mappings_share() -> None:
    check(create(SIZE))


def test_nobody_can_cut_it_short() -> None:
    fd = create(SIZE)
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_an_old_kernel_does_not_know_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.memfd_create

    def old(name: str, flags: int) -> int:
        if flags & ~(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING):
            raise OSError(errno.EINVAL, "Invalid argument")
        return make(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)
    check(create(SIZE))


@pytest.mark.usefixtures("no_memfd")
def test_without_memfd_an_unlinked_file() -> None:
    check(create(SIZE))


@pytest.mark.usefixtures("no_memfd")
def test_without_dev_shm_a_file_among_the_temporary_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(segment_module, "_DEV_SHM", str(tmp_path / "none"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    check(create(SIZE))
    assert not list(tmp_path.iterdir())


def test_a_python_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    check(create(SIZE))


def test_no_room_says_what_was_tried_and_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, *args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "ftruncate", full)  # of the memfd
    with pytest.raises(BackendError) as caught:
        create(SIZE)
    places = [f"{place}: No space left" for place in ("memfd", "/dev/shm", "the directory for temporary files")]
    for part in (str(SIZE), *places, "chunk_bytes", "message_bytes"):
        assert part in str(caught.value)


def test_without_descriptors_not_even_the_directory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with pytest.raises(BackendError, match="temporary files: Too many open files"):
        create(SIZE)


def test_another_size_is_named() -> None:
    fd = create(SIZE)
    with pytest.raises(BackendError, match=f"has {SIZE} bytes instead of {SIZE + 64}"):
        Segment(fd, SIZE + 64)
    os.close(fd)


def test_no_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    fd = create(SIZE)
    with pytest.raises(BackendError, match=f"cannot map a shared segment of {SIZE} bytes: Cannot allocate"):
        Segment(fd, SIZE)
    os.close(fd)


def is_mapped(address: int) -> bool:
    """Whether a segment lies at ``address``; other tests of this process may have others."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:asynccomm (deleted)" in line]
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(start <= address < end for start, end in spans)


def test_the_mapping_ends_with_its_last_view() -> None:
    fd = create(SIZE)
    segment = Segment(fd, SIZE)
    os.close(fd)
    view = segment.data[4096:8192].view(torch.float32)
    address = view.data_ptr()
    del segment
    gc.collect()
    assert is_mapped(address)
    view.fill_(2)
    assert view.sum() == 2048
    del view
    gc.collect()
    assert not is_mapped(address)


def test_a_forked_child_shares_it_too() -> None:
    fd = create(SIZE)
    segment = Segment(fd, SIZE)
    os.close(fd)
    pid = fork()
    if pid == 0:
        segment.words[0] = 5
        os._exit(0)
    os.waitpid(pid, 0)
    assert segment.words[0] == 5
