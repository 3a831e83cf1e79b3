"""Comms that are used without a loop and in coroutines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import asynccomm
from asynccomm.compat.either import EitherComm, at_once, outcome


def make() -> Any:
    return EitherComm.make(lambda: asynccomm.new_comm(alone=True, name="either"), lambda comm: comm)


def test_without_a_loop_calls_block() -> None:
    either = make()
    work = either.call(either.comm.all_reduce, torch.ones(1))
    assert outcome(work, lambda tensor: tensor.item()) == 1
    part = either.derive(lambda: either.comm.split([0], "part"), lambda comm: comm)
    assert part.close() is None
    assert either.derive(lambda: either.comm.split([], "none"), lambda comm: comm) is None
    assert either.awaited(either.comm.ready) is None
    assert either.close() is None
    assert at_once(3) == 3


async def test_in_a_coroutine_calls_are_awaited() -> None:
    either = await make()
    assert either.comm.loop is asyncio.get_running_loop()
    work = either.call(either.comm.all_reduce, torch.ones(1))
    assert await outcome(work, lambda tensor: tensor.item()) == 1
    part = await either.derive(lambda: either.comm.split([0], "part"), lambda comm: comm)
    await part.close()
    await either.close()
    assert await at_once(3) == 3


async def test_a_comm_of_a_thread_is_used_in_a_coroutine_and_the_other_way_round() -> None:
    either = await asyncio.to_thread(make)
    assert await outcome(either.call(either.comm.barrier), lambda _: 7) == 7
    part = await either.derive(lambda: either.comm.split([0], "part"), lambda comm: comm)
    await part.close()
    await either.close()
    ours = await make()
    assert await asyncio.to_thread(lambda: outcome(ours.call(ours.comm.barrier), lambda _: 7)) == 7
    await asyncio.to_thread(ours.close)


async def test_arguments_are_checked_at_the_call() -> None:
    with pytest.raises(ValueError, match="name"):
        EitherComm.make(lambda: asynccomm.new_comm(alone=True, name=""), lambda comm: comm)
