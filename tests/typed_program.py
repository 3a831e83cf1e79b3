"""A program as users write it, for the type checkers that ``test_types.py`` runs; it is never called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_type

import torch
from torch import Tensor
from torch import distributed as dist

import asynccomm
from asynccomm import Comm, ReduceOp, Stream, Work
from asynccomm.blocking import BlockingComm, BlockingQueue, BlockingWindow


@asynccomm.register_safe
@dataclass
class Settings:
    steps: int


async def objects(comm: Comm, settings: Settings | None) -> None:
    assert_type(comm.recv_object(0), Work[object])
    assert_type(comm.recv_object(0, expect=Settings, max_bytes=10), Work[Settings])
    assert_type(comm.broadcast_object(settings, 0, expect=Settings, tag="x"), Work[Settings])
    assert_type(comm.all_gather_object(settings, expect=Settings), Work[list[Settings]])
    assert_type(comm.gather_object(settings, 0, expect=Settings), Work[list[Settings] | None])
    assert_type(comm.scatter_object_list([settings], 0, expect=Settings), Work[Settings])
    assert_type(comm.stream(0), Stream[Any])
    assert_type([each.steps async for each in comm.stream(0, expect=Settings)], list[int])
    assert_type(Settings(1).steps, int)


async def groups(comm: Comm, ranks: Sequence[int]) -> None:
    assert_type(await comm.split(ranks, "some"), Comm)
    assert_type(await comm.split([0, 1], "two"), Comm)
    async with comm.split(range(2), "range") as half:
        assert_type(half, Comm)
    async with comm.split([], "none") as none:
        assert_type(none, None)


async def torchs(comm: Comm, tensor: Tensor) -> None:
    assert_type(await asynccomm.wrap(dist.all_reduce(tensor, async_op=True)), list[Tensor])
    assert_type(await asynccomm.wrap(dist.isend(tensor, 1)), list[Tensor])
    async with asynccomm.wrap(dist.group.WORLD) as world:
        assert_type(world, Comm)
    async with asynccomm.wrap(dist.new_group([0, 1])) as pair:
        assert_type(pair, Comm)
    for op in (ReduceOp.SUM, ReduceOp.PREMUL_SUM(2), dist.ReduceOp.SUM, dist.ReduceOp(dist.ReduceOp.MAX)):
        assert_type(comm.all_reduce(tensor, op), Work[Tensor])


async def packages() -> None:
    async with asynccomm.testing.loopback_world(4) as comms:
        assert_type(comms[0], Comm)
        asynccomm.interop.mesh.init_device_mesh([comms[0]], ["dp"])
    asynccomm.compat.c10d.get_rank()


def without_a_loop(tensor: Tensor, ranks: Sequence[int]) -> None:
    with asynccomm.blocking.new_comm("gloo", timeout=3) as comm:
        assert_type(comm, BlockingComm)
        assert_type(comm.all_reduce(tensor).wait(), Tensor)
        assert_type(comm.recv_object(0, expect=Settings).wait(), Settings)
        assert_type(comm.preempted(), bool)
        assert_type(comm.newcomers(), list[str])
        assert_type(comm.dup("other", timeout=3), BlockingComm)
        assert_type(comm.split(ranks, "some"), BlockingComm | None)
        assert_type(comm.comm, Comm)
        assert_type(comm.window(8), BlockingWindow)
        assert_type(comm.queue(writer=0), BlockingQueue)
        assert_type(comm.window(8).put(tensor, 0), Work[Tensor])
        for item in comm.stream(0, expect=Settings):
            assert_type(item, Settings)


async def mistakes(comm: Comm, tensor: Tensor) -> None:
    comm.all_reduce(tensor, "sum")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    comm.recv_object(0, expect=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    torch.ones(await comm.recv_object(0))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
