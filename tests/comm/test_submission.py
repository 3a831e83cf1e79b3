"""A submitter alone; and several operations as one, with one Work that is done when all are."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import (
    AbortedError,
    AsyncCommError,
    BackendError,
    BrokenError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Comm,
    CommOptions,
    NotSentError,
    PayloadError,
    ReduceOp,
    WouldBlockError,
)
from asynccomm.backends.base import Submission
from asynccomm.backends.loopback import Hub, LoopbackBackend
from asynccomm.batching.plan import BatchLimiter
from asynccomm.comm.deferring import DeferredCalls
from asynccomm.comm.in_flight import RECORDED, InFlight
from asynccomm.comm.submission import COMPARED, Submitter
from asynccomm.core.callsite import call_site
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import HOPS, UNNUMBERED, Work
from asynccomm.ops import AllReduce, Barrier, Call, Gather, GroupedOp, Recv, Send, variable
from asynccomm.ops.validation import CommInfo
from asynccomm.testing.local import loopback_world
from tests.fake_streams import STREAM, Place
from tests.waiting import until


def hub_of(comm: Comm) -> Hub:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, LoopbackBackend)
    return backend.hub


def together(comm: Comm, calls: Sequence[Call], result: object = "all", timeout: float | None = None) -> Work[Any]:
    return comm._submitter.submit_together(calls, result, timeout, None)


def reduced(comm: Comm, tensor: Tensor) -> Call:
    return AllReduce.of(comm._group, tensor, ReduceOp.SUM)


def barrier(comm: Comm) -> Call:
    return Barrier.of(comm._group)


def wait_for(condition: Callable[[], object]) -> None:
    """Wait in a thread."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited for ever"
        time.sleep(1e-4)


# -- alone, on a backend that keeps what it gets


class Keeper:
    """A backend that keeps the submissions, or raises ``failure``."""

    fusion_limit = fused_limit = 1 << 20

    def __init__(self) -> None:
        self.batches: list[list[Submission]] = []
        self.failure: BaseException | None = None
        self.aborted = False

    def submit(self, batch: Sequence[Submission]) -> None:
        if self.failure is not None:
            raise self.failure
        self.batches.append(list(batch))

    def call_context(self) -> None:
        return None

    def before_block(self, work: Work[Any]) -> None:
        pass

    def drain_before_failure(self) -> None:
        for batch in self.batches:
            for submission in batch:
                submission.work.settle()

    def abort(self) -> None:
        self.aborted = True


class Alone:
    """A submitter of rank 0 of two ranks, without a session."""

    def __init__(self) -> None:
        self.failures: list[BrokenError] = []
        self.group = CommInfo("alone", 0, 2, torch.device("cpu"))
        mailbox = Mailbox(asyncio.get_running_loop())
        self.in_flight = InFlight(CommOptions(timeout=30), mailbox, lambda work: None)
        self.submitter = Submitter(self.group, mailbox, self.in_flight, self.failures.append)
        self.keeper = Keeper()
        backend: Any = self.keeper
        self.submitter.backend = backend
        self.deferred = DeferredCalls(self.submitter)

    def reduce(self) -> Call:
        return AllReduce.of(self.group, torch.ones(2), ReduceOp.SUM)

    def submit(self, call: Call | None = None) -> Work[Any]:
        return self.submitter.submit(self.reduce() if call is None else call, None, None)


async def test_a_call_is_numbered_recorded_and_in_flight() -> None:
    alone = Alone()
    site = call_site()
    work = alone.submitter.submit(alone.reduce(), 7, {"hint": "x"}, site)
    message = alone.submit(Send.of(alone.group, torch.ones(1), 1, 0))
    again = alone.submit()
    assert [(each.seq, each.timeout) for each in (work, message, again)] == [(0, 7), (0, 30), (1, 30)]
    assert (alone.submitter.counts.collectives, alone.submitter.counts.messages) == (2, 1)
    assert list(alone.in_flight.works.items()) == [(work, 8), (message, 4), (again, 8)]
    assert alone.submitter.recent[0] == (work.op, site, 0, work.started, None)
    assert [[item.work for item in batch] for batch in alone.keeper.batches] == [[work], [message], [again]]


