"""Offers, and what becomes of them: between simulated devices, with the side channel in this process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import struct
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import MemoryStore
from asynccomm.backends import ordered_executor as lanes_module
from asynccomm.backends.base import BackendContext, Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.nccl.api import Config
from asynccomm.backends.nccl.communicator import end_all
from asynccomm.backends.nccl.poller import Poller
from asynccomm.backends.nccl.side_channel import SideChannel
from asynccomm.backends.nccl.stream_order import StreamPosition
from asynccomm.backends.nccl.transfers import RecvBuffer, Transfers
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.core.background import in_background
from asynccomm.core.mailbox import Mailbox
from asynccomm.errors import BackendError, BrokenError
from asynccomm.ops import Call, MessageSpace, Parcel, RecvParcel, SendParcel
from asynccomm.ops.validation import CommInfo
from tests.sampling import some
from tests.waiting import until

from . import simulation
from .conftest import World
from .simulation import SimulatedBackend, SimulatedDevice, SimulatedEvent, SimulatedNccl, SimulatedStream, UserStream

PATIENCE = 30.0  # seconds until a test that hangs is given up


def data(nbytes: int, salt: int = 0) -> Tensor:
    return (torch.arange(nbytes) * 7 + salt).to(torch.uint8)


@dataclass
class Half:
    """One end of a transfer."""

    number: int
    tensors: Sequence[Tensor]
    flight: StreamPosition
    outcomes: list[BrokenError | None] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return bool(self.outcomes)


class End:
    """One rank's transfers, and all that they need."""

    def __init__(self, rank: int, size: int, side: Any) -> None:
        self.rank = rank
        self.nccl = SimulatedNccl()
        self.device = SimulatedDevice()
        self.poller = Poller(self.device, name="test-transfers-poller")
        self.lanes = OrderedExecutor("test-transfers", 32)
        self.errors: list[BrokenError] = []
        self.streams: list[SimulatedStream] = []
        self.side = side
        config = Config(blocking=True)
        self.transfers = Transfers(
            rank,
            size,
            self.nccl,
            config,
            self.device,
            side,
            self.poller,
            self.lanes,
            self._new_stream,
            self.errors.append,
        )

    def _new_stream(self) -> SimulatedStream:
        self.streams.append(self.device.new_stream(high_priority=False))
        return self.streams[-1]

    def give(self, peer: int, segments: Sequence[Tensor], ready: SimulatedEvent | None = None) -> Half:
        half = Half(self.transfers.number() + peer, segments, StreamPosition(self.device))
        self._begin(half, ready, partial(self.transfers.offer, peer, half.number, segments))
        return half

    def take(
        self,
        giver: int,
        number: int,
        lengths: Sequence[int],
        copies: Sequence[Callable[[], object]] = (),
        ready: SimulatedEvent | None = None,
    ) -> Half:
        half = Half(number, [torch.full((n,), 0xEE, dtype=torch.uint8) for n in lengths], StreamPosition(self.device))
        landings = [RecvBuffer(tensor, copies) for tensor in half.tensors]

        def start(event: SimulatedEvent, flight: StreamPosition, done: Callable[..., object]) -> None:
            self.transfers.accept(giver, number, landings, [event], flight, done)

        self._begin(half, ready, start)
        return half

    def _begin(self, half: Half, ready: SimulatedEvent | None, start: Callable[..., None]) -> None:
        event = self.device.current_stream().record() if ready is None else ready

        def done(error: BrokenError | None) -> None:
            self.device.release(event)
            half.outcomes.append(error)

        start(event, half.flight, done)

    async def end(self) -> None:
        communicators = self.transfers.stop()
        failed = bool(self.errors)
        if not failed:
            assert await asyncio.to_thread(self.lanes.join, PATIENCE), "a lane hangs"
        ending = in_background("end", partial(end_all, self.nccl, self.device, communicators, abort=failed))
        assert await asyncio.to_thread(ending.join, PATIENCE)
        assert await asyncio.to_thread(self.lanes.join, PATIENCE), "a lane hangs"
        self.lanes.end()
        await asyncio.to_thread(self.poller.close, 1.0)


