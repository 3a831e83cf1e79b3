"""Loopback: the conformance suite, and what its hub lets tests do."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, BackendError, CollectiveMismatchError, Comm, MemoryStore, ReduceOp, Work, new_comm
from asynccomm.backends.base import Submission
from asynccomm.backends.loopback import Hub, LoopbackBackend, _hubs
from asynccomm.errors import BrokenError
from asynccomm.ops import AllReduce, AllToAll, Barrier, Call, Recv, Send
from asynccomm.testing import check_backend, loopback_world
from tests.sampling import some
from tests.waiting import until

from .conformance import IN_ONE_PROCESS, MANY_RANKS
from .contexts import rank_0_of_2


@pytest.mark.parametrize("size", some([2, 3, 4, 5, 1], 1))
async def test_conformance(size: int) -> None:
    store = MemoryStore()

    async def one(rank: int) -> None:
        only = IN_ONE_PROCESS if size <= 3 else MANY_RANKS
        await check_backend(lambda name: new_comm("loopback", name=name, store=store, rank=rank, size=size), only=only)

    async with asyncio.TaskGroup() as group:
        for rank in range(size):
            group.create_task(one(rank))


async def test_a_rank_that_closes_takes_its_messages_back() -> None:
    async with loopback_world(3) as comms:
        backend = comms[1].unsafe_get_backend()
        assert isinstance(backend, LoopbackBackend)
        comms[0].send(torch.ones(1), 2)
        backend.hub.drop(0)
        recv = comms[2].recv(torch.zeros(1))
        assert not recv.done()
        await comms[1].send(torch.full((1,), 5.0), 2)
        assert (await recv).item() == 5
        assert recv.source == 1
        comms[0].abort()


async def test_a_rank_that_closes_takes_only_its_own_operations_with_it() -> None:
    async with loopback_world(3) as comms:
        backend = comms[1].unsafe_get_backend()
        assert isinstance(backend, LoopbackBackend)
        backend.hub.hold()
        send, recv = comms[1].send(torch.ones(1), 2), comms[2].recv(torch.zeros(1), 1)
        await comms[0].aclose()
        backend.hub.release()
        await asyncio.gather(send, recv)


async def test_a_number_of_held_operations_is_released() -> None:
    async with loopback_world(2) as comms:
        hub = hub_of(comms[0])
        hub.hold()
        works = [comm.all_reduce(torch.ones(1)) for _ in range(3) for comm in comms]
        hub.release(0)
        assert not any(work.done() for work in works)
        wrong: list[Any] = [-1, 1.0, "1", True]
        for count in wrong:
            with pytest.raises(ValueError, match=f"^count must be an integer, and not negative, got {count!r}$"):
                hub.release(count)
        hub.release(2)
        assert [work.done() for work in works] == [True] * 4 + [False] * 2
        hub.release(9)
        works += [comm.all_reduce(torch.ones(1)) for comm in comms]
        assert [work.done() for work in works] == [True] * 6 + [False] * 2, "still holding"
        hub.release()
        await asyncio.gather(*works, *(comm.all_reduce(torch.ones(1)) for comm in comms))


@pytest.mark.parametrize("control", ["on", "off"])
async def test_no_operation_takes_effect_after_a_failure(control: str) -> None:
    async with loopback_world(2, hints={"control": control}) as (a, b):
        window_a, window_b = await asyncio.gather(a.window(4), b.window(4))
        await window_a.signal(1)
        memory = window_b.tensor()
        hub = hub_of(a)
        hub.hold()
        tensors = [torch.ones(1) for _ in range(5)]
        works: list[Work[Any]] = [a.all_reduce(tensors[0]), b.all_reduce(tensors[1])]
        hub.fail("on purpose")
        if control == "on":  # else the comms are broken at once
            works += [a.all_reduce(tensors[2]), b.all_reduce(tensors[3]), a.send(torch.zeros(1), 1), b.recv(tensors[4])]
            works += [window_a.put(torch.ones(1), 1), window_b.wait_signal()]
        hub.release()
        for work in works:
            with pytest.raises(BackendError, match="loopback: on purpose"):
                await work
        assert [tensor.item() for tensor in tensors] == [1] * 5
        assert not memory.any()
        await asyncio.gather(window_a.aclose(), window_b.aclose())


async def test_no_rank_is_done_before_all_have_what_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is done may write what it has given."""
    outputs = [torch.zeros(rank + 1) for rank in range(3)]
    seen: list[list[float]] = []
    settle = Work.settle

    def spy(work: Work[Any], error: Any = None) -> None:
        seen.append([output.sum().item() for output in outputs])
        settle(work, error)

    async with loopback_world(3) as comms:
        monkeypatch.setattr(Work, "settle", spy)
        works = [comm.gather_v(None, torch.ones(comm.rank + 1), 2) for comm in comms[:2]]
        await asyncio.gather(comms[2].gather_v(outputs, torch.ones(3), 2), *works)
    assert seen[:3] == [[1, 2, 3]] * 3


