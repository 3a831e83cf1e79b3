"""Windows in shared memory: order of queued operations, locks that are held elsewhere, and words that C changes."""

from __future__ import annotations

import asyncio
from array import array

import pytest
import torch

from asynccomm import new_comm
from asynccomm.backends.shm.windows import ShmWindow
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.windows.window import Window
from tests.waiting import until


def backend_of(window: Window) -> ShmWindow:
    backend = window._backend
    assert isinstance(backend, ShmWindow)
    return backend


@pytest.mark.skipif(isinstance(load_core(), CoreUnavailable), reason="the executor in C was not built")
def test_c_refuses_words_outside_of_the_memory() -> None:
    words = memoryview(array("Q", [0, 0]))
    for index in (-1, 2):
        with pytest.raises(ValueError, match="index must be in the memory"):
            load_core().signal(words, index, 1, False)
    with pytest.raises((TypeError, BufferError)):
        load_core().signal(b"12345678", 0, 1, False)


@pytest.mark.ranks(2)
async def test_small_operations_are_done_in_the_call_and_large_ones_are_not() -> None:
    async with new_comm("shm", name="inline", timeout=20) as comm, await comm.window(1 << 24) as window:
        assert window.put(torch.ones(1 << 18), 1).done()
        assert window.accumulate(torch.ones(8), 1 - comm.rank).op.nbytes == 32
        large = window.put(torch.ones(1 << 22), 1 - comm.rank)
        behind = window.signal(1 - comm.rank)
        await behind
        assert large.done()
        await window.wait_signal()


@pytest.mark.ranks(2)
async def test_an_accumulate_waits_for_the_lock_beside_the_loop_and_keeps_its_place() -> None:
    async with new_comm("shm", name="lock", timeout=20) as comm, await comm.window(64, signals=2) as window:
        lock = backend_of(window)._parts[0].memory_lock
        if comm.rank == 1:
            lock.take()
            assert lock.held()
        await comm.barrier()
        if comm.rank == 0:
            work, behind = window.accumulate(torch.ones(2), 0), window.signal(0, 1)
            await asyncio.sleep(0.01)
            assert not work.done()
            assert not behind.done()
        await comm.barrier()
        if comm.rank == 1:
            lock.leave()
        else:
            await behind
            assert work.done()
            assert window.tensor(0, (2,), torch.float32).tolist() == [1.0, 1.0]


@pytest.mark.ranks(2)
async def test_an_operation_that_waits_for_a_lock_ends_with_the_window() -> None:
    comm = await new_comm("shm", name="stuck", timeout=20)
    window = await comm.window(64)
    backend = backend_of(window)
    if comm.rank == 1:
        backend._parts[0].memory_lock.take()
    await comm.barrier()
    if comm.rank == 0:
        work = window.accumulate(torch.ones(2), 0)
        comm.abort("enough")
        assert work.exception() is not None
        await until(lambda: backend._queued == 0)
    else:
        await until(lambda: comm._session.error is not None)
    await comm.aclose()