Ends = Callable[..., Awaitable[list[End]]]


@pytest.fixture
async def ends(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ends]:
    """``await ends(size)``: those of all ranks."""
    monkeypatch.setattr(lanes_module, "IDLE_SECONDS", 0.1)  # after which threads end
    made: list[End] = []
    pollers: list[Poller[Any]] = []

    async def make(size: int, sides: Sequence[Any] | None = None) -> list[End]:
        if sides is None:
            store, mailbox = MemoryStore(), Mailbox(asyncio.get_running_loop())
            groups = [CommInfo("test", rank, size, torch.device("cpu")) for rank in range(size)]
            poller = Poller(SimulatedDevice(), name="test-transfers-poller")
            pollers.append(poller)
            contexts = [BackendContext(group, [], store, mailbox, PATIENCE, lambda error: None) for group in groups]
            sides = await asyncio.gather(*(SideChannel.connect(context, "loopback", poller) for context in contexts))
        made.extend(End(rank, size, side) for rank, side in enumerate(sides))
        return made

    before = set(threading.enumerate())
    yield make
    await asyncio.gather(*(end.end() for end in made))
    for poller in pollers:
        await asyncio.to_thread(poller.close, 1.0)
    assert not SimulatedNccl.comms, "communicators were left open"
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("test-transfers"):
            await asyncio.to_thread(thread.join, PATIENCE)
            assert not thread.is_alive(), f"{thread.name} was left"


def same(taken: Half, given: Half) -> bool:
    return all(torch.equal(one, other) for one, other in zip(taken.tensors, given.tensors, strict=True))


# -- one at a time, and in any order -------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", list(itertools.product([True, False], repeat=3)))
async def test_accepted_and_refused_in_every_order(
    ends: Ends, events: list[SimulatedEvent], accepted: tuple[bool, ...]
) -> None:
    giver, taker = await ends(2)
    for order in itertools.permutations(range(3)):
        given = [giver.give(1, [data(100 + i, i), data(7, i)]) for i in range(3)]
        taken: dict[int, Half] = {}
        for i in order:
            if accepted[i]:
                taken[i] = taker.take(0, given[i].number, [100 + i, 7])
            else:
                taker.transfers.refuse(0, given[i].number)
        await until(lambda given=given, taken=taken: all(half.over for half in [*given, *taken.values()]))
        assert all(half.outcomes == [None] and half.flight.over for half in [*given, *taken.values()])
        assert all(same(half, given[i]) for i, half in taken.items())
    assert giver.nccl.calls.count("send") == taker.nccl.calls.count("recv") == 6 * 2 * sum(accepted)
    assert giver.nccl.calls.count("init") == taker.nccl.calls.count("init") == any(accepted), "one lane, if any"
    assert not giver.errors
    assert not taker.errors
    await until(lambda: all(event.released for event in events))


async def test_what_is_refused_is_never_moved(ends: Ends, events: list[SimulatedEvent]) -> None:
    giver, taker = await ends(2)
    segment = data(50)
    given = giver.give(1, [segment])
    assert not given.over
    taker.transfers.refuse(0, given.number)
    await until(lambda: given.over)
    assert given.outcomes == [None]
    assert given.flight.over
    assert giver.nccl.calls == taker.nccl.calls == []
    assert not giver.streams
    assert not taker.streams
    assert all(event.released for event in events)


async def test_several_segments_are_one_group(ends: Ends) -> None:
    giver, taker = await ends(2)
    given = giver.give(1, [data(n, n) for n in (1, 2, 300)])
    taken = taker.take(0, given.number, [1, 2, 300])
    await until(lambda: given.over and taken.over)
    assert same(taken, given)
    assert giver.nccl.calls == ["init", "[", "send", "send", "send", "]"]
    assert taker.nccl.calls == ["init", "[", "recv", "recv", "recv", "]"]


async def test_nothing_at_all(ends: Ends) -> None:
    giver, taker = await ends(2)
    given = giver.give(1, [])
    taken = taker.take(0, given.number, [])
    itself = giver.give(0, [])
    own = giver.take(0, itself.number, [])
    await until(lambda: all(half.outcomes == [None] for half in (given, taken, itself, own)))