# -- batches -----------------------------------------------------------------------------------------------------------


def hub_of(comm: Comm) -> Hub:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, LoopbackBackend)
    return backend.hub


def reduced(comm: Comm, *numels: int) -> list[Call]:
    return [AllReduce.of(comm._group, torch.ones(numel), ReduceOp.SUM) for numel in numels]


def together(comm: Comm, calls: Sequence[Call]) -> Work[Any]:
    return comm._submitter.submit_together(calls, None, None, None)


def merged(comm: Comm, *lots: Sequence[int]) -> Work[Any]:
    """A batch of all_reduces: one for each lot, made of those of these numbers, which have number + 1 elements."""
    backend = comm.unsafe_get_backend()
    forward = backend.submit
    calls = [AllReduce.of_several(comm._group, [torch.ones(i + 1) for i in lot], ReduceOp.SUM) for lot in lots]

    def submit(batch: Sequence[Submission]) -> None:
        for submission, lot in zip(batch, lots, strict=True):
            submission.members = tuple([call.op for i in lot for call in reduced(comm, i + 1)])
            submission.numbers = tuple(lot)
        forward(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "submit", submit)
        return together(comm, calls)


async def expect_mismatch(comms: Sequence[Comm], works: Sequence[Work[Any]], text: str) -> None:
    errors = await asyncio.gather(*works, return_exceptions=True)
    for error in errors:
        assert isinstance(error, CollectiveMismatchError)
        assert str(CollectiveMismatchError(*error.args[:5])) == text
    assert all("broken" in repr(comm) for comm in comms), "on all ranks"


async def test_a_batch_meets_the_same_batch() -> None:
    async with loopback_world(3) as comms:
        for _ in range(2):
            outputs = [torch.ones(4) for _ in comms]
            works = []
            for comm, output in zip(comms, outputs, strict=True):
                group = comm._group
                calls = [Barrier.of(group), AllReduce.of(group, output, ReduceOp.SUM), *reduced(comm, 2)]
                assert not any(work.done() for work in works)
                works.append(together(comm, calls))
            assert all(work.done() for work in works)
            assert all(output.eq(3).all() for output in outputs)
            await asyncio.gather(*works)
            await asyncio.gather(*(comm.barrier() for comm in comms))


async def test_messages_do_not_count() -> None:
    async with loopback_world(2) as (a, b):
        received = torch.zeros(1)
        sent = Send.of(a._group, torch.full((1,), 5.0), 1, 0)
        first = together(a, [sent, *reduced(a, 3), sent])
        works = [first, b.recv(received), b.all_reduce(torch.ones(3))]
        await asyncio.gather(b.recv(received), *works)
        assert received.item() == 5
        calls = reduced(b, 1, 2)
        works = [
            together(b, [calls[0], Recv.of(b._group, received, 0, 0), calls[1]]),
            together(a, reduced(a, 1, 2)),
            a.send(torch.full((1,), 6.0), 1),
        ]
        await asyncio.gather(*works)
        assert received.item() == 6


ALONE = "all_reduce(float32[1], SUM) alone"
BATCHES: list[tuple[list[list[int]], list[list[int]], str]] = [
    (
        [[1, 2, 3]],
        [[1], [2], [3]],
        "operation #0 differs: rank 0 has a batch of 3 from all_reduce(float32[1], SUM) on, "
        f"with #1 all_reduce(float32[2], SUM), rank 1 has {ALONE}",
    ),
    (
        [[1], [2, 3]],
        [[1, 2, 3]],
        f"operation #0 differs: rank 0 has {ALONE}, rank 1 has a batch of 3 from all_reduce(float32[1], SUM) on, "
        "with #1 all_reduce(float32[2], SUM)",
    ),
    (
        [[9], [1, 2, 3, 4]],
        [[9], [1, 2], [3, 4]],
        "operation #1 differs: rank 0 has a batch of 4 from all_reduce(float32[1], SUM) on, "
        "with #3 all_reduce(float32[3], SUM), "
        "rank 1 has a batch of 2 from all_reduce(float32[1], SUM) on, without it",
    ),
    (
        [[1, 2, 3]],
        [[1, 4, 3]],
        "operation #1 differs: rank 0 has all_reduce(float32[2], SUM), rank 1 has all_reduce(float32[4], SUM)",
    ),
    (
        [[9, 8], [1, 2, 3]],
        [[9, 8], [1, 3]],
        "operation #3 differs: rank 0 has all_reduce(float32[2], SUM), rank 1 has all_reduce(float32[3], SUM)",
    ),
    (
        [[1, 2]],
        [[3]],
        "operation #0 differs: rank 0 has all_reduce(float32[1], SUM), rank 1 has all_reduce(float32[3], SUM)",
    ),
]


