"""The order of collectives on a simulated GPU: groups, batches, the streams of callers, and graphs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from asynccomm import Comm, ReduceOp, Routing, Work
from asynccomm.backends.base import Submission
from asynccomm.backends.nccl.call_streams import CallStream
from asynccomm.errors import BackendError, BrokenError
from asynccomm.ops import (
    AllGatherSingle,
    AllReduce,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Call,
    Gather,
    Recv,
    ReduceScatterSingle,
    Send,
)

from .conftest import World
from .simulation import SimulatedBackend, SimulatedStream
from .test_backend import backend_of, until

# -- groups and streams ----------------------------------------------------------------------------------------------


async def test_several_tensors_are_one_group(world: World) -> None:
    async with world(2) as comms:
        nccls = [backend_of(comm).nccl for comm in comms]
        for nccl in nccls:
            nccl.calls.clear()
        tensors = [[torch.full((n,), float(n)) for n in (1, 2, 3)] for _ in comms]
        await asyncio.gather(*(c.all_reduce_coalesced(t) for c, t in zip(comms, tensors, strict=True)))
        assert [t.tolist() for t in tensors[0]] == [[2.0], [4.0, 4.0], [6.0, 6.0, 6.0]]
        for nccl in nccls:
            assert nccl.calls == ["[", "all_reduce", "all_reduce", "all_reduce", "]"]


async def test_only_the_first_of_a_kind_goes_through_a_thread(world: World) -> None:
    async with world(2) as comms:
        backends = [backend_of(comm) for comm in comms]
        first = [comm.all_reduce(torch.ones(4)) for comm in comms]
        await asyncio.gather(*first)
        await until(lambda: not any(backend._collectives.waiting for backend in backends))
        work = comms[0].all_reduce(torch.ones(4))
        assert work.order is not None
        assert work.order.issued, "it was not issued in the call"
        comms[1].all_reduce(torch.ones(4))
        await work
        assert work.order.issued


async def test_calls_behind_one_that_waits_for_peers_keep_their_order(world: World) -> None:
    async with world(2) as comms:
        tensors = [torch.full((4,), float(i)) for i in range(5)]
        works = [comms[0].all_reduce(tensor) for tensor in tensors]  # the first waits in NCCL for rank 1
        backend = backend_of(comms[0])
        await until(lambda: backend.nccl.calls.count("]") == 1)
        assert backend._collectives.waiting == 5
        others = [comms[1].all_reduce(torch.full((4,), 10.0 * i)) for i in range(5)]
        for i, (work, other) in enumerate(zip(works, others, strict=True)):
            assert (await work).tolist() == (await other).tolist() == [11.0 * i] * 4


async def test_the_host_is_not_held_up_by_a_rank_that_is_late_to_connect(world: World) -> None:
    async with world(2) as comms:
        work = comms[0].all_reduce(torch.ones(4))  # returns although NCCL waits for rank 1
        assert not work.done()
        beside = asyncio.gather(comms[0].send_object("x", 1), comms[1].recv_object(0))
        await beside
        comms[1].all_reduce(torch.ones(4))
        await work


async def test_wait_orders_and_ordered_suspends_until_it_can(world: World) -> None:
    async with world(2) as comms:
        tensor = torch.ones(4)
        work = comms[0].all_reduce(tensor)
        ordered = asyncio.create_task(work.ordered())
        await asyncio.sleep(0)
        assert not ordered.done()
        comms[1].all_reduce(torch.ones(4))
        assert await ordered is tensor
        assert tensor.tolist() == [2.0] * 4
        assert work.wait() is tensor  # on the loop's thread: the host does not wait


async def test_a_barrier_comes_after_what_this_rank_has_called(world: World) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        stream = backend_of(comms[0])._collectives.communicator.stream
        assert isinstance(stream, SimulatedStream)
        held = threading.Event()
        stream.put(held.wait)
        works = [comm.all_reduce(torch.ones(4)) for comm in comms]
        barriers = [comm.barrier() for comm in comms]
        for _ in range(20):  # more turns of the loop than a barrier needs
            await asyncio.sleep(0)
        assert not barriers[0].done()
        held.set()
        await asyncio.gather(*barriers)
        assert works[0].done()


async def test_sums_of_combine_are_made_in_the_stream_that_follows(world: World) -> None:
    async with world(2) as comms:

        async def program(comm: Comm) -> None:
            sent = await comm.dispatch(torch.ones(3, 2), Routing(torch.tensor([[0, 1]] * 3), 2))
            work = comm.combine(sent.hidden, sent)
            assert (await work.ordered()).tolist() == [[2, 2]] * 3
            assert (await asyncio.to_thread(work.wait)).tolist() == [[2, 2]] * 3
            assert (await work).tolist() == [[2, 2]] * 3

        await asyncio.gather(*(program(comm) for comm in comms))


# -- batches ---------------------------------------------------------------------------------------------------------


class Mixed:
    """One rank's tensors of a batch of many kinds, and what is to become of them in a world of two."""

    def __init__(self, comm: Comm) -> None:
        rank, group = comm.rank, comm._group
        own = rank + 1.0
        self.sums = [torch.full((n,), own) for n in (3, 50, 7)]
        self.strided = torch.full((4, 2), own)[:, 0]
        self.largest = torch.full((4,), rank, dtype=torch.int32)
        self.any = torch.tensor([rank == 0, False])
        self.bits = torch.tensor([1 << rank, 4], dtype=torch.int16)
        self.moved = torch.full((5,), own, dtype=torch.bfloat16)
        self.gathered = torch.zeros(4)
        self.scattered = torch.zeros(1)
        self.listed = [torch.zeros(2), torch.zeros(2)]
        self.exchanged = torch.zeros(2)
        self.calls = [
            AllReduce.of_several(group, self.sums, ReduceOp.SUM),
            AllReduce.of(group, self.strided, ReduceOp.AVG),
            AllReduce.of(group, self.largest, ReduceOp.MAX),
            AllReduce.of(group, self.any, ReduceOp.BOR),
            AllReduce.of(group, self.bits, ReduceOp.BXOR),
            Broadcast.of(group, self.moved, 1),
            AllGatherSingle.of(group, self.gathered, torch.full((2,), own)),
            ReduceScatterSingle.of(group, self.scattered, torch.full((2,), own), ReduceOp.PREMUL_SUM(0.5)),
            Gather.of(group, self.listed if rank == 0 else None, torch.full((2,), own), 0),
            AllToAllSingle.of(group, self.exchanged, torch.tensor([10 * own, 10 * own + 1])),
        ]

    def check(self, rank: int) -> None:
        assert [tensor.unique().tolist() for tensor in self.sums] == [[3.0]] * 3
        assert self.strided.tolist() == [1.5] * 4
        assert self.largest.tolist() == [1] * 4
        assert self.any.tolist() == [True, False]
        assert self.bits.tolist() == [3, 0]
        assert self.moved.tolist() == [2.0] * 5
        assert self.gathered.tolist() == [1.0, 1.0, 2.0, 2.0]
        assert self.scattered.tolist() == [1.5]
        if rank == 0:
            assert [tensor.tolist() for tensor in self.listed] == [[1.0, 1.0], [2.0, 2.0]]
        assert self.exchanged.tolist() == [10.0 + rank, 20.0 + rank]