async def test_lanes_are_made_when_needed_and_once_for_each_direction(ends: Ends) -> None:
    world = await ends(3)
    assert [len(end.streams) for end in world] == [0, 0, 0]
    inits = []
    for source, target in [(0, 1), (0, 1), (1, 0), (2, 1), (2, 1), (1, 0)]:
        given = world[source].give(target, [data(20)])
        taken = world[target].take(source, given.number, [20])
        await until(lambda given=given, taken=taken: given.over and taken.over)
        assert same(taken, given)
        inits.append([end.nccl.calls.count("init") for end in world])
    assert inits == [[1, 1, 0], [1, 1, 0], [2, 2, 0], [2, 3, 1], [2, 3, 1], [2, 3, 1]]
    assert [len(end.transfers.stop()) for end in world] == [2, 3, 1]


async def test_numbers_are_never_the_same(ends: Ends) -> None:
    (end, *_) = await ends(4)
    numbers = [end.transfers.number() + rank for _ in range(50) for rank in range(4)]
    assert len(set(numbers)) == len(numbers)


async def test_the_taker_may_write_only_when_its_memory_is_ready(ends: Ends) -> None:
    """And the giver's is read only when that is."""
    giver, taker = await ends(2)
    gates = [threading.Event(), threading.Event()]
    users = [SimulatedStream(), SimulatedStream()]
    for gate, user in zip(gates, users, strict=True):
        user.put(gate.wait)
    segment = torch.zeros(30, dtype=torch.uint8)
    users[0].put(lambda: segment.copy_(data(30)))
    given = giver.give(1, [segment], users[0].record())
    taken = taker.take(0, given.number, [30], ready=users[1].record())
    await until(lambda: given.flight.issued and taken.flight.issued)
    gates[0].set()
    assert taken.tensors[0].eq(0xEE).all()
    assert not taken.over
    gates[1].set()
    await until(lambda: given.over and taken.over)
    assert torch.equal(taken.tensors[0], data(30))


async def test_copies_come_behind_the_transfer(ends: Ends) -> None:
    world = await ends(2)
    for source in (0, 1):
        given = world[source].give(1, [data(11)])
        memory = torch.zeros(11, dtype=torch.uint8)
        seen: list[list[int]] = []
        copies = [lambda memory=memory, seen=seen: seen.append(memory.tolist())]
        done: list[object] = []
        flight, ready = StreamPosition(world[1].device), UserStream().record()
        world[1].transfers.accept(source, given.number, [RecvBuffer(memory, copies)], [ready], flight, done.append)
        await until(lambda given=given, done=done: given.over and bool(done))
        assert seen == [data(11).tolist()]
        assert done == [None]


@pytest.mark.parametrize("source", [0, 1])
async def test_memory_is_kept_until_the_stream_is_done_with_it(ends: Ends, source: int) -> None:
    """On a GPU, what the host lets go of is given to others while it is still being written."""
    world = await ends(2)
    given = world[source].give(1, [data(11)])
    gate = threading.Event()
    user = SimulatedStream()
    user.put(gate.wait)
    memory = torch.zeros(11, dtype=torch.uint8)
    kept = weakref.ref(memory)
    done: list[object] = []
    flight = StreamPosition(world[1].device)

    def write(memory: Tensor) -> None:
        world[1].transfers.accept(source, given.number, [RecvBuffer(memory)], [user.record()], flight, done.append)

    write(memory)
    del memory
    await until(lambda: flight.issued)
    assert await asyncio.to_thread(world[1].lanes.join, PATIENCE)
    gc.collect()
    assert kept() is not None
    gate.set()
    await until(lambda: given.over and bool(done))
    gc.collect()
    assert kept() is None


