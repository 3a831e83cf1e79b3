"""Goodbyes over messages in one process, and on real groups."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asynccomm import Comm
from asynccomm.backends.gloo import backend as backend_module
from asynccomm.backends.gloo.goodbye import say_goodbye
from asynccomm.backends.gloo.torch_gloo import GOODBYE_TAG
from tests.backends.gloo.network import Network

LONG = 30.0


async def test_a_rank_waits_until_all_have_said_goodbye() -> None:
    network = Network()
    first = [asyncio.create_task(asyncio.to_thread(say_goodbye, network.of(rank), rank, 3, LONG)) for rank in (0, 1)]
    while len(network.sent) < 4:
        await asyncio.sleep(0)
    assert not any(task.done() for task in first)
    await asyncio.to_thread(say_goodbye, network.of(2), 2, 3, LONG)
    await asyncio.wait_for(asyncio.gather(*first), LONG)
    assert sorted(network.sent) == [(a, b, GOODBYE_TAG) for a in range(3) for b in range(3) if a != b]


def test_a_rank_that_does_not_close_is_waited_for_until_the_limit() -> None:
    now = iter([0.0, 5.0, 7.0, 8.0, 20.0])
    waited: list[float] = []

    class Group:
        def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
            return self

        recv = send

        def wait(self, seconds: float) -> None:
            waited.append(seconds)
            raise RuntimeError("timed out")

    group: Any = Group()
    say_goodbye(group, 0, 3, 10.0, clock=lambda: next(now))
    assert waited == [5.0, 3.0, 2.0, 0.001]


def test_a_rank_that_is_gone_is_not_waited_for_and_the_others_are() -> None:
    network = Network()
    network.of(1).send(torch.zeros(1, dtype=torch.uint8), 0, GOODBYE_TAG)
    inner = network.of(0)

    class Group:
        def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
            if peer == 2:
                raise RuntimeError("closed by peer")
            return inner.send(tensor, peer, tag)

        recv = inner.recv

    group: Any = Group()
    say_goodbye(group, 0, 3, LONG)
    assert network.sent == [(1, 0, GOODBYE_TAG), (0, 1, GOODBYE_TAG)]


@pytest.mark.ranks(2, backend="gloo", timeout=60)
async def test_a_comm_is_closed_when_the_other_rank_closes_it(comm: Comm) -> None:
    child = await comm.split([0, 1], name="child")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_module, "GOODBYE_SECONDS", LONG)
        closing = asyncio.create_task(child.aclose()) if comm.rank == 0 else None
        for _ in range(50):  # far longer than closing takes
            await comm.barrier()
        assert closing is None or not closing.done()
        await comm.barrier()
        await child.aclose()
        if closing is not None:
            await closing


@pytest.mark.ranks(2, backend="gloo", timeout=60)
async def test_a_rank_that_closes_later_is_waited_for_a_moment_only(comm: Comm) -> None:
    child = await comm.split([0, 1], name="child")
    if comm.rank == 0:
        await asyncio.wait_for(child.aclose(), LONG)
    await comm.barrier()
    await child.aclose()