async def test_a_refused_call_takes_no_number() -> None:
    alone = Alone()
    alone.keeper.failure = BackendError("full")
    with pytest.raises(BackendError, match="full"):
        alone.submit()
    alone.keeper.failure = None
    assert alone.in_flight.works == {}
    assert alone.submit().seq == 0


async def test_a_deferred_call_is_numbered_when_it_is_sent() -> None:
    alone = Alone()
    queue = alone.deferred.open_queue(BatchLimiter())
    work = alone.submit()
    assert (work.seq, alone.keeper.batches) == (UNNUMBERED, [])
    assert alone.submitter.is_held(work)
    assert not alone.submitter.sends_now(p2p=True)
    alone.deferred.flush(queue)
    assert (work.seq, len(alone.keeper.batches)) == (0, 1)
    dropped = alone.submit()
    alone.submitter.drop(alone.deferred.take(queue), "a test says so")
    assert isinstance(dropped.exception(), NotSentError)
    alone.deferred.close_queue(queue)
    assert alone.submitter.sends_now(p2p=False)
    assert alone.submit().seq == 1


async def test_an_error_ends_all_calls() -> None:
    alone = Alone()
    alone.submitter.error = AbortedError(1, "enough")
    with pytest.raises(AbortedError, match="enough") as caught:
        alone.submit()
    assert caught.value is not alone.submitter.error
    alone.submitter.detach_in_child(ClosedError("forked"))
    with pytest.raises(ClosedError, match="forked"):
        alone.submit()


async def test_a_call_that_the_comm_breaks_meanwhile_fails() -> None:
    alone = Alone()

    def break_it(batch: object) -> None:
        alone.submitter.error = AbortedError(1, "enough")

    alone.keeper.submit = break_it  # type: ignore[method-assign]
    assert isinstance(alone.submit().exception(), AbortedError)


async def test_compared_calls_are_remembered_longer() -> None:
    alone = Alone()
    compared: list[tuple[int, int]] = []
    for _ in range(RECORDED + 1):
        alone.submit()
    assert len(alone.submitter.recent) == RECORDED
    alone.submitter.compare(lambda work, batch: compared.append((work.seq, batch)))
    alone.submit()
    alone.submitter.submit_together([alone.reduce(), alone.reduce()], None, None, None)
    assert compared == [(RECORDED + 1, 1), (RECORDED + 2, 2), (RECORDED + 3, 0)], (
        "the batch's size comes with its first operation"
    )
    assert alone.submitter.recent.maxlen == COMPARED


async def test_a_work_that_a_thread_awaits_past_its_deadline_is_a_failure() -> None:
    alone = Alone()
    work = alone.submitter.submit(alone.reduce(), 0.01, None)
    with pytest.raises(CollectiveTimeoutError) as caught:
        await asyncio.to_thread(work.wait, 30)
    assert alone.failures == [caught.value]
    assert (caught.value.op, caught.value.missing) == (work.op, ())


async def test_an_operation_aside_has_a_number_of_its_own() -> None:
    alone = Alone()
    alone.submit()
    work = alone.submitter.add_aside(Barrier(), 5)
    assert (work.seq, work.timeout, alone.in_flight.works[work]) == (0, 5, 0)
    assert alone.in_flight.statistics().submitted == 2
    work.settle()
    assert work not in alone.in_flight.works


async def test_draining_and_aborting_reach_the_backend(caplog: pytest.LogCaptureFixture) -> None:
    alone = Alone()
    work = alone.submit()
    alone.submitter.drain()
    assert work.done()
    alone.submitter.abort()
    assert alone.keeper.aborted

    def fail() -> None:
        raise ValueError("oh")

    alone.submit()
    alone.keeper.drain_before_failure = fail  # type: ignore[method-assign]
    alone.submitter.drain()
    assert "comm 'alone': the backend could not settle completed operations" in caplog.text


# -- several operations as one


