"""How long calls would take: what NCCL is asked, and that nothing runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asynccomm import Comm
from asynccomm.backends.base import Submission
from asynccomm.backends.nccl import estimates
from asynccomm.backends.nccl.api import Config
from asynccomm.backends.nccl.plan import NcclCall
from asynccomm.errors import BrokenError
from asynccomm.ops import AllReduce, AllToAllSingle, Barrier, Broadcast, Call, Parcels, Recv, Reduce, Send
from asynccomm.ops.reduce_op import RedOpType, ReduceOp

from .conftest import World
from .simulation import SimulatedBackend, SimulatedStream
from .test_backend import backend_of, backend_of_broken, until


def call(name: str, count: int, peer: int = -1, kind: RedOpType | None = None, dtype: Any = torch.float32) -> NcclCall:
    return NcclCall(name, None, None, count, dtype, peer, kind, op=Barrier())


# -- what NCCL takes as one ----------------------------------------------------------------------------------------


def test_heaps_are_of_one_kind_and_about_one_size() -> None:
    a, b, c, d = (call("all_reduce", n, kind=RedOpType.SUM) for n in (100, 399, 400, 1599))
    other, bytes_, root = (
        call("all_reduce", 100, kind=RedOpType.MAX),
        call("broadcast", 100, 0),
        call("broadcast", 100, 1),
    )
    half = call("all_reduce", 100, kind=RedOpType.SUM, dtype=torch.float16)
    assert estimates.heaps([]) == []
    assert estimates.heaps([c, other, bytes_, d, half, b, root, a]) == [[a, b], [c, d], [other], [bytes_, root], [half]]


class Asked:
    """A communicator that answers."""

    def __init__(self, *answers: float) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Sequence[NcclCall], bool]] = []

    def estimate(self, calls: Sequence[NcclCall], *, known: bool) -> float:
        self.asked.append((calls, known))
        return self.answers.pop(0)


@pytest.mark.parametrize("known", [False, True])
def test_heaps_are_asked_for_one_by_one_and_added(known: bool) -> None:
    small, large = call("all_gather", 1), call("all_gather", 100)
    asked: Any = Asked(0.25, 0.5)
    assert estimates.estimate([large, small], asked, known=known) == 0.75
    assert asked.asked == [([small], known), ([large], known)]
    assert estimates.estimate([], asked, known=known) == 0.0


def test_nccl_does_not_know() -> None:
    asked: Any = Asked(0.25, -1e-6)
    with pytest.raises(NotImplementedError, match=r"^NCCL cannot estimate how long barrier\(\) takes$"):
        estimates.estimate([call("all_gather", 1), call("broadcast", 1)], asked, known=True)


@pytest.mark.parametrize("name", ["send", "recv", "all_to_all", "gather", "scatter"])
def test_messages_are_not_asked_for(name: str) -> None:
    estimates.check_calls([call("broadcast", 1)])
    with pytest.raises(NotImplementedError, match="it makes of messages"):
        estimates.check_calls([call("broadcast", 1), call(name, 1)])


@pytest.mark.parametrize(
    ("native", "blocking", "size", "message"),
    [
        ((), True, 2, "this NCCL, version 23007, cannot estimate"),
        (("estimate",), False, 2, "on a comm that does not block .*: they would run"),
        (("estimate",), True, 1, "on a comm of one rank: they would run"),
    ],
)
def test_where_there_are_no_estimates(native: tuple[str, ...], blocking: bool, size: int, message: str) -> None:
    nccl: Any = SimpleNamespace(native=frozenset(native), version=23007)
    with pytest.raises(NotImplementedError, match=message):
        estimates.check_comm(nccl, Config(blocking=blocking), size)
    estimates.check_comm(SimpleNamespace(native={"estimate"}), Config(blocking=True), 2)  # type: ignore[arg-type]


# -- of a comm -----------------------------------------------------------------------------------------------------


def batch(*calls: Call) -> list[Submission]:
    return [Submission(call, None) for call in calls]  # type: ignore[arg-type]


def some(comm: Comm) -> list[Call]:
    """Several kinds, and one that needs copies around it."""
    return [
        AllReduce.of(comm._group, torch.ones(1000), ReduceOp.SUM),
        AllReduce.of(comm._group, torch.ones(1000, dtype=torch.int32), ReduceOp.MAX),
        Broadcast.of(comm._group, torch.ones(1000, 2)[:, 0], comm.size - 1),
    ]


SECONDS = 3e-6 + 3 * 4000e-9  # of these, in the simulation
GROUPS = [*("[", "all_reduce", "?", "drop") * 2, "[", "broadcast", "?", "drop"]


async def test_nothing_runs_and_tensors_stay_as_they_were(world: World) -> None:
    async with world(2) as comms:
        backends = [backend_of(comm) for comm in comms]
        calls = [some(comm) for comm in comms]
        before = [backend.nccl.calls.copy() for backend in backends]
        futures = [backend.estimate(batch(*each)) for backend, each in zip(backends, calls, strict=True)]
        for future in futures:
            assert await asyncio.wrap_future(future) == pytest.approx(SECONDS)
        for backend, had in zip(backends, before, strict=True):
            assert backend.nccl.calls[len(had) :] == GROUPS
            assert backend._collectives._last is None, "nothing is in flight"
        await asyncio.gather(*(comm.all_reduce(torch.ones(7)) for comm in comms))  # what would run the leftovers
        for each in calls:
            assert all(tensor.eq(1).all() for call in each for tensor in (*call.inputs, *call.outputs))


async def test_what_is_known_is_estimated_in_the_call_and_by_one_rank_alone(world: World) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(1000)) for comm in comms))
        backend = backend_of(comms[0])
        await until(lambda: not backend._collectives.waiting)
        future = backend.estimate(batch(some(comms[0])[0]))
        assert future.done()
        assert future.result() == pytest.approx(5e-6)
        assert not backend._collectives.waiting


async def test_nothing_is_queued_on_a_stream(world: World, events: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(2) as comms:
        backends = [backend_of(comm) for comm in comms]

        def put(self: SimulatedStream, step: Any) -> None:
            raise AssertionError("a stream was used")

        with monkeypatch.context() as patch:
            patch.setattr(SimulatedStream, "put", put)
            for future in [b.estimate(batch(*some(c))) for b, c in zip(backends, comms, strict=True)]:
                await asyncio.wrap_future(future)
        assert events == []


async def test_connecting_for_it_keeps_its_place_and_holds_up_nobody(world: World) -> None:
    async with world(2) as comms:
        backends = [backend_of(comm) for comm in comms]
        future = backends[0].estimate(batch(*some(comms[0])))
        behind = comms[0].all_reduce(torch.ones(7))
        await until(lambda: backends[0].nccl.calls.count("?") == 1)
        assert not future.done()
        assert backends[0]._collectives.waiting == 2
        assert not future.cancel(), "rank 1 may be waiting for it"
        other = backends[1].estimate(batch(*some(comms[1])))
        comms[1].all_reduce(torch.ones(7))
        assert await asyncio.wrap_future(other) == await asyncio.wrap_future(future)
        assert (await behind).eq(2).all()


async def test_what_is_known_does_not_overtake_what_waits(world: World) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(1000)) for comm in comms))
        backend = backend_of(comms[0])
        await until(lambda: not backend._collectives.waiting)
        for group in backend.nccl.groups.values():
            group.known.clear()  # NCCL waits for rank 1, as for the first of a kind
        ahead = comms[0].all_reduce(torch.ones(7))
        future = backend.estimate(batch(some(comms[0])[0]))
        assert not future.done()
        comms[1].all_reduce(torch.ones(7))
        other = backend_of(comms[1]).estimate(batch(some(comms[1])[0]))
        assert await asyncio.wrap_future(future) == await asyncio.wrap_future(other) == pytest.approx(5e-6)
        await ahead


async def test_the_first_thing_on_a_lazy_comm(world: World) -> None:
    async with world(2, hints={"connect": "lazy"}) as comms:
        futures = [backend_of(comm).estimate(batch(*some(comm))) for comm in comms]
        for future in futures:
            assert await asyncio.wrap_future(future) == pytest.approx(SECONDS)


@pytest.mark.parametrize("what", ["send", "recv", "barrier", "parcels"])
async def test_what_begins_on_the_host_is_refused(world: World, what: str) -> None:
    async with world(2) as (comm, _):
        group = comm._group
        call = {
            "send": Send.of(group, torch.ones(1), 1, 0),
            "recv": Recv.of(group, torch.ones(1), 1, 0),
            "barrier": Barrier.of(group),
            "parcels": Call(Parcels("broadcast_object"), (), (), None),
        }[what]
        with pytest.raises(ValueError, match=r"nccl cannot estimate how long .* takes: it begins on the host"):
            backend_of(comm).estimate(batch(*some(comm), call))


async def test_what_has_no_estimate_is_refused_before_nccl_is_asked(world: World) -> None:
    async with world(2) as (comm, _):
        backend = backend_of(comm)
        before = backend.nccl.calls.copy()
        refused = [
            AllToAllSingle.of(comm._group, None, torch.ones(4)),
            Reduce.of(comm._group, torch.ones(4, dtype=torch.int32), 0, ReduceOp.BXOR),  # made of messages
        ]
        for call in refused:
            with pytest.raises(NotImplementedError, match="which it makes of messages"):
                backend.estimate(batch(*some(comm), call))
        assert backend.nccl.calls == before
        assert not backend._collectives.waiting


@pytest.mark.parametrize(("size", "hints"), [(1, {}), (2, {"blocking": "0"})])
async def test_where_nccl_would_run_it(world: World, size: int, hints: dict[str, str]) -> None:
    async with world(size, hints=hints) as comms:
        with pytest.raises(NotImplementedError, match="they would run"):
            backend_of(comms[0]).estimate(batch(*some(comms[0])[:1]))


async def test_not_while_a_graph_is_captured(world: World) -> None:
    async with world(2) as (comm, _):
        backend = backend_of(comm)
        backend.device.capture = SimulatedStream()
        with pytest.raises(RuntimeError, match="cannot be estimated while a CUDA graph is captured"):
            backend.estimate(batch(*some(comm)))
        backend.device.capture = None


async def test_a_call_that_nccl_refuses(world: World) -> None:
    async with world(2) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(1000)) for comm in comms))
        backend = backend_of(comms[0])
        await until(lambda: not backend._collectives.waiting)
        backend.nccl.fail["all_reduce"] = "NCCL could not start all_reduce: invalid argument"
        future = backend.estimate(batch(some(comms[0])[0]))
        with pytest.raises(BrokenError, match=r"nccl could not start all_reduce\(.*invalid argument"):
            future.result()
        assert backend.nccl._open.calls is None, "the group is closed"
        with pytest.raises(BrokenError):
            await comms[0].recv(torch.ones(1), 1)


async def test_a_comm_that_ends_meanwhile(world: World) -> None:
    async with world(2, timeout=20) as comms:
        backend = backend_of(comms[0])
        futures = [backend.estimate(batch(*some(comms[0]))) for _ in range(2)]
        await until(lambda: backend.nccl.calls.count("?") == 1)  # NCCL waits for rank 1
        comms[0].abort("enough")
        assert isinstance(backend_of_broken(comms[0]), SimulatedBackend)
        for future in futures:
            with pytest.raises(BrokenError):
                await asyncio.wrap_future(future)