KINDS = [
    *("all_reduce",) * 6,  # three tensors of one operation, and four operations but for the one that NCCL has not
    *("all_gather", "broadcast", "all_gather", "reduce_scatter", "gather", "all_to_all"),
]


def together(comm: Comm, calls: Sequence[Call]) -> Work[Any]:
    return comm._submitter.submit_together(calls, None, None, None)


async def idle(comms: Sequence[Comm]) -> None:
    """Until the next batch, of a kind that is known, is issued in the call."""
    await until(lambda: not any(backend_of(comm)._collectives.waiting for comm in comms))


async def test_a_batch_of_many_kinds_is_one_group(world: World) -> None:
    async with world(2) as comms:
        backends = [backend_of(comm) for comm in comms]
        for turn in range(3):  # first by a thread, then in the call
            for backend in backends:
                backend.nccl.calls.clear()
            mixed = [Mixed(comm) for comm in comms]
            works = [together(comm, each.calls) for comm, each in zip(comms, mixed, strict=True)]
            if turn:
                assert all(work.order is not None and work.order.issued for work in works)
            await asyncio.gather(*works)
            await until(lambda: not any(backend._collectives.waiting for backend in backends))
            for rank, each in enumerate(mixed):
                each.check(rank)
            assert [backend.nccl.calls for backend in backends] == [["[", *KINDS, "]"]] * 2