async def test_done_when_all_are() -> None:
    async with loopback_world(2) as (a, b):
        hub_of(a).hold()
        tensors = [torch.ones(2), torch.ones(3)]
        work = together(a, [reduced(a, x) for x in tensors], tensors)
        together(b, [reduced(b, torch.ones(n)) for n in (2, 3)])
        assert not work.done()
        hub_of(a).release(1)
        assert tensors[0].tolist() == [2, 2]
        assert not work.done()
        assert a.statistics().in_flight == 1
        hub_of(a).release()
        assert work.done()
        assert await work is tensors
        assert work.result() is tensors
        assert tensors[1].tolist() == [2, 2, 2]


async def test_numbers_and_descriptions() -> None:
    async with loopback_world(1) as (comm,):
        comm.barrier()
        calls = [
            Recv.of(comm._group, torch.zeros(1), 0, 0),
            barrier(comm),
            Send.of(comm._group, torch.zeros(1), 0, 0),
            barrier(comm),
        ]
        work = together(comm, calls)
        assert work.op == GroupedOp(tuple([call.op for call in calls]))
        assert work.seq == 0, "that of the first, a message"
        assert repr(work) == f"<Work #0 {work.op} done>"
        assert comm.barrier().seq == 3
        assert comm.recv(torch.zeros(1)).seq == 2
        comm.send(torch.zeros(1), 0)
        assert comm.statistics()[:3] == (8, 0, 0)


async def test_statistics_count_each() -> None:
    async with loopback_world(2) as (a, b):
        work = together(a, [reduced(a, torch.ones(2)), reduced(a, torch.ones(100)), barrier(a)])
        assert a.statistics()[:3] == (3, 3, 408)
        hub_of(a).hold()
        together(b, [reduced(b, torch.ones(2)), reduced(b, torch.ones(100)), barrier(b)])
        assert a.statistics()[:3] == (3, 3, 408)
        hub_of(a).release(1)
        assert a.statistics()[:3] == (3, 2, 400)
        hub_of(a).release(1)
        assert a.statistics()[:3] == (3, 1, 0)
        hub_of(a).release()
        assert a.statistics()[:3] == (3, 0, 0)
        assert work.done()


async def test_operations_of_one_kind_are_fused_and_counted_each() -> None:
    async with loopback_world(2) as (a, b):
        hub_of(a).hold()
        tensors: list[Tensor] = []
        scopes = []
        for comm in (a, b):
            with comm.coalesce() as scope:
                for n in (2, 100):
                    tensors.append(torch.ones(n))
                    comm.all_reduce(tensors[-1])
                comm.barrier()
            scopes.append(scope)
        assert a.statistics()[:3] == (3, 3, 408)
        assert [work.seq for work in scopes[0].works] == [0, 1, 2]
        hub_of(a).release(1)
        assert a.statistics()[:3] == (3, 1, 0)
        assert all(tensor.eq(2).all() for tensor in tensors)
        hub_of(a).release()
        assert all(work.done() for work in scopes[0].works)
        works = [a.barrier(), b.barrier()]
        assert [each.seq for each in works] == [3, 3]
        await asyncio.gather(*works)


async def test_calls_of_listeners_in_a_flush_have_numbers_of_their_own() -> None:
    async with loopback_world(2) as (a, b):
        calls: list[Work[Any]] = []

        def called() -> None:
            if not calls:
                calls.append(b.barrier())

        async def send(work: Work[Any]) -> None:  # in another task, whose calls are in no scope
            await work

        with a.coalesce():
            a.barrier()
            a.all_reduce(torch.ones(2))
        with b.coalesce() as scope:
            b.barrier().listen(called)
            last = b.all_reduce(torch.ones(2))
            await asyncio.create_task(send(last))
        assert [work.seq for work in (*scope.works, *calls)] == [0, 1, 2]
        await asyncio.gather(a.barrier(), *scope.works, *calls)


async def test_ready_waits_for_each() -> None:
    async with loopback_world(2, max_ops=2) as (a, b):
        hub_of(a).hold()
        for comm in (a, b):
            together(comm, [barrier(comm) for _ in range(3)])
        waiting = asyncio.ensure_future(a.ready())
        hub_of(a).release(1)
        await asyncio.sleep(0)
        assert not waiting.done()
        hub_of(a).release(1)
        await waiting
        hub_of(a).release()


