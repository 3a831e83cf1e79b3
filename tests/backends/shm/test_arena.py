"""Memory for tensors that other ranks can read: where it lies, when it is freed, and forked children."""

import errno
import fcntl
import gc
import os
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from asynccomm.backends.shm.arena import NOT_LENT, OWN_EXTENT, SHARED_EXTENT, Arena, arena
from asynccomm.backends.shm.mapping import memory_at
from asynccomm.backends.shm.peer_memory import PeerMemory
from asynccomm.errors import BackendError


@pytest.fixture
def made() -> Iterator[Arena]:
    arena = Arena()
    arena.hold()
    yield arena
    arena.release()


def test_the_file_is_closed_with_its_last_holder_and_tensor(made: Arena) -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena()
    arena.hold(), arena.hold()
    small, large = arena.bytes(10), arena.bytes(OWN_EXTENT)
    arena.release()
    arena.release()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del small
    assert arena.find(large.data_ptr()) != NOT_LENT
    del large
    assert len(os.listdir("/proc/self/fd")) == before
    assert arena.nbytes == 0
    arena.hold()
    assert arena.bytes(10).fill_(1).sum() == 10
    arena.release()
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_descriptors_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def control(fd: int, command: int, *rest: int) -> int:
        if command == fcntl.F_DUPFD_CLOEXEC:
            raise OSError(errno.EMFILE, "Too many open files")
        return forward(fd, command, *rest)

    def without(path: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files", path)

    forward = fcntl.fcntl
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("asynccomm.backends.shm.arena.fcntl.fcntl", control)
    monkeypatch.setattr("asynccomm.backends.shm.arena.os.open", without)
    with pytest.raises(OSError, match="Too many open files"):
        Arena().hold()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nbytes", [1, 64, 5000, OWN_EXTENT - 1, OWN_EXTENT, OWN_EXTENT + 1, 3 << 20])
def test_another_mapping_sees_the_memory_and_cannot_write_it(made: Arena, nbytes: int) -> None:
    tensor = made.bytes(nbytes)
    tensor.fill_(7)
    assert tensor.data_ptr() % 64 == 0
    lent = made.find(tensor.data_ptr())
    assert lent.offset + nbytes <= lent.nbytes
    peers = PeerMemory([made._reader])
    seen = memory_at(peers.address(0, lent.start, lent.nbytes) + lent.offset, nbytes, torch.uint8)
    assert torch.equal(seen, tensor)
    tensor[-1] = 8
    assert seen[-1] == 8
    with open("/proc/self/maps") as maps:
        (mode,) = [line.split()[1] for line in maps if line.startswith(f"{seen.data_ptr() - lent.offset:x}-")]
    assert mode == "r--s"
    with pytest.raises(BackendError, match="rank 0 has no tensor at byte"):
        peers.address(0, 1 << 40, 4096)


def test_small_tensors_share_an_extent_which_is_freed_with_the_last(made: Arena) -> None:
    tensors = [made.bytes(1000) for _ in range(SHARED_EXTENT // 1024 + 10)]
    places = {made.find(tensor.data_ptr()).start for tensor in tensors}
    assert len(places) == 2
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    view = tensors[0][10:]
    address = view.data_ptr()
    del tensors
    gc.collect()
    assert made.nbytes == 2 * SHARED_EXTENT, "a view keeps its extent, and the open one waits for more"
    assert made.find(address) != NOT_LENT
    del view
    assert made.nbytes == SHARED_EXTENT
    assert made.find(address) == NOT_LENT


def test_large_tensors_give_their_memory_back(made: Arena) -> None:
    tensor = made.strided((1 << 20, 4), (4, 1), torch.float32).fill_(1)
    blocks = os.fstat(made._reader).st_blocks
    assert blocks * 512 >= 16 << 20
    address = tensor.data_ptr()
    del tensor
    assert made.nbytes == 0
    assert os.fstat(made._reader).st_blocks * 512 < 1 << 20
    assert made.find(address) == NOT_LENT
    again = made.bytes(1 << 20)
    assert not again.any(), "memory of its own, not of a tensor before"


def test_strides_and_dtypes(made: Arena) -> None:
    for shape, stride in [((3, 4), (4, 1)), ((3, 4), (1, 3)), ((), ()), ((2, 0), (1, 1)), ((5,), (3,))]:
        for dtype in (torch.float64, torch.bool, torch.bfloat16):
            tensor = made.strided(shape, stride, dtype)
            assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (shape, stride, dtype)
            tensor.copy_(torch.ones(shape))
            assert bool((tensor == 1).all())
    parameter = torch.nn.Parameter(made.strided((3,), (1,), torch.float32).fill_(2))
    (parameter * 3).sum().backward()
    assert parameter.grad is not None
    assert made.find(parameter.data_ptr()) != NOT_LENT


def test_no_memory_is_a_memory_error(made: Arena) -> None:
    with pytest.raises(MemoryError, match=r"no shared memory of \d+ bytes for a tensor: "):
        made.bytes(1 << 60)
    assert made.bytes(10).numel() == 10


def test_threads(made: Arena) -> None:
    def churn() -> None:
        for n in range(300):
            tensor = made.bytes(1 + n * 1500)
            tensor[0] = 1

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.nbytes <= SHARED_EXTENT


def test_a_forked_child_has_its_own_and_leaves_its_parents_alone() -> None:
    mine = arena().bytes(OWN_EXTENT).fill_(5)
    small = arena().bytes(100).fill_(6)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            assert arena().find(mine.data_ptr()) == NOT_LENT
            theirs = arena().bytes(OWN_EXTENT).fill_(1)
            del theirs, mine, small
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert bool((mine == 5).all())
    assert bool((small == 6).all())


def test_a_forked_child_forgets_all_extents_even_if_one_was_being_freed() -> None:
    kept = [arena().bytes(OWN_EXTENT) for _ in range(2)]
    core = arena()._core
    if core is None:
        pytest.skip("the executor in C was not built")
    addresses = list(arena()._addresses)
    first = arena()._extents[addresses[0]]
    core.remove_extent(first.address)  # as a thread does that frees it
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for address in addresses:
                with pytest.raises(KeyError):
                    core.remove_extent(address)
            code = 0
        finally:
            os._exit(code)
    core.add_extent(first.address, first.nbytes, first.start)
    assert os.waitpid(pid, 0)[1] == 0
    del kept
