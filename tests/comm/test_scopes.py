"""A block of code whose operations leave together: when it holds back, whose it is, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import (
    AbortedError,
    BackendError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Comm,
    NotSentError,
    WouldBlockError,
    coalesce,
)
from asynccomm.backends.base import Submission
from asynccomm.comm.scopes import CoalesceScope, check_limit
from asynccomm.core.python_state import STREAK_AWAITS
from asynccomm.core.work import Work
from asynccomm.testing.local import loopback_world
from tests.batching.recording import Recorder
from tests.fake_streams import STREAM, Place
from tests.waiting import lets_others_run, until


def ones(n: int = 2) -> Tensor:
    return torch.ones(n)


@pytest.fixture
async def comm() -> AsyncIterator[Comm]:
    """A world of one: what is sent is done."""
    async with loopback_world(1, timeout=30) as (found,):
        yield found


@pytest.fixture
async def pair() -> AsyncIterator[list[Comm]]:
    async with loopback_world(2, timeout=30) as found:
        yield found


@contextlib.contextmanager
def nothing_reported() -> Any:
    """Nothing comes to the loop's exception handler, not even from Works that are dropped."""
    loop = asyncio.get_running_loop()
    reports: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reports.append(context))
    try:
        yield
    finally:
        gc.collect()
        loop.call_soon(loop.set_exception_handler, None)
    assert not reports, reports


# -- until the end, and then all at once


@pytest.mark.parametrize("kind", ["with", "async with"])
async def test_held_until_the_end_and_then_one_batch(pair: list[Comm], kind: str) -> None:
    a, b = pair
    record = Recorder(a)
    tensors = [ones(n) for n in range(5)]

    def calls() -> list[Work[Any]]:
        works: list[Work[Any]] = [a.all_reduce(t) for t in tensors]
        works.append(a.barrier())
        assert record.batches == []
        assert [work.seq for work in works] == [-1] * 6
        assert "held back" in repr(works[0])
        assert a.statistics()[:5] == (6, 6, 40, 6, 0)
        return works

    if kind == "with":
        with a.coalesce() as batch:
            works = calls()
    else:
        async with a.coalesce() as batch:
            works = calls()
    assert isinstance(batch, CoalesceScope)
    assert record.kinds == [["all_reduce", "barrier"]]
    assert batch.works == works
    assert [work.seq for work in works] == list(range(6))
    assert a.statistics()[:5] == (6, 6, 40, 0, 1)
    assert not any(work.done() for work in works)
    with pytest.raises(CollectiveMismatchError, match=r"a batch of 6 from .* alone"):
        await b.all_reduce(ones(0))


async def test_both_ranks(pair: list[Comm]) -> None:
    works = []
    for comm in pair:
        with comm.coalesce():
            works += [comm.all_reduce(ones(n)) for n in range(1, 5)]
    for work in works:
        assert work.done()
        assert (await work).eq(2).all()
    assert [work.seq for work in works] == [0, 1, 2, 3] * 2
    assert [comm.statistics()[:5] for comm in pair] == [(4, 0, 0, 0, 1)] * 2


async def test_one_operation_is_no_batch_to_speak_of(comm: Comm) -> None:
    record = Recorder(comm)
    t = ones()
    with comm.coalesce():
        work = comm.all_reduce(t)
    assert record.sizes == [1]
    assert record.batches[0][0].work is work
    assert comm.statistics().batches == 0
    with comm.coalesce():
        pass
    assert record.sizes == [1]


async def test_numbers_go_on(comm: Comm) -> None:
    comm.barrier()
    with comm.coalesce():
        works: list[Work[Any]] = [comm.barrier(), comm.recv(ones(), 0), comm.barrier(), comm.send(ones(), 0)]
    assert [work.seq for work in works] == [1, 0, 2, 1]
    assert comm.barrier().seq == 3
    await asyncio.gather(*works)


async def test_a_scope_is_entered_once(comm: Comm) -> None:
    batch = comm.coalesce()
    with batch, pytest.raises(RuntimeError, match="entered once"), batch:
        pass
    with pytest.raises(RuntimeError, match="entered once"):
        async with batch:
            pass
    assert comm.barrier().done(), "nothing is held any more"


async def test_a_scope_before_it_is_entered(comm: Comm) -> None:
    batch = comm.coalesce()
    assert batch.works == []
    assert await batch == []
    batch.flush()
    comm.barrier()
    assert batch.works == []


async def test_a_scope_after_it_was_left(comm: Comm) -> None:
    with comm.coalesce() as batch:
        comm.barrier()
    works = batch.works
    comm.barrier()
    batch.flush()
    assert batch.works == works
    assert len(works) == 1


# -- waiting


async def test_await_the_batch(pair: list[Comm]) -> None:
    batches, tensors = [], [ones(n) for n in (1, 2, 3)]
    for comm, mine in zip(pair, (tensors, [ones(n) for n in (1, 2, 3)]), strict=True):
        async with comm.coalesce() as batch:
            for t in mine:
                comm.all_reduce(t)
            comm.barrier()
        batches.append(batch)
    results = await batches[0]
    assert [found is t for found, t in zip(results, [*tensors, None], strict=True)] == [True] * 4
    assert [t.tolist() for t in tensors] == [[2.0] * n for n in (1, 2, 3)]
    assert await batches[0] == results, "again"
    assert len(await batches[1]) == 4


async def test_a_loop_of_finished_batches_lets_other_tasks_run(comm: Comm) -> None:
    async def tensors(calls: int) -> None:
        async with comm.coalesce() as batch:
            for _ in range(calls):
                comm.all_reduce(ones())
        await batch

    async def objects() -> None:
        async with comm.coalesce() as batch:
            comm.all_gather_object(1)
        await batch

    async def failed() -> None:
        with pytest.raises(NotSentError):
            await dropped

    with pytest.raises(ZeroDivisionError):
        async with comm.coalesce() as dropped:
            comm.barrier()
            raise ZeroDivisionError
    for once in (lambda: tensors(0), lambda: tensors(1), lambda: tensors(3), objects, failed):
        assert await lets_others_run(once)