async def test_a_kind_that_is_new_takes_the_whole_batch_to_a_thread(world: World) -> None:
    async with world(2) as comms:
        backend = backend_of(comms[0])
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        await until(lambda: not backend._collectives.waiting)
        tensors = [[torch.ones(4), torch.full((4,), comm.rank + 1.0)] for comm in comms]
        works = []
        for comm, (one, other) in zip(comms, tensors, strict=True):
            calls = [AllReduce.of(comm._group, one, ReduceOp.SUM), Broadcast.of(comm._group, other, 1)]
            works.append(together(comm, calls))
            if comm.rank == 0:
                await until(lambda: backend.nccl.calls.count("]") == 2)  # NCCL waits for rank 1, and nobody else does
                assert backend._collectives.waiting == 1
                assert backend.nccl.calls[-4:] == ["[", "all_reduce", "broadcast", "]"]
        await asyncio.gather(*works)
        assert [[t.tolist() for t in each] for each in tensors] == [[[2.0] * 4, [2.0] * 4]] * 2


async def test_what_is_known_does_not_overtake_a_batch_that_waits(world: World) -> None:
    async with world(2) as comms:
        backend = backend_of(comms[0])
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        await idle(comms)
        tensors = [torch.full((4,), comm.rank + 1.0) for comm in comms]
        works: list[Any] = []
        for comm, tensor in zip(comms, tensors, strict=True):
            works.append(comm.broadcast(tensor, 1))  # new, so NCCL waits for rank 1
            works.append(comm.all_reduce(tensor))  # known, and on the same memory
            if comm.rank == 0:
                await until(lambda: backend.nccl.calls.count("]") == 2)
                assert backend._collectives.waiting == 2
                assert backend.nccl.calls.count("all_reduce") == 1
        await asyncio.gather(*works)
        assert [tensor.tolist() for tensor in tensors] == [[4.0] * 4] * 2


async def test_messages_and_barriers_of_a_batch_go_their_own_way(world: World) -> None:
    async with world(2) as comms:
        mixed = [Mixed(comm) for comm in comms]
        received = [torch.zeros(3) for _ in comms]
        works = []
        for comm, each, output in zip(comms, mixed, received, strict=True):
            group, other = comm._group, 1 - comm.rank
            messages = [Send.of(group, torch.full((3,), 5.0 + comm.rank), other, 0), Recv.of(group, output, other, 0)]
            order = [messages[comm.rank], Barrier.of(group), messages[other]]  # which is each rank's own
            works.append(together(comm, [order[0], *each.calls[:4], order[1], *each.calls[4:], order[2]]))
        await asyncio.gather(*works)
        for rank, each in enumerate(mixed):
            each.check(rank)
        assert [output.tolist() for output in received] == [[6.0] * 3, [5.0] * 3]
        for comm in comms:
            calls = backend_of(comm).nccl.calls
            start = calls.index("all_reduce")
            assert calls[start : start + len(KINDS)] == KINDS


async def test_batches_on_the_same_memory_come_one_after_the_other(world: World) -> None:
    """Whatever is copied around them: the second must not take its copy before the first has brought its own back."""
    async with world(2) as comms:
        whole = [torch.full((3, 2), comm.rank + 1.0) for comm in comms]
        for turn in range(2):  # through a thread, and in the call
            works: list[Any] = []
            for comm, memory in zip(comms, whole, strict=True):
                column, group = memory[:, 0], comm._group
                memory.fill_(comm.rank + 1.0)
                stream = backend_of(comm)._collectives.communicator.stream
                assert isinstance(stream, SimulatedStream)
                held = threading.Event()
                stream.put(held.wait)  # so that all are queued before the first runs
                works.append(together(comm, [AllReduce.of(group, column, ReduceOp.SUM)]))
                works.append(together(comm, [Broadcast.of(group, column, 1), Barrier.of(group)]))
                works.append(together(comm, [AllReduce.of(group, column, ReduceOp.PREMUL_SUM(2.0))]))
                held.set()
            await asyncio.gather(*works)
            await idle(comms)
            assert [memory.tolist() for memory in whole] == [[[12.0, comm.rank + 1.0]] * 3 for comm in comms], turn


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("new", [False, True])
async def test_a_batch_fails_as_one_and_names_the_operation(world: World, new: bool) -> None:
    async with world(2) as comms:
        backend = backend_of(comms[0])
        if not new:
            await asyncio.gather(*(together(comm, Mixed(comm).calls) for comm in comms))
            await until(lambda: not backend._collectives.waiting)
        backend.nccl.fail["broadcast"] = "NCCL could not start broadcast: unhandled cuda error"
        submitted: list[Submission] = []
        submit = backend.submit
        backend.submit = lambda batch: (submitted.extend(batch), submit(batch))[1]  # type: ignore[method-assign]
        mixed = [Mixed(comm) for comm in comms]
        works = [together(comm, each.calls) for comm, each in zip(comms, mixed, strict=True)]
        with pytest.raises(BrokenError, match=r"could not start broadcast\(.*\): NCCL could not.*unhandled cuda error"):
            await works[0]
        assert all(submission.work.done() for submission in submitted)
        assert len(submitted) == len(mixed[0].calls)
        assert all(tensor.eq(1).all() for tensor in mixed[0].sums), "nothing of it has run"
        with pytest.raises(BrokenError):
            await works[1]
        assert backend.nccl.calls[backend.nccl.calls.index("broadcast", 1) :].count("]") >= 1
        if not new:
            assert backend.nccl._open.calls is None, "this thread's group is closed"


