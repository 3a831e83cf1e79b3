"""Point to point."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import asynccomm.compat.c10d as dist
from tests.compat.c10d.worlds import alone, run_ranks

ARGUMENTS = {
    "isend": "tensor dst group tag group_dst",
    "irecv": "tensor src group tag group_src",
    "send": "tensor dst group tag group_dst",
    "recv": "tensor src group tag group_src",
    "batch_isend_irecv": "p2p_op_list",
    "P2POp": "op tensor peer group tag group_peer",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    assert list(inspect.signature(getattr(dist, name)).parameters) == ARGUMENTS[name].split()


async def test_global_ranks_and_ranks_of_the_group() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2])
        if rank == 1:
            await dist.send(torch.tensor([1.0]), 2, pg)
            await dist.send(torch.tensor([2.0]), group=pg, group_dst=1)
            work = dist.isend(torch.tensor([3.0]), 2, pg)
            assert work is not None
            await work
        elif rank == 2:
            for n, where in enumerate([{"src": 1}, {"group_src": 0}, {}]):
                tensor = torch.empty(1)
                assert await dist.recv(tensor, group=pg, **where) == 1  # the global rank
                assert tensor.item() == n + 1

    await run_ranks(3, body)


async def test_from_anybody() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2, 3])
        if rank in (2, 3):
            await dist.send(torch.tensor([rank]), 1, pg)
        elif rank == 1:
            seen = set()
            for _ in range(2):
                tensor = torch.empty(1, dtype=torch.int64)
                sender = await dist.recv(tensor, group=pg)
                assert sender == tensor.item()
                seen.add(sender)
            assert seen == {2, 3}

    await run_ranks(4, body)


async def test_a_handle_knows_the_sender() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2])
        if rank == 2:
            await dist.send(torch.ones(1), 1, pg)
        elif rank == 1:
            work = dist.irecv(torch.empty(1), group=pg)
            assert work is not None
            await work
            assert work._source_rank() == 1  # in the group

    await run_ranks(3, body)


async def test_tags() -> None:
    async def body(rank: int) -> None:
        if rank == 0:
            for tag in (1, 2):
                dist.isend(torch.tensor([tag]), 1, tag=tag)
        else:
            for tag in (2, 1):
                tensor = torch.empty(1, dtype=torch.int64)
                await dist.recv(tensor, 0, tag=tag)
                assert tensor.item() == tag
        await dist.barrier()

    await run_ranks(2, body)


async def test_to_oneself() -> None:
    async with alone():
        tensor = torch.empty(1)
        receive, send = dist.irecv(tensor, 0), dist.isend(torch.ones(1), 0)
        assert receive is not None
        assert send is not None
        await receive
        await send
        assert tensor.item() == 1


async def test_from_oneself_is_refused_before_anything_is_received() -> None:
    async def body(rank: int) -> None:
        with pytest.raises(ValueError, match="src should not be the same as the rank of the current process"):
            dist.recv(torch.empty(1), rank)
        assert dist._get_default_group().comm().statistics().in_flight == 0

    await run_ranks(2, body)


async def test_which_ranks_must_be_given() -> None:
    async with alone():
        for call in (dist.isend, dist.send):
            with pytest.raises(ValueError, match="dst or group_dst must be given"):
                call(torch.ones(1))
            with pytest.raises(ValueError, match="dst and group_dst cannot both be given"):
                call(torch.ones(1), 0, group_dst=0)
        for call in (dist.irecv, dist.recv):
            with pytest.raises(ValueError, match="src and group_src cannot both be given"):
                call(torch.ones(1), 0, group_src=0)


async def test_complex_tensors() -> None:
    async def body(rank: int) -> None:
        value = torch.tensor([1 + 2j, 3 - 4j])
        if rank == 0:
            await dist.send(value, 1)
        else:
            tensor = torch.empty(2, dtype=torch.complex64)
            await dist.recv(tensor, 0)
            assert torch.equal(tensor, value)

    await run_ranks(2, body)


async def test_a_p2p_op() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2])
        if rank != 1:
            return
        tensor = torch.ones(2)
        op = dist.P2POp(dist.isend, tensor, 2, pg, 5)
        assert (op.op, op.tensor, op.peer, op.group, op.tag, op.group_peer) == (dist.isend, tensor, 2, pg, 5, 1)
        assert repr(op) == "P2POp(isend pg=1, group_src=0, group_dst=1, torch.Size([2]), torch.float32)"
        op = dist.P2POp(dist.irecv, tensor, group=pg, group_peer=1)
        assert (op.peer, op.group_peer) == (2, 1)
        assert "irecv pg=1, group_src=1, group_dst=0" in repr(op)

    await run_ranks(3, body)


async def test_what_is_no_p2p_op() -> None:
    async with alone() as pg:
        one = torch.ones(1)
        with pytest.raises(ValueError, match="op must be isend or irecv"):
            dist.P2POp(dist.send, one, 0)
        with pytest.raises(ValueError, match="op must be isend or irecv"):
            dist._check_op(dist.recv)
        with pytest.raises(TypeError, match=r"tensor must be a torch.Tensor"):
            dist.P2POp(dist.isend, 3, 0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="peer or group_peer must be given"):
            dist.P2POp(dist.isend, one)
        op = dist.P2POp(dist.isend, one, 0)
        other = dist.P2POp(dist.isend, one, 0, await dist.new_group([0]))
        assert op.group is pg
        bad: list[tuple[Any, str]] = [
            ([], "at least one"),
            ((op,), "must be a list of P2POp"),
            ([op, 3], "must be a list of P2POp"),
            ([op, other], "must be of one group"),
        ]
        for ops, message in bad:
            with pytest.raises(ValueError, match=message):
                dist.batch_isend_irecv(ops)
            with pytest.raises(ValueError, match=message):
                dist._check_p2p_op_list(ops)


async def test_a_ring() -> None:
    async def body(rank: int) -> None:
        mine, theirs, own = torch.tensor([rank]), torch.tensor([-1]), torch.tensor([-1])
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, (rank + 1) % 3),
                dist.P2POp(dist.irecv, theirs, (rank - 1) % 3),
                dist.P2POp(dist.isend, mine, rank, tag=1),  # and to oneself
                dist.P2POp(dist.irecv, own, rank, tag=1),
            ]
        )
        assert len(works) == 1
        await works[0]
        assert theirs.item() == (rank - 1) % 3
        assert own.item() == rank

    await run_ranks(3, body)


async def test_the_first_batch_of_a_group_needs_only_some_ranks() -> None:
    async def body(rank: int) -> None:
        tensor = torch.tensor([rank])
        if rank < 2:
            op = dist.isend if rank == 0 else dist.irecv
            for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, 1 - rank)]):
                await work
            assert tensor.item() == 0

    await run_ranks(3, body)


async def test_a_p2p_op_of_a_group_that_has_ended_can_be_shown() -> None:
    async with alone():
        op = dist.P2POp(dist.isend, torch.ones(1), 0)
        pg = await dist.new_group([0])
        other = dist.P2POp(dist.irecv, torch.ones(1), 0, pg)
        await dist.destroy_process_group(pg)
        assert repr(other).startswith("P2POp(irecv pg=1, group_src=0, group_dst=0")
    assert repr(op).startswith("P2POp(isend pg=0, group_src=0, group_dst=0")