async def test_a_finished_batch_does_not_suspend(comm: Comm) -> None:
    with comm.coalesce() as batch:
        for _ in range(2 * STREAK_AWAITS):
            comm.barrier()
    await asyncio.sleep(0)
    comm._session.mailbox.reset_streak()
    with pytest.raises(StopIteration):
        next(batch.__await__())


async def test_awaiting_a_work_inside_sends_the_held_operations(comm: Comm) -> None:
    record = Recorder(comm)
    async with comm.coalesce() as batch:
        works = [comm.all_reduce(ones()) for _ in range(3)]
        await works[1]
        assert record.sizes == [1]
        assert all(work.done() for work in works)
        works.append(comm.all_reduce(ones()))
        works.append(comm.all_reduce(ones()))
        assert record.sizes == [1]
        assert not works[-1].done()
    assert record.sizes == [1, 1]
    assert batch.works == works
    assert [work.seq for work in works] == list(range(5))


async def test_awaiting_works_with_gather_inside(pair: list[Comm]) -> None:
    async def run(comm: Comm) -> None:
        async with comm.coalesce():
            for _ in range(2):
                works = [comm.all_reduce(ones()) for _ in range(4)]
                assert [t.tolist() for t in await asyncio.gather(*works)] == [[2, 2]] * 4
        assert comm.statistics().batches == 2

    async with asyncio.timeout(20):
        await asyncio.gather(*map(run, pair))


async def test_awaiting_the_batch_inside(pair: list[Comm]) -> None:
    async def run(comm: Comm) -> None:
        async with comm.coalesce() as batch:
            works = [comm.barrier(), comm.barrier()]
            assert await batch == [None, None]
            assert all(work.done() for work in works)
            comm.barrier()

    async with asyncio.timeout(20):
        await asyncio.gather(*map(run, pair))


async def test_flush(comm: Comm) -> None:
    record = Recorder(comm)
    with comm.coalesce() as batch:
        batch.flush()
        comm.barrier()
        comm.barrier()
        batch.flush()
        assert record.sizes == [2]
        assert all(work.done() for work in batch.works)
        batch.flush()
        comm.barrier()
    assert record.sizes == [2, 1]


async def test_wait_in_a_thread_without_a_loop(pair: list[Comm]) -> None:
    a, b = pair
    found: list[Any] = []

    def run(comm: Comm) -> None:
        with comm.coalesce() as batch:
            t = comm.all_reduce(ones())
            assert not t.done()
            comm.barrier()
            t.wait(20)
            assert comm.statistics().batches == 1
            comm.all_reduce(ones(1))
            comm.all_reduce(ones(1))
        found.append([None if r is None else r.tolist() for r in batch.wait(20)])

    async with asyncio.timeout(30):
        await asyncio.gather(asyncio.to_thread(run, a), asyncio.to_thread(run, b))
    assert found == [[[2, 2], None, [2], [2]]] * 2
    assert a.statistics()[:5] == (4, 0, 0, 0, 2)


async def test_wait_times_out_for_each(pair: list[Comm]) -> None:
    a, b = pair

    def run() -> None:
        with a.coalesce() as batch:
            a.barrier()
            with pytest.raises(TimeoutError):
                batch.wait(0.01)
            assert a.statistics().held == 0, "it was sent"

    await asyncio.to_thread(run)
    await b.barrier()


async def test_wait_on_a_loop_blocks_nothing(comm: Comm) -> None:
    with comm.coalesce():
        work = comm.barrier()
        with pytest.raises(WouldBlockError):
            work.wait()


async def test_ready_does_not_wait_for_held_operations() -> None:
    async with loopback_world(1, max_ops=2, max_bytes=10) as (comm,), comm.coalesce():
        for _ in range(5):
            comm.all_reduce(ones(100))
            async with asyncio.timeout(20):
                await comm.ready()
        assert comm.statistics().held == 5


async def test_ready_waits_for_sent_operations() -> None:
    async with loopback_world(2, max_ops=2) as (a, b):
        with a.coalesce() as batch:
            a.barrier()
            a.barrier()
            batch.flush()
            waiting = asyncio.ensure_future(a.ready())
            await asyncio.sleep(0)
            assert not waiting.done()
            assert a.statistics()[5:7] == (1, 1)
        with b.coalesce():
            b.barrier()
            b.barrier()
        await waiting
        assert a.statistics()[5:7] == (0, 1)


# -- whose it is


async def test_other_tasks_are_not_held(comm: Comm) -> None:
    go, gone = asyncio.Event(), asyncio.Event()

    async def other() -> None:
        await go.wait()
        assert comm.barrier().done()
        gone.set()

    task = asyncio.create_task(other())
    async with comm.coalesce():
        held = comm.barrier()
        go.set()
        await gone.wait()
        assert not held.done()
        assert comm.statistics()[:4] == (2, 1, 0, 1)
    await task
    assert held.seq == 1


async def test_tasks_started_inside_do_not_join(comm: Comm) -> None:
    async def child() -> bool:
        return comm.barrier().done()

    async def grandchild() -> bool:
        return await asyncio.create_task(child())

    async with comm.coalesce():
        held = comm.barrier()
        assert await asyncio.create_task(child())
        assert await asyncio.gather(child(), grandchild()) == [True, True]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(child()) for _ in range(2)]
        assert all(task.result() for task in tasks)
        assert await asyncio.to_thread(lambda: comm.barrier().done())
        assert not held.done()
        assert not comm.barrier().done(), "this task's is still held"
        assert not await child(), "called, not started: it is this task"
    assert held.done()