@pytest.mark.usefixtures("unexplained")
async def test_a_group_that_fails_at_its_end_fails_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(together(comm, Mixed(comm).calls) for comm in comms))
        backends = [backend_of(comm) for comm in comms]
        await until(lambda: not any(backend._collectives.waiting for backend in backends))

        def group_end() -> None:
            backends[0].nccl._open.calls = None
            raise BackendError("NCCL could not start the operations of a group: internal error")

        monkeypatch.setattr(backends[0].nccl, "group_end", group_end)
        works = [together(comm, Mixed(comm).calls) for comm in comms]
        for work in works:
            with pytest.raises(BrokenError, match="internal error"):
                await work


@pytest.mark.usefixtures("unexplained")
async def test_a_batch_that_cannot_be_put_to_nccl_names_all_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(together(comm, Mixed(comm).calls) for comm in comms))
        await idle(comms)

        def issue(*args: Any, **options: Any) -> None:
            raise KeyError("float128")

        monkeypatch.setattr(backend_of(comms[0])._collectives.communicator, "issue", issue)
        works = [together(comm, Mixed(comm).calls[:2]) for comm in comms]
        message = r"could not start together\(all_reduce\(float32.*, AVG\)\): KeyError: 'float128'"
        with pytest.raises(BrokenError, match=message):
            await works[0]
        with pytest.raises(BrokenError):
            await works[1]


@pytest.mark.usefixtures("unexplained")
async def test_a_step_of_a_batch_that_torch_refuses_names_its_operation(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(together(comm, Mixed(comm).calls) for comm in comms))
        backend = backend_of(comms[0])
        await until(lambda: not backend._collectives.waiting)
        count = 0

        def run(step: Callable[[], object]) -> None:
            nonlocal count
            count += 1
            if count == 2:  # the first brings the strided one, this the bits
                raise torch.OutOfMemoryError("no memory is left")

        monkeypatch.setattr(backend._collectives.communicator.stream, "run", run)
        works = [together(comm, Mixed(comm).calls) for comm in comms]
        with pytest.raises(
            BrokenError, match=r"could not start all_reduce\(int16\[2\], BXOR\): OutOf.*no memory is left"
        ):
            await works[0]
        with pytest.raises(BrokenError):
            await works[1]


@pytest.mark.usefixtures("unexplained")
async def test_a_call_that_nccl_refuses_breaks_the_comm(world: World) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        backend_of(comms[0]).nccl.fail["all_reduce"] = "NCCL could not all_reduce: unhandled cuda error"
        works = [comm.all_reduce_coalesced([torch.ones(4), torch.ones(3)]) for comm in comms]
        for work in works:
            with pytest.raises(BrokenError, match="unhandled cuda error"):
                await work


