"""Repeated collectives that go from the call to NCCL, on a simulated GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import Comm, ReduceOp, Work
from asynccomm.backends.nccl.direct_calls import DirectCollectives
from asynccomm.errors import AsyncCommError, BrokenError, CollectiveMismatchError
from asynccomm.observe.watchers import Watcher
from asynccomm.ops import AllReduce, Call
from tests.ordinary_path import noted

from .conftest import World
from .test_backend import backend_of, until

REPEATED = 4

Ordinary = list[Work[Any]]


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> Ordinary:
    return noted(monkeypatch)


async def settled(comms: list[Comm]) -> None:
    """Until no rank's calls have to queue behind others."""
    await until(lambda: not any(backend_of(comm)._collectives.waiting for comm in comms))


async def connected(comms: list[Comm], call: Callable[[Comm], Work[Any]]) -> None:
    """Make a call twice: NCCL connects for its kind, and the path knows it then."""
    for _ in range(2):
        await asyncio.gather(*(call(comm) for comm in comms))
        await settled(comms)


Make = Callable[[Comm], tuple[Work[Any], Tensor, list[float]]]


def reduced(comm: Comm) -> tuple[Work[Any], Tensor, list[float]]:
    tensor = torch.full((2, 3), comm.rank + 1.0)
    return comm.all_reduce(tensor), tensor, [3.0] * 6


def averaged(comm: Comm) -> tuple[Work[Any], Tensor, list[float]]:
    tensor = torch.full((3,), comm.rank + 1.0, requires_grad=True)
    return comm.all_reduce(tensor.detach(), ReduceOp.AVG), tensor, [1.5] * 3


def put_elsewhere(comm: Comm) -> tuple[Work[Any], Tensor, list[float]]:
    output = torch.zeros(3)
    return comm.all_reduce(torch.full((3,), comm.rank + 1.0), out=output), output, [3.0] * 3


def sent(comm: Comm) -> tuple[Work[Any], Tensor, list[float]]:
    tensor = torch.full((3,), comm.rank + 1.0)
    return comm.broadcast(tensor, 1), tensor, [2.0] * 3


def gathered(comm: Comm) -> tuple[Work[Any], Tensor, list[float]]:
    output = torch.zeros(4)
    return comm.all_gather_single(output, torch.full((2,), comm.rank + 1.0)), output, [1.0, 1.0, 2.0, 2.0]


def scattered(comm: Comm) -> tuple[Work[Any], Tensor, list[float]]:
    output = torch.zeros(2)
    work = comm.reduce_scatter_single(output, torch.arange(4.0) + comm.rank)
    return work, output, [[1.0, 3.0], [5.0, 7.0]][comm.rank]


@pytest.mark.parametrize("make", [reduced, averaged, put_elsewhere, sent, gathered, scattered])
async def test_repeated_calls_are_direct(world: World, ordinary: Ordinary, make: Make) -> None:
    async with world(2) as comms:
        assert all(isinstance(comm._fast, DirectCollectives) for comm in comms)
        await connected(comms, lambda comm: make(comm)[0])
        count = len(ordinary)
        for number in range(REPEATED):
            made = [make(comm) for comm in comms]
            for comm, (work, tensor, expected) in zip(comms, made, strict=True):
                assert work.seq == 2 + number
                assert work.order is not None
                assert work.order.issued
                await work
                assert tensor.flatten().tolist() == expected
                assert comm.statistics()[:2] == (3 + number, 0)
        assert len(ordinary) == count


async def test_unusual_calls_take_the_ordinary_path(world: World, ordinary: Ordinary) -> None:
    async with world(2) as comms:
        await connected(comms, lambda comm: comm.all_reduce(torch.zeros(4)))
        await connected(comms, lambda comm: comm.all_gather_single(torch.zeros(8), torch.zeros(4)))
        both = [torch.ones(8) for _ in comms]
        calls: list[Callable[[Comm], Work[Any]]] = [
            lambda comm: comm.all_reduce(torch.ones(4), timeout=40),
            lambda comm: comm.all_reduce(torch.ones(4), tag="named"),
            lambda comm: comm.all_reduce(torch.ones(8)[::2]),
            lambda comm: comm.all_reduce(torch.complex(torch.zeros(4), torch.ones(4)).conj().imag),
            lambda comm: comm.all_reduce(torch.ones(4), ReduceOp.PREMUL_SUM(2.0)),
            lambda comm: comm.all_gather_single(both[comm.rank], both[comm.rank][2:6]),  # overlaps
            lambda comm: comm.all_gather_single(torch.zeros(16)[::2], torch.ones(4)),
        ]
        for call in calls:
            for _ in range(3):
                works = [call(comm) for comm in comms]
                assert all(work in ordinary for work in works)
                await asyncio.gather(*works)
                await settled(comms)
        held = [torch.ones(4) for _ in comms]

        async def scope(comm: Comm) -> None:
            async with comm.coalesce():
                work = comm.all_reduce(held[comm.rank])
                assert not work.done()
            await work

        await asyncio.gather(*(scope(comm) for comm in comms))
        assert [tensor.tolist() for tensor in held] == [[2.0] * 4] * 2
        with pytest.raises(TypeError, match="tensor must be"):
            comms[0].all_reduce([1.0])  # type: ignore[arg-type]
        freed = torch.ones(4)
        freed.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="storage was resized to 0"):
            comms[0].all_reduce(freed)


