"""From what was held to what a backend gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import Comm
from asynccomm.backends.base import Backend, Submission
from asynccomm.backends.regions import region
from asynccomm.batching.batches import Batch, FusedOp, batches_of, due, planned
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.ops import AllReduce, Barrier, Broadcast, Call, Send
from asynccomm.ops.lists import reduce_scatter
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.local import loopback_world


class World:
    """Makes what a scope of a comm would hold."""

    def __init__(self, comm: Comm) -> None:
        self.group = comm._group
        self.backend: Backend = comm.unsafe_get_backend()
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self.settled: list[Work[Any]] = []

    def hold(self, call: Call, timeout: float = 9.0, call_context: Any = None) -> Submission:
        work: Work[Any] = Work(
            call.op, UNNUMBERED, self.mailbox, value=call.result, timeout=timeout, on_settled=self.settled.append
        )
        submission = Submission(call, work)
        submission.call_context = call_context
        return submission

    def reduced(self, tensor: Tensor | int, **keywords: Any) -> Submission:
        t = torch.ones(tensor) if isinstance(tensor, int) else tensor
        return self.hold(AllReduce.of(self.group, t, ReduceOp.SUM), **keywords)

    def batches(self, held: Sequence[Submission]) -> list[Batch]:
        return batches_of(held, 2, self.backend, self.mailbox)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with loopback_world(2) as (comm, _):
        yield World(comm)


async def test_one_of_a_sort_goes_as_it_is(world: World) -> None:
    held = [
        world.reduced(2),
        world.hold(Barrier.of(world.group)),
        world.hold(Broadcast.of(world.group, torch.ones(1), 1)),
    ]
    [batch] = world.batches(held)
    assert batch.items is held
    assert [fused.submission for fused in batch.fused_ops] == held
    assert [list(fused.members) for fused in batch.fused_ops] == [[item] for item in held]
    assert [fused.fused_work for fused in batch.fused_ops] == [None] * 3
    assert [fused.most_urgent for fused in batch.fused_ops] == [item.work for item in held]


async def test_several_of_one_sort_become_one(world: World) -> None:
    held = [world.reduced(1), world.hold(Barrier.of(world.group)), world.reduced(2), world.reduced(3)]
    [batch] = world.batches(held)
    assert batch.items is held
    merged, alone = batch.fused_ops
    assert alone.submission is held[1]
    assert merged.members == [held[0], held[2], held[3]]
    assert merged.fused_work is not None
    assert merged.submission.work is merged.fused_work.work
    assert merged.submission.members == tuple(item.op for item in merged.members)
    assert isinstance(merged.submission.op, AllReduce)
    assert merged.submission.op.numel == 6
    assert merged.submission.nbytes == 24
    merged.submission.work.settle()
    assert world.settled == [held[0].work, held[2].work, held[3].work]


async def test_batches_in_their_order(world: World) -> None:
    t, u = torch.ones(1), torch.ones(1)
    held = [
        world.reduced(t),
        world.hold(Barrier.of(world.group)),
        world.reduced(u),
        world.reduced(t),
        world.hold(Send.of(world.group, torch.ones(1), 1, 0)),
        world.reduced(u),
        world.reduced(t),
    ]
    batches = world.batches(held)
    assert [list(batch.items) for batch in batches] == [held[:3], held[3:6], held[6:]], "as they were called"
    assert [[len(fused.members) for fused in batch.fused_ops] for batch in batches] == [[2, 1], [2, 1], [1]]


async def test_numbers_are_passed_on(world: World) -> None:
    held = [world.reduced(1), world.hold(Barrier.of(world.group)), world.reduced(2)]
    [batch] = world.batches(held)
    for n, item in enumerate(batch.items):
        item.work.seq = 5 + n
    driver: Any = object()
    for fused in batch.fused_ops:
        fused.prepare(driver)
    merged, alone = batch.fused_ops
    assert merged.submission.numbers == (5, 7)
    assert merged.submission.work.seq == 5
    assert alone.submission.numbers == ()
    assert alone.submission.work.driver is driver
    assert [item.work.driver for item in merged.members] == [merged.fused_work] * 2
    assert merged.submission.work.driver is world.backend


async def test_the_most_urgent(world: World) -> None:
    held = [world.reduced(1, timeout=9.0), world.reduced(2, timeout=3.0), world.reduced(3, timeout=6.0)]
    [batch] = world.batches(held)
    assert batch.fused_ops[0].most_urgent is held[1].work
    assert batch.fused_ops[0].submission.work.timeout == 3.0
    assert due(held[1].work) == held[1].work.started + 3.0


async def test_places_of_a_gpu_are_passed_on(world: World) -> None:
    [batch] = world.batches([world.reduced(1), world.reduced(2)])
    [fused] = batch.fused_ops
    place: Any = object()
    fused.submission.work.order = place
    fused.sent()
    assert [item.work.order for item in fused.members] == [place, place]
    FusedOp(fused.members[0], fused.members[:1]).sent()


async def test_where_they_were_called(world: World) -> None:
    origins = ["a", "b", "a"]
    [batch] = world.batches([world.reduced(n, call_context=call_context) for n, call_context in enumerate(origins)])
    assert batch.fused_ops[0].submission.call_context == ("a", "b"), "each place once"
    [batch] = world.batches([world.reduced(n, call_context="a") for n in range(3)])
    assert batch.fused_ops[0].submission.call_context == "a"
    [batch] = world.batches([world.reduced(n) for n in range(3)])
    assert batch.fused_ops[0].submission.call_context is None


async def test_what_cannot_be_sent_together(world: World) -> None:
    t = torch.ones(2)
    held = [world.reduced(t), world.hold(Send.of(world.group, t, 1, 0))]
    with pytest.raises(ValueError, match="shares memory with"):
        world.batches(held)
    assert [item.work.seq for item in held] == [UNNUMBERED] * 2
    assert world.settled == []


async def test_what_is_copied_later_counts_as_read(world: World) -> None:
    whole = torch.ones(2, 3).t()
    (call,), _ = reduce_scatter(world.group, [torch.ones(3)], [whole], ReduceOp.SUM)
    held = world.hold(call)
    assert region(whole) in planned(held)[1]
    batches = world.batches([world.reduced(whole), held, world.reduced(whole)])
    assert [[fused.members for fused in batch.fused_ops] for batch in batches][1] == [[held]]
    assert len(batches) == 3


async def test_nothing(world: World) -> None:
    assert world.batches([]) == []