async def test_each_task_has_its_own(comm: Comm) -> None:
    record = Recorder(comm)
    at_once = asyncio.Barrier(3)

    async def task(n: int) -> None:
        async with comm.coalesce() as batch:
            for _ in range(n):
                await at_once.wait()
                comm.all_reduce(ones())
                comm.barrier()
            assert len(batch.works) == 2 * n
            await at_once.wait()

    await asyncio.gather(*[task(2) for _ in range(3)])
    assert record.kinds == [["all_reduce", "barrier", "barrier"]] * 3


async def test_callbacks_of_the_loop_are_not_held(comm: Comm) -> None:
    called: list[Work[Any]] = []
    done = asyncio.Event()

    def callback() -> None:
        called.append(comm.barrier())
        with comm.coalesce():
            called.append(comm.barrier())
            assert not called[-1].done()
        done.set()

    async with comm.coalesce():
        comm.barrier()
        asyncio.get_running_loop().call_soon(callback)
        await done.wait()
        assert [work.done() for work in called] == [True, True]
        assert comm.statistics().held == 1


async def test_each_thread_has_its_own(comm: Comm) -> None:
    inside, leave = threading.Event(), threading.Event()

    def run() -> None:
        with comm.coalesce():
            comm.barrier()
            inside.set()
            assert leave.wait(20)

    thread = threading.Thread(target=run)
    thread.start()
    await asyncio.to_thread(inside.wait, 20)
    assert comm.barrier().done()
    assert await asyncio.to_thread(lambda: comm.barrier().done())
    assert comm.statistics().held == 1
    leave.set()
    await asyncio.to_thread(thread.join)
    assert comm.statistics()[:5] == (3, 0, 0, 0, 0)


async def test_not_on_another_loop(comm: Comm) -> None:
    def run() -> None:
        async def inner() -> None:
            with pytest.raises(RuntimeError, match="belongs to another event loop"), comm.coalesce():
                pass

        asyncio.run(inner())

    await asyncio.to_thread(run)


async def test_left_by_another_task(comm: Comm) -> None:
    """As fixtures and generators do it."""
    batch = comm.coalesce()

    async def enter() -> Work[None]:
        await batch.__aenter__()
        return comm.barrier()

    work = await asyncio.create_task(enter())
    assert not work.done()
    assert comm.barrier().done()
    await batch.__aexit__(None, None, None)
    assert work.done()


# -- one in another


async def test_an_inner_scope_joins(comm: Comm) -> None:
    record = Recorder(comm)
    async with comm.coalesce() as outer:
        first = comm.barrier()
        with comm.coalesce() as inner:
            second, third = comm.barrier(), comm.barrier()
        assert record.batches == []
        assert inner.works == [second, third]
        last = comm.barrier()
        assert inner.works == [second, third]
    assert record.sizes == [4]
    assert outer.works == [first, second, third, last]


async def test_awaiting_a_work_of_an_inner_scope(comm: Comm) -> None:
    async with comm.coalesce():
        first = comm.barrier()
        async with comm.coalesce() as inner:
            comm.barrier()
        assert await inner == [None]
        assert first.done()


async def test_flushing_an_inner_scope_sends_the_outer_scopes_operations(comm: Comm) -> None:
    with comm.coalesce():
        first = comm.barrier()
        with comm.coalesce() as inner:
            inner.flush()
            assert first.done()


async def test_limits_of_an_inner_scope_are_those_around_it(comm: Comm) -> None:
    record = Recorder(comm)
    with comm.coalesce(max_ops=3):
        comm.barrier()
        with comm.coalesce(max_ops=1):
            comm.barrier()
            assert record.batches == []
            comm.barrier()
            assert record.sizes == [3]
    assert record.sizes == [3]


async def test_an_inner_exception_drops_only_its_own(comm: Comm) -> None:
    record = Recorder(comm)
    with nothing_reported():
        async with comm.coalesce():
            first = comm.all_reduce(ones())
            with contextlib.suppress(KeyError):
                async with comm.coalesce():
                    dropped = comm.all_reduce(ones())
                    raise KeyError("inner")
            assert isinstance(dropped.exception(), NotSentError)
            assert not first.done()
            second = comm.all_reduce(ones())
            with contextlib.suppress(KeyError), comm.coalesce():
                flushed = comm.all_reduce(ones())
                await flushed
                dropped = comm.all_reduce(ones())
                raise KeyError("inner")
            assert isinstance(dropped.exception(), NotSentError)
            third = comm.all_reduce(ones())
        assert record.sizes == [1, 1]
        assert len(record.batches[0][0].members) == 3
        assert [work.seq for work in (first, second, flushed, third)] == [0, 1, 2, 3]
        for work in (first, second, flushed, third):
            await work
        del dropped


async def test_limits_count_anew_after_an_inner_exception(comm: Comm) -> None:
    record = Recorder(comm)
    with comm.coalesce(max_ops=3):
        comm.barrier()
        with contextlib.suppress(KeyError), comm.coalesce():
            comm.barrier()
            raise KeyError
        comm.barrier()
        assert record.batches == []
        comm.barrier()
        assert record.sizes == [3]


async def test_an_outer_exception_drops_the_operations_of_inner_scopes(comm: Comm) -> None:
    works = []
    with contextlib.suppress(KeyError), comm.coalesce():
        with comm.coalesce() as inner:
            works.append(comm.barrier())
        works.append(comm.barrier())
        raise KeyError("outer")
    for work in works:
        with pytest.raises(NotSentError, match="KeyError: 'outer'"):
            await work
    with pytest.raises(NotSentError):
        await inner
    assert comm.statistics()[:5] == (2, 0, 0, 0, 0)


