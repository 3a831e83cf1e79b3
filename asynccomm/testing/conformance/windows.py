"""Checks of windows; a backend without windows, or without one of their operations, passes if it refuses that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from asynccomm.backends.base import Backend
from asynccomm.comm.comm import Comm
from asynccomm.core.work import Work
from asynccomm.errors import ClosedError
from asynccomm.ops import SignalCmpOp
from asynccomm.testing.conformance.data import expect_equal, layouts, sample
from asynccomm.windows.window import Window

Check = Callable[[Comm], Awaitable[None]]
LARGE = (5 << 20) // 4  # elements: above the size up to which shm copies in the call


def _on_windows(check: Check) -> Check:
    """Run a check only where the backend has windows."""

    @wraps(check)
    async def run(comm: Comm) -> None:
        if type(comm.unsafe_get_backend()).window is not Backend.window:
            await check(comm)
            return
        try:
            await comm.window(8)
        except NotImplementedError as exc:
            assert repr(comm.backend) in str(exc), exc
        else:
            raise AssertionError(f"backend {comm.backend!r} has made a window that it cannot have")

    return run


async def _lacks(window: Window, kind: str) -> bool:
    """Whether the backend refuses the operation ``kind``; it must name it."""
    try:
        await getattr(window, kind)(torch.empty(0), window.rank)
    except NotImplementedError as exc:
        assert kind in str(exc), exc
        return True
    return False


def _memory(window: Window, dtype: torch.dtype = torch.float32) -> Tensor:
    """This rank's memory as a vector."""
    return window.tensor(dtype=dtype)


@_on_windows
async def windows_carry_puts_behind_signals(comm: Comm) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    async with await comm.window(4096, signals=3) as window:
        for turn in range(20):
            window.put(sample(comm.rank, (3, 5), salt=turn), right, 7)
            window.signal(right, 2, turn + 1)
            await window.wait_signal(2, turn + 1, SignalCmpOp.EQ)
            expect_equal(window.tensor(None, (3, 5), torch.float32, 7), sample(left, (3, 5), salt=turn), f"turn {turn}")
            window.signal(left, 1, turn + 1)  # the next put may come
            await window.wait_signal(1, turn + 1)
        assert window.signal_value(0) == 0


@_on_windows
async def windows_carry_large_puts_and_gets(comm: Comm) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    async with await comm.window(4 * (LARGE + 3)) as window:
        works: list[Work[Any]] = [window.put(sample(comm.rank, (LARGE,)), right, 3), window.signal(right)]
        small = window.put(torch.tensor([7.0]), right)  # does not overtake
        await window.wait_signal()
        expect_equal(_memory(window)[3:], sample(left, (LARGE,)), "a large put")
        await asyncio.gather(*works, small)
        if await _lacks(window, "get"):
            return
        out = torch.empty(LARGE)
        assert await window.get(out, right, 3) is out
        expect_equal(out, sample(comm.rank, (LARGE,)), "a large get, behind puts of the same rank")


@_on_windows
async def windows_take_any_dtype_and_strides(comm: Comm) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    async with await comm.window(1 << 16) as window:
        turn, gets = 0, not await _lacks(window, "get")
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8, torch.int64):
            for kind, mine in layouts(sample(comm.rank, (4, 6)).to(dtype)):
                turn += 1
                theirs = sample(left, (4, 6)).to(dtype)
                await window.put(mine, right, 5)
                await window.signal(right, 0, turn)
                await window.wait_signal(0, turn)
                expect_equal(window.tensor(None, (4, 6), dtype, 5), theirs, f"put of {dtype}, {kind}")
                if gets:
                    out = torch.zeros_like(mine)
                    await window.get(out, right, 5)
                    expect_equal(out, sample(comm.rank, (4, 6)).to(dtype), f"get of {dtype}, {kind}")
                await comm.barrier()


@_on_windows
async def accumulates_of_all_ranks_add_up(comm: Comm) -> None:
    async with await comm.window(1 << 12) as window:
        if await _lacks(window, "accumulate"):
            return
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.uint16, torch.complex64, torch.bool):
            for _ in range(8):
                for target in range(comm.size):
                    window.accumulate(torch.ones(9, dtype=torch.uint8).to(dtype), target, 4)
            await window.fence()
            await comm.barrier()
            expected = torch.full((9,), 8 * comm.size, dtype=torch.int32).to(dtype)
            expect_equal(window.tensor(None, (9,), dtype, 4), expected, f"accumulate of {dtype}")
            await comm.barrier()
            _memory(window, torch.uint8).zero_()
            await comm.barrier()


