"""Checks of operations that a scope defers and submits together."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.core.work import Work
from asynccomm.errors import NotSentError
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.argument_forms import Forms, StartedOp, expect_finished
from asynccomm.testing.conformance.data import everyones, expect_equal, reduced, sample, sentinel, strided
from asynccomm.testing.conformance.objects import expect_same

KINDS = [
    ((3, 4), torch.float32),
    ((0,), torch.int64),
    ((5_003,), torch.float32),
    ((), torch.bfloat16),
    ((7, 3), torch.complex64),
    ((257,), torch.uint8),
]


def _parts(forms: Forms, op: ReduceOp) -> list[list[StartedOp]]:
    """All operations, in an order that is the same on all ranks."""
    makers = [forms.lists, forms.copies, forms.singles, forms.messages]
    makers += [lambda: forms.reductions(op), lambda: forms.scattered_reductions(op)]
    random.Random(1).shuffle(makers)
    return [list(make()) for make in makers]


async def everything_in_one_scope(comm: Comm) -> None:
    all_forms, started = [], list[StartedOp]()
    async with comm.coalesce():
        for i, (shape, dtype) in enumerate(KINDS):
            forms = Forms(comm, shape, dtype, strided if i % 3 == 0 else torch.clone)
            all_forms.append(forms)
            for part in _parts(
                forms, ReduceOp.AVG if i % 2 else ReduceOp.MAX if dtype == torch.uint8 else ReduceOp.SUM
            ):
                started += part
        assert not any(work.done() for _, work, _ in started), "nothing is sent before the end"
    random.Random(comm.rank).shuffle(started)
    await expect_finished(started, "in a scope")
    for forms in all_forms:
        forms.expect_inputs_untouched("in a scope")


async def objects_and_tensors_in_one_scope(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    tensors = {"a": sample(1, (5, 2)), "b": [sample(1, (1000,)), 3]}
    works: list[tuple[Work[Any], object]] = []
    async with comm.coalesce():
        for i in range(3):
            works.append((comm.all_gather_object((rank, "x" * i)), [(r, "x" * i) for r in range(size)]))
            total = reduced(everyones(size, (9,), salt=i), ReduceOp.SUM)
            works.append((comm.all_reduce(sample(rank, (9,), salt=i)), total))
            works.append((comm.broadcast_tensor_dict(tensors if rank == i % size else None, i % size), tensors))
            works.append((comm.send_object((rank, i), following, i), None))
            works.append((comm.recv_object(previous, i), (previous, i)))
            works.append((comm.barrier(), None))
    for work, expected in reversed(works):
        expect_same(await work, expected, f"{work.op} in a scope")


def _operations(comm: Comm, t: Tensor, u: Tensor, lists: list[Tensor]) -> Iterator[Work[Any]]:
    """Operations on shared tensors: each depends on earlier ones."""
    last = comm.size - 1
    at_last = lists if comm.rank == last else None
    yield comm.all_reduce(t)
    yield comm.all_reduce(t, ReduceOp.MAX)
    yield comm.all_reduce(t[3:9], ReduceOp.MIN)
    yield comm.reduce_scatter_single(u, t)
    yield comm.all_gather_single(t, u)
    yield comm.broadcast(u, 0)
    yield comm.broadcast(u, 0)
    yield comm.all_gather(lists, u)
    yield comm.broadcast(u, last)
    yield comm.reduce(u, 0)
    yield comm.broadcast(u, 0)
    yield comm.all_to_all_single(t, t)
    yield comm.gather(at_last, u, last)
    yield comm.gather(at_last, t[:6], last)
    yield comm.scatter(u, at_last, last)
    yield comm.all_reduce(lists[0], out=u)
    yield comm.reduce(u, last, out=t[:6] if comm.rank == last else None)
    yield comm.all_reduce(t[:6])
    yield comm.all_reduce_coalesced([t, u], ReduceOp.MAX)
    yield comm.all_gather_v(None, u, [6] * comm.size)
    yield comm.broadcast_coalesced([u, t], 0)
    yield comm.all_reduce(t)


async def operations_on_the_same_tensors_in_one_scope(comm: Comm) -> None:
    """Check that operations take effect in program order, as without a scope."""
    one_by_one, together = (
        [
            sample(comm.rank, (6 * comm.size,)),
            sample(comm.rank, (6,), salt=1),
            *[sentinel((6,)) for _ in range(comm.size)],
        ]
        for _ in range(2)
    )
    for work in _operations(comm, one_by_one[0], one_by_one[1], one_by_one[2:]):
        await work
    async with comm.coalesce() as batch:
        for work in _operations(comm, together[0], together[1], together[2:]):
            assert not work.done()
    await batch
    for i, (apart, held) in enumerate(zip(one_by_one, together, strict=True)):
        expect_equal(held, apart, f"tensor {i} after many operations on it in one scope")


async def scopes_with_limits(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for limits in (
        {"max_ops": 1},
        {"max_ops": 7},
        {"max_bytes": 1},
        {"max_bytes": 4096},
        {"max_ops": 3, "max_bytes": 99},
    ):
        started = []
        async with comm.coalesce(**limits):
            for i in range(20):
                shape = (1 + 37 * i,)
                total = reduced(everyones(size, shape, salt=i), ReduceOp.SUM)
                started.append(StartedOp("all_reduce", comm.all_reduce(sample(rank, shape, salt=i)), [total]))
                copy = sample(i % size, shape) if rank == i % size else sentinel(shape)
                started.append(StartedOp("broadcast", comm.broadcast(copy, i % size), [sample(i % size, shape)]))
        await expect_finished(started, f"in a scope with {limits}")


async def nested_scopes_and_exceptions(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    total = reduced(everyones(size, (4,)), ReduceOp.SUM)
    dropped: list[Work[Any]] = []
    async with comm.coalesce() as batch:
        comm.all_reduce(sample(rank, (4,)))
        with comm.coalesce():
            comm.all_reduce(sample(rank, (4,)))
        with contextlib.suppress(ZeroDivisionError), comm.coalesce() as inner:
            comm.all_reduce(sample(rank, (4,)))
            dropped += inner.works
            raise ZeroDivisionError
        comm.all_reduce(sample(rank, (4,)))
    works = [work for work in batch.works if work not in dropped]
    assert len(works) == 3
    await expect_finished([StartedOp("all_reduce", work, [total]) for work in works], "in nested scopes")
    tensor = sample(rank, (4,))
    with contextlib.suppress(ZeroDivisionError):
        async with comm.coalesce() as outer:
            comm.all_reduce(tensor)
            comm.barrier()
            comm.send(tensor.clone(), rank, 5)
            dropped += outer.works
            raise ZeroDivisionError
    assert len(dropped) == 4
    for work in dropped:
        assert isinstance(work.exception(), NotSentError), f"{work.op} was left by an exception: {work!r}"
    expect_equal(tensor, sample(rank, (4,)), "a tensor of a scope that was left by an exception")
    expect_equal(await comm.all_reduce(tensor), total, "all_reduce after a scope that was left by an exception")


async def memory_that_is_freed_in_a_scope(comm: Comm) -> None:
    for layout in (torch.clone, strided):
        kept = sample(comm.rank, (6,))
        for free in (0, 8):
            freed = layout(sample(comm.rank, (6,)))
            message = ""
            try:
                async with comm.coalesce() as batch:
                    comm.all_reduce(kept)
                    comm.all_reduce(freed)
                    freed.untyped_storage().resize_(free)
            except ValueError as exc:
                message = str(exc)
            assert "was freed between its call and the end of its operation" in message, f"of {free} bytes: {message!r}"
            for work in batch.works:
                assert isinstance(work.exception(), NotSentError), f"{work.op} has no memory: {work!r}"
        expect_equal(kept, sample(comm.rank, (6,)), "a tensor of a scope with another one that was freed")
    total = reduced(everyones(comm.size, (6,)), ReduceOp.SUM)
    expect_equal(await comm.all_reduce(kept), total, "all_reduce after a scope without its memory")


async def scopes_with_suspensions_of_their_own(comm: Comm) -> None:
    """Check scopes in which ranks suspend at different points, while other tasks on them use the comm as well."""
    chaos = random.Random(f"{comm.name} {comm.rank}")
    await asyncio.gather(_scopes_with_suspensions(comm, chaos), _messages_meanwhile(comm, chaos))


async def _scopes_with_suspensions(comm: Comm, chaos: random.Random) -> None:
    size, rank = comm.size, comm.rank
    plan = random.Random(7)  # the same on all ranks
    for n in range(6):
        started = []
        pool = [sample(rank, (40 * size,), salt=n) for _ in range(3)]
        values = [[sample(r, (40 * size,), salt=n) for r in range(size)] for _ in pool]  # by rank
        async with comm.coalesce(max_ops=plan.choice([None, 3, 10])):
            for i in range(plan.randrange(1, 25)):
                await _suspended(chaos)
                kind, which = plan.randrange(4), plan.randrange(3)
                if kind == 0:
                    work: Work[Any] = comm.all_reduce(pool[which], ReduceOp.MAX)
                    values[which] = [reduced(values[which], ReduceOp.MAX)] * size
                elif kind == 1:
                    work = comm.broadcast(pool[which], i % size)
                    values[which] = [values[which][i % size]] * size
                elif kind == 2:
                    shares = [x.chunk(size)[0].clone() for x in values[which]]
                    started.append(StartedOp("all_gather", comm.all_gather(None, pool[which].chunk(size)[0]), shares))
                    continue
                else:
                    work = comm.barrier()
                if plan.randrange(8) == 0:
                    await work
        await _suspended(chaos)
        await comm.barrier()
        await expect_finished(started, "in a scope with suspensions")
        for tensor, expected in zip(pool, values, strict=True):
            expect_equal(tensor, expected[rank], "a tensor after a scope with suspensions")


async def _suspended(chaos: random.Random) -> None:
    for _ in range(chaos.choice([0, 0, 1, 5])):
        await asyncio.sleep(0)


async def _messages_meanwhile(comm: Comm, chaos: random.Random) -> None:
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for i in range(20):
        received = comm.recv(sentinel((3,)), previous, 9)
        await _suspended(chaos)
        await comm.send(sample(comm.rank, (3,), salt=i), following, 9)
        expect_equal(await received, sample(previous, (3,), salt=i), "a message beside a scope")


async def hundreds_of_small_operations_in_one_scope(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    started = []
    async with comm.coalesce():
        for i in range(300):
            dtype, shape = dtypes[i % 3], (i % 11,)
            total = reduced(everyones(size, shape, dtype), ReduceOp.SUM)
            started.append(StartedOp("all_reduce", comm.all_reduce(sample(rank, shape, dtype)), [total]))
            if i % 3 == 0:
                copy = sample(1, shape, dtype) if rank == i % size else sentinel(shape, dtype)
                started.append(StartedOp("broadcast", comm.broadcast(copy, i % size), [sample(1, shape, dtype)]))
            elif i % 10 == 1:
                everyone = everyones(size, shape, dtype)
                started.append(StartedOp("all_gather", comm.all_gather(None, sample(rank, shape, dtype)), everyone))
                whole = torch.cat(everyone)
                gathered = comm.all_gather_single(None, sample(rank, shape, dtype))
                started.append(StartedOp("all_gather_single", gathered, [whole]))
                wide = sample(rank, (size, *shape), dtype)
                mine = reduced(everyones(size, (size, *shape), dtype), ReduceOp.MIN)[rank]
                scattered = comm.reduce_scatter_single(sentinel(shape, dtype), wide, ReduceOp.MIN)
                started.append(StartedOp("reduce_scatter_single", scattered, [mine]))
    await expect_finished(started, "among hundreds in a scope")


async def large_and_small_operations_in_one_scope(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    numels = [3, 400_001, 17, 300_007, 150_001, 0, 150_001, 5]  # above and below the fusion limit
    for _ in range(2):
        started = []
        async with comm.coalesce():
            for i, n in enumerate(numels):
                total = reduced(everyones(size, (n,), salt=i), ReduceOp.SUM)
                started.append(StartedOp("all_reduce", comm.all_reduce(sample(rank, (n,), salt=i)), [total]))
                copy = sample(0, (n,), salt=i) if rank == 0 else sentinel((n,))
                started.append(StartedOp("broadcast", comm.broadcast(copy, 0), [sample(0, (n,), salt=i)]))
        await expect_finished(started, "large ones among small ones in a scope")


async def rings_of_messages_in_one_scope(comm: Comm) -> None:
    """All ranks send before they receive, more than any buffer holds; collectives between them are not delayed."""
    size, rank = comm.size, comm.rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    started = []
    async with comm.coalesce():
        for i, n in enumerate((3, 120_011, 0, 70_001)):
            mine = sample(rank, (n,), salt=i)
            started.append(StartedOp("send", comm.send(mine, following, i % 2), [mine]))
            total = reduced(everyones(size, (5,), salt=i), ReduceOp.SUM)
            started.append(StartedOp("all_reduce", comm.all_reduce(sample(rank, (5,), salt=i)), [total]))
            batch = comm.batch_op_create()
            batch.send(mine, previous, 7)
            batch.recv(sentinel((n,)), following, 7)
            started.append(StartedOp("batch", batch.issue(), [mine, sample(following, (n,), salt=i)]))
        for i, n in enumerate((3, 120_011, 0, 70_001)):
            expected = [sample(previous, (n,), salt=i)]
            started.append(StartedOp("recv", comm.recv(sentinel((n,)), previous, i % 2), expected))
    await expect_finished(started, "a ring in a scope")


async def messages_of_some_ranks_in_a_scope_of_all(comm: Comm) -> None:
    """Messages of some ranks only, which must not change the batches of collectives."""
    size, rank = comm.size, comm.rank
    started = []
    async with comm.coalesce(max_ops=2):
        for i in range(6):
            total = reduced(everyones(size, (3,), salt=i), ReduceOp.SUM)
            started.append(StartedOp("all_reduce", comm.all_reduce(sample(rank, (3,), salt=i)), [total]))
            for j in range(i):
                if rank == 0:
                    mine = sample(j, (4,), salt=i)
                    started.append(StartedOp("send", comm.send(mine, size - 1, i), [mine]))
                if rank == size - 1:
                    expected = [sample(j, (4,), salt=i)]
                    started.append(StartedOp("recv", comm.recv(sentinel((4,)), 0, i), expected))
    await expect_finished(started, "in a scope with messages of some ranks")


async def awaiting_in_a_scope(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    total = reduced(everyones(size, (6,)), ReduceOp.SUM)
    following, previous = (rank + 1) % size, (rank - 1) % size
    async with comm.coalesce() as batch:
        for i in range(5):
            works = [comm.all_reduce(sample(rank, (6,))) for _ in range(4)]
            comm.send(sample(rank, (6,)), following, i)
            received = comm.recv(sentinel((6,)), previous, i)
            if i % 2:
                results: list[Tensor] = await asyncio.gather(*works, received)
            else:
                results = [await work for work in [*works, received]]
            for tensor in results[:4]:
                expect_equal(tensor, total, "all_reduce awaited in a scope")
            expect_equal(results[4], sample(previous, (6,)), "recv awaited in a scope")
        comm.barrier()
        assert len(await batch) == 31
        await asyncio.create_task(_apart(comm, total))
        left = comm.all_reduce(sample(rank, (6,)))
        assert not left.done()
    expect_equal(await left, total, "the last all_reduce of a scope")


async def _apart(comm: Comm, total: Tensor) -> None:
    """Run all_reduce in another task, so that the scope does not defer it."""
    expect_equal(await comm.all_reduce(sample(comm.rank, (6,))), total, "all_reduce of a task started in a scope")
