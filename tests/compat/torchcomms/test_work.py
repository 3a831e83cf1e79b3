"""The handle: states, errors, and the loops on which it is awaited."""

import asyncio
from datetime import timedelta

import pytest
import torch

from asynccomm import BrokenError, Comm
from asynccomm.compat import torchcomms


@pytest.mark.ranks(2)
async def test_states_and_errors(comm: Comm) -> None:
    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "work")
        work = main.recv(torch.ones(1), 1 - main.get_rank(), True, timeout=timedelta(seconds=0.2))
        assert not work.is_completed()
        assert "pending" in repr(work)
        with pytest.raises(RuntimeError, match="not finished after"):
            work.wait()
        assert work.is_completed()
        with pytest.raises(BrokenError):  # of this rank's time, or of the other's
            work.wait_blocking()
        main.finalize()

    await asyncio.to_thread(program)


@pytest.mark.ranks(2)
async def test_awaiting_gives_the_output_any_number_of_times(comm: Comm) -> None:
    main = await torchcomms.new_comm(comm.backend, torch.device("cpu"), "work")
    tensor = torch.ones(1)
    work = main.all_reduce(tensor, torchcomms.ReduceOp.SUM, True)
    assert await asyncio.gather(work, work) == [tensor, tensor]
    waiting = asyncio.ensure_future(work_of(main.recv(tensor, 1 - comm.rank, True)))
    await asyncio.sleep(0)
    waiting.cancel()
    await main.send(torch.zeros(1), 1 - comm.rank, True)
    await main.barrier(True)
    await main.finalize()
    assert tensor.item() == 0


async def work_of(work: torchcomms.TorchWork) -> object:
    return await work


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_the_documents_example(comm: Comm) -> None:
    def example() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "example")
        tensor, a = torch.ones(2), torch.ones(2)
        work = main.all_reduce(tensor, torchcomms.ReduceOp.SUM, async_op=True)
        b = a * 2
        work.wait()
        assert tensor.sum() == b.sum()
        main.finalize()

    await asyncio.to_thread(example)
