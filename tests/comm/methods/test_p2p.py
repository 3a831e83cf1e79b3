"""send, recv, and several of them started together, on loopback."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, ClosedError, CollectiveMismatchError, CollectiveTimeoutError
from asynccomm.ops import GroupedOp, Recv, Send
from asynccomm.testing.local import loopback_world

F = torch.float32


def full(value: float, n: int = 2) -> torch.Tensor:
    return torch.full((n,), float(value))


async def test_results_are_the_tensors_passed_in() -> None:
    async with loopback_world(2) as (a, b):
        sent, received = full(7), full(0)
        results = await asyncio.gather(a.send(sent, 1), b.recv(received, 0))
        assert results[0] is sent
        assert results[1] is received
        assert received.tolist() == [7, 7]


async def test_ordered_by_pair_and_tag() -> None:
    async with loopback_world(2) as (a, b):
        for n in range(4):
            a.send(full(n), 1, n % 2)
        outs = [full(-1) for _ in range(4)]
        await asyncio.gather(*[b.recv(out, 0, tag) for out, tag in zip(outs, (1, 0, 1, 0), strict=True)])
        assert [x[0].item() for x in outs] == [1, 0, 3, 2]


async def test_a_send_to_oneself_needs_a_receive() -> None:
    async with loopback_world(1) as (comm,):
        out = full(0)
        work = comm.send(full(3), 0)
        assert not work.done()
        receive = comm.recv(out)
        assert await receive is out
        assert receive.source == 0
        await work


# -- batches


async def test_recording_sends_nothing() -> None:
    async with loopback_world(2) as (a, b):
        batch = a.batch_op_create()
        assert batch.ops == []
        assert batch.send(full(1), 1, 5) is None
        assert batch.recv(full(1, 3), None, 6) is None
        assert batch.ops == [Send(F, 2, 1, 5), Recv(F, 3, None, 6)]
        batch.ops.clear()
        assert len(batch.ops) == 2, "a list of its own"
        assert a.statistics()[:3] == (0, 0, 0)
        assert b.statistics()[:3] == (0, 0, 0)


async def test_arguments_are_checked_when_recorded() -> None:
    async with loopback_world(2) as (a, _):
        batch = a.batch_op_create()
        with pytest.raises(ValueError, match=r"dst must be in \[0, 2\), got 2"):
            batch.send(full(1), 2)
        with pytest.raises(TypeError, match="src must be a rank"):
            batch.recv(full(1), "0")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="tensor overlaps itself"):
            batch.recv(torch.zeros(1).expand(3), 1)
        with pytest.raises(TypeError, match=r"tensor must be a torch\.Tensor"):
            batch.send([1.0], 1)  # type: ignore[arg-type]
        assert batch.ops == []


async def test_an_empty_batch() -> None:
    async with loopback_world(1) as (comm,):
        batch = comm.batch_op_create()
        with pytest.raises(ValueError, match="nothing was recorded in this batch"):
            batch.issue()
        assert comm.statistics()[:3] == (0, 0, 0)
        batch.send(full(1), 0)
        batch.recv(full(1), 0)
        await batch.issue()  # not too late


async def test_a_batch_is_issued_once() -> None:
    async with loopback_world(1) as (comm,):
        batch = comm.batch_op_create()
        batch.send(full(1), 0)
        batch.recv(full(1), 0)
        work = batch.issue()
        for again in (batch.issue, lambda: batch.send(full(1), 0), lambda: batch.recv(full(1))):
            with pytest.raises(RuntimeError, match="this batch was issued; make a new one"):
                again()
        await work
        assert comm.statistics()[:3] == (2, 0, 0)
        assert len(batch.ops) == 2


async def test_a_batch_that_failed_to_issue_can_be_issued_again() -> None:
    async with loopback_world(1) as (comm,):
        batch = comm.batch_op_create()
        batch.send(full(1), 0)
        batch.recv(full(1), 0)
        with pytest.raises(ValueError, match="timeout must be positive"):
            batch.issue(timeout=0)
        with pytest.raises(TypeError, match="hints must be a mapping"):
            batch.issue(hints=["x"])  # type: ignore[arg-type]
        assert comm.statistics()[:3] == (0, 0, 0)
        await batch.issue(timeout=5, hints={"unknown": "ignored"})


async def test_one_work_of_all_tensors_in_the_order_of_recording() -> None:
    async with loopback_world(2) as (a, b):
        sent, first, second = full(1), full(0), full(0, 3)
        batch = a.batch_op_create()
        batch.recv(first, 1, 7)
        batch.send(sent, 1)
        batch.recv(second, 1, 8)
        work = batch.issue()
        assert isinstance(work.op, GroupedOp)
        assert list(work.op.ops) == batch.ops
        assert a.statistics()[:3] == (3, 3, 28)
        await asyncio.gather(b.send(full(5), 0, 7), b.recv(full(0), 0))
        assert not work.done(), "one is still missing"
        b.send(full(6, 3), 0, 8)
        results: Any = await work
        assert [x is y for x, y in zip(results, [first, sent, second], strict=True)] == [True] * 3
        assert first.tolist() == [5, 5]
        assert second.tolist() == [6, 6, 6]
        assert a.statistics()[:3] == (3, 0, 0)


async def test_a_batch_of_one() -> None:
    async with loopback_world(2) as (a, b):
        out = full(0)
        batch = b.batch_op_create()
        batch.recv(out)
        work = batch.issue()
        a.send(full(4), 1)
        results = await work
        assert results[0] is out
        assert len(results) == 1
        assert work.op == Recv(F, 2, None, 0)
        assert work.source == 0


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_a_ring(size: int) -> None:
    async with loopback_world(size) as comms:
        outs = [full(-1) for _ in comms]
        works = []
        for comm in comms:
            batch = comm.batch_op_create()
            batch.send(full(comm.rank), (comm.rank + 1) % size)
            batch.recv(outs[comm.rank], (comm.rank - 1) % size)
            works.append(batch.issue())
        await asyncio.gather(*works)
        assert [x[0].item() for x in outs] == [(rank - 1) % size for rank in range(size)]


async def test_a_subset_of_the_ranks() -> None:
    async with loopback_world(3) as comms:
        outs = {0: full(0), 2: full(0)}
        works = []
        for rank, peer in ((0, 2), (2, 0)):
            batch = comms[rank].batch_op_create()
            batch.recv(outs[rank], peer)
            batch.send(full(10 + rank), peer)
            works.append(batch.issue())
        await asyncio.gather(*works)
        assert [outs[0][0].item(), outs[2][0].item()] == [12, 10]
        assert comms[1].statistics()[:3] == (0, 0, 0)
        works = [comm.barrier() for comm in comms]
        assert [work.seq for work in works] == [0, 0, 0], "collectives are numbered apart"
        await asyncio.gather(*works)


async def test_several_to_one_peer_match_in_order() -> None:
    async with loopback_world(2) as (a, b):
        outs = [full(-1) for _ in range(4)]
        sends, receives = a.batch_op_create(), b.batch_op_create()
        for n in range(4):
            sends.send(full(n), 1)
            receives.recv(outs[n], 0)
        await asyncio.gather(receives.issue(), sends.issue())
        assert [x[0].item() for x in outs] == [0, 1, 2, 3]


async def test_to_oneself_and_to_others() -> None:
    async with loopback_world(2) as comms:
        outs = [[full(-1), full(-1)] for _ in comms]
        works = []
        for comm in comms:
            batch = comm.batch_op_create()
            for peer in (0, 1):
                batch.send(full(10 * comm.rank + peer), peer)
                batch.recv(outs[comm.rank][peer], peer)
            works.append(batch.issue())
        await asyncio.gather(*works)
        assert [[x[0].item() for x in found] for found in outs] == [[0, 10], [1, 11]]


async def test_from_any_source() -> None:
    async with loopback_world(3) as comms:
        outs = [full(-1), full(-1)]
        batch = comms[0].batch_op_create()
        for out in outs:
            batch.recv(out)
        work = batch.issue()
        comms[2].send(full(2), 0)
        comms[1].send(full(1), 0)
        await work
        assert [x[0].item() for x in outs] == [2, 1]
        assert work.source is None, "there are two"


async def test_a_batch_meets_single_messages() -> None:
    async with loopback_world(2) as (a, b):
        out = full(0)
        batch = a.batch_op_create()
        batch.send(full(1), 1)
        batch.recv(out, 1)
        work = batch.issue()
        got = full(0)
        await asyncio.gather(b.recv(got, 0), b.send(full(2), 0), work)
        assert [out[0].item(), got[0].item()] == [2, 1]


async def test_a_message_of_another_size() -> None:
    async with loopback_world(2) as (a, b):
        batch = a.batch_op_create()
        batch.send(full(1), 1)
        batch.recv(full(0), 1)
        work = batch.issue()
        other = b.recv(full(0, 3), 0)
        for one in (work, other):
            with pytest.raises(CollectiveMismatchError, match=r"send\(float32\[2\].*recv\(float32\[3\]"):
                await one


async def test_deadline_of_a_batch_names_the_message_and_the_peer() -> None:
    async with loopback_world(3) as comms:
        batch = comms[0].batch_op_create()
        batch.send(full(1), 0)
        batch.recv(full(0), 0)
        batch.recv(full(0), 2, 9)
        with pytest.raises(CollectiveTimeoutError, match=r"recv\(float32\[2\], src=2, tag=9\)") as caught:
            await batch.issue(timeout=0.03)
        assert caught.value.missing == (2,)


async def test_a_batch_on_a_comm_that_has_ended() -> None:
    async with loopback_world(1) as (comm,):
        batch = comm.batch_op_create()
        batch.recv(full(0), 0)
        other = comm.batch_op_create()
        other.recv(full(0), 0)
        other.recv(full(0), 0)
        work = other.issue()
        comm.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            await work
        with pytest.raises(AbortedError, match="enough"):
            batch.issue()
        await comm.aclose()
        with pytest.raises(ClosedError):
            batch.issue()
