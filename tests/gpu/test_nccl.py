"""NCCL on real GPUs. Several ranks may share one: NCCL 2.30 and newer, with NCCL_MULTI_RANK_GPU_ENABLE=1."""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from datetime import timedelta

import pytest
import torch

import asynccomm
from asynccomm import AbortedError, Comm, ReduceOp, Work, new_comm
from asynccomm.errors import CollectiveTimeoutError
from asynccomm.testing import check_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LONG = 200_000_000  # cycles that a stream is busy for: a tenth of a second


def open_comm(name: str = "main", *, timeout: float | timedelta | None = 60.0) -> AbstractAsyncContextManager[Comm]:
    """A comm of all ranks, each on a GPU of its own if there are as many."""
    rank, size, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.cuda.device_count()
    if size > count and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        pytest.skip(f"needs {size} GPUs, or NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1; there are {count}")
    torch.cuda.set_device(rank % count)
    return new_comm("nccl", "cuda", name=name, timeout=timeout)


@pytest.mark.ranks([1, 2, 4], timeout=600)
@pytest.mark.timeout(700)
async def test_conformance() -> None:
    await check_backend(open_comm)


@pytest.mark.ranks([1, 2])
async def test_the_stream_follows_the_caller_and_the_caller_the_stream() -> None:
    async with open_comm() as comm:
        for _ in range(3):
            tensor = torch.zeros(1 << 20, device=comm.device)
            torch.cuda._sleep(LONG)  # the values are not there yet when all_reduce is called
            tensor += comm.rank + 1
            work = comm.all_reduce(tensor)
            work.wait()  # returns at once, and orders
            tensor *= 2
            assert torch.equal(tensor, torch.full_like(tensor, comm.size * (comm.size + 1)))
            await work


@pytest.mark.ranks([1, 2])
async def test_another_stream_can_be_ordered() -> None:
    async with open_comm() as comm:
        tensor = torch.ones(1 << 20, device=comm.device)
        other = torch.cuda.Stream()
        work = comm.all_reduce(tensor)
        work.wait_stream(other)
        with torch.cuda.stream(other):
            doubled = tensor * 2
        other.synchronize()
        assert torch.equal(doubled, torch.full_like(doubled, 2.0 * comm.size))
        assert await work.ordered() is tensor


@pytest.mark.ranks([1, 2])
async def test_awaiting_means_that_the_host_may_read() -> None:
    async with open_comm() as comm:
        tensor = torch.zeros(1000, device=comm.device)
        torch.cuda._sleep(LONG)
        tensor += 1
        work = comm.all_reduce(tensor)
        assert not work.done()
        await work
        aside = torch.cuda.Stream()  # ordered after nothing
        with torch.cuda.stream(aside):
            seen = tensor.to("cpu", non_blocking=True)
        aside.synchronize()
        assert seen.eq(comm.size).all()


@pytest.mark.ranks([1, 2])
async def test_tensors_are_kept_until_the_operation_is_over() -> None:
    async with open_comm() as comm:
        n = 1 << 18
        torch.cuda._sleep(LONG)
        works = [  # which hold the outputs, and nobody but the comm the inputs
            comm.reduce_scatter_single(None, torch.full((n,), float(i), device=comm.device)) for i in range(20)
        ]
        junk = [torch.full((n,), -1.0, device=comm.device) for _ in range(40)]  # would take their memory
        for i, work in enumerate(works):
            assert (await work).eq(i * comm.size).all()
        del junk


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
async def test_native_reductions(dtype: torch.dtype) -> None:
    async with open_comm() as comm:
        ranks = range(1, comm.size + 1)
        tensor = torch.full((3,), comm.rank + 1, dtype=dtype, device=comm.device)
        assert (await comm.all_reduce(tensor.clone(), ReduceOp.AVG)).tolist() == [int(sum(ranks) / comm.size)] * 3 or (
            dtype.is_floating_point
        )
        factor = torch.tensor(2, dtype=dtype, device=comm.device)
        scaled = await comm.all_reduce(tensor.clone(), ReduceOp.PREMUL_SUM(factor))
        assert scaled.tolist() == [2 * sum(ranks)] * 3


@pytest.mark.ranks([1, 2])
async def test_graphs() -> None:
    async with open_comm() as comm:
        tensor = torch.ones(1000, device=comm.device)
        gathered = torch.zeros(1000 * comm.size, device=comm.device)
        for _ in range(2):  # NCCL connects
            await comm.all_reduce(tensor.clone())
            await comm.all_gather_single(gathered, tensor)
        graph = torch.cuda.CUDAGraph()
        with comm.graph_capture() as capture, torch.cuda.graph(graph, stream=capture.stream):
            tensor += 1
            work = comm.all_reduce(tensor)
            work.wait()
            comm.all_gather_single(gathered, tensor).wait()
            with pytest.raises(RuntimeError, match="cannot become part of a CUDA graph"):
                comm.barrier()
        with pytest.raises(RuntimeError, match="part of a CUDA graph"):
            await work
        tensor.fill_(1)
        expected = 1.0
        for _ in range(3):
            graph.replay()
            expected = (expected + 1) * comm.size
            await comm.all_reduce(torch.ones(5, device=comm.device))  # others go on beside it
            torch.cuda.synchronize()
            assert tensor.eq(expected).all()
            assert gathered.eq(expected).all()
        graph.reset()  # NCCL ends a communicator only when no graph needs it