async def test_waited_for_in_every_way() -> None:
    async with loopback_world(2) as (a, b):
        work = together(a, [barrier(a), barrier(a)])
        heard: list[object] = []
        work.add_done_callback(heard.append)
        in_thread = asyncio.ensure_future(asyncio.to_thread(work.wait, 20))

        async def ask() -> object:
            return await work

        waiters = [asyncio.ensure_future(ask()) for _ in range(3)]
        await asyncio.sleep(0.01)
        waiters[0].cancel()
        hub_of(a).hold()
        together(b, [barrier(b), barrier(b)])
        hub_of(a).release(1)
        assert work.duration is None
        hub_of(a).release()
        assert await asyncio.gather(*waiters[1:], in_thread) == ["all"] * 3
        assert heard == [work]
        assert work.duration is not None
        with pytest.raises(asyncio.CancelledError):
            await waiters[0]


# -- errors


def misfit(comm: Comm) -> Call:
    """Will be told that what comes does not fit, here only."""
    return variable.all_gather_v(comm._group, torch.zeros(9), torch.zeros(1), 0)


def fitting(comm: Comm) -> Call:
    """The other side of it."""
    return variable.all_gather_v(comm._group, None, torch.zeros(1), 0)


async def test_error_of_one_when_all_are_over() -> None:
    async with loopback_world(2) as (a, b):
        tensor = torch.ones(1)
        hub_of(a).hold()
        work = together(a, [misfit(a), reduced(a, tensor), barrier(a)])
        together(b, [fitting(b), reduced(b, torch.ones(1)), barrier(b)])
        hub_of(a).release(2)
        assert not work.done(), "the last is not over yet"
        hub_of(a).release()
        assert work.done()
        for _ in range(2):
            with pytest.raises(PayloadError, match="output must have shape"):
                await work
        assert isinstance(work.exception(), PayloadError)
        assert tensor.item() == 2
        assert a.statistics()[:3] == (3, 0, 0)
        await asyncio.gather(a.barrier(), b.barrier())  # the comm goes on


async def test_the_first_of_several_errors() -> None:
    async with loopback_world(1) as (comm,):

        def failing(text: str) -> Call:
            def place(*arguments: object) -> Sequence[Tensor]:
                raise PayloadError(text)

            return variable.scatter_v(comm._group, None, [torch.zeros(1)], 0)._replace(place=place)

        assert await together(comm, [failing("unasked"), barrier(comm)]) == "all", "nothing comes in a group of one"
    async with loopback_world(2) as (a, b):
        hub_of(a).hold()
        calls = [barrier(a), *[variable.all_gather_v(a._group, torch.zeros(n), torch.zeros(1), 0) for n in (7, 9)]]
        work = together(a, calls)
        together(b, [barrier(b), fitting(b), fitting(b)])
        hub_of(a).release()
        with pytest.raises(PayloadError, match=r"got \(7,\)"):
            await work


async def test_a_mismatch_breaks_the_comm() -> None:
    async with loopback_world(2) as (a, b):
        work = together(a, [barrier(a), barrier(a)])
        other = together(b, [barrier(b), reduced(b, torch.ones(1))])
        for one in (work, other):
            with pytest.raises(CollectiveMismatchError, match="operation #1 differs"):
                await one
        assert "broken" in repr(a)


async def test_deadline_names_the_operation_that_is_late() -> None:
    async with loopback_world(3) as comms:
        hub_of(comms[0]).hold()
        works = [
            together(comm, [barrier(comm), reduced(comm, torch.ones(5))], timeout=30 if comm.rank else 0.03)
            for comm in comms
        ]
        hub_of(comms[0]).release(1)
        with pytest.raises(CollectiveTimeoutError) as caught:
            await works[0]
        assert caught.value.op == AllReduce(torch.float32, 5, ReduceOp.SUM)
        assert caught.value.seq == 1
        assert caught.value.missing == ()
        with pytest.raises(AbortedError, match=r"all_reduce\(float32\[5\], SUM\)"):
            await works[1]