@pytest.mark.parametrize(("mine", "theirs", "text"), BATCHES)
async def test_another_batch_is_a_mismatch_on_all_ranks(
    mine: list[list[int]], theirs: list[list[int]], text: str
) -> None:
    async with loopback_world(3) as comms:
        tensors = []
        works = []
        hub_of(comms[0]).hold()  # until all have called: who hears of it calls no more
        for comm, batches in zip(comms, [mine, theirs, mine], strict=True):
            for batch in batches:
                calls = reduced(comm, *batch)
                tensors += [call.outputs[0] for call in calls if 9 not in batch]
                works.append(together(comm, calls))
        hub_of(comms[0]).release()
        await expect_mismatch(comms, [work for work in works if 9 not in [op.numel for op in work.op.ops]], text)  # type: ignore[attr-defined]
        assert all(tensor.eq(1).all() for tensor in tensors), "nothing of a wrong batch is done"


async def test_a_mismatch_is_held_back_too() -> None:
    async with loopback_world(2) as (a, b):
        hub_of(a).hold()
        works = [together(a, reduced(a, 1, 2)), b.all_reduce(torch.ones(1))]
        await asyncio.sleep(0)
        assert not any(work.done() for work in works)
        hub_of(a).release()
        for work in works:
            with pytest.raises(CollectiveMismatchError, match="alone"):
                await work


async def test_merged_operations_meet() -> None:
    async with loopback_world(2) as comms:
        works = [merged(comm, [0, 2], [1, 3, 4]) for comm in comms]
        await asyncio.gather(*works)


MERGED: list[tuple[list[list[int]], list[list[int]], str]] = [
    (
        [[0, 2, 3]],
        [[0, 2, 4]],
        "operation #3 differs: rank 0 has all_reduce(float32[4], SUM), rank 1 has all_reduce(float32[5], SUM)",
    ),
    (
        [[0, 3], [1, 2]],
        [[0, 3], [1]],
        "operation #2 differs: rank 0 has all_reduce(float32[3], SUM), rank 1 has all_reduce(float32[4], SUM)",
    ),
    (
        [[0, 1, 2]],
        [[0, 1]],
        "operation #0 differs: rank 0 has a batch of 3 from all_reduce(float32[1], SUM) on, "
        "with #2 all_reduce(float32[3], SUM), "
        "rank 1 has a batch of 2 from all_reduce(float32[1], SUM) on, without it",
    ),
    (
        [[0, 1], [2, 3]],
        [[0, 1], [2], [3]],
        "operation #0 differs: rank 0 has a batch of 4 from all_reduce(float32[1], SUM) on, merged into "
        "all_reduce(float32[3] in pieces, SUM), all_reduce(float32[7] in pieces, SUM), "
        "rank 1 has a batch of 4 from all_reduce(float32[1], SUM) on, merged into "
        "all_reduce(float32[3] in pieces, SUM), all_reduce(float32[3] in pieces, SUM), "
        "all_reduce(float32[4] in pieces, SUM)",
    ),
]


@pytest.mark.parametrize(("mine", "theirs", "text"), MERGED)
async def test_merged_operations_that_differ(mine: list[list[int]], theirs: list[list[int]], text: str) -> None:
    async with loopback_world(
        2, hints={"control": "off"}
    ) as comms:  # the comms would compare the lots, as they know them
        works = [merged(comm, *lots) for comm, lots in zip(comms, [mine, theirs], strict=True)]
        await expect_mismatch(comms, works, text)


async def test_sizes_that_do_not_fit_are_seen_before_anything_is_done() -> None:
    async with loopback_world(2) as (a, b):
        tensor = torch.ones(1)

        def exchanged(comm: Comm, sends: list[int], receives: list[int]) -> Call:
            tensors = [torch.zeros(n) for n in receives], [torch.zeros(n) for n in sends]
            return AllToAll.of(comm._group, *tensors)

        works = [
            together(a, [AllReduce.of(a._group, tensor, ReduceOp.SUM), exchanged(a, [1, 2], [1, 2])]),
            together(b, [*reduced(b, 1), exchanged(b, [3, 4], [2, 4])]),
        ]
        for work in works:
            with pytest.raises(CollectiveMismatchError, match="operation #1 differs"):
                await work
        assert tensor.item() == 1


async def test_a_split_ends_where_the_parent_breaks_before_all_have_come() -> None:
    async with loopback_world(2) as (a, b):
        child = a.split([0, 1], "child")

        async def split() -> None:
            await child

        splitting = asyncio.create_task(split())
        await until(lambda: bool(a._session.children))
        b.abort("no longer wanted")
        with pytest.raises(AbortedError, match="no longer wanted"):
            await splitting


async def test_a_rank_that_gives_up_connecting_hears_nothing_more() -> None:
    store, heard = MemoryStore(), list[BrokenError]()
    connecting = asyncio.create_task(LoopbackBackend.connect(rank_0_of_2(store=store, on_error=heard.append)))
    await until(lambda: len(store._waiters) > 0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    (hub,) = _hubs[store].values()
    hub.fail("on purpose")
    assert not heard