# -- many ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", some([3, 2], 1))
async def test_many_at_once_in_all_directions(ends: Ends, events: list[SimulatedEvent], size: int) -> None:
    world = await ends(size)
    choose = random.Random(size)
    pairs = [(source, target) for source in range(size) for target in range(size)]
    lengths = [[choose.choice([1, 8, 1000, 70_000]) for _ in range(choose.choice([1, 1, 3]))] for _ in range(60)]
    halves: list[Half] = []
    taken: list[tuple[Half, Half]] = []

    def both_ends(source: int, target: int) -> None:
        given = [world[source].give(target, [data(n, i) for n in lengths[i]]) for i in range(60)]
        halves.extend(given)
        order = list(range(60))
        random.Random(source * size + target).shuffle(order)
        for i in order:
            if i % 7 == 3:
                world[target].transfers.refuse(source, given[i].number)
            else:
                half = world[target].take(source, given[i].number, lengths[i])
                halves.append(half)
                taken.append((half, given[i]))

    await asyncio.gather(*(asyncio.to_thread(both_ends, source, target) for source, target in pairs))
    await until(lambda: all(half.over for half in halves))
    assert all(half.outcomes == [None] for half in halves)
    assert all(same(half, given) for half, given in taken)
    assert len(taken) == len(pairs) * sum(i % 7 != 3 for i in range(60))
    assert [end.nccl.calls.count("init") for end in world] == [2 * (size - 1)] * size
    await until(lambda: all(event.released for event in events))


async def test_one_pair_does_not_wait_for_another(ends: Ends) -> None:
    """Nor one direction for the other."""
    world = await ends(3)
    gate = threading.Event()
    user = SimulatedStream()
    user.put(gate.wait)
    held = world[0].give(1, [data(10)], user.record())
    stuck = world[1].take(0, held.number, [10])
    for source, target in [(1, 0), (0, 2), (2, 1)]:
        given = world[source].give(target, [data(10)])
        taken = world[target].take(source, given.number, [10])
        await until(lambda given=given, taken=taken: given.over and taken.over)
    assert not held.over
    assert not stuck.over
    gate.set()
    await until(lambda: held.over and stuck.over)


async def test_to_oneself(ends: Ends, events: list[SimulatedEvent]) -> None:
    (end,) = await ends(1)
    given = [end.give(0, [data(n), data(3, n)]) for n in (5, 600)]
    end.transfers.refuse(0, given[0].number)
    assert given[0].outcomes == [None]
    taken = end.take(0, given[1].number, [600, 3])
    await until(lambda: taken.over and given[1].over)
    assert same(taken, given[1])
    assert all(half.flight.over for half in [*given, taken])
    assert end.nccl.calls == []
    assert end.transfers.stop() == []
    await until(lambda: all(event.released for event in events))


async def test_to_oneself_in_inference_mode(ends: Ends) -> None:
    (end,) = await ends(1)
    given = end.give(0, [data(9)])
    with torch.inference_mode():
        taken = end.take(0, given.number, [9])
    await until(lambda: taken.over)
    assert same(taken, given)


async def test_the_collectives_have_a_communicator_of_their_own(world: World) -> None:
    async with world(2) as comms:
        outputs = [torch.zeros(4) for _ in comms]
        for comm, output in zip(comms, outputs, strict=True):
            comm.send(torch.full((4,), comm.rank + 1.0), 1 - comm.rank)
            comm.recv(output, 1 - comm.rank)
            comm.send_object([torch.ones(3)], 1 - comm.rank)
            comm.recv_object(1 - comm.rank)
        await until(lambda: all(comm.statistics().in_flight == 0 for comm in comms))
        assert [output.tolist() for output in outputs] == [[2.0] * 4, [1.0] * 4]
        for comm in comms:
            backend = comm.unsafe_get_backend()
            assert isinstance(backend, SimulatedBackend)
            assert backend.nccl.calls.count("init") == 3, "one for collectives, one for each direction"
            handle: Any = backend._collectives.communicator._shared._handle
            assert handle.collectives == 0
            assert not handle.messages


# -- what goes wrong -----------------------------------------------------------------------------------------------


def answer(end: End, peer: int, head: bytes) -> None:
    op = SendParcel("clear to send", peer, 1, MessageSpace.INTERNAL)
    end.side.submit(Call(op, (), (), None, parcels=(Parcel(head, ()),)), lambda error: None)