# -- errors in the body


@pytest.mark.parametrize("kind", ["with", "async with"])
async def test_an_exception_sends_nothing(pair: list[Comm], kind: str) -> None:
    a, b = pair
    with nothing_reported():
        tensors = [ones(), ones()]
        for comm in pair:
            works: list[Work[Any]] = []

            def calls(comm: Comm = comm, works: list[Work[Any]] = works) -> None:
                works += [comm.all_reduce(t) for t in tensors]
                works.append(comm.all_reduce_coalesced([torch.ones(1), torch.ones(1, dtype=torch.int64)]))
                works.append(comm.send(ones(), 0))
                raise ZeroDivisionError("oh no")

            with pytest.raises(ZeroDivisionError):
                if kind == "with":
                    with comm.coalesce():
                        calls()
                else:
                    async with comm.coalesce():
                        calls()
            assert comm.statistics()[:5] == (5, 0, 0, 0, 0)
            for work in works[:3]:
                assert work.done()
                assert work.seq == -1
                with pytest.raises(NotSentError) as caught:
                    await work
                assert "was never sent: the scope was left by ZeroDivisionError: oh no" in str(caught.value)
                assert caught.value.comm == "test"
            del works[:], caught
        assert [t.tolist() for t in tensors] == [[1, 1]] * 2
    assert await asyncio.gather(a.barrier(), b.barrier()) == [None, None], "the comms go on"
    assert [comm.barrier().seq for comm in pair] == [1, 1]


async def test_operations_sent_before_the_exception_go_on(comm: Comm) -> None:
    with contextlib.suppress(KeyError):
        async with comm.coalesce():
            sent = comm.all_reduce(ones())
            await sent
            dropped = comm.all_reduce(ones())
            raise KeyError
    await sent
    assert isinstance(dropped.exception(), NotSentError)


async def test_an_exception_without_text(comm: Comm) -> None:
    with contextlib.suppress(KeyError), comm.coalesce():
        work = comm.barrier()
        raise KeyError
    assert str(work.exception()).endswith("the scope was left by KeyError")


async def test_cancelled_inside(pair: list[Comm]) -> None:
    a, b = pair
    inside = asyncio.Event()
    works: list[Work[Any]] = []

    async def run() -> None:
        async with a.coalesce():
            works.append(a.barrier())
            inside.set()
            await asyncio.sleep(3600)

    with nothing_reported():
        task = asyncio.create_task(run())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(NotSentError, match="CancelledError"):
            await works[0]
        await asyncio.gather(a.barrier(), b.barrier())


async def test_cancelled_while_waiting_for_a_work_inside(pair: list[Comm]) -> None:
    a, b = pair
    works: list[Work[Any]] = []

    async def run() -> None:
        async with a.coalesce():
            works.append(a.barrier())
            works.append(a.barrier())
            await works[0]

    task = asyncio.create_task(run())
    while not works or works[0].seq < 0:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with b.coalesce():
        b.barrier()
        b.barrier()
    await asyncio.gather(*works)


async def test_a_wrong_argument_holds_nothing(comm: Comm) -> None:
    async with comm.coalesce() as batch:
        first = comm.all_reduce(ones())
        for wrong in (
            lambda: comm.all_reduce("x"),  # type: ignore[arg-type]
            lambda: comm.broadcast(ones(), 5),
            lambda: comm.all_reduce(ones(), timeout=-1),
            lambda: comm.barrier(hints={"a": 1}),  # type: ignore[dict-item]
            lambda: comm.all_reduce_coalesced([]),
            lambda: comm.batch_op_create().issue(),
        ):
            with pytest.raises((TypeError, ValueError)):
                wrong()
        assert batch.works == [first]
        assert comm.statistics()[:4] == (1, 1, 8, 1)
        second = comm.all_reduce(ones())
    await asyncio.gather(first, second)


async def test_operations_that_cannot_be_sent_together_fail_and_the_comm_goes_on(comm: Comm) -> None:
    with nothing_reported():
        t = ones()
        with pytest.raises(ValueError, match="shares memory with"):
            async with comm.coalesce():
                works: list[Work[Any]] = [comm.all_reduce(t), comm.send(t, 0), comm.barrier()]
        for work in works:
            with pytest.raises(NotSentError, match="shares memory with"):
                await work
        assert t.tolist() == [1, 1]
        assert comm.statistics()[:5] == (3, 0, 0, 0, 0)
        assert comm.barrier().seq == 0
        assert comm.recv(t, 0).seq == 0
        comm.send(ones(), 0)


async def test_awaiting_inside_raises_the_error_of_sending(comm: Comm) -> None:
    t = ones()
    async with comm.coalesce():
        works: list[Work[Any]] = [comm.all_reduce(t), comm.send(t, 0)]
        with pytest.raises(ValueError, match="shares memory with"):
            await works[0]
        for work in works:
            with pytest.raises(NotSentError):
                await work
        after = comm.barrier()
    await after


async def test_a_backend_that_refuses(comm: Comm) -> None:
    record = Recorder(comm)
    record.failure = BackendError("not today")
    t = ones()
    with pytest.raises(BackendError, match="not today"), comm.coalesce():
        works: list[Work[Any]] = [comm.all_reduce(t), comm.all_reduce(ones()), comm.barrier()]
    for work in works:
        with pytest.raises(NotSentError, match="not today"):
            await work
        assert work.seq == -1
    assert comm.statistics()[:5] == (3, 0, 0, 0, 0)
    record.failure = None
    assert comm.barrier().seq == 0