async def test_deadline_names_the_ranks_that_are_late() -> None:
    async with loopback_world(3) as (a, b, c):
        del c
        work = together(a, [barrier(a), reduced(a, torch.ones(5))], timeout=0.03)
        late = together(b, [barrier(b), reduced(b, torch.ones(5))])
        with pytest.raises(CollectiveTimeoutError) as caught:
            await work
        assert caught.value.seq == 0
        assert caught.value.missing == (2,)
        with pytest.raises(AbortedError, match=r"barrier\(\)"):
            await late


async def test_a_thread_that_waits_longer_than_the_loop_should_take() -> None:
    """The loop is blocked, so the deadline is noticed by the thread that waits."""
    async with loopback_world(2) as (a, b):
        del b
        work = together(a, [barrier(a), barrier(a)], timeout=0.05)
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                work.wait()
            except CollectiveTimeoutError as exc:
                failed.append(exc)

        thread = threading.Thread(target=wait)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert len(failed) == 1


async def test_abort() -> None:
    async with loopback_world(2) as (a, b):
        hub_of(a).hold()
        work = together(a, [barrier(a), reduced(a, torch.ones(1))])
        together(b, [barrier(b), reduced(b, torch.ones(1))])
        hub_of(a).release(1)
        a.abort("enough")
        assert work.done()
        with pytest.raises(AbortedError, match="enough"):
            await work
        assert a.statistics().in_flight == 0
        with pytest.raises(AbortedError, match="enough"):
            together(a, [barrier(a), barrier(a)])


async def test_abort_on_another_rank() -> None:
    async with loopback_world(2) as (a, b):
        work = together(a, [barrier(a), barrier(a)])
        b.abort("over there")
        with pytest.raises(AbortedError, match="aborted by rank 1: over there"):
            await work


async def test_a_closed_comm() -> None:
    async with loopback_world(1) as (comm,):
        calls = [barrier(comm), barrier(comm)]
        await comm.aclose()
        with pytest.raises(ClosedError):
            together(comm, calls)
        assert comm.statistics()[:3] == (0, 0, 0)


async def test_closing_waits_for_all() -> None:
    async with loopback_world(2) as (a, b):
        hub_of(a).hold()
        work = together(a, [barrier(a), barrier(a)])
        together(b, [barrier(b), barrier(b)])
        hub_of(a).release(1)
        closing = asyncio.ensure_future(a.aclose())
        await asyncio.sleep(0.01)
        assert not closing.done()
        hub_of(b).release()
        await closing
        assert await work == "all"


async def test_a_batch_that_the_backend_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as (comm,):
        backend = comm.unsafe_get_backend()

        def refuse(batch: object) -> None:
            raise BackendError("not today")

        with monkeypatch.context() as patch:
            patch.setattr(backend, "submit", refuse)
            with pytest.raises(BackendError, match="not today"):
                together(comm, [barrier(comm), barrier(comm)])
        assert comm.statistics()[:3] == (0, 0, 0)
        assert comm.barrier().seq == 0


async def test_wrong_arguments_send_nothing() -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(ValueError, match="timeout must be positive"):
            together(comm, [barrier(comm), barrier(comm)], timeout=-1)
        assert comm.statistics()[:3] == (0, 0, 0)


async def test_handed_on_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as (comm,):
        backend = comm.unsafe_get_backend()
        assert isinstance(backend, LoopbackBackend)
        batches: list[int] = []
        submit = backend.submit

        def counting(batch: Sequence[Any]) -> None:
            batches.append(len(batch))
            submit(batch)

        monkeypatch.setattr(backend, "submit", counting)
        await together(comm, [barrier(comm) for _ in range(5)])
        gather = Gather.of(comm._group, [torch.ones(1)], torch.ones(1), 0)  # in a scope, alone in its batch
        await together(comm, [barrier(comm), gather, barrier(comm)])
        assert batches == [5, 3]


# -- in the streams of a GPU


