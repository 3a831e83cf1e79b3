"""Dry runs as one of many ranks, none of which is there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm import PayloadError

ONE = torch.ones(1)


@asynccontextmanager
async def fake(rank: int = 2, size: int = 8, **options: Any) -> AsyncIterator[dist.ProcessGroup]:
    with dist.use_world(dist.World()):
        await dist.init_process_group("fake", rank=rank, world_size=size, **options)
        yield dist._get_default_group()
        await dist.destroy_process_group()


async def test_collectives_do_nothing() -> None:
    async with fake() as pg:
        assert (pg.rank(), pg.size(), pg.name()) == (2, 8, "fake")
        tensor, whole = torch.full((2,), 5.0), torch.full((16,), 7.0)
        parts = list(whole.clone().chunk(8))
        await dist.all_reduce(tensor)
        await dist.broadcast(tensor, 3)
        await dist.reduce(tensor, 1)
        await dist.all_gather(parts, tensor)
        await dist.all_gather_into_tensor(whole, tensor)
        await dist.reduce_scatter_tensor(tensor, whole)
        await dist.all_to_all_single(whole, torch.ones(16))
        await dist.scatter(tensor, src=0)
        await dist.barrier()
        await dist.send(tensor, 1)
        assert await dist.recv(tensor, 1) == 1
        ops = [dist.P2POp(dist.isend, tensor, 3), dist.P2POp(dist.irecv, torch.ones(2), 3)]
        for work in dist.batch_isend_irecv(ops):
            await work
        async with dist._coalescing_manager():
            dist.all_reduce(tensor)
            dist.all_reduce(whole)
        assert tensor.tolist() == [5.0, 5.0]
        assert whole.tolist() == [7.0] * 16
        assert torch.cat(parts).tolist() == [7.0] * 16


async def test_arguments_are_checked() -> None:
    async with fake():
        with pytest.raises(ValueError, match="in \\[0, 8\\)"):
            dist.broadcast(ONE, 8)
        with pytest.raises(ValueError, match="16"):
            dist.all_gather_into_tensor(torch.ones(15), torch.ones(2))
        with pytest.raises(ValueError, match="monitored_barrier needs"):
            dist.monitored_barrier()


async def test_objects_cannot_come() -> None:
    async with fake():
        await dist.send_object_list([1], 0)
        with pytest.raises(PayloadError, match="moves nothing"):
            await dist.all_gather_object([None] * 8, 1)
        await dist.all_reduce(ONE.clone())  # the group goes on


async def test_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")  # which nobody else would come to
    async with fake():
        assert await dist.new_group([0, 1]) == dist.GroupMember.NON_GROUP_MEMBER
        pg = await dist.new_group([2, 7])
        await dist.all_reduce(ONE.clone(), group=pg)
        mine, everybodys = await dist.new_subgroups(4)
        assert everybodys[0] is mine
        assert dist.get_process_group_ranks(mine) == [0, 1, 2, 3]
        split = await dist.split_group(None, [[7, 2], [1]])
        assert dist.get_process_group_ranks(split) == [2, 7]
        await dist.barrier(split)
        assert not dist._get_default_group().supports_shrinking


@pytest.mark.parametrize("who", [{}, {"rank": 2}, {"rank": 2, "world_size": 2}])
async def test_it_must_be_said_who_this_is(who: Any) -> None:
    with dist.use_world(dist.World()), pytest.raises(ValueError, match="'fake' needs rank and world_size"):
        await dist.init_process_group("fake", **who)


async def test_several_at_once() -> None:
    """Nothing is shared: two ranks of one name and number can be in one process."""
    async with fake(), fake():
        await dist.all_reduce(ONE.clone())