async def test_a_backend_that_refuses_the_second_batch(comm: Comm) -> None:
    record = Recorder(comm)
    t = ones()
    note = record._note

    def refuse_second(batch: Any) -> None:
        if record.batches:
            record.failure = BackendError("not twice")
        note(batch)

    comm.unsafe_get_backend().submit = refuse_second  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="not twice"), comm.coalesce():
        works = [comm.all_reduce(t), comm.barrier(), comm.all_reduce(t), comm.barrier()]
    await works[0]
    await works[1]
    for work in works[2:]:
        with pytest.raises(NotSentError, match="not twice"):
            await work
    assert [work.seq for work in works] == [0, 1, -1, -1]
    assert comm.statistics()[:4] == (4, 0, 0, 0)


# -- limits


async def test_a_full_batch_leaves_at_once(comm: Comm) -> None:
    record = Recorder(comm)
    with comm.coalesce(max_ops=2):
        for n in range(5):
            comm.barrier()
            assert len(record.batches) == (n + 1) // 2
    assert record.sizes == [2, 2, 1]


async def test_bytes(comm: Comm) -> None:
    record = Recorder(comm)
    sent = []
    with comm.coalesce(max_bytes=24):
        for n in (1, 4, 2, 100, 6, 1):
            comm.all_reduce(ones(n))
            sent.append(len(record.batches))
    assert sent == [0, 0, 1, 3, 4, 4]
    members = [[s.members or (s.op,) for s in batch] for batch in record.batches]
    assert [[op.nbytes for op in batch[0]] for batch in members] == [[4, 16], [8], [400], [24], [4]]


async def test_messages_do_not_fill_a_batch(comm: Comm) -> None:
    record = Recorder(comm)
    with comm.coalesce(max_ops=2, max_bytes=100):
        comm.barrier()
        for n in range(10):
            comm.recv(ones(50), 0, n)
            comm.send(ones(50), 0, n)
        assert record.batches == []
        comm.barrier()
        assert record.sizes == [22]


async def test_limits_count_anew_after_an_await(comm: Comm) -> None:
    record = Recorder(comm)
    async with comm.coalesce(max_ops=2):
        await comm.barrier()
        comm.barrier()
        assert record.sizes == [1]
        comm.barrier()
        assert record.sizes == [1, 2]


@pytest.mark.parametrize("name", ["max_ops", "max_bytes"])
async def test_limits_are_checked(comm: Comm, name: str) -> None:
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"{name} must be a positive integer or None, got {value}"):
            comm.coalesce(**{name: value})
        with pytest.raises(ValueError, match=name):
            coalesce(comm, **{name: value})
    wrong: Any
    for wrong in (1.0, "1", True, [1]):
        with pytest.raises(TypeError, match=f"{name} must be a positive integer or None, got"):
            comm.coalesce(**{name: wrong})
    check_limit(name, None)
    check_limit(name, 1)


async def test_the_call_that_fills_a_batch_raises_the_error_of_sending(comm: Comm) -> None:
    """And what was being called is not lost: it fails, so that closing does not wait for it."""
    t = ones(10)
    with pytest.raises(ValueError, match="shares memory"), comm.coalesce(max_bytes=60) as batch:
        comm.send(t, 0)
        comm.all_reduce(t)
        comm.all_reduce(ones(10))  # has no room: what is there must leave first
    expect_nothing_left(comm, batch)


async def test_several_calls_of_one_when_a_batch_cannot_leave(comm: Comm) -> None:
    t = ones(10)
    with pytest.raises(ValueError, match="shares memory"), comm.coalesce(max_bytes=60) as batch:
        comm.send(t, 0)
        comm.all_reduce(t)
        comm.all_reduce_coalesced([ones(10), torch.ones(10, dtype=torch.int32)])
    expect_nothing_left(comm, batch)


def expect_nothing_left(comm: Comm, batch: CoalesceScope) -> None:
    try:
        assert comm.statistics()[1:4] == (0, 0, 0)
        assert all(work.done() for work in batch.works)
    finally:
        comm.abort()  # closing would wait for what is left


# -- a comm that ends meanwhile


async def test_abort_while_held(pair: list[Comm]) -> None:
    a, b = pair
    async with a.coalesce() as batch:
        work = a.barrier()
        a.abort("enough")
        assert work.done()
        with pytest.raises(AbortedError):
            a.barrier()
    with pytest.raises(AbortedError, match="enough"):
        await work
    with pytest.raises(AbortedError, match="enough"):
        await batch
    with pytest.raises(AbortedError), a.coalesce():
        pass
    del b


async def test_abort_while_held_and_then_an_exception(comm: Comm) -> None:
    with contextlib.suppress(KeyError):
        async with comm.coalesce():
            work = comm.barrier()
            comm.abort("enough")
            raise KeyError
    with pytest.raises(AbortedError, match="enough"):
        await work


async def test_broken_elsewhere_while_held(pair: list[Comm]) -> None:
    a, b = pair
    async with a.coalesce():
        work = a.barrier()
        b.abort("over there")
        async with asyncio.timeout(20):
            with pytest.raises(AbortedError, match="over there"):
                await work
        assert a.statistics().held == 0


async def test_closing_sends_the_held_operations(pair: list[Comm]) -> None:
    a, b = pair
    async with a.coalesce():
        work = a.barrier()
        closing = asyncio.ensure_future(a.aclose())
        await asyncio.sleep(0)
        assert work.seq == 0
        with pytest.raises(ClosedError):
            a.barrier()
        b.barrier()
        async with asyncio.timeout(20):
            await closing
    await work


async def test_closing_with_operations_that_cannot_be_sent(comm: Comm) -> None:
    t = ones()
    async with comm.coalesce():
        works: list[Work[Any]] = [comm.all_reduce(t), comm.send(t, 0)]
        async with asyncio.timeout(20):
            await comm.aclose()
    for work in works:
        with pytest.raises(NotSentError, match="shares memory"):
            await work


async def test_closed_comms_open_no_scope(comm: Comm) -> None:
    await comm.aclose()
    with pytest.raises(ClosedError), comm.coalesce():
        pass