@pytest.mark.usefixtures("unexplained")
async def test_a_step_that_torch_refuses_breaks_the_comm(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        stream = backend_of(comms[0])._collectives.communicator.stream

        def run(step: Callable[[], object]) -> None:
            raise torch.OutOfMemoryError("no memory is left")

        monkeypatch.setattr(stream, "run", run)
        strided = [torch.ones(4, 2)[:, 0] for _ in comms]  # is to be copied
        works = [comm.all_reduce(tensor) for comm, tensor in zip(comms, strided, strict=True)]
        for work in works:
            with pytest.raises(BrokenError, match=r"could not start all_reduce.*no memory is left"):
                await work


# -- streams of held calls -------------------------------------------------------------------------------------------


def hold(backend: SimulatedBackend, *origins: Any) -> None:
    """What is submitted from now on was called where ``origins`` say, in turn."""
    left = list(origins)
    submit = type(backend).submit

    def with_origin(batch: Sequence[Submission]) -> None:
        for submission in batch:
            submission.call_context = left.pop(0)
        submit(backend, batch)

    backend.submit = with_origin  # type: ignore[method-assign]


def noted(comm: Comm) -> tuple[Any, SimulatedStream, threading.Event]:
    """The call_context of a call on a stream of the user's that is busy until the event is set."""
    backend = backend_of(comm)
    stream, go_on = SimulatedStream(), threading.Event()
    stream.put(lambda: go_on.wait(30))
    before = backend.device.user
    backend.device.user = stream  # type: ignore[assignment]
    call_context = backend.call_context()
    backend.device.user = before
    return call_context, stream, go_on


async def test_the_stream_of_the_call_is_followed_and_not_the_current_one(world: World) -> None:
    async with world(1) as (comm,):
        await comm.all_reduce(torch.ones(4))
        tensor = torch.zeros(4)
        call_context, stream, go_on = noted(comm)
        stream.run(lambda: tensor.fill_(3.0))  # after the call, and before it is submitted: covered, too
        hold(backend_of(comm), call_context)
        work = comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(2.0))
        assert not work.done()
        go_on.set()
        assert (await work).tolist() == [6.0] * 4


