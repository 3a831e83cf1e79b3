"""Windows without an event loop."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import torch

from asynccomm import ClosedError, Comm, SignalCmpOp, Window, WouldBlockError, blocking
from asynccomm.blocking import BlockingWindow


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if name[0] != "_"}


def test_every_method_of_a_window_is_there_with_its_arguments() -> None:
    assert public(Window) - public(BlockingWindow) == {"aclose"}
    assert public(BlockingWindow) - public(Window) == {"close", "window", "end_of_process"}
    for name in public(Window) - {"aclose"}:
        theirs, mine = getattr(Window, name), getattr(BlockingWindow, name)
        if inspect.isfunction(theirs):
            assert list(inspect.signature(mine).parameters) == list(inspect.signature(theirs).parameters), name


def program(backend: str) -> None:
    with blocking.new_comm(backend, name="windows", timeout=40) as comm:
        rank, other = comm.rank, 1 - comm.rank
        with comm.window(64, signals=3) as window:
            assert (window.rank, window.size, window.sizes, window.signals) == (rank, 2, (64, 64), 3)
            assert window.get_size() == 64
            window.put(torch.arange(3.0) + rank, other, offset=2)
            window.signal(other, slot=1, value=7)
            window.wait_signal(1, 7, SignalCmpOp.EQ).wait()
            assert window.signal_value(1) == 7
            assert window.tensor(None, (3,), torch.float32, 2).tolist() == [other, other + 1, other + 2]
            window.accumulate(torch.ones(1), 0)
            window.fence().wait()
            comm.barrier().wait()
            assert window.get(torch.zeros(1), 0).wait().item() == 2
            assert window.can_map(rank)
            assert repr(window).startswith("<BlockingWindow of <Window 0")
        with pytest.raises(ClosedError, match="window 0"):
            window.put(torch.ones(1), 0)
        window.close()
        kept = comm.window(like=torch.zeros(2, dtype=torch.int32))
        assert kept.window.tensor().shape == (2,)
        with pytest.raises(ZeroDivisionError), comm.window(8):
            raise ZeroDivisionError  # waits for no rank
    kept.close()


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_a_window_without_a_loop(comm: Comm) -> None:
    await asyncio.to_thread(program, comm.backend)


async def test_a_loop_is_not_blocked_by_closing() -> None:
    comm = await asyncio.to_thread(lambda: blocking.new_comm("loopback", name="apart", alone=True))
    window = await asyncio.to_thread(lambda: comm.window(8))
    with pytest.raises(WouldBlockError):
        window.close()
    await asyncio.to_thread(comm.close)