async def test_a_deadline_counts_from_the_call_and_names_the_held_operation(pair: list[Comm]) -> None:
    a, _ = pair
    async with a.coalesce():
        work = a.all_reduce(ones(3), timeout=0.05)
        handle = asyncio.Event()
        work.add_done_callback(lambda _: handle.set())
        async with asyncio.timeout(20):
            await handle.wait()
        with pytest.raises(CollectiveTimeoutError) as caught:
            await work
    assert caught.value.seq == -1
    assert caught.value.op == work.op
    text = str(caught.value)
    assert text.startswith("all_reduce(float32[3], SUM) on comm 'test', rank 0: not finished after 0.")
    assert text.endswith("it is still held back here: a scope of coalesce() has not been left")


async def until_done(work: Work[Any]) -> None:
    """Without waiting for it, which would send it."""
    async with asyncio.timeout(20):
        while not work.done():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("form", ["message", "list", "message batch"])
async def test_deadlines_of_all_that_is_held(pair: list[Comm], form: str) -> None:
    a, _ = pair
    async with a.coalesce():
        work: Work[Any]
        if form == "message":
            work = a.send(ones(), 1, timeout=0.05)
        elif form == "list":
            work = a.all_reduce_coalesced([ones(), torch.ones(1, dtype=torch.int64)], timeout=0.05)
        else:
            messages = a.batch_op_create()
            messages.send(ones(), 1)
            messages.recv(ones(), 1)
            work = messages.issue(timeout=0.05)
        await until_done(work)
    with pytest.raises(CollectiveTimeoutError, match="still held back here"):
        await work


async def test_a_deadline_after_a_full_batch_was_sent(pair: list[Comm]) -> None:
    a, b = pair
    with b.coalesce():
        b.barrier()
        b.barrier()
    async with a.coalesce(max_ops=2):
        recorded = a.unsafe_get_backend()
        hub: Any = recorded
        hub.hub.hold()  # so that what was sent is not done in the call
        sent = [a.barrier(timeout=0.3), a.barrier(timeout=0.3)]
        hub.hub.release()
        assert all(work.done() for work in sent)
        held = a.barrier(timeout=0.31)
        await until_done(held)
    with pytest.raises(CollectiveTimeoutError, match="still held back here"):
        await held


async def test_a_deadline_after_a_nearer_one_was_dropped(pair: list[Comm]) -> None:
    a, _ = pair
    async with a.coalesce():
        a.barrier(timeout=20)
        with contextlib.suppress(KeyError), a.coalesce():
            a.barrier(timeout=0.05)
            raise KeyError
        held = a.barrier(timeout=0.2)
        await until_done(held)
    with pytest.raises(CollectiveTimeoutError, match="still held back here"):
        await held


async def test_a_fused_operation_has_the_earliest_deadline_of_its_members(pair: list[Comm]) -> None:
    a, _ = pair
    with a.coalesce():
        a.all_reduce(ones(1))
        urgent = a.all_reduce(ones(2), timeout=0.05)
        a.all_reduce(ones(3))
    with pytest.raises(CollectiveTimeoutError) as caught:
        await urgent
    assert caught.value.seq == 1
    assert caught.value.op == urgent.op
    assert caught.value.missing == (1,)


async def test_a_deadline_that_passed_while_held_still_counts(pair: list[Comm]) -> None:
    """The loop was blocked meanwhile, say: it is not given time anew."""
    a, _ = pair
    with a.coalesce():
        work = a.barrier(timeout=0.2)
        threading.Event().wait(0.25)
    with pytest.raises(CollectiveTimeoutError) as caught:
        await work
    assert caught.value.elapsed < 20


# -- in the streams of a GPU


class Gpu:
    """In place of a comm's backend: gives what is submitted a place in a stream."""

    def __init__(self, comm: Comm) -> None:
        self.places: list[Place] = []
        self.works: list[Work[Any]] = []
        comm.unsafe_get_backend().submit = self._submit  # type: ignore[method-assign]

    def _submit(self, batch: Any) -> None:
        for submission in batch:
            assert isinstance(submission, Submission)
            place = Place(issued=True)
            submission.work.order = place
            self.places.append(place)
            self.works.append(submission.work)


ORDERED: dict[str, Callable[[Work[Any]], Any]] = {
    "wait": lambda work: work.wait(),
    "wait_stream": lambda work: work.wait_stream(STREAM),
    "ordered": lambda work: asyncio.ensure_future(work.ordered(STREAM)),
}


@pytest.mark.parametrize("how", ORDERED)
async def test_ordering_a_stream_after_a_held_operation_sends_it(comm: Comm, how: str) -> None:
    """On a GPU these do not block, so they are as good as awaiting."""
    gpu = Gpu(comm)
    works: list[Work[Any]] = []
    try:
        async with comm.coalesce():
            works += [comm.all_reduce(ones()), comm.all_reduce(ones())]
            found = ORDERED[how](works[1])
            if how == "ordered":
                async with asyncio.timeout(5):
                    await found
            assert [place.ordered for place in gpu.places] == [[None if how == "wait" else STREAM]]
    finally:
        for work in gpu.works:
            work.settle()
    await asyncio.gather(*works)


# -- several comms


@contextlib.asynccontextmanager
async def two_comms(size: int = 1) -> AsyncIterator[list[tuple[Comm, Comm]]]:
    """Comms "b" and "a" of each rank, in that order."""
    async with loopback_world(size, name="b", timeout=30) as bs, loopback_world(size, name="a", timeout=30) as others:
        yield list(zip(bs, others, strict=True))