@pytest.mark.parametrize("head", [b"", b"123", struct.pack("<Q?", 999, True), struct.pack("<Q?", 999, False)])
async def test_a_wrong_answer_is_named(ends: Ends, head: bytes) -> None:
    giver, taker = await ends(2)
    given = giver.give(1, [data(10)])
    answer(taker, 0, head)
    await until(lambda: bool(giver.errors))
    assert giver.lanes.join(PATIENCE)
    (error,) = giver.errors
    assert isinstance(error, BackendError)
    assert "rank 1 sent a wrong answer to an offer" in str(error)
    assert not given.over
    back = taker.give(0, [data(10)])  # the threads live
    taken = giver.take(1, back.number, [10])
    await until(lambda: back.over and taken.over)


async def test_the_same_offer_is_taken_once(ends: Ends) -> None:
    giver, taker = await ends(2)
    given = giver.give(1, [data(10)])
    giver.give(1, [data(10)])
    taker.transfers.refuse(0, given.number)
    taker.transfers.refuse(0, given.number)
    await until(lambda: bool(giver.errors))
    assert given.outcomes == [None]
    assert giver.lanes.join(PATIENCE)
    assert len(giver.errors) == 1


@pytest.mark.parametrize("which", [0, 1])
async def test_nccl_refuses_a_call(ends: Ends, which: int) -> None:
    world = await ends(2)
    failing = world[which]
    failing.nccl.fail["recv" if which else "send"] = "NCCL could not do it"
    given = world[0].give(1, [data(10), data(5)])
    taken = world[1].take(0, given.number, [10, 5])
    await until(lambda: bool(failing.errors))
    assert failing.lanes.join(PATIENCE)
    assert [str(error) for error in failing.errors] == ["NCCL could not do it"]
    assert not (given if which == 0 else taken).over
    world[1 - which].errors.append(BackendError("as the other rank says"))  # which is what ends it