async def test_a_batch_follows_the_streams_of_all_its_calls_once_each(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(1) as (comm,):
        backend = backend_of(comm)
        first, one, go_one = noted(comm)
        second, other, go_other = noted(comm)
        hold(backend, (first, second), first, None)  # a merged one, another, and one that was not held
        tensors = [torch.zeros(4) for _ in range(3)]
        one.run(lambda: tensors[0].fill_(1.0))
        other.run(lambda: tensors[1].fill_(2.0))
        waits: list[Any] = []
        stream = backend._collectives.communicator.stream
        wait = stream.wait
        monkeypatch.setattr(stream, "wait", lambda event: (waits.append(event), wait(event)))
        calls = [AllReduce.of(comm._group, tensor, ReduceOp.PREMUL_SUM(2.0)) for tensor in tensors]
        work = together(comm, calls)
        await until(lambda: len(waits) == 3)
        go_one.set()
        assert not work.done()
        go_other.set()
        await work
        assert [tensor.unique().tolist() for tensor in tensors] == [[2.0], [4.0], [0.0]]
        assert len(waits) == 3, "two streams and the current one"
        assert all(event.released for event in waits)


async def test_a_message_that_was_held_follows_its_stream(world: World) -> None:
    async with world(2) as comms:
        source, target = torch.zeros(4), torch.zeros(4)
        call_context, stream, go_on = noted(comms[0])
        stream.run(lambda: source.fill_(3.0))
        hold(backend_of(comms[0]), call_context)
        work = comms[0].send(source, 1)
        received = comms[1].recv(target, 0)
        go_on.set()
        await work
        assert (await received).tolist() == [3.0] * 4


async def test_what_was_called_in_a_capture_must_be_submitted_in_it(world: World) -> None:
    async with world(1) as (comm,):
        await comm.all_reduce(torch.ones(4))
        backend = backend_of(comm)
        await until(lambda: not backend._collectives.waiting)
        outside = backend.call_context()
        backend.device.capture = captured = SimulatedStream()
        inside = backend.call_context()
        backend.nccl.calls.clear()
        tensor = torch.ones(4)
        for call_context, capture, message in (
            (outside, captured, "was called outside of the capture"),
            (inside, None, "was called within the capture"),
        ):
            backend.device.capture = capture
            for call in (AllReduce.of(comm._group, tensor, ReduceOp.MAX), Send.of(comm._group, tensor, 0, 0)):
                hold(backend, None if capture is None else inside, call_context)
                with pytest.raises(RuntimeError, match=message):
                    together(comm, [Broadcast.of(comm._group, torch.ones(4), 0), call])
        assert backend.nccl.calls == [], "nothing of the batches was handed on"
        backend.device.capture = None
        assert comm.statistics().in_flight == 0


async def test_a_captured_batch_follows_the_streams_of_its_calls(world: World) -> None:
    async with world(2) as comms:
        backends = [backend_of(comm) for comm in comms]
        await asyncio.gather(*(together(comm, Mixed(comm).calls) for comm in comms))
        await until(lambda: not any(backend._collectives.waiting for backend in backends))
        mixed = [Mixed(comm) for comm in comms]
        gates = []
        for comm, backend, each in zip(comms, backends, mixed, strict=True):
            backend.nccl.calls.clear()
            backend.device.capture = captured = SimulatedStream()
            aside, go_on = SimulatedStream(), threading.Event()
            backend.device.joined[aside.handle] = backend.device.capture_of(captured)
            values = each.sums[0].clone()
            each.sums[0].zero_()
            aside.put(lambda go_on=go_on: go_on.wait(30))
            aside.put(lambda each=each, values=values: each.sums[0].copy_(values))
            there = CallStream(aside, backend.device.capture_of(captured))
            hold(backend, (there, backend.call_context()), *[there, *[backend.call_context()] * (len(each.calls) - 2)])
            work = together(comm, each.calls)
            assert work.captured
            assert backend.nccl.calls == ["[", *KINDS, "]"], "one group"
            gates.append(go_on)
        ends = []
        for backend, go_on in zip(backends, gates, strict=True):
            captured_stream, backend.device.capture = backend.device.capture, None
            assert captured_stream is not None
            ends.append(captured_stream.record())
            go_on.set()
        for end in ends:
            await until(end.passed.is_set)
        for rank, each in enumerate(mixed):
            each.check(rank)


# -- graphs ----------------------------------------------------------------------------------------------------------


async def test_what_is_captured_runs_on_the_captured_stream(world: World) -> None:
    async with world(2) as comms:
        backends = [backend_of(comm) for comm in comms]
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
        await until(lambda: not any(backend._collectives.waiting for backend in backends))
        tensors = [torch.ones(4) for _ in comms]
        works = []
        for comm, backend, tensor in zip(comms, backends, tensors, strict=True):
            backend.device.capture = SimulatedStream()
            works.append(comm.all_reduce(tensor))
            for refused in (comm.barrier, lambda comm=comm: comm.broadcast_object(1, 0)):
                with pytest.raises(RuntimeError, match="cannot become part of a CUDA graph"):
                    refused()
        for backend in backends:
            captured, backend.device.capture = backend.device.capture, None
            assert captured is not None
            done = captured.record()
            await until(done.passed.is_set)
        assert [tensor.tolist() for tensor in tensors] == [[2.0] * 4] * 2
        with pytest.raises(RuntimeError, match="part of a CUDA graph"):
            await works[0]
        with pytest.raises(RuntimeError, match="part of a CUDA graph"):
            works[0].result()
        assert works[0].wait() is tensors[0]
        assert comms[0].statistics().in_flight == 0  # nothing is due, and closing waits for nothing


async def test_batches_of_messages_can_be_captured(world: World) -> None:
    async with world(2) as comms:
        backends = [backend_of(comm) for comm in comms]
        outputs = [torch.zeros(3) for _ in comms]
        works = []
        threads = []
        for comm, backend, output in zip(comms, backends, outputs, strict=True):
            backend.device.capture = SimulatedStream()
            batch = comm.batch_op_create()
            batch.send(torch.full((3,), comm.rank + 1.0), 1 - comm.rank)
            batch.recv(output, 1 - comm.rank)
            threads.append(asyncio.to_thread(lambda batch=batch: works.append(batch.issue())))  # NCCL connects
        await asyncio.gather(*threads)
        for backend in backends:
            captured, backend.device.capture = backend.device.capture, None
            assert captured is not None
            await until(captured.record().passed.is_set)
        assert [output.tolist() for output in outputs] == [[2.0] * 3, [1.0] * 3]
        for work in works:
            with pytest.raises(RuntimeError, match="part of a CUDA graph"):
                await work


async def test_nothing_is_captured_before_nccl_has_connected(world: World) -> None:
    async with world(1, hints={"connect": "lazy"}) as (comm,):
        device = backend_of(comm).device
        device.capture = SimulatedStream()
        with pytest.raises(RuntimeError, match="NCCL is not connected yet"):
            comm.all_reduce(torch.ones(4))
        device.capture = None
        assert (await comm.all_reduce(torch.ones(4))).tolist() == [1.0] * 4


async def test_a_message_to_oneself_alone_cannot_be_captured(world: World) -> None:
    async with world(1) as (comm,):
        await comm.all_reduce(torch.ones(4))
        backend = backend_of(comm)
        await until(lambda: not backend._collectives.waiting)
        backend.device.capture = SimulatedStream()
        with pytest.raises(RuntimeError, match="to oneself can be captured in a batch only"):
            comm.send(torch.ones(1), 0)
        backend.device.capture = None