class Gpu:
    """In place of a comm's backend: keeps what is submitted, each with its place in a stream."""

    def __init__(self, comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[Work[Any]] = []
        self.places: Sequence[Place | None] = ()
        self.captures = False
        self._comm = comm
        monkeypatch.setattr(comm.unsafe_get_backend(), "submit", self._submit)

    def _submit(self, batch: Sequence[Submission]) -> None:
        self.parts = [submission.work for submission in batch]
        for part, place in zip(self.parts, self.places, strict=True):
            part.order = place
            if self.captures:
                assert place is not None
                place.issue()
                part.capture()

    def batch(self, *places: Place | None) -> Work[Any]:
        self.places = places
        return together(self._comm, [barrier(self._comm) for _ in places])

    def settle(self, error: AsyncCommError | None = None) -> None:
        for part in self.parts:
            part.settle(error)


async def test_a_batch_is_issued_once_all_parts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as (comm,):
        gpu = Gpu(comm, monkeypatch)
        places = [Place(), Place()]
        work = gpu.batch(*places)
        order = work.order
        assert order is not None
        assert order.immediate
        waiting = [asyncio.ensure_future(asyncio.to_thread(work.wait)), asyncio.ensure_future(work.ordered(STREAM))]
        heard: list[bool] = []
        order.listen(lambda: heard.append(order.issued))
        await asyncio.to_thread(wait_for, lambda: all(len(place.listeners) == 3 for place in places))
        places[1].issue()
        assert not order.issued
        assert heard == []
        places[0].issue()
        assert await asyncio.gather(*waiting) == ["all", "all"]
        assert order.issued
        assert heard == [True]
        for place in places:
            assert sorted(place.ordered, key=str) == [None, STREAM]
        work.wait_stream(STREAM)
        assert work.wait() == "all"
        assert [place.ordered[2:] for place in places] == [[STREAM, None]] * 2
        assert not work.done()
        gpu.settle()
        assert await work == "all"


async def test_listening_to_a_batch_that_is_issued_already(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as (comm,):
        gpu = Gpu(comm, monkeypatch)
        places = [Place(), Place()]
        work = gpu.batch(*places)
        for place in places:
            place.issue()
        heard: list[None] = []
        assert work.order is not None
        work.order.listen(lambda: heard.append(None))
        assert heard
        gpu.settle()


async def test_parts_that_come_to_their_streams_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as (comm,):
        gpu = Gpu(comm, monkeypatch)
        for _ in range(100):
            places = [Place() for _ in range(3)]
            work = gpu.batch(*places)
            waiting = asyncio.ensure_future(work.ordered())
            await asyncio.sleep(0)
            threads = [threading.Thread(target=place.issue) for place in places]
            for thread in threads:
                thread.start()
            assert await asyncio.wait_for(waiting, 30) == "all"
            for thread in threads:
                thread.join()
            assert [place.ordered for place in places] == [[None]] * 3
            gpu.settle()


async def test_a_batch_is_as_prompt_as_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as (comm,):
        gpu = Gpu(comm, monkeypatch)
        work = gpu.batch(Place(), Place(immediate=False))
        assert work.order is not None
        assert not work.order.immediate
        with pytest.raises(WouldBlockError, match="ordered"):
            work.wait()
        gpu.settle()


async def test_a_batch_with_a_part_that_is_in_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as (comm,):
        gpu = Gpu(comm, monkeypatch)
        place = Place()
        place.issue()
        work = gpu.batch(place, None)
        assert work.order is None
        with pytest.raises(WouldBlockError, match="await"):
            work.wait()
        with pytest.raises(RuntimeError, match="runs on the CPU"):
            work.wait_stream()
        waiting = asyncio.ensure_future(asyncio.to_thread(work.wait))
        gpu.settle()
        assert await waiting == "all"
        assert place.ordered == []


async def test_a_captured_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as (comm,):
        gpu = Gpu(comm, monkeypatch)
        gpu.captures = True
        places = [Place(), Place()]
        work = gpu.batch(*places)
        assert work.captured
        assert work.done()
        assert work.exception() is None
        assert comm.statistics()[:3] == (2, 0, 0)
        with pytest.raises(RuntimeError, match="part of a CUDA graph"):
            await work
        with pytest.raises(RuntimeError, match="part of a CUDA graph"):
            work.result()
        assert work.wait() == "all"
        work.wait_stream(STREAM)
        assert [place.ordered for place in places] == [[None, STREAM]] * 2


@pytest.mark.parametrize("issued", [False, True])
async def test_a_batch_that_fails(monkeypatch: pytest.MonkeyPatch, issued: bool) -> None:
    async with loopback_world(1) as (comm,):
        gpu = Gpu(comm, monkeypatch)
        places = [Place(), Place()]
        work = gpu.batch(*places)
        if issued:
            for place in places:
                place.issue()
        gpu.settle(BackendError("cable cut"))
        for wait in (work.wait, work.wait_stream):
            with pytest.raises(BackendError, match="cable cut"):
                wait()
        with pytest.raises(BackendError, match="cable cut"):
            await work.ordered()
        assert [place.ordered for place in places] == [[], []]


# -- threads, and being forgotten


async def test_from_many_threads() -> None:
    async with loopback_world(1) as (comm,):
        works: list[Work[Any]] = []

        def calls() -> None:
            works.extend(together(comm, [barrier(comm), barrier(comm)]) for _ in range(100))

        threads = [threading.Thread(target=calls) for _ in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        assert sorted(work.seq for work in works) == list(range(0, 800, 2)), "no other comes in between"
        assert comm.statistics()[:3] == (800, 0, 0)


@pytest.mark.parametrize("order", [(0, 1, 1, 0), (1, 0, 0, 1)], ids=str)
async def test_the_last_two_settle_at_once(monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]) -> None:
    """Two threads of the backend go through the same lines, one line at a time, in turns: one of them is the last."""
    async with loopback_world(1) as (comm,):
        backend = comm.unsafe_get_backend()
        batches: list[Sequence[Any]] = []
        with monkeypatch.context() as patch:
            patch.setattr(backend, "submit", batches.append)
            work = together(comm, [barrier(comm), barrier(comm)])
        turns = Turns(order)
        errors = [PayloadError("thrown away"), None]

        def settle(i: int) -> None:
            sys.settrace(turns.tracer(i))
            try:
                batches[0][i].work.settle(errors[i])
            finally:
                sys.settrace(None)
                turns.leave(i)

        await asyncio.gather(*(asyncio.to_thread(settle, i) for i in range(2)))
        with pytest.raises(PayloadError, match="thrown away"):
            await work


class Turns:
    """Lets two threads take turns at the lines of the function ``settled``.

    Args:
        order: of the turns, again and again; one who has left is passed over.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self._next = 0
        self._here = {0, 1}
        self._changed = threading.Condition()

    def tracer(self, i: int) -> Callable[..., Any]:
        def line(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                self._take(i)
            return line

        return lambda frame, event, argument: line if frame.f_code.co_name == "settled" else None

    def _take(self, i: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn() == i, 20)
            self._next += 1
            self._changed.notify_all()

    def _turn(self) -> int:
        while self._order[self._next % len(self._order)] not in self._here:
            self._next += 1
        return self._order[self._next % len(self._order)]

    def leave(self, i: int) -> None:
        with self._changed:
            self._here.discard(i)
            self._changed.notify_all()


async def test_a_dropped_work_runs_on() -> None:
    async with loopback_world(2) as (a, b):
        tensors = [torch.ones(1), torch.ones(1)]
        work = together(a, [reduced(a, x) for x in tensors], None)
        gone = weakref.ref(work)
        del work
        gc.collect()
        await together(b, [reduced(b, torch.ones(1)), reduced(b, torch.ones(1))])
        assert [x.item() for x in tensors] == [2, 2]
        await a.aclose()
        gc.collect()
        assert gone() is None, "nothing keeps it"


async def test_an_error_that_is_not_retrieved_is_reported_once() -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
    async with loopback_world(2) as (a, b):
        together(a, [misfit(a), barrier(a)])
        await together(b, [fitting(b), barrier(b)])
        gc.collect()
        await until(lambda: reports)
        assert [type(report["exception"]) for report in reports] == [PayloadError]


async def test_a_retrieved_error_is_not_reported() -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
    async with loopback_world(2) as (a, b):
        work = together(a, [misfit(a), misfit(a)])
        together(b, [fitting(b), fitting(b)])
        with contextlib.suppress(PayloadError):
            await work
        del work
        gc.collect()
        for _ in range(HOPS + 2):
            await asyncio.sleep(0)
        assert reports == []
