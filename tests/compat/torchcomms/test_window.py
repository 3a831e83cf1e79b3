"""Windows with torchcomms' names, without a loop and awaited."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import torch

from asynccomm import Comm
from asynccomm.compat import torchcomms
from asynccomm.compat.torchcomms import SignalCmpOp, TorchCommWindow

CPU = torch.device("cpu")


def refused_calls(window: TorchCommWindow, comm: Any) -> None:
    with pytest.raises(RuntimeError, match="target_disp must leave room for the tensor: 4 elements"):
        window.put(torch.ones(4), 0, 13, async_op=True)
    with pytest.raises(RuntimeError, match="offset must leave room"):
        window.get_tensor(comm.get_rank(), (17,), torch.float32, 0)
    with pytest.raises(RuntimeError, match=r"signal_disp must be in \[0, 4\)"):
        window.signal(4, 1, 0, async_op=True)
    with pytest.raises(TypeError, match="async_op must be True or False, got None"):
        window.wait_signal(0, 1, SignalCmpOp.EQ, None)  # type: ignore[arg-type]


def program(backend: str) -> None:
    comm = torchcomms.new_comm(backend, CPU, name="windows", timeout=timedelta(seconds=40))
    rank, other = comm.get_rank(), 1 - comm.get_rank()
    seen: list[str] = []
    comm.register_pre_hook(lambda name, *_: seen.append(name))
    window = comm.window_allocate(64, cpu_buf=True, signal_size=4)
    assert window.get_size() == 64
    for step in (1, 2):
        work = window.put(torch.full((2, 2), float(10 * step + rank)), other, 4, async_op=True)
        work.wait()
        window.signal(3, step, other, async_op=False)
        window.wait_signal(3, step, SignalCmpOp.GE, async_op=False)
        mine = window.get_tensor(rank, (2, 2), torch.float32, 4)
        assert mine.eq(10 * step + other).all()
        comm.barrier(async_op=False)
    assert seen[:3] == ["put", "signal", "wait_signal"]
    if backend == "shm":
        assert window.get_tensor(other, (4,), torch.float32, 4).tolist() == [20.0 + rank] * 4
    else:
        with pytest.raises(RuntimeError, match="rank must be one whose memory can be mapped here"):
            window.get_tensor(other, (4,), torch.float32, 4)
    refused_calls(window, comm)
    with pytest.raises(TypeError, match="cpu_buf must be True or False"):
        comm.window_allocate(8, cpu_buf=1)
    with pytest.raises(RuntimeError, match="signal_size must be in"):
        comm.window_allocate(8, signal_size=-1)
    window.close()
    window.close()
    with pytest.raises(RuntimeError, match="is closed"):
        window.put(torch.ones(1), 0, 0, async_op=True)
    left = comm.window_allocate(8)  # finalize() frees it
    comm.finalize()
    with pytest.raises(RuntimeError, match="is finalized"):
        left.put(torch.ones(1), 0, 0, async_op=True)


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_windows_without_a_loop(comm: Comm) -> None:
    await asyncio.to_thread(program, comm.backend)


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_windows_awaited(comm: Comm) -> None:
    other = await torchcomms.new_comm(comm.backend, CPU, name="windows awaited", timeout=timedelta(seconds=40))
    window = await other.window_allocate(16)
    peer = 1 - comm.rank
    assert (await window.put(torch.tensor([comm.rank]), peer, 1, async_op=True)).item() == comm.rank
    await window.signal(255, 5, peer, async_op=False)
    await window.wait_signal(255, 5, SignalCmpOp.EQ, async_op=False)
    assert window.get_tensor(comm.rank, [2], torch.int64, 0).tolist() == [0, peer]
    await window.close()
    await other.finalize()


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_the_documents_example(comm: Comm) -> None:
    """With ``window_allocate`` in place of ``create_window``, and the signal that the example's text asks for."""

    def example() -> None:
        main = torchcomms.new_comm(comm.backend, CPU, name="example")
        rank, dst_rank = main.get_rank(), 1 - main.get_rank()
        tensor = torch.arange(4.0) + rank
        window = main.window_allocate(tensor.nbytes, True)
        work = window.put(tensor, dst_rank, 0, async_op=True)
        work.wait()
        window.signal(0, 1, dst_rank, async_op=False)
        window.wait_signal(0, 1, SignalCmpOp.EQ, async_op=False)
        tensor = window.get_tensor(rank, (4,), torch.float32, 0)
        assert tensor.sum() == 6 + 4 * dst_rank
        main.finalize()

    await asyncio.to_thread(example)