async def test_a_call_beside_parcels_waits_for_their_memory(world: World, ordinary: Ordinary) -> None:
    async with world(2) as comms:
        await connected(comms, lambda comm: comm.all_reduce(torch.zeros(6)))
        tensors = [torch.full((6,), comm.rank + 1.0) for comm in comms]
        parcels, works = [], []
        for comm, tensor in zip(comms, tensors, strict=True):
            parcels.append(comm.all_gather_v(None, tensor))
            works.append(comm.all_reduce(tensor))
            assert works[-1] in ordinary, "it would overtake the parcels"
        await asyncio.gather(*parcels, *works)
        assert [tensor.tolist() for tensor in tensors] == [[3.0] * 6] * 2
        for parcel in parcels:
            assert (await parcel).tolist() == [1.0] * 6 + [2.0] * 6


async def test_operations_with_factors_are_not_remembered(world: World) -> None:
    async with world(1) as (comm,):
        fast = comm._fast
        assert isinstance(fast, DirectCollectives)
        for factor in (2.0, torch.tensor([2.0]), 3.0):
            await comm.all_reduce(torch.ones(4), ReduceOp.PREMUL_SUM(factor))
        assert not fast._known


async def test_a_call_is_learnt_without_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(1) as (comm,):
        backend, fast = backend_of(comm), comm._fast
        assert isinstance(fast, DirectCollectives)
        made: list[int] = []
        empty = backend.device.empty
        monkeypatch.setattr(
            backend.device, "empty", lambda nbytes, stream: (made.append(nbytes), empty(nbytes, stream))[1]
        )
        await comm.all_reduce(torch.ones(4, dtype=torch.int16), ReduceOp.AVG)
        assert len(made) == 1, "that of the call"
        assert list(fast._known.values()) == [None]


async def test_nothing_is_learnt_in_a_capture(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(1) as (comm,):
        backend, fast = backend_of(comm), comm._fast
        assert isinstance(fast, DirectCollectives)
        await comm.all_reduce(torch.ones(4))
        learnt = dict(fast._known)
        monkeypatch.setattr(backend.device, "capturing", lambda: True)
        for _ in range(2):
            call = AllReduce.of(comm._group, torch.ones(5), ReduceOp.SUM)
            assert fast._begin(call, None, 0.0) is None
        assert fast._known == learnt


async def test_a_call_in_another_loop_is_refused_as_ever(world: World) -> None:
    async with world(1) as (comm,):
        await connected([comm], lambda comm: comm.all_reduce(torch.zeros(4)))

        async def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="another event loop"):
                comm.all_reduce(torch.zeros(4))

        await asyncio.to_thread(asyncio.run, elsewhere())


@pytest.mark.usefixtures("unexplained")
async def test_a_call_that_fails_breaks_the_comm(world: World, ordinary: Ordinary) -> None:
    async with world(2) as comms:
        await connected(comms, lambda comm: comm.all_reduce(torch.zeros(4)))
        backend_of(comms[0]).nccl.fail["all_reduce"] = "NCCL could not all_reduce: unhandled cuda error"
        count = len(ordinary)
        work = comms[0].all_reduce(torch.zeros(4))
        assert len(ordinary) == count
        with pytest.raises(BrokenError, match=r"all_reduce\(float32\[4\], SUM\).*unhandled cuda error"):
            await work
        with pytest.raises(AsyncCommError):
            comms[0].all_reduce(torch.zeros(4))


@pytest.mark.usefixtures("unexplained")
async def test_an_interrupt_in_the_middle_breaks_the_comm(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(2) as comms:
        await connected(comms, lambda comm: comm.all_reduce(torch.zeros(4)))

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        fast = comms[0]._fast
        assert isinstance(fast, DirectCollectives)
        monkeypatch.setattr(fast._calls, "numbered", interrupted)
        with pytest.raises(KeyboardInterrupt):
            comms[0].all_reduce(torch.zeros(4))
        await until(lambda: comms[0]._submitter.error is not None)
        with pytest.raises(BrokenError, match="KeyboardInterrupt"):
            comms[0].all_reduce(torch.zeros(4))


async def test_a_mismatch_is_told(world: World, ordinary: Ordinary) -> None:
    async with world(2) as comms:
        await connected(comms, lambda comm: comm.all_reduce(torch.zeros(4)))
        count = len(ordinary)
        direct = comms[0].all_reduce(torch.zeros(4))
        assert len(ordinary) == count
        for work in (direct, comms[1].barrier()):
            with pytest.raises(CollectiveMismatchError):
                await work


class Watched(Watcher):
    def __init__(self) -> None:
        self.works: list[Work[Any]] = []

    def called(self, call: Call, work: Work[Any]) -> None:
        self.works.append(work)


async def test_watchers_are_told(world: World) -> None:
    async with world(2) as comms:
        watched = Watched()
        comms[0]._submitter.watch(watched)
        works = []
        for _ in range(REPEATED):
            works.append(comms[0].all_reduce(torch.zeros(4)))
            await asyncio.gather(works[-1], comms[1].all_reduce(torch.zeros(4)))
            await settled(comms)
        assert watched.works == works


async def test_few_operations_are_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccomm.backends.nccl.direct_calls.REMEMBERED", 3)
    async with world(1) as (comm,):
        fast = comm._fast
        assert isinstance(fast, DirectCollectives)
        for n in range(1, 12):
            await comm.all_reduce(torch.zeros(n))
            assert len(fast._known) <= 3
