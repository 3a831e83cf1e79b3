"""Collectives that share memory with parcels: the waits, by hand; and on a simulated GPU, the results."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import AbortedError, BackendError, BrokenError, Comm, ReduceOp, Work, WouldBlockError
from asynccomm.backends.base import Submission
from asynccomm.backends.nccl import hazard_tracker
from asynccomm.backends.nccl.hazard_tracker import Entry, HazardTracker
from asynccomm.backends.nccl.stream_order import StreamPosition
from asynccomm.errors import CollectiveTimeoutError
from asynccomm.ops import AllReduce, Call, Parcel, Parcels
from tests.sampling import amount, some
from tests.waiting import until

from .conftest import World
from .simulation import SimulatedBackend, SimulatedDevice, SimulatedEvent, SimulatedStream

SOMETHING = AllReduce(torch.uint8, 1, ReduceOp.SUM)

# -- the waits: each operation is ended by hand, and the lane turned by hand -------------------------------------------


class ByHand:
    """Notes what is started; an operation is called by a name, in capitals if it is made of parcels."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.failures: list[str] = []
        self.dropped: list[str] = []
        self.refused: set[str] = set()
        self._entries: dict[str, Entry] = {}
        self._jobs: list[Callable[[], object]] = []
        self.line = HazardTracker(self, self._fail)  # type: ignore[arg-type]

    def put(self, lane: str, job: Callable[[], object]) -> None:
        assert not self._jobs, "two lanes would start what waits"
        self._jobs.append(job)

    def _fail(self, entry: Entry, exc: Exception) -> None:
        self.failures.append(str(exc))

    def submit(self, name: str, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> bool:
        """Whether it is started in the call."""

        def start(entry: Entry, late: bool) -> None:
            if name in self.refused:
                raise ValueError(f"no {name}")
            self.started.append(f"{name} late" if late else name)

        batch: Sequence[Submission] = ()
        flight = None
        if name.isupper():
            parcel = Parcel(b"", tuple(reads))
            batch = [Submission(Call(Parcels("x"), (), tuple(writes), None, parcels=(parcel,)), None)]  # type: ignore[arg-type]
        elif reads or writes:
            outputs = tuple(writes)
            batch = [Submission(Call(SOMETHING, tuple(reads) or outputs, outputs, None), None)]  # type: ignore[arg-type]
            flight = StreamPosition(None)  # type: ignore[arg-type]
            if self.line.quiet:
                self.line.note(flight, batch)
                self._entries[name] = Entry(start, batch, flight)
                self.started.append(name)
                return True
        entry = self._entries[name] = Entry(start, batch, flight, lambda: self.dropped.append(name))
        return self.line.submit(entry)

    def over(self, name: str) -> list[str]:
        """What is started then."""
        self.started.clear()
        self.line.over(self._entries.pop(name))
        self.turn()
        return list(self.started)

    def turn(self) -> None:
        while self._jobs:
            self._jobs[0]()
            self._jobs.pop(0)


@pytest.fixture
def hand() -> ByHand:
    return ByHand()


M = torch.zeros(10)
FREE, TAKEN = torch.zeros(10), M[4:]
CONFLICTS = {
    "both write": ([], [M[:5]], [], [TAKEN]),
    "the second reads": ([], [M[:5]], [TAKEN], [FREE]),
    "the second writes what is read": ([M[:5]], [FREE], [], [TAKEN]),
    "one of several": ([FREE[:1]], [FREE[1:2], M[4:5]], [FREE[2:3], M[:9:4]], [FREE[3:4]]),
}


@pytest.mark.parametrize("kind", CONFLICTS)
@pytest.mark.parametrize(("first", "second"), [("a", "B"), ("A", "b"), ("A", "B")])
@pytest.mark.parametrize("others", [0, 2])
def test_conflicts_with_parcels_wait(hand: ByHand, kind: str, first: str, second: str, others: int) -> None:
    reads, writes, later_reads, later_writes = CONFLICTS[kind]
    for i in range(others):
        assert hand.submit(f"x{i}", writes=[torch.zeros(3)])
        assert hand.submit(f"X{i}", writes=[torch.zeros(3)])
    assert hand.submit(first, reads, writes)
    assert not hand.submit(second, later_reads, later_writes)
    if others:
        assert hand.over("x1") == [], "of another operation"
        assert hand.over("X0") == [], "of another operation"
    assert hand.over(first) == [f"{second} late"]
    assert not hand.line.waiting
    assert hand.over(second) == []
    assert hand.submit(first, reads, writes), "all of that is over"


def test_reads_are_shared(hand: ByHand) -> None:
    assert hand.submit("A", [M], [FREE[:2]])
    assert hand.submit("b", [M], [FREE[2:4]])
    assert hand.submit("C", [M[2:7]], [FREE[4:]])
    assert not hand.submit("d", writes=[M])
    assert hand.over("A") == []
    assert hand.over("b") == []
    assert hand.over("C") == ["d late"]


def test_a_stream_orders_collectives_of_nccl_alone(hand: ByHand) -> None:
    assert hand.submit("A", writes=[FREE])
    assert hand.submit("a", writes=[M])
    assert hand.submit("b", writes=[M])


def test_everything_waits_behind_what_waits_and_starts_in_order(hand: ByHand) -> None:
    assert hand.submit("A", writes=[M])
    assert not hand.submit("b", writes=[M])
    assert not hand.submit("c", writes=[FREE]), "is told apart by its order"
    assert not hand.submit("D", writes=[torch.zeros(3)]), "is told apart by its order"
    assert not hand.submit("barrier"), "is told apart by its order"
    assert not hand.submit("E", [FREE])
    assert not hand.submit("f", writes=[torch.zeros(3)])
    assert hand.over("A") == ["b late", "c late", "D late", "barrier late"]
    assert not hand.submit("g", writes=[torch.zeros(3)])
    assert hand.over("c") == ["E late", "f late", "g late"]
    assert hand.line.waiting is False
    assert not hand.line.quiet
    assert hand.over("D") == hand.over("E") == []
    assert hand.line.quiet


def test_nothing_overtakes_what_a_lane_is_about_to_start(hand: ByHand) -> None:
    hand.submit("A", writes=[M])
    hand.submit("b", writes=[M])
    hand.started.clear()
    hand.line.over(hand._entries["A"])
    assert not hand.line.quiet
    assert not hand.submit("c", writes=[FREE])
    assert not hand.submit("D")
    hand.turn()
    assert hand.started == ["b late", "c late", "D late"]


def test_memory_is_looked_at_only_for_parcels(hand: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    real = hazard_tracker.accesses
    monkeypatch.setattr(hazard_tracker, "accesses", lambda submission: looks.append(submission) or real(submission))
    for name in "abc":
        assert hand.submit(name, writes=[M])
    assert hand.over("a") == []
    assert looks == []
    assert hand.submit("D", writes=[FREE])
    assert len(looks) == 3, "D, and b and c, which are under way"
    assert hand.submit("E", writes=[torch.zeros(1)])
    assert len(looks) == 4, "the memory of b and c is known"


def test_what_is_over_is_forgotten(hand: ByHand) -> None:
    hand.submit("a", writes=[M])
    hand.submit("B", writes=[FREE])
    hand.over("a")
    hand.over("B")
    hand.submit("C", writes=[M])
    hand.over("C")
    line = hand.line
    assert not [*line._known, *line._collectives, *line._parcels]
    assert not [*line._of_collectives._written._layers, *line._of_parcels._written._layers]


def test_a_start_that_fails_in_the_call_takes_nothing_with_it(hand: ByHand) -> None:
    hand.refused = {"A", "barrier"}
    for name in ("A", "barrier"):
        with pytest.raises(ValueError, match=f"no {name}"):
            hand.submit(name, writes=[M] if name == "A" else ())
    assert hand.line.quiet
    assert hand.submit("B", writes=[M])
    hand.refused = {"c"}
    with pytest.raises(ValueError, match="no c"):
        hand.submit("c", writes=[FREE])
    assert hand.submit("D", writes=[FREE])
    assert hand.failures == []


def test_a_start_that_fails_after_a_wait_ends_the_line(hand: ByHand) -> None:
    hand.submit("A", writes=[M])
    hand.submit("b", writes=[M])
    hand.submit("c", writes=[FREE])
    hand.refused = {"b"}
    assert hand.over("A") == []
    assert hand.failures == ["no b"]
    assert hand.dropped == ["c"]
    assert not hand.submit("D")
    assert hand.dropped == ["c", "D"]
    assert not hand.line.waiting


def test_the_end(hand: ByHand) -> None:
    hand.submit("A", writes=[M])
    hand.submit("b", writes=[M])
    hand.submit("estimate")
    for _ in range(2):
        hand.line.end()
    assert hand.dropped == ["b", "estimate"]
    assert hand.over("A") == []
    assert not hand.line.quiet, "a collective would be started"
    assert not hand.submit("c", writes=[FREE])
    assert hand.started == []


def test_many_threads() -> None:
    """Ended by threads while others are put in: all are started, in order, and no two that conflict at once."""
    tensors = [torch.zeros(4) for _ in range(3)]
    chance = random.Random(3)
    plan = [(chance.random() < 0.4, chance.sample(range(3), chance.randrange(1, 3))) for _ in range(600)]
    started: list[int] = []
    busy: dict[int, tuple[bool, set[int]]] = {}
    ready: list[int] = []
    changed = threading.Condition()
    entries: dict[int, Entry] = {}
    over: list[int] = []
    lanes = SimulatedLanes()
    line = HazardTracker(lanes, lambda entry, exc: over.extend(range(len(plan))))  # type: ignore[arg-type]

    def start(i: int) -> None:
        parcels, used = plan[i]
        with changed:
            for others_parcels, others_used in busy.values():
                assert not (parcels or others_parcels) or not others_used & {*used}, i
            busy[i] = parcels, {*used}
            started.append(i)
            ready.append(i)
            changed.notify_all()

    def end_them() -> None:
        while True:
            with changed:
                assert changed.wait_for(lambda: ready or len(over) == len(plan), 30)
                if not ready:
                    return
                i = ready.pop()
                del busy[i]
                over.append(i)
                changed.notify_all()
            line.over(entries[i])

    threads = [threading.Thread(target=end_them) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i, (parcels, used) in enumerate(plan):
        call = Call(Parcels("x") if parcels else SOMETHING, (), tuple([tensors[j] for j in used]), None)
        flight = None if parcels else StreamPosition(None)  # type: ignore[arg-type]
        batch = [Submission(call, None)]  # type: ignore[arg-type]
        entries[i] = Entry(lambda entry, late, i=i: start(i), batch, flight)  # type: ignore[misc]
        line.submit(entries[i])
    for thread in threads:
        thread.join()
    assert started == list(range(len(plan)))


class SimulatedLanes:
    """One lane, which is a simulated stream."""

    def __init__(self) -> None:
        self._stream = SimulatedStream()

    def put(self, lane: str, job: Callable[[], object]) -> None:
        self._stream.put(job)


# -- on a simulated GPU ------------------------------------------------------------------------------------------------


def backend_of(comm: Comm) -> SimulatedBackend:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, SimulatedBackend)
    return backend


def waiting_in(comm: Comm) -> int:
    return len(backend_of(comm)._in_flight._waiting)


@contextmanager
def held_stream(comm: Comm) -> Iterator[threading.Event]:
    """Collectives of NCCL alone do not pass on ``comm`` until the event is set."""
    gate = threading.Event()
    backend_of(comm)._collectives.communicator.stream.put(gate.wait)
    try:
        yield gate
    finally:
        gate.set()


@contextmanager
def held_caller(comm: Comm) -> Iterator[threading.Event]:
    """Operations called on ``comm`` here follow a stream that does not go on until the event is set."""
    gate = threading.Event()
    device = backend_of(comm).device
    plain, held = device.user, SimulatedStream()
    held.put(gate.wait)
    device.user = held  # type: ignore[assignment]
    try:
        yield gate
    finally:
        device.user = plain


def mine(comm: Comm, n: int = 7) -> Tensor:
    return torch.arange(float(n)) + 10 * comm.rank + 1


def gathered(comms: Sequence[Comm], n: int = 7) -> Tensor:
    return torch.cat([mine(comm, n) for comm in comms])


def summed(comms: Sequence[Comm], n: int = 7) -> Tensor:
    return torch.stack([mine(comm, n) for comm in comms]).sum(0)


async def warm(comms: Sequence[Comm]) -> None:
    """What is called later is issued at once."""
    for _ in range(2):
        await asyncio.gather(*(comm.all_reduce(torch.ones(7)) for comm in comms))
    await until(lambda: not any(backend_of(comm)._collectives.waiting for comm in comms))


@pytest.mark.parametrize("held", [0, 1])
async def test_parcels_read_what_a_collective_before_them_writes(world: World, held: int) -> None:
    async with world(2) as comms:
        await warm(comms)
        tensors = [mine(comm) for comm in comms]
        with held_stream(comms[held]) as gate:
            works = [comm.all_reduce(x) for comm, x in zip(comms, tensors, strict=True)]
            works += [comm.all_gather_v(None, x) for comm, x in zip(comms, tensors, strict=True)]
            assert [waiting_in(comm) for comm in comms] == [1, 1]
            gate.set()
            await asyncio.gather(*works)
        assert torch.equal(works[2].result(), summed(comms).repeat(2))
        assert torch.equal(works[3].result(), summed(comms).repeat(2))


async def test_parcels_write_what_a_collective_before_them_reads_and_writes(world: World) -> None:
    async with world(2) as comms:
        await warm(comms)
        inputs, whole = [mine(comm) for comm in comms], [torch.cat([mine(comm)] * 2) for comm in comms]
        with held_stream(comms[0]) as gate:
            works = [comm.all_reduce(x[:7]) for comm, x in zip(comms, whole, strict=True)]
            works += [comm.all_gather_v(o, x) for comm, o, x in zip(comms, whole, inputs, strict=True)]
            gate.set()
            await asyncio.gather(*works)
        assert all(torch.equal(x, gathered(comms)) for x in whole)


async def test_a_collective_writes_what_parcels_before_it_read(world: World) -> None:
    async with world(2) as comms:
        await warm(comms)
        tensors = [mine(comm) for comm in comms]
        with held_caller(comms[1]) as gate:
            parcels = [comm.all_gather_v(None, x) for comm, x in zip(comms, tensors, strict=True)]
        works = [comm.all_reduce(x) for comm, x in zip(comms, tensors, strict=True)]
        assert [waiting_in(comm) for comm in comms] == [1, 1]
        gate.set()
        await asyncio.gather(*parcels, *works)
        for work, x in zip(parcels, tensors, strict=True):
            assert torch.equal(work.result(), gathered(comms))
            assert torch.equal(x, summed(comms))


async def test_a_collective_reads_what_parcels_before_it_write(world: World) -> None:
    async with world(2) as comms:
        await warm(comms)
        whole = [torch.zeros(14) for _ in comms]
        with held_caller(comms[1]) as gate:
            works: list[Work[Any]] = [comm.all_gather_v(o, mine(comm)) for comm, o in zip(comms, whole, strict=True)]
        results = [torch.zeros(7) for _ in comms]
        works += [comm.all_reduce(o[7:], out=r) for comm, o, r in zip(comms, whole, results, strict=True)]
        gate.set()
        await asyncio.gather(*works)
        assert all(torch.equal(r, 2 * mine(comms[1])) for r in results)


async def test_parcels_after_parcels(world: World) -> None:
    async with world(2) as comms:
        whole = [torch.zeros(14) for _ in comms]
        with held_caller(comms[1]) as gate:
            works: list[Work[Any]] = [comm.all_gather_v(o, mine(comm)) for comm, o in zip(comms, whole, strict=True)]
        works += [comm.all_gather_v(None, o[4:8]) for comm, o in zip(comms, whole, strict=True)]
        works += [comm.all_gather_v(o[:4], mine(comm, 2)) for comm, o in zip(comms, whole, strict=True)]
        gate.set()
        await asyncio.gather(*works)
        for rank in range(2):
            assert torch.equal(works[2 + rank].result(), gathered(comms)[4:8].repeat(2))
            assert torch.equal(whole[rank], torch.cat([gathered(comms, 2), gathered(comms)[4:]]))


@pytest.mark.parametrize("waits", [(0,), (1,), (0, 1)])
async def test_calls_of_nccl_keep_their_order_wherever_something_waits(world: World, waits: tuple[int, ...]) -> None:
    """On a rank that waits and on one that does not; the calls are of different kinds, so that a swap is an error."""
    async with world(2) as comms:
        await warm(comms)
        for comm in comms:
            backend_of(comm).nccl.calls.clear()
        tensors = [mine(comm) for comm in comms]
        with held_caller(comms[1]) as gate:
            works: list[Work[Any]] = [comm.all_gather_v(None, x) for comm, x in zip(comms, tensors, strict=True)]
        for comm, x in zip(comms, tensors, strict=True):
            used = x if comm.rank in waits else mine(comm)
            works += [comm.all_reduce(used), comm.broadcast(torch.ones(8), 0), comm.all_gather_object(comm.rank)]
            works += [comm.all_gather_single(None, torch.ones(3)), comm.barrier(), comm.reduce(torch.ones(6), 1)]
            assert waiting_in(comm) == (6 if comm.rank in waits else 0)
        await asyncio.sleep(0)
        assert not any(work.done() for work in works)
        gate.set()
        await asyncio.gather(*works)
        kinds = ("all_reduce", "broadcast", "all_gather", "reduce")
        for comm in comms:
            assert [name for name in backend_of(comm).nccl.calls if name in kinds] == list(kinds)


Do = Callable[[Comm, Tensor], Work[Any]]


def exchanged(comm: Comm, tensor: Tensor) -> Work[Any]:
    sizes = [1 + (comm.rank + peer) % 3 for peer in range(comm.size)]
    return comm.all_to_all_v_single(None, tensor[3 : 3 + sum(sizes)], input_split_sizes=sizes)


def scattered(comm: Comm, tensor: Tensor) -> Work[Any]:
    inputs = [tensor[rank : 2 * rank + 3] for rank in range(comm.size)]
    root = comm.size - 1
    return comm.scatter_v(tensor[-comm.rank - 3 :], inputs if comm.rank == root else None, root)


DO: list[Do] = [
    lambda comm, tensor: comm.all_reduce(tensor[:9]),
    lambda comm, tensor: comm.all_reduce(tensor[::2], out=tensor[1::2]),
    lambda comm, tensor: comm.broadcast(tensor[2:8], 0),
    lambda comm, tensor: comm.all_gather_single(tensor[: 2 * comm.size], tensor[9:11]),
    lambda comm, tensor: comm.all_gather_v(tensor[: 4 * comm.size], tensor[5:9]),
    lambda comm, tensor: comm.all_gather_v(None, tensor[comm.rank : 8]),
    lambda comm, tensor: comm.gather_v(None, tensor[: 3 + comm.rank], 0),
    lambda comm, tensor: comm.all_gather_object(comm.rank),
    lambda comm, tensor: comm.barrier(),
    exchanged,
    scattered,
]


@pytest.mark.parametrize("size", some([3, 1, 2], 1))
async def test_chains_are_as_if_one_by_one(world: World, size: int, events: list[SimulatedEvent]) -> None:
    def show(value: Any) -> Any:
        return [show(each) for each in value] if isinstance(value, list) else getattr(value, "tolist", lambda: value)()

    async with world(size) as comms:
        for seed in range(amount(25, 15)):
            steps = random.Random(seed).choices(DO, k=6)
            one_by_one = [mine(comm, 24) % 5 for comm in comms]
            together = [x.clone() for x in one_by_one]
            expected = []
            for step in steps:
                done = await asyncio.gather(*(step(c, x) for c, x in zip(comms, one_by_one, strict=True)))
                expected.append(show(done) if step in DO[5:7] or step is exchanged else None)
            works = [[step(comm, x) for step in steps] for comm, x in zip(comms, together, strict=True)]
            for number, step in enumerate(steps):
                found = await asyncio.gather(*(each[number] for each in works))
                assert expected[number] in (None, show(found)), (seed, number, step)
            assert show(together) == show(one_by_one), seed
    await until(lambda: all(event.released for event in events))


async def test_a_barrier_comes_after_what_waits(world: World) -> None:
    async with world(2) as comms:
        await warm(comms)
        tensors = [mine(comm) for comm in comms]
        with held_caller(comms[1]) as gate:
            works: list[Work[Any]] = [comm.all_gather_v(None, x) for comm, x in zip(comms, tensors, strict=True)]
        works += [comm.all_reduce(x) for comm, x in zip(comms, tensors, strict=True)]
        barriers = [comm.barrier() for comm in comms]
        gate.set()
        await asyncio.gather(*barriers)
        assert all(torch.equal(x, summed(comms)) for x in tensors)
        await asyncio.gather(*works)


async def test_estimates_wait_behind_what_waits(world: World) -> None:
    async with world(2) as comms:
        await warm(comms)
        tensors = [mine(comm) for comm in comms]
        with held_caller(comms[1]) as gate:
            works: list[Work[Any]] = [comm.all_gather_v(None, x) for comm, x in zip(comms, tensors, strict=True)]
        works += [comm.all_reduce(x) for comm, x in zip(comms, tensors, strict=True)]
        batch = [Submission(AllReduce.of(comms[0]._group, torch.ones(7), ReduceOp.SUM), None)]  # type: ignore[arg-type]
        futures = [backend_of(comm).estimate(batch) for comm in comms]
        assert not any(future.done() for future in futures)
        gate.set()
        for future in futures:
            assert await asyncio.wrap_future(future) > 0
        await asyncio.gather(*works)


# -- streams -----------------------------------------------------------------------------------------------------------


async def test_what_waits_can_be_ordered_or_waited_for_and_says_that_it_would_block(world: World) -> None:
    async with world(2) as comms:
        await warm(comms)
        tensors = [mine(comm) for comm in comms]
        with held_caller(comms[1]) as gate:
            parcels = [comm.all_gather_v(None, x) for comm, x in zip(comms, tensors, strict=True)]
        works = [comm.all_reduce(x) for comm, x in zip(comms, tensors, strict=True)]
        with pytest.raises(WouldBlockError, match="must wait for other ranks first: use `await work"):
            works[0].wait_stream()
        ordered = asyncio.ensure_future(works[0].ordered())
        thread = asyncio.ensure_future(asyncio.to_thread(works[1].wait))
        await asyncio.sleep(0)
        assert not ordered.done()
        gate.set()
        assert torch.equal(await ordered, summed(comms))
        await thread
        await asyncio.gather(*works, *parcels)


async def test_a_thread_that_blocks_relieves_the_parcels_before(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(2) as comms:
        await warm(comms)
        backend = backend_of(comms[0])
        x = mine(comms[0])
        parcels = comms[0].all_gather_v(None, x)
        waits = comms[0].all_reduce(x)
        relieved: list[object] = []
        monkeypatch.setattr(backend._side, "before_block", relieved.append)
        backend.before_block(waits)
        assert relieved == [backend._driven[parcels]]
        y = mine(comms[1])
        await asyncio.gather(parcels, waits, comms[1].all_gather_v(None, y), comms[1].all_reduce(y))
        relieved.clear()
        backend.before_block(waits)
        assert relieved == []


async def test_parcels_that_have_waited_follow_the_stream_as_it_was_at_the_call(world: World) -> None:
    """They wait for what was queued before the call, and not for what was queued since."""
    async with world(2) as comms:
        await warm(comms)
        tensors = [mine(comm) for comm in comms]
        device = backend_of(comms[0]).device
        with held_stream(comms[1]) as passing, held_caller(comms[0]) as before:
            works: list[Work[Any]] = [comms[1].all_reduce(tensors[1]), comms[1].all_gather_v(None, tensors[1])]
            stream: Any = device.user
            device.user = SimulatedDevice().user
            works.append(comms[0].all_reduce(tensors[0]))
            device.user = stream
            works.append(comms[0].all_gather_v(None, tensors[0]))
            assert waiting_in(comms[0]) == 1
            since = threading.Event()
            stream.put(since.wait)
            passing.set()
            await asyncio.gather(works[0], works[2])
            await until(lambda: not waiting_in(comms[0]))
            await until(lambda: not backend_of(comms[0])._in_flight.waiting)
            assert not works[3].done()
            before.set()
            await asyncio.gather(*works)
            since.set()
        assert torch.equal(works[1].result(), summed(comms).repeat(2))


async def test_new_memory_of_parcels_that_have_waited_is_lent_to_the_caller(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(2) as comms:
        await warm(comms)
        lent: list[int] = []
        device = backend_of(comms[0]).device
        monkeypatch.setattr(device, "lend", lambda tensor, stream: lent.append(tensor.data_ptr()))
        tensors = [mine(comm) for comm in comms]
        with held_stream(comms[0]) as gate:
            works: list[Work[Any]] = [comm.all_reduce(x) for comm, x in zip(comms, tensors, strict=True)]
            scattering = comms[0].scatter_v(None, [tensors[0], tensors[0]], 0)
            assert waiting_in(comms[0]) == 1
            works += [scattering, comms[1].scatter_v(None, None, 0)]
            gate.set()
            await asyncio.gather(*works)
        assert lent == [scattering.result().data_ptr()]
        assert torch.equal(works[3].result(), summed(comms))


@pytest.mark.parametrize("theirs", [5, 7], ids=["from the host", "from the device"])
async def test_this_ranks_own_share_is_read_behind_the_callers_stream(world: World, theirs: int) -> None:
    async with world(2) as comms:
        with held_caller(comms[0]) as gate:
            placed: list[int] = []
            read_behind: list[bool] = []
            works = []
            for comm, numel, coming in zip(comms, (7, theirs), (theirs, 7), strict=True):

                def place(*_: object, rank: int = comm.rank, coming: int = coming) -> Sequence[Tensor]:
                    placed.append(rank)
                    return [torch.zeros(coming)]

                call = Call(Parcels("x"), (), (), None, None, (Parcel(b"", (torch.ones(numel),)),), place)
                if comm is comms[0]:
                    call = call._replace(keep=lambda: read_behind.append(gate.is_set()))
                works.append(comm._submit(call, None, None))
            await until(lambda: 0 in placed)
            await until(lambda: backend_of(comms[0])._lanes.join(0.0))
            assert not read_behind
            gate.set()
            await asyncio.gather(*works)
        assert read_behind == [True]


async def test_nothing_is_captured_while_something_waits(world: World) -> None:
    async with world(2) as comms:
        await warm(comms)
        tensors = [mine(comm) for comm in comms]
        with held_caller(comms[1]) as gate:
            works: list[Work[Any]] = [comm.all_gather_v(None, x) for comm, x in zip(comms, tensors, strict=True)]
        works += [comm.all_reduce(x) for comm, x in zip(comms, tensors, strict=True)]
        device = backend_of(comms[0]).device
        device.capture = SimulatedStream()
        with pytest.raises(RuntimeError, match="await them before capturing"):
            comms[0].all_reduce(torch.ones(7))
        device.capture = None
        gate.set()
        await asyncio.gather(*works)


# -- errors, and the end -----------------------------------------------------------------------------------------------


async def stuck(comms: Sequence[Comm]) -> list[Work[Any]]:
    """Rank 0 has parcels under way that rank 1 never gives it, and more that waits for their memory."""
    await warm(comms)
    x = mine(comms[0])
    works: list[Work[Any]] = [comms[0].all_gather_v(None, x), comms[0].all_reduce(x), comms[0].all_gather_v(None, x)]
    works += [comms[0].barrier(), comms[0].all_reduce(torch.ones(7))]
    assert waiting_in(comms[0]) == 4
    return works


async def test_abort_fails_what_waits(world: World) -> None:
    async with world(2) as comms:
        works = await stuck(comms)
        batch = [Submission(AllReduce.of(comms[0]._group, torch.ones(7), ReduceOp.SUM), None)]  # type: ignore[arg-type]
        future = backend_of(comms[0]).estimate(batch)
        line = backend_of(comms[0])._in_flight
        comms[0].abort("enough")
        for work in works:
            with pytest.raises(AbortedError, match="enough"):
                await work
        with pytest.raises(BackendError, match="the comm has ended"):
            await asyncio.wrap_future(future)
        await comms[0].aclose()
        assert not line.waiting


async def test_the_other_rank_aborts(world: World) -> None:
    async with world(2) as comms:
        works = await stuck(comms)
        comms[1].abort("enough")
        for work in works:
            with pytest.raises(AbortedError, match="enough"):
                await work


async def test_the_deadline_of_what_waits(world: World) -> None:
    async with world(2, timeout=60) as comms:
        await warm(comms)
        x = mine(comms[0])
        comms[0].all_gather_v(None, x)
        with pytest.raises(CollectiveTimeoutError) as caught:
            await comms[0].all_reduce(x, timeout=0.05)
        assert str(caught.value.op) == "all_reduce(float32[7], SUM)"


async def test_a_cancelled_wait_leaves_what_waits_in_line(world: World) -> None:
    async with world(2) as comms:
        works = await stuck(comms)
        waiting = asyncio.ensure_future(asyncio.wait_for(works[1], 60))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        y = mine(comms[1])
        works += [comms[1].all_gather_v(None, y), comms[1].all_reduce(y), comms[1].all_gather_v(None, y)]
        works += [comms[1].barrier(), comms[1].all_reduce(torch.ones(7))]
        await asyncio.gather(*works)
        assert torch.equal(works[2].result(), summed(comms).repeat(2))


async def test_closing_sees_what_waits_to_its_end(world: World) -> None:
    async with world(2) as comms:
        works = await stuck(comms)
        closing = asyncio.ensure_future(comms[0].aclose())
        y = mine(comms[1])
        works += [comms[1].all_gather_v(None, y), comms[1].all_reduce(y), comms[1].all_gather_v(None, y)]
        works += [comms[1].barrier(), comms[1].all_reduce(torch.ones(7))]
        await closing
        assert all(work.done() for work in works[:5])
        assert torch.equal(works[2].result(), summed(comms).repeat(2))
        await asyncio.gather(*works)


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("kind", ["parcels", "barrier", "collective"])
async def test_what_has_waited_and_cannot_be_started_breaks_the_comm(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async with world(2) as comms:
        works = await stuck(comms)
        backend = backend_of(comms[0])

        def fail(*_: object) -> None:
            raise ValueError("no luck")

        if kind == "parcels":
            monkeypatch.setattr(backend._messenger, "collective", fail)
        elif kind == "barrier":
            monkeypatch.setattr(backend._collectives, "after_all", fail)
        else:
            backend.nccl.fail["all_reduce"] = "no luck"
        y = mine(comms[1])
        works += [comms[1].all_gather_v(None, y), comms[1].all_reduce(y), comms[1].all_gather_v(None, y)]
        works += [comms[1].barrier(), comms[1].all_reduce(torch.ones(7))]
        await works[0]
        error = {"parcels": r"all_gather_v\(\)", "barrier": r"barrier\(\)", "collective": r"all_reduce\(.*\)"}[kind]
        with pytest.raises(BackendError, match=rf"nccl could not start {error}: (ValueError: )?no luck"):
            await works[4]
        with pytest.raises(BrokenError, match="no luck"):
            await works[9]
        await asyncio.gather(*works, return_exceptions=True)
