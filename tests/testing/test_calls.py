"""The collectives that a process called, seen through a world in one process."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asynccomm.comm import session as sessions
from asynccomm.errors import AbortedError
from asynccomm.testing import loopback_world
from asynccomm.testing.calls import SHOWN, CallWatch


async def test_calls_on_closed_and_open_comms() -> None:
    others = list(sessions.on_close)
    async with loopback_world(1, name="before") as (before,):
        watch = CallWatch()
        await before.barrier()
        async with loopback_world(1, name="closed") as (closed,):
            await closed.all_reduce(torch.ones(2))
            await closed.barrier()
        async with loopback_world(1, name="open") as (comm,):
            for _ in range(SHOWN + 1):
                await comm.barrier()
            calls = watch.calls()
        watch.stop()
    first, second = calls
    assert (first.name, first.called, first.broken) == ("closed", 2, False)
    assert [(number, op) for number, op, _ in first.last] == [(0, "all_reduce(float32[2], SUM)"), (1, "barrier()")]
    assert "test_calls.py" in first.last[0][2]
    assert (second.name, second.called, len(second.last)) == ("open", SHOWN + 1, SHOWN)
    assert first.key != second.key
    assert sessions.on_close == others


async def test_held_messages_and_failures() -> None:
    watch = CallWatch()
    async with loopback_world(2, name="agreed", ordering="agreed") as (one, two):
        held = one.barrier(tag="a")
        await asyncio.gather(one.send(torch.ones(1), 1), two.recv(torch.ones(1), 0))
        mine = next(each for each in watch.calls() if each.called)
        assert (mine.called, [op for _, op, _ in mine.last]) == (1, [str(held.op)])
        two.barrier(tag="a")
        await held
    async with loopback_world(2, name="broken") as (one, two):
        work = one.barrier()
        one.abort()
        with pytest.raises(AbortedError):
            await work
    watch.stop()
    assert sorted((each.name, each.called, each.broken) for each in watch.calls()) == [
        ("agreed", 1, False),
        ("agreed", 1, False),
        ("broken", 0, False),  # this rank has not seen the error
        ("broken", 1, True),
    ]
