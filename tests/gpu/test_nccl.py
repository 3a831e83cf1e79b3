"""NCCL on real GPUs. Several ranks may share one: NCCL 2.30 and newer, with NCCL_MULTI_RANK_GPU_ENABLE=1."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import asynccomm
from asynccomm import AbortedError, Comm, ReduceOp, Work
from asynccomm.backends.base import Submission
from asynccomm.backends.nccl.backend import NcclBackend
from asynccomm.errors import CollectiveTimeoutError
from asynccomm.ops import AllGatherSingle, AllReduce, Broadcast, Call, Gather, ReduceScatterSingle
from tests.gpu.opening import needs_gpu, open_comm

pytestmark = needs_gpu

LONG = 200_000_000  # cycles that a stream is busy for: a tenth of a second


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


# -- batches: what to look at first on a new machine, since much of it is only known from NCCL's source ----------------


def backend_of(comm: Comm) -> NcclBackend:
    backend = comm._session.backend
    assert isinstance(backend, NcclBackend)
    return backend


def together(comm: Comm, calls: Sequence[Call]) -> Work[Any]:
    return comm._submitter.submit_together(calls, None, None, None)


def estimated(comm: Comm, *calls: Call) -> asyncio.Future[float]:
    return asyncio.wrap_future(backend_of(comm).estimate([Submission(call, None) for call in calls]))  # type: ignore[arg-type]


class Mixed:
    """Calls of several kinds, dtypes and reductions, some with copies around them, and their tensors."""

    def __init__(self, comm: Comm, n: int = 1000) -> None:
        device, group, own = comm.device, comm._group, comm.rank + 1.0
        self.size = comm.size
        self.sums = [torch.full((n + i,), own, device=device) for i in range(5)]
        self.strided = torch.full((n, 2), own, device=device)
        self.largest = torch.full((n,), comm.rank + 1, dtype=torch.int32, device=device)
        self.bits = torch.full((n,), 1 << comm.rank, dtype=torch.int16, device=device)
        self.moved = torch.full((n,), own, dtype=torch.bfloat16, device=device)
        self.gathered = torch.zeros(n * comm.size, device=device)
        self.scattered = torch.zeros(n, device=device)
        self.listed = [torch.zeros(n, device=device) for _ in range(comm.size)]
        self.estimable = [
            AllReduce.of_several(group, self.sums, ReduceOp.SUM),
            AllReduce.of(group, self.strided[:, 0], ReduceOp.AVG),
            AllReduce.of(group, self.largest, ReduceOp.MAX),
            Broadcast.of(group, self.moved, comm.size - 1),
            AllGatherSingle.of(group, self.gathered, torch.full((n,), own, device=device)),
            ReduceScatterSingle.of(
                group, self.scattered, torch.full((n * comm.size,), own, device=device), ReduceOp.PREMUL_SUM(0.5)
            ),
        ]
        self.calls = [
            *self.estimable,
            AllReduce.of(group, self.bits, ReduceOp.BOR),
            Gather.of(group, self.listed if comm.rank == 0 else None, torch.full((n,), own, device=device), 0),
        ]
        self.root = comm.rank == 0

    def tensors(self) -> list[Tensor]:
        return [*self.sums, self.strided, self.largest, self.bits, self.moved, self.gathered, self.scattered]

    def check(self) -> None:
        total = self.size * (self.size + 1) / 2
        for tensor in self.sums:
            assert tensor.eq(total).all()
        assert self.strided[:, 0].eq(total / self.size).all()
        assert self.largest.eq(self.size).all()
        assert self.bits.eq((1 << self.size) - 1).all()
        assert self.moved.eq(self.size).all()
        assert self.scattered.eq(total / 2).all()
        for rank in range(self.size):
            assert self.gathered.chunk(self.size)[rank].eq(rank + 1).all()
            if self.root:
                assert self.listed[rank].eq(rank + 1).all()


@pytest.mark.ranks([1, 2])
async def test_a_mixed_batch_is_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_comm() as comm:
        nccl = backend_of(comm)._platform.nccl
        ended: list[None] = []
        group_end = nccl.group_end
        monkeypatch.setattr(nccl, "group_end", lambda: (ended.append(None), group_end())[1])
        for _ in range(3):  # by a thread while NCCL connects, and in the call
            ended.clear()
            mixed = Mixed(comm)
            await together(comm, mixed.calls)
            mixed.check()
            assert len(ended) == 1


@pytest.mark.ranks([1, 2])
async def test_batches_on_the_same_memory_come_one_after_the_other() -> None:
    async with open_comm() as comm:
        group, size = comm._group, comm.size
        for _ in range(3):
            column = torch.full((1 << 16, 3), comm.rank + 1.0, device=comm.device)[:, 1]  # copied for each
            torch.cuda._sleep(LONG)
            works = [
                together(comm, [AllReduce.of(group, column, ReduceOp.SUM)]),
                together(
                    comm, [Broadcast.of(group, column, 0), AllReduce.of(group, torch.ones_like(column), ReduceOp.MAX)]
                ),
                together(comm, [AllReduce.of(group, column, ReduceOp.PREMUL_SUM(2.0))]),
            ]
            await asyncio.gather(*works)
            assert column.eq(size * (size + 1) / 2 * 2 * size).all()


@pytest.mark.ranks([1, 2])
async def test_what_was_held_follows_the_streams_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_comm() as comm:
        backend = backend_of(comm)
        await comm.all_reduce(torch.ones(1 << 16, device=comm.device))
        for _ in range(3):
            noted, tensors = [], [torch.zeros(1 << 16, device=comm.device) for _ in range(2)]
            torch.cuda.synchronize()
            for tensor in tensors:
                with torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda._sleep(LONG)
                    tensor += comm.rank + 1
                    noted.append(backend.call_context())
            submit = backend.submit

            def with_origins(batch: Sequence[Submission], submit: Any = submit, noted: Any = tuple(noted)) -> None:
                batch[0].call_context = noted
                submit(batch)

            with monkeypatch.context() as patch:
                patch.setattr(backend, "submit", with_origins)
                work = together(comm, [AllReduce.of_several(comm._group, tensors, ReduceOp.SUM)])
            await work
            for tensor in tensors:
                assert tensor.eq(comm.size * (comm.size + 1) / 2).all()


@pytest.mark.ranks([1, 2])
async def test_what_was_called_on_the_other_side_of_a_capture() -> None:
    async with open_comm() as comm:
        backend = backend_of(comm)
        await comm.all_reduce(torch.ones(10, device=comm.device))
        graph, stream, tensor = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.ones(10, device=comm.device)
        outside = backend.call_context()
        with torch.cuda.graph(graph, stream=stream):
            inside = backend.call_context()
            assert inside.capture > 0 == outside.capture
            submission = Submission(AllReduce.of(comm._group, tensor, ReduceOp.SUM), None)  # type: ignore[arg-type]
            submission.call_context = outside
            with pytest.raises(RuntimeError, match="outside of the capture"):
                backend.submit([submission])
            tensor += 1
        submission.call_context = inside
        with pytest.raises(RuntimeError, match="within the capture"):
            backend.submit([submission])
        graph.replay()  # it was not spoilt
        torch.cuda.synchronize()
        assert tensor.eq(2).all()


@pytest.mark.ranks(2)
async def test_estimates() -> None:
    """Also by one rank alone, once NCCL has connected: what it leaves in line must not run with what comes next."""
    async with open_comm() as comm:
        mixed = Mixed(comm)
        before = [tensor.clone() for tensor in mixed.tensors()]
        first = await estimated(comm, *mixed.estimable)  # connects, so all ranks call it
        assert 0 < first < 1
        await together(comm, Mixed(comm).calls)  # which would also run what was estimated
        for tensor, had in zip(mixed.tensors(), before, strict=True):
            assert torch.equal(tensor, had)
        if comm.rank == 0:
            for _ in range(3):
                assert await estimated(comm, *mixed.estimable) == pytest.approx(first)
        for _ in range(3):
            again = Mixed(comm)
            await together(comm, again.calls)
            again.check()
        for tensor, had in zip(mixed.tensors(), before, strict=True):
            assert torch.equal(tensor, had)
        sizes = [torch.ones(1 << n, device=comm.device) for n in (10, 20, 24)]
        seconds = [await estimated(comm, AllReduce.of(comm._group, tensor, ReduceOp.SUM)) for tensor in sizes]
        assert seconds == sorted(seconds)
        assert seconds[0] < seconds[-1]
        with pytest.raises(NotImplementedError, match="makes of messages"):
            estimated(comm, *mixed.calls)


@pytest.mark.ranks(1)
async def test_there_is_no_estimate_where_nccl_would_run_it() -> None:
    async with open_comm() as comm:
        with pytest.raises(NotImplementedError, match="one rank"):
            estimated(comm, *Mixed(comm).estimable)


# -- graphs ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.ranks(2)
async def test_communicators_that_do_not_block() -> None:
    async with open_comm(hints={"blocking": "0"}) as comm:
        for turn in range(5):
            works = [comm.all_reduce(torch.full((1000,), float(turn), device=comm.device)) for _ in range(5)]
            for work in works:
                assert (await work).eq(2 * turn).all()


@pytest.mark.ranks(2)
async def test_a_communicator_connects_with_its_first_collective() -> None:
    async with open_comm(hints={"connect": "lazy"}) as comm:
        assert (await comm.all_reduce(torch.ones(1000, device=comm.device))).eq(2).all()


@pytest.mark.ranks(2)
async def test_calls_of_a_scope_are_few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_comm() as comm:
        await comm.all_reduce(torch.ones(10, device=comm.device))
        nccl = backend_of(comm)._platform.nccl
        ended: list[None] = []
        group_end = nccl.group_end
        monkeypatch.setattr(nccl, "group_end", lambda: (ended.append(None), group_end())[1])
        tensors = [torch.full((100,), float(i), device=comm.device) for i in range(50)]
        async with comm.coalesce():
            works = [comm.all_reduce(tensor) for tensor in tensors]
        for i, work in enumerate(works):
            assert (await work).eq(2 * i).all()
        assert len(ended) < 5


@pytest.mark.ranks(3)
async def test_the_others_go_on_without_a_rank() -> None:
    async with open_comm(timeout=30) as comm:
        await comm.all_reduce(torch.ones(10, device=comm.device))
        if comm.rank == 2:
            with pytest.raises(asynccomm.BrokenError):
                await comm.recv(torch.ones(10, device=comm.device), 0)
            return
        async with comm.shrink(exclude=[2]) as small:
            assert (await small.all_reduce(torch.ones(10, device=small.device))).eq(2).all()


@pytest.mark.ranks(2)
async def test_registered_memory() -> None:
    async with open_comm() as comm:
        tensor = torch.full((1 << 20,), comm.rank + 1.0, device=comm.device)
        await comm.register(tensor)
        for _ in range(3):
            tensor.fill_(comm.rank + 1.0)
            assert (await comm.all_reduce(tensor)).eq(3).all()
        await comm.deregister(tensor)
        assert (await comm.all_reduce(tensor)).eq(6).all()
