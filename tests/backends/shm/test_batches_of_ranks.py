"""Batches between processes: who drives them, and what becomes of them when ranks are late, differ, fail or go."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, BackendError, CollectiveMismatchError, Comm, ReduceOp, new_comm, ops
from asynccomm.backends.shm.board import Board
from asynccomm.comm.scopes import CoalesceScope
from asynccomm.ops import Call
from tests.sampling import amount

from .calls import DTYPES, KINDS, legal, make, values

LARGE = 3 << 19  # elements: for the worker, in many steps


def batch(comm: Comm, calls: Sequence[Call]) -> CoalesceScope:
    """As one batch."""
    with comm.coalesce() as scope:
        for call in calls:
            comm._submit(call, None, None)
    return scope


def reduced(comm: Comm, *tensors: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> list[Call]:
    return [ops.AllReduce.of(comm._group, tensor, op) for tensor in tensors]


def board_of(comm: Comm) -> Board:
    backend: Any = comm._session.backend
    board: Board = backend._engine._board
    return board


def mixture(comm: Comm, seed: int) -> list[Call]:
    """Every rank makes the same sequence, with tensors of its own."""
    choose, own = random.Random(seed), random.Random(seed + 100 * comm.rank)
    calls = []
    for _ in range(choose.randint(1, 20)):
        kind, n, root = choose.choice(KINDS), choose.choice([0, 1, 100, 5000, 40_000]), choose.randrange(comm.size)
        dtype = choose.choice(DTYPES)
        op = choose.choice([op for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG) if legal(op, dtype)])
        new = partial(values, dtype=dtype, strided=choose.random() < 0.2, choose=own)
        calls.append(make(kind, comm._group, n, root, op, new))
    return calls


@pytest.mark.ranks([1, 2, 3, 4], backend="shm")
@pytest.mark.parametrize("late", [False, True])
async def test_any_batch_is_what_one_by_one_is(comm: Comm, late: bool) -> None:
    """Also on ranks that come late, and where batches follow each other."""
    for seed in range(0, amount(30, 9), 3):
        together = [mixture(comm, seed + i) for i in range(3)]
        alone = [mixture(comm, seed + i) for i in range(3)]
        if late and comm.rank == seed % comm.size:
            await asyncio.sleep(0.01)
        works = [batch(comm, calls) for calls in together]
        await asyncio.gather(*works)
        for calls in alone:
            for call in calls:
                await comm._submit(call, None, None)
        for mine, others in zip(together, alone, strict=True):
            for one, other in zip(mine, others, strict=True):
                for a, b in zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True):
                    assert torch.equal(a, b), one.op


@pytest.mark.ranks(2, backend="shm")
async def test_operations_of_one_kind_take_one_step(comm: Comm) -> None:
    board = board_of(comm)
    await comm.barrier()
    before = board.state.step
    tensors = [torch.full((n,), comm.rank + 1.0) for n in range(100)]
    await batch(comm, reduced(comm, *tensors))
    assert board.state.step == before + 1
    assert all(tensor.eq(3).all() for tensor in tensors)


@pytest.mark.ranks(2, backend="shm")
async def test_a_fused_operation_is_over_in_the_call_where_the_peer_was_first(comm: Comm) -> None:
    first = torch.zeros(1)
    for turn in range(20):
        calls = reduced(comm, torch.ones(1), torch.ones(2))
        if comm.rank == turn % 2:
            work = batch(comm, calls)
            await comm.send(first, 1 - comm.rank)  # "I have posted mine"
            await work
        else:
            await comm.recv(first, 1 - comm.rank)
            assert all(work.done() for work in batch(comm, calls).works)


@pytest.mark.ranks(2, backend="shm")
async def test_the_works_of_fused_operations_settle_together(comm: Comm) -> None:
    calls = [*reduced(comm, torch.ones(1), torch.ones(2), torch.ones(3)), ops.Barrier.of(comm._group)]
    if comm.rank == 1:
        await comm.recv(torch.ones(1), 0)
        await batch(comm, calls)
        return
    parts = batch(comm, calls).works
    assert [part.done() for part in parts] == [False] * 4
    seen: list[list[bool]] = []
    for part in parts:
        part.add_done_callback(lambda _: seen.append([each.done() for each in parts[:3]]))
    await comm.send(torch.ones(1), 1)
    await asyncio.gather(*parts)
    assert seen == [[True] * 3] * 4


@pytest.mark.ranks([2, 3], backend="shm")
@pytest.mark.parametrize("inline", [None, "0", "1000"])
async def test_large_and_small_ones_stay_in_order(comm: Comm, inline: str | None) -> None:
    """Fused operations, single ones, and those of the worker: each reads what the one before has written."""
    hints = {} if inline is None else {"inline_bytes": inline}
    async with new_comm("shm", name="mixed", timeout=60, hints=hints) as mixed:
        small, large = torch.ones(10), torch.ones(LARGE)
        factor = float(comm.size)
        works: list[Awaitable[object]] = []
        for _ in range(3):
            works.append(mixed.all_reduce(small))
            works.append(batch(mixed, reduced(mixed, small, torch.ones(3), large, torch.ones(5))))
            works.append(batch(mixed, [*reduced(mixed, torch.ones(2), small), ops.Barrier.of(mixed._group)]))
            works.append(mixed.all_reduce(large))
        await asyncio.gather(*works)
        assert small.eq(factor**9).all()
        assert large.eq(factor**6).all()


@pytest.mark.ranks(2, backend="shm")
async def test_messages_of_a_batch_wait_for_no_collective(comm: Comm) -> None:
    group, other = comm._group, 1 - comm.rank
    sent, got, tensor = torch.full((4,), comm.rank + 1.0), torch.zeros(4), torch.ones(4)
    messages = [ops.Send.of(group, sent, other, 3), ops.Recv.of(group, got, other, 3)]
    reduces = reduced(comm, tensor, torch.ones(3))
    if comm.rank == 0:
        work = batch(comm, [reduces[0], messages[0], reduces[1], messages[1]])
    else:
        await asyncio.gather(*[comm._submit(call, None, None) for call in messages])  # rank 0's batch waits
        work = batch(comm, reduces)
    await work
    assert got.eq(other + 1).all()
    assert tensor.eq(2).all()


@pytest.mark.ranks(2, backend="shm")
async def test_threads_that_wait_for_batches_need_no_loop(comm: Comm) -> None:
    tensors = [torch.ones(8), torch.ones(LARGE), torch.ones(3)]

    def blocking() -> None:
        for _ in range(5):
            batch(comm, reduced(comm, *tensors, op=ReduceOp.MAX)).wait(timeout=30)
            batch(comm, reduced(comm, tensors[0], op=ReduceOp.MAX) * 3).wait(timeout=30)

    thread = threading.Thread(target=blocking)
    thread.start()
    thread.join(60)  # blocks the loop
    assert not thread.is_alive()
    await comm.barrier()


def mistaken(comm: Comm, case: str, wrong: bool) -> list[list[Call]]:
    """Batches on a comm of which one rank has made a mistake."""
    ones = [torch.ones(n) for n in (1, 2, 3, 4, 20_000, LARGE)]
    if not wrong:
        return [reduced(comm, *ones)]
    match case:
        case "one more":
            return [reduced(comm, *ones, torch.ones(1))]
        case "one less":
            return [reduced(comm, *ones[:-1])]
        case "one other":
            return [[*reduced(comm, *ones[:3]), ops.Barrier.of(comm._group), *reduced(comm, *ones[4:])]]
        case "other dtype":
            return [reduced(comm, *ones[:3], torch.ones(4).long(), *ones[4:])]
        case "cut":
            return [reduced(comm, *ones[:4]), reduced(comm, *ones[4:])]
        case _:
            return [[call] for call in reduced(comm, *ones)]


@pytest.mark.ranks(3, backend="shm")
@pytest.mark.parametrize("case", ["one more", "one less", "one other", "other dtype", "cut", "one by one"])
async def test_batches_that_differ_fail_on_all_ranks(comm: Comm, case: str) -> None:
    for who in range(comm.size):
        async with new_comm("shm", name=f"{case} {who}", timeout=60) as doomed:
            await doomed.barrier()
            if comm.rank == (who + 1) % comm.size:
                await asyncio.sleep(0.01)  # late
            with pytest.raises(CollectiveMismatchError) as caught:
                for calls in mistaken(doomed, case, comm.rank == who):
                    await batch(doomed, calls)
                await doomed.barrier()
            error = caught.value
            assert who in (error.rank, error.other_rank)
            assert error.op != error.other_op
        await comm.barrier()


@pytest.mark.ranks(3, backend="shm")
async def test_a_batch_may_be_cut_before_an_operation_that_is_not_fused(comm: Comm) -> None:
    tensors = [torch.ones(n) for n in (1, 2, 3, LARGE)]
    calls = [*reduced(comm, *tensors), ops.Barrier.of(comm._group)]
    for part in [calls[:3], calls[3:]] if comm.rank == 1 else [calls]:
        await batch(comm, part)
    assert all(tensor.eq(comm.size).all() for tensor in tensors)


@pytest.mark.ranks(3, backend="shm")
async def test_a_rank_that_has_closed_is_missed_in_a_batch(comm: Comm) -> None:
    async with new_comm("shm", name="short", timeout=60) as short:
        await short.barrier()
        if comm.rank == 2:
            await short.aclose()
            return
        text = r"rank 2 has closed the comm and takes no part in all_reduce\(float32\[9\] in pieces, SUM\)"
        with pytest.raises(BackendError, match=text):
            await batch(short, [*reduced(short, torch.ones(4), torch.ones(5)), ops.Barrier.of(short._group)])


@pytest.mark.ranks(3, backend="shm")
@pytest.mark.parametrize("n", [1, 16 * LARGE])
async def test_abort_in_the_middle_of_a_batch(comm: Comm, n: int) -> None:
    async with new_comm("shm", name="doomed", timeout=60) as doomed:
        await comm.barrier()
        with pytest.raises(AbortedError, match="rank 1: enough"):
            if comm.rank != 2:
                work = batch(doomed, reduced(doomed, torch.ones(3), torch.ones(n), torch.ones(2)))
            if comm.rank == 0:
                await comm.send(torch.ones(1), 1)
            if comm.rank == 1:
                await comm.recv(torch.ones(1), 0)  # else rank 0 might hear of the abort between its calls
                doomed.abort("enough")
                assert all(each.done() for each in work.works)
            await (work if comm.rank != 2 else doomed.recv(torch.ones(1), 0))
    await comm.barrier()


@pytest.mark.ranks(2, backend="shm")
@pytest.mark.parametrize(
    ("step", "where"),
    [("prepare", "shm.schedule.share_of"), ("land", "arithmetic.write")],
)
async def test_a_failing_operation_of_a_batch_is_named_on_all_ranks(
    comm: Comm, step: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with new_comm("shm", name="failing", timeout=60) as failing:
        await failing.barrier()
        strided = torch.ones(7, 2)[:, 0]
        calls = reduced(failing, torch.ones(4), torch.ones(5))
        calls.insert(1, ops.Broadcast.of(failing._group, strided, 0))
        if comm.rank == (0 if step == "prepare" else 1):

            def no_memory(*arguments: Any) -> None:
                raise MemoryError("no more")

            monkeypatch.setattr(f"asynccomm.backends.{where}", no_memory)
        with pytest.raises(
            BackendError, match=r"shm failed in broadcast\(float32\[7\], root=0\): MemoryError: no more"
        ):
            await batch(failing, calls)
            await failing.barrier()
        monkeypatch.undo()
    await comm.barrier()


@pytest.mark.ranks(2, backend="shm")
async def test_nothing_of_a_batch_is_handed_on_if_it_cannot_be_fused(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("asynccomm.batching.batches.fuse", no_memory)
        with pytest.raises(MemoryError):
            batch(comm, [ops.Barrier.of(comm._group), *reduced(comm, torch.ones(1), torch.ones(2))])
    assert comm.statistics().in_flight == 0
    tensor = torch.ones(1)
    await batch(comm, reduced(comm, tensor, torch.ones(2)))
    assert tensor.item() == 2