@_on_windows
async def added_signals_count_and_wrap(comm: Comm) -> None:
    async with await comm.window(0, signals=2) as window:
        works = [window.signal(target, 1, 3, add=True) for target in range(comm.size) for _ in range(50)]
        await window.wait_signal(1, 150 * comm.size, SignalCmpOp.EQ)
        await asyncio.gather(*works)
        await window.signal(comm.rank, 0, 2**64 - 1)
        await window.signal(comm.rank, 0, 2, add=True)
        assert window.signal_value(0) == 1


@_on_windows
async def waits_compare_in_every_way(comm: Comm) -> None:
    async with await comm.window(0, signals=1) as window:
        cases = [(cmp, value, cmp.holds(5, value)) for cmp in SignalCmpOp for value in (4, 5, 6)]
        assert sum(held for _, _, held in cases) == 9
        await window.signal(comm.rank, 0, 5)
        waits = [(window.wait_signal(0, value, cmp), held) for cmp, value, held in cases]
        await asyncio.gather(*[work for work, held in waits if held])
        assert not any(work.done() for work, held in waits if not held)
    for work, held in waits:  # closing has ended the others
        error = work.exception()
        assert (error is None) is held and (held or isinstance(error, ClosedError)), work.op


@_on_windows
async def closing_the_comm_ends_waits_for_signals(comm: Comm) -> None:
    async with comm.dup("closing") as other:
        window = await other.window(8)
        work = window.wait_signal()
    assert isinstance(work.exception(), ClosedError), work


@_on_windows
async def waits_and_puts_never_wait_for_each_other(comm: Comm) -> None:
    right = (comm.rank + 1) % comm.size
    async with await comm.window(64, signals=2) as window:
        last = window.wait_signal(1)
        waits = [window.wait_signal(0) for _ in range(5)]
        await asyncio.gather(window.put(torch.ones(4), right), window.fence(right))
        assert not any(work.done() for work in (last, *waits))
        await comm.barrier()
        window.signal(right)
        await asyncio.gather(*waits)
        assert not last.done()
        await comm.barrier()
        await window.signal(right, 1)
        await last


@_on_windows
async def windows_differ_in_size_and_are_apart(comm: Comm) -> None:
    mine = 16 * comm.rank
    async with await comm.window(mine) as one, await comm.window(like=torch.zeros(2, 3, dtype=torch.float64)) as two:
        assert one.sizes == tuple(16 * rank for rank in range(comm.size))
        assert one.get_size() == mine
        assert two.tensor().shape == (2, 3)
        assert two.tensor().dtype == torch.float64
        assert not two.tensor().count_nonzero()
        await two.put(torch.ones(1, dtype=torch.float64), comm.rank)
        assert not _memory(one, torch.uint8).count_nonzero()
        await one.put(torch.empty(0), 0)  # nothing, to a rank without memory
        if not await _lacks(one, "get"):
            await one.get(torch.empty(0), 0)
        for rank in range(comm.size):
            try:
                one.put(torch.zeros(4 * rank + 1), rank)
            except ValueError as exc:
                assert f"{16 * rank} bytes on rank {rank}" in str(exc), exc
            else:
                raise AssertionError("a put beyond the memory was not refused")
        await comm.barrier()
    try:
        one.put(torch.empty(0), 0)
    except ClosedError:
        return
    raise AssertionError("a closed window has taken a put")


@_on_windows
async def views_outlive_their_window(comm: Comm) -> None:
    async with await comm.window(1 << 16) as window:
        view = window.tensor(dtype=torch.float32)
        others = [window.tensor(rank) for rank in range(comm.size) if window.can_map(rank)]
        await window.put(torch.full((8,), 3.0), comm.rank)
        await comm.barrier()
    del window
    assert view[:8].tolist() == [3.0] * 8
    view[9] = 1.0
    assert all(other.view(torch.float32)[7] == 3.0 for other in others)
