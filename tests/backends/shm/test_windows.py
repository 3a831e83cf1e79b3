"""Windows in shared memory: order of queued operations, locks that are held elsewhere, and words that C changes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, SignalCmpOp, new_comm
from asynccomm.backends.shm.windows import ShmWindow
from asynccomm.core.callsite import show
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.core.work import Work
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


class Untaken:
    """The fast path of a window on which no call is usual."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class NoSubmitter:
    """Stands in for the submitter of a window where no call may take the ordinary path."""

    def __init__(self, comm: Any) -> None:
        self.check_open = comm.check_open

    def submit_to(self, *arguments: Any) -> None:
        raise AssertionError(arguments)


@contextlib.contextmanager
def only_in_c(window: Window) -> Iterator[None]:
    ordinary, window._comm = window._comm, NoSubmitter(window._comm)  # type: ignore[assignment]
    try:
        yield
    finally:
        window._comm = ordinary


@contextlib.contextmanager
def only_in_python(window: Window) -> Iterator[None]:
    fast, window._fast = window._fast, Untaken()
    try:
        yield
    finally:
        window._fast = fast


in_c = pytest.mark.skipif(
    isinstance(load_core(), CoreUnavailable) or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="the executor in C was not built, or torch shows it no tensors",
)


def every_kind(window: Window, peer: int) -> list[Work[Any]]:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    return [
        window.put(tensor, peer, 1),
        window.get(torch.empty(3, dtype=torch.float64), peer),
        window.signal(peer, 1, 2**64 - 1),
        window.signal(peer, 1, 3, add=True),
        window.wait_signal(0, 0, SignalCmpOp.LE),
        window.fence(peer),
        window.fence(),
    ]


@in_c
@pytest.mark.ranks(2)
async def test_plain_operations_are_the_same_in_c_and_in_python() -> None:
    async with new_comm("shm", name="same", timeout=20) as comm, await comm.window(4096, signals=2) as window:
        peer = 1 - comm.rank
        before = comm.statistics().submitted, comm._submitter.counts.messages
        with only_in_python(window):
            ordinary = every_kind(window, peer)
        middle = comm.statistics().submitted, comm._submitter.counts.messages
        recent = list(comm._submitter.recent)[-len(ordinary) :]
        with only_in_c(window):
            fast = every_kind(window, peer)
        assert [work.op for work in fast] == [work.op for work in ordinary]
        assert [str(work.op) for work in fast] == [str(work.op) for work in ordinary]
        assert [work.seq for work in fast] == [work.seq + len(ordinary) for work in ordinary]
        for work, other in zip(fast, ordinary, strict=True):
            assert work.done()
            assert (work.duration or 0) >= 0
            value, expected = await work, await other
            assert (value is None) == (expected is None)
        after = comm.statistics().submitted, comm._submitter.counts.messages
        assert [a - m for a, m in zip(after, middle, strict=True)] == [
            m - b for m, b in zip(middle, before, strict=True)
        ]
        assert [(call[0], call[2]) for call in list(comm._submitter.recent)[-len(fast) :]] == [
            (call[0], call[2] + len(fast)) for call in recent
        ]
        await window.fence()
        await comm.barrier()
        assert window.tensor(None, (7,), torch.int16).tolist() == [0, 0, 1, 2, 3, 4, 5]
        assert window.signal_value(1) == 2  # 2**64 - 1 and 3, modulo 2**64


@in_c
@pytest.mark.ranks(2)
async def test_c_compares_signals_as_python_does() -> None:
    values = [0, 1, 2, 2**63 - 1, 2**63, 2**64 - 1]
    async with new_comm("shm", name="compare", timeout=20) as comm, await comm.window(0, signals=1) as window:
        for signal in values:
            window.signal(comm.rank, 0, signal)
            for value in values:
                for cmp in SignalCmpOp:
                    assert window._fast is not None
                    found = window._fast.wait_signal(0, value, cmp)
                    assert (found is not None) == cmp.holds(signal, value), (signal, cmp, value)


@in_c
@pytest.mark.ranks(2)
async def test_what_c_does_not_take_is_taken_or_refused_by_python() -> None:
    async with new_comm("shm", name="unusual", timeout=20) as comm, await comm.window(64, signals=1) as window:
        fast: Any = window._fast
        peer, one = 1 - comm.rank, torch.ones(1)
        calls: list[tuple[Any, ...]] = [
            ("put", one, 2, 0),
            ("put", one, -1, 0),
            ("put", one, True, 0),
            ("put", one, peer, 16),
            ("put", one, peer, 2**62),
            ("put", one, peer, 2**70),
            ("put", one, peer, -1),
            ("put", torch.ones(17), peer, 0),
            ("put", torch.ones(2, 2).T, peer, 0),
            ("put", torch.ones(0), peer, 0),
            ("put", torch.ones(1, dtype=torch.complex64).conj(), peer, 0),
            ("put", torch.ones(2, dtype=torch.complex64).conj().imag, peer, 0),
            ("put", [1.0], peer, 0),
            ("get", torch.empty(1, device="meta"), peer, 0),
            ("signal", peer, 1, 1, False),
            ("signal", peer, -1, 1, False),
            ("signal", peer, 0, 2**64, False),
            ("signal", peer, 0, -1, False),
            ("signal", peer, 0, 1, 1),
            ("signal", comm.rank, 0, 0, False),
            ("wait_signal", 1, 1, SignalCmpOp.EQ),
            ("wait_signal", 0, 0, "=="),
            ("wait_signal", 0, 1, SignalCmpOp.EQ),
            ("fence", 2),
        ]
        for name, *arguments in calls:
            assert getattr(fast, name)(*arguments) is None, (name, arguments)
        with pytest.raises(TypeError, match="1 arguments in place of 3"):
            fast.put(one)
        for shrunk in (torch.ones(8)[4:], torch.ones(8)):  # the latter from the first element of its memory
            shrunk.untyped_storage().resize_(4)
            assert fast.put(shrunk, peer, 0) is None
            assert fast.get(shrunk, peer, 0) is None
            with pytest.raises(ValueError, match="its storage was resized to 4"):
                window.get(shrunk, peer)
        with pytest.raises(ValueError, match="offset must leave room"):
            window.put(one, peer, 16)
        assert not window.wait_signal(0, 1).done()
        window.signal(comm.rank)
        assert await window.put(torch.arange(4.0).view(2, 2).T, peer) is not None
        await comm.barrier()
        assert window.tensor(None, (4,), torch.float32).tolist() == [0.0, 2.0, 1.0, 3.0]


