"""Operations in flight: their statistics, deadlines and limits."""

from __future__ import annotations

import asyncio
import math
from datetime import timedelta
from typing import Any

import pytest
import torch

from asynccomm import ClosedError, Comm, CommOptions, CommStatistics, Work
from asynccomm.backends.loopback import Hub, LoopbackBackend
from asynccomm.comm.in_flight import InFlight, RollCall, timeout_error
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import UNNUMBERED
from asynccomm.ops import Barrier
from asynccomm.ops.validation import CommInfo
from asynccomm.testing.local import loopback_world
from tests.waiting import lets_others_run


def hub_of(comm: Comm) -> Hub:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, LoopbackBackend)
    return backend.hub


async def test_every_number_of_the_statistics() -> None:
    async with loopback_world(2) as (a, b):
        hub_of(a).hold()
        assert a.statistics() == CommStatistics(submitted=0, in_flight=0, bytes_in_flight=0)
        with a.coalesce() as batch:
            a.all_reduce(torch.ones(4))
            a.all_reduce(torch.ones(6))
            assert a.statistics() == CommStatistics(submitted=2, in_flight=2, bytes_in_flight=40, held=2)
        assert a.statistics() == CommStatistics(submitted=2, in_flight=2, bytes_in_flight=40, batches=1)
        with b.coalesce():
            b.all_reduce(torch.ones(4))
            b.all_reduce(torch.ones(6))
        single = a.all_reduce(torch.ones(1))
        assert a.statistics() == CommStatistics(submitted=3, in_flight=3, bytes_in_flight=44, batches=1)
        b.all_reduce(torch.ones(1))
        hub_of(a).release()
        await batch
        await single
        assert a.statistics() == CommStatistics(submitted=3, in_flight=0, bytes_in_flight=0, batches=1)


async def test_a_done_work_is_not_in_flight() -> None:
    """Not even before the thread that settles it has come to the end of that."""
    async with loopback_world(2) as (a, b):
        hub_of(a).hold()
        work = a.all_reduce(torch.ones(4))
        seen: list[tuple[bool, CommStatistics, list[Work[Any]]]] = []
        work.listen(lambda: seen.append((work.done(), a.statistics(), a._session.in_flight.pending())))
        assert a._session.in_flight.pending() == [work]
        b.all_reduce(torch.ones(4))
        hub_of(a).release()
        await work
        assert seen == [(True, CommStatistics(submitted=1, in_flight=0, bytes_in_flight=0), [])]


async def test_ready_waits_and_counts_its_waits() -> None:
    async with loopback_world(2, max_bytes=100) as (a, b):
        hub_of(a).hold()
        await a.ready()
        assert a.statistics()[5:7] == (0, 0), "it did not have to wait"
        a.all_reduce(torch.ones(25))
        waiting = [asyncio.ensure_future(a.ready()) for _ in range(2)]
        await asyncio.sleep(0)
        assert a.statistics()[5:7] == (2, 2)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        assert a.statistics()[5:7] == (1, 2)
        b.all_reduce(torch.ones(25))
        hub_of(a).release()
        await waiting[1]
        assert a.statistics()[5:7] == (0, 2)


async def test_a_new_timeout_is_for_later_calls_only() -> None:
    async with loopback_world(2, timeout=30) as (a, b):
        before = a.all_reduce(torch.ones(1))
        a.set_timeout(timedelta(seconds=5))
        after, own = a.all_reduce(torch.ones(1)), a.all_reduce(torch.ones(1), timeout=7)
        assert (before.timeout, after.timeout, own.timeout) == (30, 5, 7)
        assert a.options.timeout == 5
        assert b.options.timeout == 30
        await asyncio.gather(*(b.all_reduce(torch.ones(1)) for _ in range(3)))
        for bad in (0, -1, math.nan, "1", True, None):
            with pytest.raises((TypeError, ValueError), match="timeout must be"):
                a.set_timeout(bad)  # type: ignore[arg-type]


