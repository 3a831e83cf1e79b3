"""How comms on NCCL fail and go on: what the control channel tells, and a new communicator after a loss."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, BrokenError, CollectiveMismatchError, Comm, Work

from .conftest import World

BOUND = 10.0  # seconds; for a busy machine


async def fails(work: Work[Any]) -> BaseException:
    async with asyncio.timeout(BOUND):
        with pytest.raises(BrokenError) as caught:
            await work
    return caught.value


async def breaks(comm: Comm) -> BaseException:
    async with asyncio.timeout(BOUND):
        while comm._session.error is None:
            await asyncio.sleep(0.001)
    return comm._session.error


async def test_other_collectives_are_named_with_their_call_sites(world: World) -> None:
    async with world(2) as (a, b):
        a.all_reduce(torch.ones(4)), b.broadcast(torch.ones(4), root=0)  # which may be over before that is seen
        for comm in (a, b):
            error = await breaks(comm)
            assert isinstance(error, CollectiveMismatchError)
            assert "all_reduce(float32[4], SUM)" in str(error)
            assert "broadcast(float32[4], root=0)" in str(error)
            assert str(error).count(__file__) == 2


async def test_comms_of_many_ranks_shrink_and_work(world: World) -> None:
    async with world(3) as (a, b, c):
        pending = [a.all_reduce(torch.ones(1)), b.all_reduce(torch.ones(1))]
        c.abort("gone")
        for work in pending:
            assert isinstance(await fails(work), AbortedError)
        async with asyncio.timeout(BOUND):
            small = await asyncio.gather(a.shrink(exclude=[2]), b.shrink(exclude=[2]))
        tensors = [torch.ones(1), torch.ones(1)]
        await asyncio.gather(*(comm.all_reduce(tensor) for comm, tensor in zip(small, tensors, strict=True)))
        assert [tensor.item() for tensor in tensors] == [2, 2]
        for comm in small:
            assert comm.backend == "simulated"
            assert comm.parent_ranks == (0, 1)
            await comm.aclose()


async def test_abort_while_another_thread_is_stuck_in_a_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(2) as (a, b):
        waiting = b.all_reduce(torch.ones(1))
        stuck, let_go = threading.Event(), threading.Event()
        backend = a.unsafe_get_backend()
        submit = backend.submit

        def hang(batch: object) -> None:
            stuck.set()
            let_go.wait(BOUND)
            submit(batch)  # type: ignore[arg-type]

        monkeypatch.setattr(backend, "submit", hang)
        thread = threading.Thread(target=lambda: a.all_reduce(torch.ones(1)).exception)
        thread.start()
        try:
            await asyncio.to_thread(stuck.wait, BOUND)
            await asyncio.to_thread(a.abort, "enough of this")
            error = await fails(waiting)
            assert isinstance(error, AbortedError)
            assert error.reason == "enough of this"
        finally:
            let_go.set()
            await asyncio.to_thread(thread.join)
