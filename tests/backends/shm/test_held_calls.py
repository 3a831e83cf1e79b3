"""Calls that scopes hold in C (``_scopes.c``): what they are sent as, and that Python takes over wherever it has to."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import Comm, PayloadError, ReduceOp, Work, coalesce, new_comm
from asynccomm.backends.shm.executor import Executor
from asynccomm.comm.deferring import DeferredCalls
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.errors import AbortedError, BackendError, BrokenError, ClosedError, CollectiveTimeoutError, NotSentError
from tests.waiting import until

from .paths import counted

pytestmark = pytest.mark.skipif(isinstance(load_core(), CoreUnavailable), reason="the executor in C was not built")


def ones(*sizes: int) -> list[Tensor]:
    return [torch.ones(n) for n in sizes]


# -- what is sent here -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
async def test_a_mixture_is_right_and_fast() -> None:
    async with counted(scopes=True) as (comm, paths):
        size, rank = comm.size, comm.rank
        for round in range(3):
            a, b, c = ones(3, 70_000, 5)
            d, e = torch.full((4,), rank + round), torch.full((2,), float(rank))
            gathered, lists = torch.empty(size * 2), ones(2, 2)
            part, gave = torch.empty(3), torch.empty(size * 3)
            async with comm.coalesce() as batch:
                comm.all_reduce(a)
                comm.broadcast(d, 1)
                comm.all_reduce(b)
                comm.all_gather_single(gathered, e)
                comm.all_gather(lists, torch.full((2,), rank + 5.0))
                comm.barrier()
                comm.all_reduce(c, ReduceOp.MAX)
                comm.reduce_scatter_single(part, torch.ones(size * 3))
                comm.all_to_all_single(gave, torch.full((size * 3,), float(rank)))
                comm.barrier()
            results = await batch
            assert paths.took() == ("fast" if round else "ordinary"), "lists must come twice"
            assert a.tolist() == [size] * 3
            assert bool((b == size).all())
            assert c.tolist() == [1.0] * 5
            assert d.tolist() == [1 + round] * 4
            assert gathered.tolist() == [0.0, 0.0, 1.0, 1.0]
            assert [x.tolist() for x in lists] == [[5.0, 5.0], [6.0, 6.0]]
            assert part.tolist() == [size] * 3
            assert gave.tolist() == [0.0] * 3 + [1.0] * 3
            assert results[0] is a
            assert results[5] is None
            assert [work.seq for work in batch.works] == list(range(round * 10, round * 10 + 10))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_python", [False, True])
async def test_calls_with_sizes_in_a_scope(by_python: bool) -> None:
    async with counted(scopes=True) as (comm, paths):
        rank = comm.rank
        for round in range(5):
            mine = torch.arange(4.0) + 10 * rank + round
            even, uneven, several = torch.empty(8), torch.empty(6), ones(6, 6)
            part, exchanged = torch.empty(2), torch.empty(3)
            strided = torch.ones(2, 2)
            async with comm.coalesce() as batch:
                comm.all_gather_v(even, mine, [4, 4])
                comm.all_gather_v(uneven, mine[: 4 - 2 * rank], [4, 2])
                comm.all_gather_v_coalesced(several, [mine[:3], mine[1:]], [3, 3])
                comm.reduce_scatter_v(part, mine, [2, 2])
                comm.all_to_all_v_single(exchanged, mine, [1, 2] if rank else [2, 1], [1, 2] if rank else [2, 1])
                if by_python:
                    comm.all_reduce(strided.t())
            await batch
            zero, one = torch.arange(4.0) + round, torch.arange(4.0) + 10 + round
            assert torch.equal(even, torch.cat([zero, one]))
            assert torch.equal(uneven, torch.cat([zero, one[:2]]))
            assert torch.equal(several[0], torch.cat([zero[:3], one[:3]]))
            assert torch.equal(several[1], torch.cat([zero[1:], one[1:]]))
            assert torch.equal(part, (zero + one).split(2)[rank])
            assert torch.equal(exchanged, torch.cat([zero[2:3], one[1:3]] if rank else [zero[:2], one[:1]]))
            assert strided.eq(2 if by_python else 1).all()
            assert paths.took() == "ordinary", "an all_to_all is held by Python"


@pytest.mark.ranks(2)
async def test_a_scope_of_calls_with_sizes_is_fast_once_they_repeat() -> None:
    async with counted(scopes=True) as (comm, paths):
        took = []
        for _ in range(20):
            mine, even, part = torch.arange(4.0) + 10 * comm.rank, torch.empty(8), torch.empty(2)
            async with comm.coalesce() as batch:
                comm.all_gather_v(even, mine.clone(), [4, 4])
                comm.reduce_scatter_v(part, mine, [2, 2])
            await batch
            zero, one = torch.arange(4.0), torch.arange(4.0) + 10
            assert torch.equal(even, torch.cat([zero, one]))
            assert torch.equal(part, (zero + one).split(2)[comm.rank])
            took.append(paths.took())
        assert took[0] == "ordinary"
        assert "fast" in took, "a rank that loses its core makes some ordinary"


@pytest.mark.ranks(1)
async def test_which_scopes_are_fast() -> None:
    async with counted(scopes=True) as (comm, paths):

        async def path(*calls: Callable[[], Work[Any]], **limits: Any) -> str:
            async with comm.coalesce(**limits) as batch:
                for call in calls:
                    call()
            await batch
            return paths.took()

        x, y = ones(6, 6)
        plain = lambda: comm.all_reduce(x)  # noqa: E731
        for _ in range(2):
            assert await path(plain) == "fast"
            assert await path(plain, lambda: comm.all_reduce(y)) == "fast"
            assert await path(comm.barrier, comm.barrier, plain) == "fast"
            assert await path(plain, lambda: comm.all_reduce(torch.ones(1 << 21)), comm.barrier) == "fast", "large"
            assert await path(*[lambda t=t: comm.all_reduce(t) for t in ones(*[4] * 500)]) == "fast"
            unusual = {
                "shared": [plain, plain],
                "overlap": [plain, lambda: comm.all_reduce(x[3:])],
                "a tag": [plain, lambda: comm.all_reduce(y, tag="a")],
                "strides": [plain, lambda: comm.all_reduce(torch.ones(4, 4)[:, 1])],
                "one root": [plain, lambda: comm.reduce(y, 0)],
                "a message": [plain, lambda: comm.recv(y, 0), lambda: comm.send(torch.ones(6), 0)],
                "an object": [plain, lambda: comm.all_gather_object(3)],
            }
            for name, calls in unusual.items():
                assert await path(*calls) == "ordinary", name
            assert await path(plain, lambda: comm.all_reduce(y), max_ops=5) == "ordinary"
        async with comm.coalesce() as batch:
            plain()
            comm.all_reduce(y).add_done_callback(lambda work: None)
        await batch
        assert paths.took() == "fast"


@pytest.mark.ranks(3)
async def test_ranks_may_take_different_paths() -> None:
    """The same calls: a rank whose tensors have strides holds them in Python."""
    async with counted(scopes=True) as (comm, paths):
        seen = set()
        for seed in range(60):
            choose, mine = random.Random(seed), random.Random(seed * 10 + comm.rank)
            strided = mine.random() < 0.3

            def tensor(n: int, value: float, strided: bool = strided) -> Tensor:
                return torch.full((n, 2), value)[:, 0] if strided else torch.full((n,), value)

            expected: list[tuple[Tensor, list[float]]] = []
            async with comm.coalesce() as batch:
                for _ in range(choose.randrange(1, 12)):
                    n, kind = choose.choice([1, 12, 300, 20_000]), choose.randrange(4)
                    if kind == 0:
                        t = tensor(n, comm.rank + 1.0)
                        comm.all_reduce(t)
                        expected.append((t, [6.0] * n))
                    elif kind == 1:
                        root = choose.randrange(3)
                        t = tensor(n, float(comm.rank))
                        comm.broadcast(t, root)
                        expected.append((t, [float(root)] * n))
                    elif kind == 2:
                        out = [tensor(n, -1.0) for _ in range(3)]
                        comm.all_gather(out, tensor(n, comm.rank + 7.0))
                        expected += [(t, [rank + 7.0] * n) for rank, t in enumerate(out)]
                    else:
                        comm.barrier()
            await batch
            seen.add(paths.took())
            for t, values in expected:
                assert t.tolist() == values
        assert seen == {"fast", "ordinary"}


@pytest.mark.ranks(2)
async def test_a_late_rank_is_waited_for_by_python() -> None:
    async with counted(scopes=True) as (comm, paths):
        for round in range(4):
            tensors = ones(4, 5, 6)
            numbers = torch.full((3,), comm.rank)
            other = await new_comm("shm", name=f"sign {round}", timeout=30)
            if comm.rank == 1 and round:  # the first time is as late as it is
                await other.recv(torch.empty(1), 0)
            async with comm.coalesce() as batch:
                for t in tensors:
                    comm.all_reduce(t)
                comm.broadcast(numbers, 1)
                comm.barrier()
            if comm.rank == 0 and round:
                assert paths.adopted == 1
                assert not batch.works[0].done()
                assert comm.statistics().in_flight == 5
                assert comm.statistics().held == 0
                await other.send(torch.empty(1), 1)
            await batch
            assert [t.tolist() for t in tensors] == [[2.0] * n for n in (4, 5, 6)]
            assert numbers.tolist() == [1] * 3
            assert comm.statistics().in_flight == 0
            assert paths.took() == "fast"
            await other.aclose()


# -- the scope ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
async def test_works_and_statistics_of_held_calls() -> None:
    async with counted(scopes=True) as (comm, paths):
        a, b = ones(3, 4)
        await comm.all_reduce(a)
        batches = comm.statistics().batches
        async with comm.coalesce() as batch:
            first, second = comm.all_reduce(a), comm.all_reduce(b)
            assert batch.works == [first, second]
            assert (first.done(), first.seq) == (False, -1)
            assert "held back" in repr(first)
            assert first.timeout == 30
            with pytest.raises(asyncio.InvalidStateError):
                first.result()
            assert comm.statistics()[:4] == (3, 2, 28, 2)
            outside = asyncio.create_task(call(comm))
            await outside  # another task's call is sent at once
            done: list[Any] = []
            second.add_done_callback(done.append)
        assert first.done()
        assert (first.seq, second.seq) == (2, 3)
        assert first.duration is not None
        assert first.duration > 0
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert done == [second]
        assert comm.statistics()[:4] == (4, 0, 0, 0)
        assert comm.statistics().batches == batches + 1
        assert paths.took() == "fast"
        pending = comm._submitter.recent
        assert [entry[2] for entry in pending][-2:] == [2, 3]


async def call(comm: Comm) -> None:
    work = comm.all_reduce(torch.ones(3))
    assert work.done()
    assert work.seq == 1


@pytest.mark.ranks(2)
async def test_awaits_flushes_and_scopes_within_scopes() -> None:
    async with counted(scopes=True) as (comm, _):
        for _ in range(2):
            a, b, c, d = ones(2, 3, 4, 5)
            async with comm.coalesce() as batch:
                assert (await comm.all_reduce(a)) is a
                assert a.tolist() == [2.0] * 2
                work = comm.all_reduce(b)
                batch.flush()
                assert work.seq >= 0
                async with comm.coalesce() as inner:
                    comm.all_reduce(c)
                assert inner.works[0].seq == -1, "the outer scope sends it"
                comm.all_reduce(d)
            await batch
            assert (b.tolist(), c.tolist(), d.tolist()) == ([2.0] * 3, [2.0] * 4, [2.0] * 5)
            assert [w.done() for w in (*batch.works, *inner.works)] == [True] * 5


@pytest.mark.ranks(1)
async def test_calls_that_are_not_sent() -> None:
    async with counted(scopes=True) as (comm, _):
        x = torch.ones(3)
        await comm.all_reduce(x)
        with pytest.raises(KeyError):
            async with comm.coalesce() as batch:
                work = comm.all_reduce(x)
                raise KeyError("no")
        with pytest.raises(NotSentError, match="the scope was left by KeyError"):
            await work
        assert batch.works == [work]
        assert comm.statistics().in_flight == 0
        assert (await comm.all_reduce(x)).tolist() == [1.0] * 3
        with pytest.raises(AbortedError, match="enough"):
            async with comm.coalesce():
                work = comm.all_reduce(x)
                comm.abort("enough")
                await work
        with pytest.raises(AbortedError):
            comm.all_reduce(x)


@pytest.mark.ranks(1)
async def test_closing_sends_what_a_scope_holds() -> None:
    async with counted(scopes=True) as (comm, _):
        x = torch.ones(3)
        await comm.all_reduce(x)
        scope = comm.coalesce()
        async with scope:
            work = comm.all_reduce(x)
            await asyncio.create_task(comm.aclose())
            assert work.done()
            assert work.result() is x
            with pytest.raises(ClosedError):
                comm.all_reduce(x)


@pytest.mark.ranks(2)
async def test_deadlines_count_from_the_call() -> None:
    async with counted(scopes=True) as (comm, _):
        x = torch.ones(3)
        await comm.all_reduce(x)
        await comm.barrier()
        async with comm.coalesce():
            first = comm.all_reduce(x)
            comm.set_timeout(0.2)
            second = comm.all_reduce(torch.ones(3))
            assert (first.timeout, second.timeout) == (30, 0.2)
            with pytest.raises((CollectiveTimeoutError, AbortedError), match="not finished after"):
                await asyncio.wait_for(asyncio.shield(wait_for(second)), 20)


async def wait_for(work: Work[Any]) -> None:
    """Wait without sending what the scope holds."""
    done = asyncio.Event()
    work.add_done_callback(lambda _: done.set())
    await done.wait()
    work.result()


@pytest.mark.ranks(2)
async def test_scopes_of_threads_and_tasks_are_apart() -> None:
    async with counted(scopes=True) as (comm, _):
        errors: list[BaseException] = []
        turn = asyncio.Event()

        def in_thread(tensors: list[Tensor]) -> None:
            try:
                with comm.coalesce() as batch:
                    for t in tensors:
                        comm.all_reduce(t)
                batch.wait(20)
            except BaseException as exc:
                errors.append(exc)

        async def in_task(tensors: list[Tensor], first: bool) -> None:
            if not first:
                await turn.wait()
            async with comm.coalesce() as batch:
                comm.all_reduce(tensors[0])
                turn.set()
                await asyncio.sleep(0)
                comm.all_reduce(tensors[1])
            await batch

        for _ in range(3):
            mine = ones(3, 4)
            thread = threading.Thread(target=in_thread, args=(mine,))
            thread.start()
            await asyncio.to_thread(thread.join)
            turn.clear()
            one, other = ones(5, 6), ones(7, 8)
            async with asyncio.TaskGroup() as group:
                group.create_task(in_task(one, True))
                group.create_task(in_task(other, False))
            assert not errors
            assert all((t == 2).all() for t in (*mine, *one, *other))


@pytest.mark.ranks(1)
async def test_the_deadline_of_a_held_call_behind_a_longer_one() -> None:
    async with counted(scopes=True) as (comm, _):
        a, b = ones(3, 4)
        for _ in range(2):
            async with comm.coalesce() as batch:
                comm.all_reduce(a)
                comm.all_reduce(b)
            await batch
        async with comm.coalesce():
            comm.all_reduce(a, timeout=100)  # which Python holds
            comm.set_timeout(0.1)
            with pytest.raises(CollectiveTimeoutError, match="not finished after"):
                await asyncio.wait_for(asyncio.shield(wait_for(comm.all_reduce(b))), 20)


@pytest.mark.ranks(2)
async def test_calls_of_listeners_come_after_all_held_calls() -> None:
    async with counted(scopes=True) as (comm, paths):
        sign = await new_comm("shm", name="sign", timeout=30)
        a, d, x = ones(3, 4, 5)
        for round in range(4):
            made: list[Work[Any]] = []
            async with comm.coalesce() as batch:
                comm.broadcast(d, 0).listen(lambda: None if made else made.append(comm.all_reduce(x)))  # noqa: B023
                second = comm.all_reduce(a)
                comm.barrier()

                async def send() -> None:  # by another task, in whose calls no scope is
                    if comm.rank == 1 and round == 3:  # noqa: B023
                        await sign.recv(torch.empty(1), 0)
                    await second  # noqa: B023

                sending = asyncio.create_task(send())
                while comm.rank == 0 and not made:
                    await asyncio.sleep(0)
                if comm.rank == 0 and round == 3:
                    assert paths.adopted
                    await sign.send(torch.empty(1), 1)
                await sending
            await batch
            await made[0]
            assert x.tolist() == [2.0 ** (round + 1)] * 5
            numbers = [work.seq for work in (*batch.works, made[0])]
            assert numbers == sorted(set(numbers))
        await sign.aclose()


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
async def test_memory_is_what_it_was_at_the_call() -> None:
    """As for operations that Python holds, which detach their tensors at the call."""
    for tag in (None, "in Python"):
        async with counted(scopes=True) as (comm, _):
            for _ in range(2):
                a, b, c = torch.ones(2, 3), torch.ones(4), torch.ones(8)[2:6]
                was = [x.detach() for x in (a, b, c)]
                async with comm.coalesce() as batch:
                    works = [comm.all_reduce(x, tag=tag) for x in (a, b, c)]
                    a.data = torch.zeros(6, dtype=torch.float64)
                    b.resize_(1000)  # the storage is the same, in other memory
                    c.data = torch.zeros(4)
                await batch
                assert [works[0].result() is a, a.tolist(), c.tolist()] == [True, [0.0] * 6, [0.0] * 4]
                assert was[0].tolist() == [[2.0] * 3] * 2
                assert b[:4].tolist() == [2.0] * 4
                assert was[2].tolist() == [2.0] * 4


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "grows": lambda t: t.set_(torch.zeros(100_000)),  # type: ignore[call-overload]
    "shrinks": lambda t: setattr(t, "data", torch.zeros(1)),
    "in place": lambda t: t.resize_(2, 2),
    "dtype": lambda t: setattr(t, "data", t.data.view(torch.int32)),
    "strides": lambda t: t.t_(),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("held_by_python", [False, True])
async def test_what_scopes_send_is_made_of_the_tensors_as_at_the_call(change: str, held_by_python: bool) -> None:
    """Also where a scope is the first of its kind."""
    async with counted(scopes=True) as (comm, paths):
        for _ in range(3):
            await comm.all_reduce(torch.ones(8, 8))
        for round in range(3):
            tensors = [torch.arange(64.0).view(8, 8) + comm.rank for _ in range(2)]
            was = [tensor.detach() for tensor in tensors]
            async with comm.coalesce() as batch:
                for tensor in tensors:
                    comm.all_reduce(tensor)
                if held_by_python:
                    comm.all_reduce(torch.ones(0))
                if not round and comm.rank == 0:
                    CHANGES[change](tensors[0])
            await batch
            assert all(torch.equal(tensor, 2 * torch.arange(64.0).view(8, 8) + 1) for tensor in was)
            elsewhere = not round and comm.rank == 0 and change in ("grows", "shrinks")
            assert paths.took() == ("ordinary" if held_by_python or elsewhere else "fast")


@pytest.mark.ranks(1)
async def test_tensors_live_until_they_are_sent_and_no_longer() -> None:
    async with counted(scopes=True) as (comm, _):
        for _ in range(2):
            x = torch.ones(300)
            memory = weakref.ref(x)
            async with comm.coalesce():
                comm.all_reduce(x)
                del x
                gc.collect()
                assert memory() is not None
            gc.disable()
            try:
                assert memory() is None, "kept by a cycle"
            finally:
                gc.enable()
        before = torch.ones(3)
        with pytest.raises(KeyError):
            async with comm.coalesce():
                comm.all_reduce(before)
                memory = weakref.ref(before)
                del before
                raise KeyError
        gc.collect()
        assert memory() is None


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
async def test_a_failure_to_go_on_breaks_the_comm() -> None:
    async with counted(scopes=True) as (comm, paths):
        for _ in range(2):
            async with comm.coalesce() as batch:
                comm.all_reduce(torch.ones(3))
                comm.all_reduce(torch.ones(4))
            await batch
        sign = await new_comm("shm", name="sign", timeout=30)
        await comm.barrier()
        if comm.rank == 0:

            def fails(*arguments: Any) -> Any:
                raise MemoryError("no more")

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Executor, "driven", fails)
                with pytest.raises(BackendError, match="no more"):
                    async with comm.coalesce() as batch:
                        comm.all_reduce(torch.ones(3))
                        comm.all_reduce(torch.ones(4))
                    await batch
            assert paths.adopted
            await sign.send(torch.ones(1), 1)
        else:
            await sign.recv(torch.ones(1), 0)
            with pytest.raises(BackendError):
                async with comm.coalesce() as batch:
                    comm.all_reduce(torch.ones(3))
                    comm.all_reduce(torch.ones(4))
                await batch  # may be done: the other rank has filled its slot
                await comm.barrier()
        await sign.aclose()


@pytest.mark.ranks(1)
async def test_held_calls_that_cannot_be_sent_any_more_fail() -> None:
    def refuses(*arguments: Any) -> Any:
        raise ValueError("not any more")

    async with counted(scopes=True) as (comm, _):
        for _ in range(2):
            x, y = ones(3, 4)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(DeferredCalls, "taken_over", refuses)
                with pytest.raises(ValueError, match="not any more"):
                    async with comm.coalesce():
                        works = [comm.all_reduce(x), comm.all_reduce(x)]
            for work in works:
                with pytest.raises(NotSentError, match="ValueError: not any more"):
                    await work
            assert comm.statistics().in_flight == 0
            assert (await comm.all_reduce(y)) is y


@pytest.mark.ranks(2)
async def test_what_is_large_goes_on_a_thread_with_all_that_come_after_it() -> None:
    async with counted(scopes=True) as (comm, paths):
        for _ in range(4):
            numbers = [torch.arange(float(n)) * (comm.rank + 1) for n in (5, 1 << 21, 7, 3 << 19, 9)]
            shares = [torch.full((4 << 20,), float(comm.rank)), torch.empty(8 << 20)]
            async with comm.coalesce() as batch:
                for each in numbers:
                    comm.all_reduce(each)
                comm.all_gather_single(shares[1], shares[0])
                comm.all_reduce(shares[0][:100].clone())
            assert not batch.works[1].done()
            assert await batch
            assert all(torch.equal(each, 3 * torch.arange(float(len(each)))) for each in numbers)
            assert shares[1].view(2, -1).sum(1).tolist() == [0, 4 << 20]
            assert paths.took() == "fast"
        await comm.barrier()


@pytest.mark.ranks(2)
async def test_large_calls_that_are_known_are_begun_in_c() -> None:
    async with counted() as (comm, paths):
        for round in range(3):
            numbers = torch.arange(float(1 << 21)) * (comm.rank + 1)
            work = comm.all_reduce(numbers)
            assert not work.done()
            assert await work is numbers
            assert torch.equal(numbers, 3 * torch.arange(float(1 << 21)))
            assert paths.adopted == round + 1
        assert comm.statistics().in_flight == 0


@pytest.mark.ranks(1)
async def test_held_calls_are_in_flight_and_fail_with_the_comm() -> None:
    comm = await new_comm("shm", name="fails")
    with pytest.raises(AbortedError):
        async with comm.coalesce() as batch:
            for each in ones(3, 4):
                comm.all_reduce(each)
            statistics = comm.statistics()
            assert (statistics.in_flight, statistics.held, statistics.bytes_in_flight) == (2, 2, 28)
            comm.abort("enough")
            assert all(work.done() for work in batch.works)
            raise batch.works[0].exception() or AssertionError("it is done")
    assert comm.statistics().in_flight == 0
    await comm.aclose()


@pytest.mark.ranks(1)
async def test_memory_that_was_apart_may_be_shared_later() -> None:
    async with counted(scopes=True) as (comm, paths):
        whole = torch.ones(20)
        for first, second in (((0, 8), (8, 16)), ((0, 8), (8, 16)), ((0, 8), (7, 15)), ((0, 8), (8, 16))):
            async with comm.coalesce() as batch:
                comm.all_reduce(whole[slice(*first)])
                comm.all_reduce(whole[slice(*second)])
            await batch
            assert paths.took() == ("ordinary" if second[0] < first[1] else "fast")


@pytest.mark.ranks(1)
async def test_held_calls_that_have_failed_before_python_takes_them_over_are_over() -> None:
    first, second = await new_comm("shm", name="first"), await new_comm("shm", name="second")
    numbers = torch.ones(4)
    for _ in range(2):
        async with first.coalesce() as batch:
            first.all_reduce(numbers)
        await batch
    with pytest.raises(BrokenError):
        async with first.coalesce() as batch:
            work = first.all_reduce(numbers)
            async with coalesce(first, second):
                first.abort("enough")
                await until(work.done)
            raise work.exception() or AssertionError("it has failed")
    assert first.statistics().in_flight == 0
    async with asyncio.timeout(30):
        await first.aclose()
        await second.aclose()


@pytest.mark.ranks(2)
async def test_the_first_error_of_a_scope_does_not_wait_for_the_other_operations() -> None:
    async with new_comm("shm") as comm:
        if comm.rank == 0:
            numbers = torch.zeros(4)
            async with comm.coalesce() as batch:
                comm.recv_object(1, max_bytes=10)
                receive = comm.recv(numbers, 1)
            with pytest.raises(PayloadError):
                await batch
            assert not receive.done()
            await comm.send(numbers, 1)
            await receive
        else:
            await comm.send_object("x" * 1000, 0)
            await comm.recv(torch.empty(4), 0)
            await comm.send(torch.ones(4), 0)


@pytest.mark.ranks(1)
async def test_memory_at_the_same_place_may_have_become_shorter() -> None:
    async with new_comm("shm") as comm:
        for _ in range(2):
            numbers = torch.ones(1 << 14)
            with pytest.raises(ValueError, match="the memory of a tensor"):
                async with comm.coalesce():
                    comm.all_reduce(numbers)
                    numbers.untyped_storage().resize_(4 << 13)
