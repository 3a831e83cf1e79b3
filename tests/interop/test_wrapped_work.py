"""Awaiting torch's Works: of backends of torch's, of ours, and of what only looks like one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from asynccomm import CollectiveTimeoutError, Comm
from asynccomm.core.python_state import STREAK_AWAITS
from asynccomm.interop.torch_backend import group_over
from asynccomm.interop.torch_work import TorchWork
from asynccomm.interop.wrapped_work import WrappedWork
from tests.interop.world import store as keys
from tests.interop.world import world

reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def waiting_threads() -> int:
    return sum(thread.name == "asynccomm wait" for thread in threading.enumerate())


def at_once(awaitable: WrappedWork) -> list[Tensor]:
    """What awaiting gives without suspending."""
    steps = awaitable.__await__()
    with pytest.raises(StopIteration) as caught:
        while True:
            assert steps.send(None) is None, "a yield to the loop, not a future"
    outputs: list[Tensor] = caught.value.value
    return outputs


def all_reduce(rank: int) -> tuple[Any, list[Tensor]]:
    return dist.all_reduce(torch.tensor([rank + 1.0]), async_op=True), [torch.tensor([3.0])]


def all_gather(rank: int) -> tuple[Any, list[Tensor]]:
    outputs = [torch.zeros(1), torch.zeros(1)]
    return dist.all_gather(outputs, torch.tensor([float(rank)]), async_op=True), [torch.zeros(1), torch.ones(1)]


def barrier(rank: int) -> tuple[Any, list[Tensor]]:
    return dist.barrier(async_op=True), []


def coalesced(rank: int) -> tuple[Any, list[Tensor]]:
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(torch.tensor([rank + 1.0]))
        dist.all_reduce(torch.tensor([rank + 2.0]))
    return manager.works[0], [torch.tensor([3.0]), torch.tensor([5.0])]


OPERATIONS = {call.__name__: call for call in (all_reduce, all_gather, barrier, coalesced)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["gloo", "asynccomm"])
async def test_the_loop_turns_until_the_outputs_are_there(backend: str) -> None:
    store = keys("go")
    with world(backend) as group:
        for name, operation in OPERATIONS.items():
            if group.rank() == 1:
                store.wait([name])
            work, expected = operation(group.rank())
            task = asyncio.create_task(awaited(work))
            if group.rank() == 0:
                for _ in range(10):
                    await asyncio.sleep(0)
                assert not task.done()
                store.set(name, "")  # only now the other rank takes part
            outputs = await task
            assert [output.tolist() for output in outputs] == [output.tolist() for output in expected], name
            assert at_once(WrappedWork([work]))[: len(expected)] == outputs


async def awaited(*works: Any) -> list[Tensor]:
    return await WrappedWork(works)


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_works_of_a_comm_of_this_loop(comm: Comm) -> None:
    group, store = group_over(comm), keys("go")
    for name, count in (("small", 1), ("large", 1 << 20)):
        if comm.rank == 1:
            store.wait([name])
        tensor = torch.ones(count)
        task = asyncio.create_task(awaited(group.allreduce([tensor])))
        if comm.rank == 0:
            for _ in range(10):
                await asyncio.sleep(0)
            assert not task.done()
            store.set(name, "")
        (output,) = await task
        assert output is tensor
        assert bool((output == 2).all())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["gloo", "asynccomm"])
async def test_sends_and_receives(backend: str) -> None:
    store = keys("go")
    before = waiting_threads()
    with world(backend) as group:
        other = 1 - group.rank()
        if group.rank() == 1:
            store.wait(["go"])
            message = WrappedWork([dist.isend(torch.arange(3.0), other)])
            await message
            await message
            return
        tensor = torch.zeros(3)
        work = dist.irecv(tensor, other)
        tasks = [asyncio.create_task(awaited(work)) for _ in range(3)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await WrappedWork([work])  # abandons this wait alone
        assert not any(task.done() for task in tasks)
        assert not WrappedWork([work]).done()
        assert waiting_threads() - before == (backend == "gloo")  # whose receive must not be waited for twice
        store.set("go", "")
        outputs = await asyncio.gather(*tasks)
        assert tensor.tolist() == [0, 1, 2]
        assert [[output.tolist() for output in each] for each in outputs] == [
            [] if backend == "gloo" else [[0, 1, 2]]
        ] * 3
        assert WrappedWork([work]).done()
        at_once(WrappedWork([work]))


@pytest.mark.ranks(2)
async def test_a_work_of_gloo_without_a_future() -> None:
    with world("gloo") as group:
        output = torch.zeros(2)
        work = reduce_scatter_single(output, torch.arange(4.0), async_op=True)
        assert await WrappedWork([work]) == []
        assert output.tolist() == ([0, 2] if group.rank() == 0 else [4, 6])
        # messages of several Works, in whichever order they come
        tensors = [torch.zeros(1) for _ in range(5)]
        if group.rank() == 0:
            works = [dist.irecv(tensor, 1, tag=tag) for tag, tensor in enumerate(tensors)]
            await asyncio.gather(*(awaited(work) for work in works))
            assert [tensor.item() for tensor in tensors] == [0, 1, 2, 3, 4]
        else:
            for tag in (3, 1, 4, 0, 2):
                await WrappedWork([dist.isend(torch.tensor([float(tag)]), 0, tag=tag)])
        # one that its user has waited for
        work = dist.irecv(tensors[0], 1) if group.rank() == 0 else dist.isend(tensors[0], 0)
        work.wait()
        assert at_once(WrappedWork([work])) == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["gloo", "asynccomm"])
async def test_errors(backend: str) -> None:
    store = keys("over")
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(world(backend, seconds=1.0))
        if group.rank() == 1:
            store.wait(["over"], timedelta(seconds=60))
            return
        stack.callback(store.set, "over", "")
        work = WrappedWork(
            [dist.irecv(torch.zeros(1), 1) if backend == "gloo" else dist.all_reduce(torch.zeros(1), async_op=True)]
        )
        kind = RuntimeError if backend == "gloo" else CollectiveTimeoutError
        errors = await asyncio.gather(*(awaited_of(work) for _ in range(2)), return_exceptions=True)
        assert {type(error) for error in errors} == {kind}
        assert work.done()
        depths = []
        for _ in range(3):
            awaiting = work.__await__()
            with pytest.raises(kind) as caught:
                while True:  # it may yield to the loop first
                    awaiting.send(None)
            depths.append(len(traceback.extract_tb(caught.tb)))
        assert len(set(depths)) == 1
        if backend == "gloo":  # of a Work that has a future
            with pytest.raises(RuntimeError):
                await WrappedWork([dist.all_reduce(torch.zeros(1), async_op=True)])


async def awaited_of(work: WrappedWork) -> list[Tensor]:
    return await work


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["gloo", "asynccomm"])
async def test_on_another_loop(backend: str) -> None:
    with world(backend) as group:
        work, expected = all_reduce(group.rank())
        here = asyncio.create_task(awaited(work))
        there = await asyncio.to_thread(lambda: asyncio.run(awaited(work)))
        assert [output.tolist() for output in there] == [output.tolist() for output in expected]
        assert await here == there


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
async def test_what_is_put_together_from_several_works_of_ours() -> None:
    with world("asynccomm") as group:
        tensor = torch.sparse_coo_tensor([[group.rank()]], [1.0], (3,))
        work = dist.all_reduce(tensor, async_op=True)
        assert isinstance(work, TorchWork)
        assert work.finish is not None or work.is_completed()
        (output,) = await WrappedWork([work])
        assert output.to_dense().tolist() == [1, 1, 0]


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
async def test_what_cannot_be_put_together_is_an_error() -> None:
    with world("asynccomm") as group:
        for late in (False, True):
            work = dist.all_reduce(torch.eye(4 + group.rank()).to_sparse(), async_op=True)
            if late:
                with pytest.raises(ValueError, match="tensor must have the same shape"):
                    work.wait()
            for _ in range(2):
                with pytest.raises(ValueError, match="tensor must have the same shape"):
                    await WrappedWork([work])


class Own(dist.Work):
    """A Work in Python, as other libraries have them."""

    def __init__(self, wait: Callable[[], object], future: torch.futures.Future[Any] | None = None) -> None:
        super().__init__()
        self._wait = wait
        self._future = future
        self.waits = 0
        self.is_done = False
        self.error: BaseException | None = None

    def is_completed(self) -> bool:
        return self.is_done

    def is_success(self) -> bool:
        return self.error is None

    def exception(self) -> Any:
        return self.error

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits += 1
        self._wait()
        return True

    def get_future(self) -> Any:
        if self._future is None:
            raise NotImplementedError
        return self._future


async def test_types_of_errors_are_kept() -> None:
    def fail() -> None:
        raise KeyError("it was like that")

    work = Own(fail)
    for _ in range(2):
        with pytest.raises(KeyError, match="like that"):
            await WrappedWork([work])
        gc.collect()
    assert work.waits == 1
    died = weakref.ref(work)
    del work, fail
    gc.collect()
    assert died() is None


async def test_a_finished_work_is_not_waited_for_again() -> None:
    """A second wait of gloo's receive would wait for a second message."""
    work = Own(lambda: None)
    for _ in range(2):
        assert await WrappedWork([work]) == []
        gc.collect()
    assert work.waits == 1
    died = weakref.ref(work)
    del work
    gc.collect()
    assert died() is None