@pytest.mark.ranks(2)
async def test_the_poller_does_not_spoil_a_capture() -> None:
    async with open_comm() as comm:
        await comm.all_reduce(torch.ones(10, device=comm.device))
        graph = torch.cuda.CUDAGraph()
        tensor, other = torch.ones(1000, device=comm.device), torch.ones(10, device=comm.device)
        stream, aside = torch.cuda.Stream(), torch.cuda.Stream()

        def beside() -> Work[torch.Tensor]:
            with torch.cuda.stream(aside):
                torch.cuda._sleep(LONG)
                return comm.all_reduce(other)

        with torch.cuda.graph(graph, stream=stream):
            work = await asyncio.to_thread(beside)  # is being watched while this goes on
            for _ in range(1000):
                tensor += 1
            assert not work.done()
        await work
        graph.replay()
        torch.cuda.synchronize()
        assert tensor.eq(1001).all()


@pytest.mark.ranks(2)
async def test_a_split_works_beside_its_parent() -> None:
    async with open_comm() as comm:
        child = await comm.split([1, 0], "reversed")
        assert child is not None
        async with child:
            assert child.rank == 1 - comm.rank
            works = []
            for i in range(10):
                works.append(child.all_reduce(torch.full((100,), float(i), device=comm.device)))
                works.append(comm.all_reduce(torch.full((100,), float(i), device=comm.device)))
            for i, work in enumerate(works):
                assert (await work).eq(2 * (i // 2)).all()


@pytest.mark.ranks(2)
async def test_a_rank_that_never_arrives() -> None:
    async with open_comm("broken", timeout=30) as comm:
        await comm.all_reduce(torch.ones(10, device=comm.device))
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeoutError) as found:
                await comm.all_reduce(torch.ones(10, device=comm.device), timeout=2.0)
            assert found.value.missing == (1,)
        else:
            with pytest.raises(asynccomm.BrokenError):
                await comm.recv(torch.ones(10, device=comm.device), 0)
    async with open_comm("next") as comm:  # the process and its GPU are as they were
        assert (await comm.all_reduce(torch.ones(10, device=comm.device))).eq(2).all()


@pytest.mark.ranks(2)
async def test_abort_while_an_operation_hangs() -> None:
    async with open_comm("broken") as comm:
        await comm.all_reduce(torch.ones(10, device=comm.device))
        if comm.rank == 0:
            work = comm.all_reduce(torch.ones(10, device=comm.device))
            await comm.recv_object(1)
            comm.abort("enough")
            with pytest.raises(AbortedError, match="enough"):
                await work
        else:
            await comm.send_object("it hangs", 0)
            with pytest.raises(AbortedError, match="enough"):
                await comm.recv_object(0)
    async with open_comm("next") as comm:
        assert (await comm.all_reduce(torch.ones(10, device=comm.device))).eq(2).all()


@pytest.mark.ranks(2)
async def test_messages_of_many_tags_cross() -> None:
    async with open_comm() as comm:
        other = 1 - comm.rank
        recvs = [comm.recv(torch.zeros(1 << 16, device=comm.device), other, tag) for tag in reversed(range(10))]
        reduced = comm.all_reduce(torch.ones(10, device=comm.device))
        sends = [comm.send(torch.full((1 << 16,), float(tag), device=comm.device), other, tag) for tag in range(10)]
        for tag, recv in zip(reversed(range(10)), recvs, strict=True):
            assert (await recv).eq(tag).all()
        assert (await reduced).eq(2).all()
        await asyncio.gather(*sends)


@pytest.mark.ranks(1)
async def test_communication_runs_beside_computation() -> None:
    """One rank: NCCL copies on a stream of its own while the caller's stream multiplies."""
    async with open_comm() as comm:
        big = torch.ones(1 << 28, device=comm.device)
        out = torch.empty_like(big)
        a = torch.randn(4096, 4096, device=comm.device)

        def seconds(steps: int, *, both: bool) -> float:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            for _ in range(steps):
                work = comm.all_reduce(big, out=out)
                if not both:
                    work.wait()
                a @ a
                if both:
                    work.wait()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end)

        await comm.all_reduce(big, out=out)
        seconds(3, both=True)
        one_after_the_other, together = seconds(20, both=False), seconds(20, both=True)
        assert together < one_after_the_other