@pytest.mark.parametrize("which", [0, 1])
async def test_nccl_cannot_connect(ends: Ends, monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    world = await ends(2)
    failing = world[which]

    def init(size: int, rank: int, unique_id: bytes, config: Config) -> Any:
        # the other end sees it leave
        group = SimulatedNccl.groups.setdefault(unique_id, simulation.Group(unique_id, size))
        with group.lock:
            group.joined.add(rank)
            group.lock.notify_all()
        raise BackendError("NCCL could not connect")

    monkeypatch.setattr(failing.nccl, "init", init)
    given = [world[0].give(1, [data(10)]) for _ in range(3)]
    taken = [world[1].take(0, half.number, [10]) for half in given]
    await until(lambda: bool(failing.errors))
    assert failing.lanes.join(PATIENCE)
    assert str(failing.errors[0]) == "NCCL could not connect"
    assert len(failing.errors) == 1, "it is told once"
    assert not any(half.over for half in (taken if which else given))
    world[1 - which].errors.append(BackendError("as the other rank says"))


async def test_no_unique_id(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = await ends(2)
    given = giver.give(1, [data(10)])

    def unique_id() -> bytes:
        raise BackendError("NCCL could not make an id")

    with monkeypatch.context() as patch, pytest.raises(BackendError, match="make an id"):
        patch.setattr(taker.nccl, "unique_id", unique_id)
        taker.take(0, given.number, [10])
    taken = taker.take(0, given.number, [10])  # nothing is left of it
    await until(lambda: given.over and taken.over)
    assert not taker.errors


@pytest.mark.parametrize("where", ["wait", "record"])
async def test_a_device_that_fails_breaks_the_comm_and_no_thread(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """torch raises RuntimeError, whatever CUDA says."""
    giver, taker = await ends(2)
    given = giver.give(1, [data(10)])
    first = taker.take(0, given.number, [10])
    await until(lambda: given.over and first.over)
    (stream,) = taker.streams

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(stream, where, fail)
    given = giver.give(1, [data(10)])
    taken = taker.take(0, given.number, [10])
    await until(lambda: bool(taker.errors))
    assert taker.lanes.join(PATIENCE), "the lane is stuck"
    assert isinstance(taker.errors[0], BackendError)
    assert "illegal memory access" in str(taker.errors[0])
    assert not taken.over
    giver.errors.append(BackendError("as the other rank says"))


async def test_the_poller_sees_a_device_fail(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = await ends(2)

    def query(event: SimulatedEvent) -> bool:
        raise BackendError("CUDA failed on it")

    monkeypatch.setattr(taker.device, "query", query)
    given = giver.give(1, [data(10)])
    taken = taker.take(0, given.number, [10])
    await until(lambda: given.over and taken.over)
    (error,) = taken.outcomes
    assert isinstance(error, BackendError)
    assert given.outcomes == [None]


async def test_after_the_end_there_are_no_new_lanes(ends: Ends) -> None:
    giver, taker = await ends(2)
    given = [giver.give(1, [data(10)]) for _ in range(2)]
    assert taker.transfers.stop() == []
    with pytest.raises(BackendError, match="has ended"):
        taker.take(0, given[0].number, [10])
    taker.transfers.refuse(0, given[0].number)
    await until(lambda: given[0].over)
    assert taker.nccl.calls == []


async def test_an_answer_that_comes_after_the_end(ends: Ends) -> None:
    giver, taker = await ends(2)
    given = giver.give(1, [data(10)])
    giver.transfers.stop()
    answer(taker, 0, struct.pack("<Q?", given.number, True) + bytes(128))
    await until(lambda: bool(giver.errors))
    assert giver.lanes.join(PATIENCE), "the lane is stuck"
    assert "the comm has ended" in str(giver.errors[0])
    assert giver.nccl.calls == []


async def test_stop_while_a_lane_connects(ends: Ends) -> None:
    giver, taker = await ends(2)
    started, gate = threading.Event(), threading.Event()
    init = giver.nccl.init

    def late(*arguments: Any) -> Any:
        started.set()
        assert gate.wait(PATIENCE)
        return init(*arguments)

    giver.nccl.init = late  # type: ignore[method-assign, assignment]
    given = giver.give(1, [data(10)])
    taken = taker.take(0, given.number, [10])
    await until(started.is_set)
    ends = [partial(end_all, end.nccl, end.device, end.transfers.stop(), abort=True) for end in (giver, taker)]
    for ending in [in_background("end", end) for end in ends]:
        assert await asyncio.to_thread(ending.join, PATIENCE)
    gate.set()
    await until(lambda: bool(giver.errors) and bool(taker.errors))
    assert not given.over
    assert not taken.over


# -- a side channel that tells of the ends of its calls in any order ---------------------------------------------------


class Shuffled:
    """The side channel of one rank. It places messages in order, but tells of several that have come in any order."""

    def __init__(self) -> None:
        self.peer: Shuffled = self
        self.receives: list[tuple[Call, Callable[..., object]]] = []
        self.told: list[Callable[[], object]] = []

    def submit(self, call: Call, done: Callable[..., object]) -> None:
        if isinstance(call.op, RecvParcel):
            self.receives.append((call, done))
            return
        receive, told = self.peer.receives.pop(0)
        delivery = Delivery(Submission(receive, None))  # type: ignore[arg-type]
        assert delivery.accept(1, call.parcels[0].head, {1: 0}) is not None
        self.peer.told.append(lambda: told(None))
        done(None)


async def test_answers_count_in_the_order_they_came_in_and_not_that_of_the_news(ends: Ends) -> None:
    sides = [Shuffled(), Shuffled()]
    sides[0].peer, sides[1].peer = sides[1], sides[0]
    giver, taker = await ends(2, sides)
    given = [giver.give(1, [data(64, i)]) for i in range(5)]
    taken = [taker.take(0, half.number, [64]) for half in given]
    for tell in reversed(sides[0].told):
        tell()
    await until(lambda: all(half.over for half in [*given, *taken]))
    assert all(same(one, other) for one, other in zip(taken, given, strict=True)), "payloads came to the wrong taker"