async def test_one_that_has_failed_already() -> None:
    work = Own(lambda: None)
    work.is_done, work.error = True, KeyError("before")
    with pytest.raises(KeyError, match="before"):
        await WrappedWork([work])
    work = Own(lambda: None)
    work.is_done, work.error = True, None
    assert await WrappedWork([work]) == []
    work.is_success = lambda: False  # type: ignore[method-assign]
    work.exception = lambda: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="has failed"):
        await WrappedWork([work])


@pytest.mark.parametrize(
    "value", [None, 3, torch.ones(1), [torch.ones(1)], [[torch.ones(1)], (torch.ones(1),)]], ids=repr
)
async def test_whatever_a_future_has(value: Any) -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    work = Own(pytest.fail, future)
    tasks = [asyncio.create_task(awaited(work, work)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.to_thread(future.set_result, value)
    count = 0 if value is None or value == 3 else 2 * max(1, len(value))
    for task in tasks:
        assert await task == [torch.ones(1)] * count
    assert len(at_once(WrappedWork([work]))) == count / 2


async def test_a_future_that_fails() -> None:
    gate: torch.futures.Future[Any] = torch.futures.Future()

    def fail(_: Any) -> None:
        raise KeyError("inside")

    work = Own(pytest.fail, gate.then(fail))
    task = asyncio.create_task(awaited(work))
    await asyncio.sleep(0)
    await asyncio.to_thread(gate.set_result, None)
    with pytest.raises(RuntimeError, match="KeyError: 'inside'"):  # torch keeps no more of it
        await task


async def test_a_thread_only_while_it_waits() -> None:
    gate = threading.Event()
    works = [Own(gate.wait) for _ in range(3)]
    before = waiting_threads()
    tasks = [asyncio.create_task(awaited(work)) for work in works for _ in range(4)]
    await asyncio.sleep(0)
    assert waiting_threads() == before + 3
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "asynccomm wait")
    tasks[0].cancel()
    gate.set()
    assert await asyncio.gather(*tasks[1:]) == [[]] * 11
    while waiting_threads() > before:
        await asyncio.sleep(0.001)
    assert [work.waits for work in works] == [1, 1, 1]


async def test_nobody_waits_before_it_is_awaited() -> None:
    work = Own(pytest.fail)
    wrapped = WrappedWork([work])
    assert not wrapped.done()
    assert waiting_threads() == 0
    shared = weakref.ref(work)
    del work, wrapped
    gc.collect()
    assert shared() is None


async def test_finished_ones_let_the_loop_turn_now_and_then() -> None:
    work = Own(lambda: None)
    work.is_done = True
    turned = asyncio.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    for _ in range(STREAK_AWAITS):
        await WrappedWork([work])
    assert turned.is_set()


def test_a_loop_that_is_closed_is_not_told() -> None:
    gate = threading.Event()
    work = Own(gate.wait)

    async def give_up() -> None:
        task = asyncio.create_task(awaited(work))
        await asyncio.sleep(0)
        steps: Generator[Any, None, Any] = WrappedWork([work]).__await__()
        left.append(steps)
        steps.send(None)  # waits, and is not cancelled by the end of the loop
        task.cancel()

    left: list[Generator[Any, None, Any]] = []
    asyncio.run(give_up())
    gate.set()
    assert asyncio.run(awaited(work)) == []
    left[0].close()