async def test_several_comms_send_in_the_order_of_their_names() -> None:
    async with two_comms() as [(b, a)]:
        order: list[str] = []
        for comm in (b, a):
            backend: Any = comm.unsafe_get_backend()

            def note(batch: Any, submit: Any = backend.submit, name: str = comm.name) -> None:
                order.append(name)
                submit(batch)

            backend.submit = note
        async with coalesce(b, a) as batch:
            works = [b.barrier(), a.barrier(), b.barrier(), a.barrier()]
            assert order == []
        assert order == ["a", "b"]
        assert batch.works == [works[1], works[3], works[0], works[2]]
        assert await batch == [None] * 4
        with coalesce(a, b) as batch:
            b.barrier()
            a.barrier()
            batch.flush()
            assert order == ["a", "b", "a", "b"]


async def test_several_comms_and_one_exception() -> None:
    async with two_comms() as [(b, a)]:
        with contextlib.suppress(KeyError), coalesce(b, a):
            works = [a.barrier(), b.barrier()]
            raise KeyError("x")
        for work in works:
            with pytest.raises(NotSentError, match="'x'"):
                await work
        assert a.barrier().done()
        assert b.barrier().done()


async def test_memory_shared_across_comms_is_refused() -> None:
    async with two_comms() as [(b, a)]:
        t = ones(4)
        for one, other in [
            (lambda c: c.all_reduce(t), lambda c: c.all_reduce(t[3:])),
            (lambda c: c.all_reduce(t), lambda c: c.all_reduce(t, out=ones(4))),
            (lambda c: c.all_gather(None, t), lambda c: c.all_reduce(t)),
            (lambda c: c.send(t, 0), lambda c: c.all_reduce(t)),
        ]:
            with pytest.raises(ValueError, match=r"on comm 'b' shares memory with .* on comm 'a'"):
                async with coalesce(b, a):
                    works = [b.barrier(), one(b), other(a), a.barrier()]
            for work in works:
                with pytest.raises(NotSentError, match="shares memory"):
                    await work
        assert t.tolist() == [1] * 4
        assert (a.barrier().seq, b.barrier().seq) == (0, 0)
        async with coalesce(b, a) as batch:
            b.all_gather(None, t)
            a.all_gather(None, t)
            a.all_reduce(t)
            with pytest.raises(ValueError, match="shares memory"):
                batch.flush()
            await batch.works[1]  # sends what its comm holds, "a"
            b.all_reduce(t)
        assert len(await batch) == 4


async def test_memory_shared_across_comms_is_refused_inside_another_scope() -> None:
    async with two_comms() as [(b, a)]:
        t = ones(4)
        async with a.coalesce():
            before = a.barrier()
            with pytest.raises(ValueError, match=r"on comm 'b' shares memory with .* on comm 'a'"):
                async with coalesce(b, a):
                    works = [b.all_reduce(t), a.all_reduce(t)]
        for work in works:
            with pytest.raises(NotSentError, match="shares memory"):
                await work
        await before
        assert t.tolist() == [1] * 4


async def test_several_comms_of_which_one_is_closed() -> None:
    async with two_comms() as [(b, a)]:
        await b.aclose()
        with pytest.raises(ClosedError), coalesce(a, b):
            pass
        assert a.barrier().done(), "it is not held"


async def test_a_comm_within_several() -> None:
    async with two_comms() as [(b, a)]:
        with a.coalesce():
            with coalesce(a, b):
                works = [a.barrier(), b.barrier()]
            assert [work.done() for work in works] == [False, True]
        assert works[0].done()
        with coalesce(a, b):
            with a.coalesce():
                work = a.barrier()
            assert not work.done()
        assert work.done()


async def test_limits_of_several_comms_are_each_ones() -> None:
    async with two_comms() as [(b, a)]:
        with coalesce(a, b, max_ops=2):
            works = [a.barrier(), b.barrier(), a.barrier()]
            assert [work.done() for work in works] == [True, False, True]


async def test_several_comms_on_all_ranks() -> None:
    """Ranks that call in different orders."""
    async with two_comms(2) as ranks:
        works = []
        for n, (b, a) in enumerate(ranks):
            with coalesce(b, a):
                for comm in (a, b)[:: 1 if n else -1]:
                    works += [comm.all_reduce(ones()) for _ in range(3)]
        for work in works:
            assert (await work).tolist() == [2, 2]


# -- estimates


class Estimator:
    """In place of a comm's backend: one that can tell how long operations take, 1 s each."""

    def __init__(self, comm: Comm) -> None:
        self.record = Recorder(comm)
        self.asked: list[list[str]] = []
        self.failure: Exception | None = None
        self.futures: list[Future[float]] | None = None  #: what was promised, if the answer is to wait
        comm.unsafe_get_backend().estimate = self._estimate  # type: ignore[method-assign]

    def _estimate(self, batch: Sequence[Submission]) -> Future[float]:
        if self.failure is not None and batch:
            raise self.failure
        self.asked.append([submission.op.kind for submission in batch])
        future = Future[float]()
        if self.futures is None:
            future.set_result(float(len(batch)))
        else:
            self.futures.append(future)
        return future


