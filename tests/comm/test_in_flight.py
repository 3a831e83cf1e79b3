"""What is in flight, counted, and held back where it is too much."""

from __future__ import annotations

import asyncio
import math
from datetime import timedelta
from typing import Any

import pytest
import torch

from asynccomm import Comm, CommStatistics, Work
from asynccomm.backends.loopback import Hub, LoopbackBackend
from asynccomm.testing.local import loopback_world


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


async def test_what_is_done_is_not_in_flight_any_more() -> None:
    """Not even before the thread that settles it has come to the end of that."""
    async with loopback_world(2) as (a, b):
        hub_of(a).hold()
        work = a.all_reduce(torch.ones(4))
        seen: list[tuple[bool, CommStatistics, list[Work[Any]]]] = []
        work.listen(lambda: seen.append((work.done(), a.statistics(), a._session.pending())))
        assert a._session.pending() == [work]
        b.all_reduce(torch.ones(4))
        hub_of(a).release()
        await work
        assert seen == [(True, CommStatistics(submitted=1, in_flight=0, bytes_in_flight=0), [])]


async def test_who_waits_until_there_is_less() -> None:
    async with loopback_world(2, max_bytes=100) as (a, b):
        hub_of(a).hold()
        await a.ready()
        assert a.statistics()[-2:] == (0, 0), "it did not have to wait"
        a.all_reduce(torch.ones(25))
        waiting = [asyncio.ensure_future(a.ready()) for _ in range(2)]
        await asyncio.sleep(0)
        assert a.statistics()[-2:] == (2, 2)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        assert a.statistics()[-2:] == (1, 2)
        b.all_reduce(torch.ones(25))
        hub_of(a).release()
        await waiting[1]
        assert a.statistics()[-2:] == (0, 2)


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