async def test_an_extended_timeout_ends_with_the_first_call_after_it() -> None:
    async with loopback_world(2, timeout=30) as (a, b):
        before = a.all_reduce(torch.ones(1))
        a.extend_timeout(10)
        await b.all_reduce(torch.ones(1))
        await before  # was called earlier
        first, second = a.all_reduce(torch.ones(1)), a.all_reduce(torch.ones(1))
        own = a.all_reduce(torch.ones(1), timeout=3)
        assert (first.timeout, second.timeout, own.timeout) == (40, 40, 3)
        await b.all_reduce(torch.ones(1))
        await first
        assert a.all_reduce(torch.ones(1)).timeout == 30
        with pytest.raises(ValueError, match="extra must be positive, got -1"):
            a.extend_timeout(-1)
        await asyncio.gather(*(b.all_reduce(torch.ones(1)) for _ in range(3)))


# -- alone, without a submitter


class Alone:
    """An InFlight whose Works are added and settled by the test."""

    def __init__(self, **options: Any) -> None:
        self.expired: list[Work[Any]] = []
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self.in_flight = InFlight(CommOptions(**options), self.mailbox, self.expired.append)

    def work(self, nbytes: int = 0, seq: int = 0, timeout: float = 60.0) -> Work[Any]:
        work: Work[Any] = Work(
            Barrier(), seq, self.mailbox, value=None, timeout=timeout, on_settled=self.in_flight.settled
        )
        self.in_flight.works[work] = nbytes
        self.in_flight.counts.submitted += 1
        return work


def stay_open() -> None:
    """For a comm that is open."""


async def test_settling_removes_a_work() -> None:
    alone = Alone()
    late, early = alone.work(8), alone.work(4, UNNUMBERED)
    early.started = late.started - 1
    assert alone.in_flight.pending() == [early, late]
    assert alone.in_flight.statistics()[:4] == (2, 2, 12, 1)
    late.settle()
    assert alone.in_flight.works == {early: 4}
    assert alone.in_flight.statistics()[:4] == (2, 1, 4, 1)


async def test_held_operations_do_not_count_for_ready() -> None:
    alone = Alone(max_ops=1)
    alone.work(seq=UNNUMBERED)
    await asyncio.wait_for(alone.in_flight.ready(stay_open), 10)
    sent = alone.work()
    waiting = asyncio.ensure_future(alone.in_flight.ready(stay_open))
    await asyncio.sleep(0)
    assert not waiting.done()
    sent.settle()
    await asyncio.wait_for(waiting, 10)


async def test_a_loop_of_ready_lets_other_tasks_run() -> None:
    alone = Alone()
    assert await lets_others_run(lambda: alone.in_flight.ready(stay_open))


async def test_ready_raises_the_error_of_a_comm_that_ends() -> None:
    alone = Alone(max_ops=1)
    works = [alone.work(), alone.work()]
    errors: list[Exception] = []

    def check_open() -> None:
        for error in errors:
            raise error

    waiting = asyncio.ensure_future(alone.in_flight.ready(check_open))
    await asyncio.sleep(0)
    errors.append(ClosedError("closed"))
    works[0].settle()
    with pytest.raises(ClosedError):
        await asyncio.wait_for(waiting, 10)
    assert alone.in_flight.statistics().waiting == 0


async def test_waiting_for_operations_that_threads_settle() -> None:
    alone = Alone()
    works = [alone.work() for _ in range(3)]
    waiting = asyncio.ensure_future(alone.in_flight.wait_while(lambda: bool(alone.in_flight.works)))
    for work in works:
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.to_thread(work.settle)
    await asyncio.wait_for(waiting, 10)


async def test_the_first_work_past_its_deadline_is_reported() -> None:
    alone = Alone()
    works = [alone.work(timeout=timeout) for timeout in (30, 0.01)]
    for work in works:
        alone.in_flight.deadlines.add(work)
    await asyncio.sleep(0.1)
    assert alone.expired == works[1:]


async def test_the_error_of_a_timeout() -> None:
    work = Alone().work(seq=4, timeout=0.5)
    group = CommInfo("grads", 1, 3, torch.device("cpu"))
    error = timeout_error(group, work, RollCall([2], [0, 1], ["busy"]))
    assert (error.op, error.seq, error.timeout) == (Barrier(), 4, 0.5)
    assert (error.missing, error.arrived) == ((2,), (0, 1))
