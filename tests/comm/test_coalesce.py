"""Scopes on comms: what may be mixed in them, and that all ranks send the same batches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import asynccomm
from asynccomm import Comm, NotSentError, ReduceOp, coalesce
from asynccomm.comm.scopes import CoalesceScope
from asynccomm.core.work import Work
from asynccomm.testing.local import loopback_world
from tests.batching.recording import Recorder


@pytest.fixture
async def comms() -> AsyncIterator[list[Comm]]:
    """The comms of all three ranks, on loopback."""
    async with loopback_world(3) as found:
        yield found


def full(comm: Comm, n: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((n,), comm.rank + 1, dtype=dtype)


async def on_all(comms: Sequence[Comm], run: Callable[[Comm], Awaitable[Any]]) -> list[Any]:
    try:
        async with asyncio.timeout(60):
            return await asyncio.gather(*map(run, comms))
    except BaseException:
        for comm in comms:
            comm.abort()  # closing would wait for what the others have called
        raise


# -- what may be in a scope


async def test_one_batch_of_everything(comms: list[Comm]) -> None:
    records = [Recorder(comm) for comm in comms]

    async def run(comm: Comm) -> list[Any]:
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        async with comm.coalesce() as batch:
            comm.all_reduce(full(comm))
            comm.all_reduce(full(comm, dtype=torch.bfloat16))
            comm.all_reduce(full(comm), ReduceOp.MAX)
            comm.all_reduce(full(comm, 5))
            comm.broadcast(full(comm), 2)
            comm.broadcast(full(comm, 1, torch.int8), 2)
            comm.barrier()
            comm.all_gather_single(None, full(comm, 1))
            comm.all_gather_v(None, full(comm, comm.rank), [0, 1, 2])
            comm.all_gather_object(comm.rank)
            comm.send(full(comm), following)
            comm.recv(torch.zeros(3), previous)
            comm.send_object("hello", following)
            comm.recv_object(previous)
            assert comm.statistics().held == 14
        assert comm.statistics().held == 0
        return await batch

    results = await on_all(comms, run)
    for rank, got in enumerate(results):
        tensors = [x.tolist() for x in got[:6]]
        assert tensors == [[6] * 3, [6] * 3, [3] * 3, [6] * 5, [3] * 3, [3]]
        assert got[6] is None
        assert [x.tolist() for x in got[7:9]] == [[1, 2, 3], [2, 3, 3]]
        assert got[9] == [0, 1, 2]
        assert got[11].tolist() == [(rank - 1) % 3 + 1] * 3
        assert got[13] == "hello"
    assert all(record.collectives == records[0].collectives for record in records)
    merged = [members for batch in records[0].collectives for _, members, _ in batch if members]
    assert [len(members) for members in merged] == [2, 2], "two of the sums, two of the copies"
    assert all(comm.statistics()[1:4] == (0, 0, 0) for comm in comms)


async def test_numbers_are_the_same_on_all_ranks(comms: list[Comm]) -> None:
    async def run(comm: Comm) -> list[int]:
        await comm.barrier()
        with comm.coalesce() as batch:
            t = full(comm)
            comm.all_reduce(t)
            if comm.rank == 0:
                comm.send(full(comm), 1)
            comm.broadcast(full(comm), 0)
            if comm.rank == 1:
                comm.recv(full(comm), 0)
            comm.all_reduce(t)
            comm.all_reduce(full(comm))
        await batch
        return [work.seq for work in batch.works if not work.op.p2p]

    assert await on_all(comms, run) == [[1, 2, 3, 4]] * 3


STEPS: dict[str, Callable[[Comm, Tensor, Tensor], Any]] = {
    "twice": lambda c, t, u: [c.all_reduce(t), c.all_reduce(t), c.all_reduce(t)],
    "into and from": lambda c, t, u: [c.all_reduce(t, out=u), c.all_reduce(u), c.all_reduce(u, out=t)],
    "overlapping": lambda c, t, u: [c.all_reduce(t[:4]), c.all_reduce(t[2:]), c.all_reduce(t[1:3])],
    "roots": lambda c, t, u: [c.broadcast(t, 0), c.all_reduce(t), c.broadcast(t, 1), c.broadcast(t, 1)],
    "scatter and gather": lambda c, t, u: [
        c.reduce_scatter_single(u[:2], t),
        c.all_gather_single(t, u[:2]),
        c.all_reduce(t),
    ],
    "read after broadcast": lambda c, t, u: [c.broadcast(t, 2), c.all_reduce(t, out=u), c.broadcast(t, 0)],
    "lists": lambda c, t, u: [c.all_reduce_coalesced([t, u]), c.all_reduce_coalesced([u, t], ReduceOp.MAX)],
    "lists of dtypes": lambda c, t, u: [
        c.all_reduce_coalesced([t, torch.ones(2, dtype=torch.int64)]),
        c.reduce_scatter_coalesced([u[:2]], [t]),
        c.all_reduce(t),
    ],
    "reduce": lambda c, t, u: [c.reduce(t, 0), c.broadcast(t, 0), c.reduce(t, 1), c.all_reduce(t)],
    "reduce into": lambda c, t, u: [c.reduce(t, 1, out=u if c.rank == 1 else None), c.all_reduce(u)],
    "rooted lists": lambda c, t, u: [
        c.gather(list(t.chunk(3)) if c.rank == 1 else None, u[:2], 1),
        c.gather(list(t.chunk(3)) if c.rank == 1 else None, u[2:4], 1),
        c.scatter(u[:2], list(t.chunk(3)) if c.rank == 1 else None, 1),
        c.all_reduce(t),
        c.all_reduce(u),
    ],
    "sizes exchanged": lambda c, t, u: [
        c.all_reduce(u),
        c.all_gather_v(t, u[:2]),
        c.all_reduce(t),
        c.all_reduce(u, ReduceOp.MAX),
    ],
    "uneven": lambda c, t, u: [
        c.reduce_scatter_v(t[: c.rank], u[:3], [0, 1, 2]),
        c.all_gather_v(u[:3], t[: c.rank], [0, 1, 2]),
        c.all_reduce(t),
        c.all_reduce(u),
    ],
}


@pytest.mark.parametrize("name", STEPS)
async def test_dependent_operations_take_effect_in_order(comms: list[Comm], name: str) -> None:
    records = [Recorder(comm) for comm in comms]
    found: list[list[tuple[list[float], list[float]]]] = []
    for held in (False, True):

        async def run(comm: Comm, held: bool = held) -> tuple[list[float], list[float]]:
            t, u = torch.arange(6.0) + comm.rank, torch.arange(6.0) * comm.rank
            if held:
                async with comm.coalesce() as batch:
                    STEPS[name](comm, t, u)
                await batch
            else:
                for work in STEPS[name](comm, t, u):
                    await work
            return t.tolist(), u.tolist()

        for record in records:
            record.batches.clear()
        found.append(await on_all(comms, run))
    assert found[0] == found[1]
    assert all(record.collectives == records[0].collectives for record in records)
    for record in records:
        for batch in record.batches:
            for i, one in enumerate(batch):
                for other in batch[i + 1 :]:
                    expect_apart(one, other)


def expect_apart(one: Any, other: Any) -> None:
    """Backends may run what is in one batch in any order."""
    places = [
        ({t.data_ptr() for t in s.outputs if t.numel()}, {t.data_ptr() for t in s.inputs if t.numel()})
        for s in (one, other)
    ]
    (writes, reads), (others_writes, others_reads) = places
    clash = writes & others_writes or writes & others_reads or others_writes & reads
    assert not clash, f"{one.op} and {other.op} in one batch"


PARCELS: dict[str, Callable[[Comm, Tensor], Sequence[Work[Any]]]] = {
    "sizes exchanged, then written": lambda c, t: [c.all_gather_v(None, t), c.all_reduce(t)],
    "written, then sizes exchanged": lambda c, t: [c.all_reduce(t), c.all_gather_v(None, t)],
    "sizes exchanged into what is read": lambda c, t: [c.all_gather_v(t, torch.ones(2)), c.all_reduce(t)],
    "a dict": lambda c, t: [c.broadcast_tensor_dict({"t": t} if c.rank == 0 else None, 0), c.all_reduce(t)],
}


@pytest.mark.parametrize("name", PARCELS)
async def test_memory_of_parcels_counts(comms: list[Comm], name: str) -> None:
    """Their tensors are not among the inputs and outputs of a submission, but are read and written all the same."""
    records = [Recorder(comm) for comm in comms]

    async def run(comm: Comm) -> None:
        t = torch.ones(6)
        async with comm.coalesce() as batch:
            PARCELS[name](comm, t)
        await batch

    await on_all(comms, run)
    assert [len(record.collectives) for record in records] == [2] * 3, "each in a batch of its own"


async def test_messages_of_objects_share_no_memory_with_others() -> None:
    async with loopback_world(1) as (comm,):
        t = torch.ones(3)
        with pytest.raises(ValueError, match="shares memory"), comm.coalesce():
            works: list[Work[Any]] = [comm.send_tensor_dict({"t": t}, 0), comm.all_reduce(t)]
        for work in works:
            with pytest.raises(NotSentError):
                await work


async def test_a_message_may_share_memory_that_is_only_read(comms: list[Comm]) -> None:
    """On this rank, whatever others do with theirs."""

    async def run(comm: Comm) -> list[float]:
        t = full(comm)
        async with comm.coalesce() as batch:
            out = torch.zeros(3)
            comm.reduce(t, 0, out=out if comm.rank == 0 else None)
            comm.broadcast(t if comm.rank == 1 else torch.zeros(3), 1)
            comm.send(t, (comm.rank + 1) % 3)
            comm.recv(torch.zeros(3), (comm.rank - 1) % 3)
        return (await batch)[3].tolist()  # type: ignore[no-any-return]

    assert await on_all(comms, run) == [[3] * 3, [1] * 3, [2] * 3]


async def test_lists_and_message_batches(comms: list[Comm]) -> None:
    async def run(comm: Comm) -> Any:
        dtypes = [torch.float32, torch.int64, torch.float32]
        messages = comm.batch_op_create()
        messages.recv(torch.zeros(2), (comm.rank - 1) % 3)
        messages.send(full(comm, 2), (comm.rank + 1) % 3)
        async with comm.coalesce() as batch:
            works: list[Work[Any]] = [
                comm.all_reduce_coalesced([full(comm, n, d) for n, d in enumerate(dtypes, 1)]),
                messages.issue(),
                comm.reduce_scatter_coalesced(None, [full(comm, 3), full(comm, 3, torch.int64)]),
                comm.all_reduce(full(comm)),
            ]
            assert not any(work.done() for work in works)
        assert batch.works == works
        assert [work.seq for work in works] == [0, 0, 2, 4], "of the first of each"
        assert (comm.statistics().submitted, comm.statistics().held, comm.statistics().batches) == (7, 0, 1)
        return [[x.tolist() for x in found] for found in (await batch)[:3]]

    for rank, found in enumerate(await on_all(comms, run)):
        assert found[0] == [[6], [6, 6], [6, 6, 6]]
        assert found[1] == [[float((rank - 1) % 3 + 1)] * 2, [rank + 1.0] * 2]
        assert found[2] == [[6], [6]]


async def test_lists_that_fill_a_batch_between_their_dtypes(comms: list[Comm]) -> None:
    async def run(comm: Comm) -> Any:
        async with comm.coalesce(max_ops=2) as batch:
            for _ in range(3):
                comm.all_reduce_coalesced([full(comm, 1, d) for d in (torch.float32, torch.int64, torch.int8)])
            assert comm.statistics().held == 1
        assert comm.statistics().batches == 4
        return [[x.item() for x in tensors] for tensors in await batch]

    assert await on_all(comms, run) == [[[6, 6, 6]] * 3] * 3


async def test_a_group_within_a_scope(comms: list[Comm]) -> None:
    """It is another comm: what is called on it is sent at once, and what this one holds stays held."""

    async def run(comm: Comm) -> Any:
        async with comm.coalesce():
            before = comm.all_reduce(full(comm))
            async with comm.split([0, 1, 2], "all") as group:
                assert group is not None
                inside = group.all_reduce(full(comm))
                assert (group.statistics().held, comm.statistics().held) == (0, 1)
                await inside
            assert not before.done()
        return [(await work).tolist() for work in (before, inside)]

    assert await on_all(comms, run) == [[[6] * 3] * 2] * 3


# -- the same batches on all ranks


async def suspended(chaos: random.Random) -> None:
    for _ in range(chaos.choice([0, 0, 1, 2, 7])):
        await asyncio.sleep(0)


async def program(comm: Comm, seed: int) -> list[list[float]]:
    """The same on all ranks, but for when they get to it."""
    plan, chaos = random.Random(seed), random.Random(f"{seed} {comm.rank}")
    pool = [torch.arange(12.0) + i for i in range(4)]
    for _ in range(plan.randrange(1, 4)):
        await suspended(chaos)
        async with comm.coalesce(max_ops=plan.choice([None, 2, 5]), max_bytes=plan.choice([None, 40, 200])) as batch:
            for _ in range(plan.randrange(1, 20)):
                await suspended(chaos)
                await step(comm, batch, plan, pool)
        await suspended(chaos)
    await comm.barrier()
    return [t.tolist() for t in pool]


async def step(comm: Comm, batch: CoalesceScope, plan: random.Random, pool: list[Tensor]) -> None:
    t, other = plan.sample(pool, 2)
    start = plan.randrange(6)
    part, root = t[start : start + 6], plan.randrange(comm.size)
    work: Work[Any] | None = None
    match plan.randrange(11):
        case 0 | 1:
            work = comm.all_reduce(part, plan.choice([ReduceOp.MAX, ReduceOp.MIN]))
        case 2:
            work = comm.broadcast(part, root)
        case 3:
            work = comm.all_reduce(part, ReduceOp.MAX, out=other[:6])
        case 4:
            work = comm.reduce_scatter_single(other[:2], part, ReduceOp.MAX)
        case 5:
            work = comm.all_gather_single(other[6:], part[:2])
        case 6:
            work = comm.barrier()
        case 7:
            comm.send(torch.ones(2), (comm.rank + 1) % comm.size)
            comm.recv(torch.ones(2), (comm.rank - 1) % comm.size)
        case 8:
            batch.flush()
        case 9:
            with comm.coalesce():
                comm.all_reduce_coalesced([part, other[:3]], ReduceOp.MAX)
        case 10:
            work = comm.reduce(part, root, ReduceOp.MAX)
    if work is not None and plan.randrange(6) == 0:
        await work


async def disturb(comm: Comm, seed: int, over: asyncio.Event) -> None:
    """Other tasks of the same rank, on the same comm: messages, which need no order among ranks."""
    chaos = random.Random(f"disturb {seed} {comm.rank}")
    while not over.is_set():
        await suspended(chaos)
        received = comm.recv(torch.zeros(1), comm.rank, 5)
        async with comm.coalesce():
            await suspended(chaos)
            comm.send(torch.ones(1), comm.rank, 5)
        await received


@pytest.mark.parametrize("seed", range(20))
async def test_ranks_that_come_in_their_own_time_send_the_same_batches(comms: list[Comm], seed: int) -> None:
    records = [Recorder(comm) for comm in comms]
    over = asyncio.Event()
    others = [asyncio.create_task(disturb(comm, seed, over)) for comm in comms]
    try:
        results = await on_all(comms, lambda comm: program(comm, seed))
    finally:
        over.set()
        await asyncio.gather(*others)
    for record in records[1:]:
        assert record.collectives == records[0].collectives
    # and what comes out is what one rank after the other, with a world to itself each time, would get
    async with loopback_world(3) as calm:
        assert await on_all(calm, lambda comm: program(comm, seed)) == results


async def test_a_rank_that_awaits_elsewhere_is_seen_in_its_batches(comms: list[Comm]) -> None:
    """What the test above would see if boundaries depended on time."""
    records = [Recorder(comm) for comm in comms]
    works: list[Work[Any]] = []
    for comm in comms:
        with comm.coalesce() as batch:
            works.append(comm.barrier())
            if comm.rank == 1:
                batch.flush()
            works.append(comm.all_reduce(full(comm)))
    assert records[0].collectives == records[2].collectives
    assert records[0].collectives != records[1].collectives
    for comm in comms:
        comm.abort()
    await asyncio.gather(*works, return_exceptions=True)


# -- arguments


async def test_arguments(comms: list[Comm]) -> None:
    comm = comms[0]
    wrong: Any
    with pytest.raises(ValueError, match="comms must be at least one Comm, got none"):
        coalesce()
    for wrong in (None, "x", comm.coalesce(), [comm]):
        with pytest.raises(TypeError, match=r"comms\[1\] must be a Comm, got"):
            coalesce(comm, wrong)
    with pytest.raises(ValueError, match="comms must be different ones"):
        coalesce(comm, comms[1], comm)
    with pytest.raises(TypeError, match="positional"):
        comm.coalesce(5)  # type: ignore[misc]
    assert asynccomm.coalesce is coalesce
    assert comm.statistics().submitted == 0
    with pytest.raises(NotImplementedError, match="'loopback' cannot estimate"):
        comm.time_estimator()


async def test_both_are_batches(comms: list[Comm]) -> None:
    assert isinstance(comms[0].coalesce(max_ops=3, max_bytes=7), CoalesceScope)
    assert isinstance(coalesce(*comms, max_ops=3, max_bytes=7), CoalesceScope)