@pytest.fixture
def estimator(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> Estimator:
    # loopback says at once that it cannot
    monkeypatch.setattr(type(comm.unsafe_get_backend()), "estimate", lambda self, batch: Future[float]())
    return Estimator(comm)


async def test_seconds(comm: Comm, estimator: Estimator) -> None:
    tensors = [ones(), ones(), ones()]
    with nothing_reported():
        async with comm.time_estimator() as estimate:
            assert estimate.seconds == 0
            works = [comm.all_reduce(tensors[0]), comm.all_reduce(tensors[1]), comm.barrier()]
            works.append(comm.all_reduce(tensors[0]))
            assert estimate.seconds == 0
        assert estimate.seconds == 3
        assert estimator.asked == [["all_reduce", "barrier"], ["all_reduce"]], "planned and merged as if sent"
        for work in works[:2]:
            with pytest.raises(NotSentError, match="it was only estimated"):
                await work
        works.clear()
        del work
    assert estimator.record.batches == []
    assert [t.tolist() for t in tensors] == [[1, 1]] * 3
    assert comm.statistics()[1:5] == (0, 0, 0, 0)
    assert comm.barrier().seq == 0
    async with comm.time_estimator() as estimate:
        pass
    assert estimate.seconds == 0
    with pytest.raises(RuntimeError, match="entered once"):
        async with estimate:
            pass


async def test_an_estimate_sends_nothing_when_something_is_awaited(comm: Comm, estimator: Estimator) -> None:
    async with comm.time_estimator() as estimate:
        work = comm.barrier()
        with pytest.raises(RuntimeError, match="time_estimator"):
            await work
        with pytest.raises(RuntimeError, match="time_estimator"):
            await asyncio.to_thread(work.wait)
    assert estimator.record.batches == []
    assert estimate.seconds == 1


async def test_an_estimate_with_a_scope_in_it_sends_nothing(comm: Comm, estimator: Estimator) -> None:
    async with comm.time_estimator() as estimate:
        comm.barrier()
        with comm.coalesce(max_ops=1) as batch:
            comm.barrier()
            with pytest.raises(RuntimeError, match="time_estimator"):
                batch.flush()
        comm.barrier()
    assert estimator.record.batches == []
    assert estimate.seconds == 3


async def test_closing_within_an_estimate_sends_nothing(comm: Comm, estimator: Estimator) -> None:
    with pytest.raises(ClosedError):
        async with comm.time_estimator():
            work = comm.barrier()
            async with asyncio.timeout(20):
                await comm.aclose()
    assert estimator.record.batches == []
    with pytest.raises(NotSentError):
        await work


async def test_estimates_do_not_nest(comm: Comm, estimator: Estimator) -> None:
    async with comm.time_estimator() as estimate:
        comm.barrier()
        with pytest.raises(RuntimeError, match="within another scope"):
            async with comm.time_estimator():
                pass
        comm.barrier()
    assert estimate.seconds == 2
    with comm.coalesce():
        held = comm.barrier()
        with pytest.raises(RuntimeError, match="within another scope"):
            async with comm.time_estimator():
                pass
        assert not held.done()
    assert held.done()
    assert estimator.record.sizes == [1]


async def test_an_estimate_whose_body_raises(comm: Comm, estimator: Estimator) -> None:
    with contextlib.suppress(KeyError):
        async with comm.time_estimator() as estimate:
            work = comm.barrier()
            raise KeyError("x")
    assert estimate.seconds == 0
    assert estimator.asked == []
    with pytest.raises(NotSentError):
        await work
    assert comm.statistics()[1:4] == (0, 0, 0)
    assert comm.barrier().done()


async def test_an_estimate_that_fails(comm: Comm, estimator: Estimator) -> None:
    estimator.failure = BackendError("cannot say")
    with pytest.raises(BackendError, match="cannot say"):
        async with comm.time_estimator() as estimate:
            work = comm.barrier()
    assert estimate.seconds == 0
    assert isinstance(work.exception(), NotSentError)
    assert comm.barrier().done()


async def test_estimates_of_another_task(comm: Comm, estimator: Estimator) -> None:
    async with comm.time_estimator() as estimate:
        comm.barrier()
        assert await asyncio.to_thread(lambda: comm.barrier().done())
    assert estimate.seconds == 1
    assert estimator.record.sizes == [1]


async def test_calls_during_the_estimate_are_sent(comm: Comm, estimator: Estimator) -> None:
    estimator.futures = []
    found: list[float] = []

    async def run() -> None:
        async with comm.time_estimator() as estimate:
            comm.barrier()
        found.append(estimate.seconds)

    task = asyncio.create_task(run())
    while not estimator.futures:
        await asyncio.sleep(0)
    assert comm.barrier().done()
    estimator.futures[0].set_result(2.5)
    await task
    assert found == [2.5]


async def test_an_estimate_without_a_loop(comm: Comm, estimator: Estimator) -> None:
    estimator.futures = []

    def run() -> tuple[float, Work[Any]]:
        with comm.time_estimator() as estimate:
            work = comm.barrier()
        with pytest.raises(ZeroDivisionError), comm.time_estimator():
            raise ZeroDivisionError
        with comm.time_estimator() as empty:
            pass
        assert empty.seconds == 0
        return estimate.seconds, work

    running = asyncio.ensure_future(asyncio.to_thread(run))
    await until(lambda: estimator.futures)
    estimator.futures[0].set_result(2.5)
    seconds, work = await running
    assert seconds == 2.5
    assert isinstance(work.exception(), NotSentError)
    assert estimator.asked == [["barrier"]]
    assert estimator.record.batches == []


async def test_an_estimate_blocks_no_loop(comm: Comm, estimator: Estimator) -> None:
    with pytest.raises(WouldBlockError, match="async with"):
        comm.time_estimator().__enter__()
    assert comm.barrier().done()


async def test_an_estimate_that_others_do_not_come_to() -> None:
    async with loopback_world(1, timeout=0.05) as (comm,):
        estimator = Estimator(comm)
        estimator.futures = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(comm.unsafe_get_backend()), "estimate", lambda self, batch: Future[float]())
            with pytest.raises(TimeoutError):
                async with comm.time_estimator():
                    work = comm.barrier()
        assert work.done()
        with pytest.raises(AbortedError, match="time_estimator"):
            comm.barrier()


async def test_a_comm_that_cannot_estimate() -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(NotImplementedError, match="'loopback' cannot estimate"):
            comm.time_estimator()
        assert comm.barrier().done()
    with pytest.raises(ClosedError):
        comm.time_estimator()