@in_c
@pytest.mark.ranks(1)
async def test_parts_of_one_memory_may_overlap_in_c() -> None:
    async with new_comm("shm", name="overlap", timeout=20) as comm, await comm.window(1 << 18) as window:
        numbers = torch.arange(1 << 15, dtype=torch.int64)
        for shift in (1, 100, 1 << 14):
            memory = window.tensor(0, (1 << 15,), torch.int64).copy_(numbers)
            with only_in_c(window):
                window.put(memory[: -shift or None], 0, shift)
            assert torch.equal(memory[shift:], numbers[:-shift])
            memory.copy_(numbers)
            with only_in_c(window):
                window.get(memory[: -shift or None], 0, shift)
            assert torch.equal(memory[:-shift], numbers[shift:])


@in_c
@pytest.mark.ranks(2)
async def test_calls_behind_an_operation_on_the_thread_and_on_an_ended_window_are_not_for_c() -> None:
    async with new_comm("shm", name="behind", timeout=20) as comm, await comm.window(64, signals=1) as window:
        backend, peer = backend_of(window), 1 - comm.rank
        fast: Any = window._fast
        backend._count(1)
        assert fast.put(torch.ones(1), peer, 0) is None
        assert fast.signal(peer, 0, 1, False) is None
        assert fast.fence(None) is None
        assert fast.wait_signal(0, 0, SignalCmpOp.EQ) is not None  # outside of the order
        backend._count(-1)
        assert fast.fence(None) is not None
        await comm.barrier()
        backend.abort()
        assert fast.fence(None) is None
        assert fast.wait_signal(0, 0, SignalCmpOp.EQ) is None
        comm.abort("enough")
        with pytest.raises(AbortedError):
            window.fence()


@pytest.mark.ranks(2)
async def test_a_closed_comm_frees_the_memory_of_its_windows_without_the_garbage_collector() -> None:
    def segments() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:asynccomm ")

    async def use_window(number: int) -> None:
        async with new_comm("shm", name=f"free {number}", timeout=20) as comm, await comm.window(8) as window:
            await window.put(torch.ones(2), 1 - comm.rank)

    gc.collect()
    gc.disable()
    try:
        before = segments()
        for number in range(2):
            await use_window(number)
        await until(lambda: segments() <= before)
    finally:
        gc.enable()


@in_c
@pytest.mark.ranks(2)
async def test_a_signal_wakes_a_sleeping_rank_and_a_blocked_thread_from_c() -> None:
    async with (
        new_comm("shm", name="wake", timeout=20, hints={"spin_us": "0"}) as comm,
        await comm.window(8, signals=2) as window,
    ):
        for turn in range(1, 20):
            if turn % 2 == comm.rank:
                await window.wait_signal(0, turn)
                with only_in_c(window):
                    window.signal(1 - comm.rank, 1, turn)
            else:
                with only_in_c(window):
                    window.put(torch.tensor([turn]), 1 - comm.rank)
                    window.signal(1 - comm.rank, 0, turn)
                await asyncio.to_thread(lambda number: window.wait_signal(1, number).wait(), turn)


@in_c
@pytest.mark.ranks(1)
async def test_c_refuses_a_window_that_does_not_fit_its_memory() -> None:
    async with new_comm("shm", name="misfit", timeout=20) as comm, await comm.window(64, signals=1) as window:
        backend = backend_of(window)
        memory, make = backend._mapping.segment.raw, load_core().FastWindow
        kinds, comparisons = tuple(range(5)), tuple(SignalCmpOp)
        words = len(memory) // 8
        good = (0, 64, 0, (0, 1), (0, 0))
        assert make(comm._fast, memory, 0, 0, 1, 1, [good], kinds, comparisons) is not None
        for bad in (
            (len(memory) + 1, 0, 0, (0, 1), (0, 0)),
            (0, len(memory) + 1, 0, (0, 1), (0, 0)),
            (0, 64, words, (0, 1), (0, 0)),
            (0, 64, 0, (0, words), (0, 0)),
            (0, 64, 0, (0, 1), (-1, 0)),
        ):
            with pytest.raises(ValueError, match="must be from"):
                make(comm._fast, memory, 0, 0, 1, 1, [bad], kinds, comparisons)
        for rank, some_kinds in ((1, kinds), (0, kinds[1:])):
            with pytest.raises(ValueError, match="no window"):
                make(comm._fast, memory, rank, 0, 1, 1, [good], some_kinds, comparisons)


@in_c
@pytest.mark.ranks(2)
async def test_call_sites_of_operations_in_c_are_those_of_the_program() -> None:
    async with (
        new_comm("shm", name="sites", timeout=20) as comm,
        await comm.window(64, signals=1) as window,
    ):
        with only_in_c(window):
            work = window.put(torch.ones(2), 1 - comm.rank)
        assert __file__ in str(show(work.site))
        await comm.barrier()
