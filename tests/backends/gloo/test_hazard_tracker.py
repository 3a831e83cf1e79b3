"""Collectives that share memory: what waits for what, by hand; and on real processes, what comes out."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import AbortedError, BackendError, BrokenError, CollectiveTimeoutError, Comm, ReduceOp, Work, new_comm
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo import collectives as gloo_collectives
from asynccomm.backends.gloo import lowering
from asynccomm.backends.gloo.backend import GlooBackend
from asynccomm.backends.gloo.groups import LARGE
from asynccomm.backends.gloo.hazard_tracker import HazardTracker
from asynccomm.backends.regions import bytes_of
from asynccomm.ops import AllGather, AllReduce, Barrier, Broadcast, Call, Op, Parcel, Parcels, Recv, Send
from tests.sampling import amount, some

SOMETHING = AllGather(torch.uint8, 1)

# -- what waits for what: with a gloo of which each operation is ended by hand -----------------------------------------


class Gloo:
    """Notes what is started; an operation is called by a name."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.started: list[str] = []
        self.failures: list[str] = []
        self.flying: dict[str, Callable[[], object]] = {}
        self.at_start: Callable[[str], object] = lambda name: None
        self.line = HazardTracker(self._start, self._fail)
        self._names: dict[int, str] = {}

    def _start(self, submission: Submission, over: Callable[[], object]) -> None:
        name = self._names[id(submission.work)]
        self.events.append(f"start {name}")
        self.started.append(name)
        self.flying[name] = over
        self.at_start(name)

    def _fail(self, submission: Submission, exc: Exception) -> None:
        self.line.end()
        self.failures.append(f"{self._names[id(submission.work)]}: {exc}")

    def submit(
        self,
        name: str,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        *,
        op: Op = SOMETHING,
        parcels: Sequence[Tensor] = (),
    ) -> list[str]:
        """What happens in the call."""
        work = self._work(name)
        outputs = tuple(writes)
        inputs = outputs if not reads else tuple(reads)
        self.events.clear()
        given = (Parcel(b"", tuple(parcels)),) if parcels else ()
        self.line.submit(Submission(Call(op, inputs, outputs, None, parcels=given), work))
        return list(self.events)

    def enter_alone(self, name: str, memory: Tensor) -> None:
        """Count an operation that something else has started."""
        call = Call(SOMETHING, (memory,), (memory,), None)
        self.flying[name] = self.line.enter_alone(Submission(call, self._work(name)))

    def _work(self, name: str) -> Any:
        class Settled:
            settle = staticmethod(lambda error: self.events.append(f"settle {name}"))

        work = Settled()
        self._names[id(work)] = name
        return work

    def over(self, name: str) -> list[str]:
        self.events.clear()
        self.flying.pop(name)()
        return list(self.events)


@pytest.fixture
def gloo() -> Gloo:
    return Gloo()


def test_what_was_started_elsewhere_is_waited_for(gloo: Gloo) -> None:
    memory = torch.zeros(10)
    assert gloo.line.idle
    gloo.enter_alone("a", memory)
    assert not gloo.line.idle
    assert gloo.submit("b", writes=[memory[5:]]) == []
    assert gloo.submit("c") == []
    assert gloo.over("a") == ["settle a", "start b", "start c"]
    gloo.over("b")
    gloo.over("c")
    assert gloo.line.idle
    gloo.line.end()
    assert not gloo.line.idle


def test_what_shares_nothing_is_started_in_the_call(gloo: Gloo) -> None:
    memory = torch.zeros(10)
    assert gloo.submit("a", writes=[memory[:5]]) == ["start a"]
    assert gloo.submit("b", writes=[memory[5:]]) == ["start b"]
    assert gloo.submit("c") == ["start c"]
    assert gloo.submit("d", reads=[torch.ones(1), torch.ones(0)], writes=[torch.ones(1), memory[:0]]) == ["start d"]
    assert [gloo.over(name) for name in "badc"] == [[f"settle {name}"] for name in "badc"]


def test_catching_up_is_over_once_all_is_settled(gloo: Gloo) -> None:
    assert gloo.line.drain_before_failure(0)
    gloo.submit("a", writes=[torch.zeros(2)])
    assert not gloo.line.drain_before_failure(0)
    waiting = threading.Thread(target=gloo.line.drain_before_failure, args=(60,))
    waiting.start()
    gloo.over("a")
    waiting.join(30)
    assert not waiting.is_alive()
    gloo.submit("b", writes=[torch.zeros(2)])
    waiting = threading.Thread(target=gloo.line.drain_before_failure, args=(60,))
    waiting.start()
    gloo.line.end()  # which fails what is left
    waiting.join(30)
    assert not waiting.is_alive()


M = torch.zeros(10)
FREE, TAKEN = torch.zeros(10), M[4:]
CONFLICTS = {
    "both write": ([], [M[:5]], [], [TAKEN]),
    "the second reads": ([], [M[:5]], [TAKEN], [FREE]),
    "the second writes what is read": ([M[:5]], [FREE], [], [TAKEN]),
    "one of several": ([FREE[:1]], [FREE[1:2], M[4:5]], [FREE[2:3], M[:9:4]], [FREE[3:4]]),
}


@pytest.mark.parametrize("kind", CONFLICTS)
@pytest.mark.parametrize("others", [0, 1, 3])
def test_what_shares_memory_waits(gloo: Gloo, kind: str, others: int) -> None:
    reads, writes, later_reads, later_writes = CONFLICTS[kind]
    for i in range(others):
        gloo.submit(f"other {i}", writes=[torch.zeros(3)])
    assert gloo.submit("a", reads, writes) == ["start a"]
    assert gloo.submit("b", later_reads, later_writes) == []
    if others:
        assert gloo.over("other 0") == ["settle other 0"], "is not what it waits for"
    assert gloo.over("a") == ["settle a", "start b"]
    assert gloo.over("b") == ["settle b"]
    assert gloo.submit("c", reads, writes) == ["start c"], "b is over"


def test_what_is_only_read_is_shared(gloo: Gloo) -> None:
    assert gloo.submit("a", [M], [FREE[:2]]) == ["start a"]
    assert gloo.submit("b", [M], [FREE[2:4]]) == ["start b"]
    assert gloo.submit("c", [M[2:7]], [FREE[4:]]) == ["start c"]
    assert gloo.submit("d", writes=[M]) == []
    for name in "abc":
        assert "start d" not in gloo.events
        gloo.over(name)
    assert gloo.events == ["settle c", "start d"]


def test_what_comes_later_waits_behind_it(gloo: Gloo) -> None:
    gloo.submit("a", writes=[M])
    assert gloo.submit("b", writes=[M]) == []
    assert gloo.submit("c", writes=[FREE]) == [], "is told apart by its order"
    assert gloo.submit("d", [FREE], [M]) == []
    assert gloo.submit("e") == []
    assert gloo.over("a") == ["settle a", "start b", "start c"]
    assert gloo.over("c") == ["settle c"], "d reads that, but b has M still"
    assert gloo.over("b") == ["settle b", "start d", "start e"]
    assert gloo.submit("f", writes=[torch.zeros(1)]) == ["start f"]


def test_parcels_are_in_the_same_order(gloo: Gloo) -> None:
    op = Parcels("all_gather_v")
    assert gloo.submit("a", writes=[M]) == ["start a"]
    assert gloo.submit("b", op=op, parcels=[FREE[:2], TAKEN]) == [], "of what a writes"
    assert gloo.over("a") == ["settle a", "start b"]
    assert gloo.submit("c", op=op, parcels=[TAKEN]) == ["start c"], "is only read"
    assert gloo.submit("d", writes=[FREE[1:3]]) == [], "of which a parcel is made"
    assert gloo.over("b") == ["settle b", "start d"]
    assert gloo.submit("e", op=op, writes=[FREE[2:]], parcels=[torch.zeros(0)]) == []
    assert gloo.over("d") == ["settle d", "start e"]


def test_a_barrier_waits_for_all_that_is_under_way(gloo: Gloo) -> None:
    assert gloo.submit("first", op=Barrier()) == ["start first"]
    assert gloo.over("first") == ["settle first"]
    gloo.submit("a", writes=[M])
    gloo.submit("b")
    assert gloo.submit("barrier", op=Barrier()) == []
    assert gloo.submit("c") == []
    assert gloo.over("b") == ["settle b"]
    assert gloo.over("a") == ["settle a", "start barrier", "start c"]


def test_one_that_is_over_when_it_is_started(gloo: Gloo) -> None:
    gloo.submit("a", writes=[M])
    for name in "bcd":
        gloo.submit(name, writes=[M])
    gloo.at_start = lambda name: gloo.flying.pop(name)()
    assert gloo.over("a") == ["settle a", *[f"{what} {name}" for name in "bcd" for what in ("start", "settle")]]
    assert gloo.submit("e", writes=[M]) == ["start e", "settle e"]


def test_memory_is_free_before_its_operation_is_settled(gloo: Gloo) -> None:
    """Who awaits one operation after the other on the same tensor never waits for a thread of gloo's."""
    gloo.submit("a", writes=[M])
    started: list[str] = []
    gloo.flying["a"].args[0].submission.work.settle = lambda error: started.extend(gloo.submit("b", writes=[M]))  # type: ignore[attr-defined]
    gloo.over("a")
    assert started == ["start b"]


def test_one_thread_starts_and_all_others_leave_it_to_that(gloo: Gloo) -> None:
    gloo.submit("a", writes=[M])
    gloo.submit("x", writes=[FREE])
    gloo.submit("b", writes=[M])
    inside, go_on = threading.Event(), threading.Event()

    def slow(name: str) -> None:
        if name == "b":
            inside.set()
            assert go_on.wait(20)

    gloo.at_start = slow
    thread = threading.Thread(target=gloo.flying["a"])
    thread.start()
    assert inside.wait(20)
    assert gloo.submit("c", writes=[torch.zeros(1)]) == [], "nobody else may start anything now"
    gloo.flying["x"]()
    assert gloo.events == ["settle x"]
    gloo.submit("d", writes=[FREE])
    assert gloo.events == []
    go_on.set()
    thread.join()
    assert gloo.events == ["start c", "start d"]


def test_a_failing_start_in_the_call_takes_nothing_with_it(gloo: Gloo) -> None:
    def refuse(name: str) -> None:
        raise RuntimeError("no")

    gloo.at_start = refuse
    with pytest.raises(RuntimeError, match="no"):
        gloo.submit("a", writes=[M])
    gloo.at_start = lambda name: None
    assert gloo.submit("b", writes=[M]) == ["start b"]
    assert gloo.failures == []


def test_a_failing_start_of_what_waited_is_told_and_nothing_follows(gloo: Gloo) -> None:
    def refuse(name: str) -> None:
        raise ValueError("no")

    for name in "abc":
        gloo.submit(name, writes=[M])
    gloo.at_start = refuse
    assert gloo.over("a") == ["settle a", "start b"]
    assert gloo.failures == ["b: no"]
    assert gloo.submit("d") == []
    assert gloo.line.join(0)


def test_the_end(gloo: Gloo) -> None:
    gloo.submit("x", writes=[FREE])
    for name in "abc":
        gloo.submit(name, writes=[M])
    for _ in range(2):
        gloo.line.end()
    assert gloo.submit("d") == []
    assert gloo.over("x") == ["settle x"]
    assert gloo.over("a") == ["settle a"]
    alone = Gloo()
    alone.submit("a", writes=[M])
    alone.line.end()
    assert alone.over("a") == ["settle a"]


def test_joining_waits_for_what_is_being_started(gloo: Gloo) -> None:
    gloo.submit("a", writes=[M])
    gloo.submit("b", writes=[M])
    inside, go_on = threading.Event(), threading.Event()

    def slow(name: str) -> None:
        inside.set()
        assert go_on.wait(20)

    gloo.at_start = slow
    thread = threading.Thread(target=gloo.flying["a"])
    thread.start()
    assert inside.wait(20)
    gloo.line.end()
    assert not gloo.line.join(0.001)
    go_on.set()
    assert gloo.line.join(20)
    thread.join()


def test_many_threads(gloo: Gloo) -> None:
    """Ended by threads while others are put in: all are started, in order, and never two at a time on one memory."""
    tensors = [torch.zeros(4) for _ in range(3)]
    chance = random.Random(3)
    plan = [chance.sample(range(3), chance.randrange(1, 3)) for _ in range(600)]
    busy: set[int] = set()
    over: list[int] = []
    changed = threading.Condition()
    ready: list[int] = []

    def start(name: str) -> None:
        with changed:
            mine = set(plan[int(name)])
            assert not busy & mine
            busy.update(mine)
            ready.append(int(name))
            changed.notify_all()

    def end_them() -> None:
        while True:
            with changed:
                assert changed.wait_for(lambda: ready or len(over) == len(plan), 30)
                if not ready:
                    return
                i = ready.pop()
                busy.difference_update(plan[i])
                over.append(i)
                changed.notify_all()
            gloo.flying[str(i)]()

    gloo.at_start = start
    threads = [threading.Thread(target=end_them) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i, used in enumerate(plan):
        gloo.submit(str(i), writes=[tensors[j] for j in used])
    for thread in threads:
        thread.join()
    assert gloo.started == [str(i) for i in range(len(plan))]


# -- on real processes -------------------------------------------------------------------------------------------------

N = 1201  # elements of a small tensor
Step = Callable[[Comm, Tensor], Work[Any]]


def large(dtype: torch.dtype) -> int:
    """Elements of a tensor of which a half goes through the gloo group for large transfers, and a third does not."""
    return (2 * LARGE + 8192) // dtype.itemsize


def half(tensor: Tensor) -> Tensor:
    return tensor[: len(tensor) // 2]


def middle(tensor: Tensor) -> Tensor:
    return tensor[len(tensor) // 3 : len(tensor) // 3 * 2]


def pieces(tensor: Tensor) -> list[Tensor]:
    return list(tensor[:-1].split([7, 1, len(tensor) - 100, 91]))


def gather_into_the_beginning(comm: Comm, tensor: Tensor) -> Work[Any]:
    share = len(tensor) // (comm.size + 1)
    return comm.all_gather_single(tensor[: share * comm.size], tensor[-share:])


def exchange_into_the_end(comm: Comm, tensor: Tensor) -> Work[Any]:
    share = len(tensor) // (2 * comm.size) * comm.size
    return comm.all_to_all_single(tensor[-share:], tensor[:share])


STEPS: list[Step] = [
    lambda comm, tensor: comm.all_reduce(tensor),
    lambda comm, tensor: comm.all_reduce(tensor[::2]),
    lambda comm, tensor: comm.all_reduce(half(tensor), out=tensor[-len(half(tensor)) :]),
    lambda comm, tensor: comm.all_reduce(middle(tensor), ReduceOp.PREMUL_SUM(comm.rank + 1)),
    lambda comm, tensor: comm.all_reduce(tensor[:5]),
    lambda comm, tensor: comm.all_reduce_coalesced(pieces(tensor)),
    lambda comm, tensor: comm.reduce(half(tensor), 0),
    lambda comm, tensor: comm.reduce_scatter_single(tensor[-5:], tensor[: 5 * comm.size]),
    lambda comm, tensor: comm.broadcast(middle(tensor), comm.size - 1),
    lambda comm, tensor: comm.broadcast(tensor[1::3], 0),
    lambda comm, tensor: comm.broadcast_coalesced([*pieces(half(tensor)), tensor[-3::2]], 0),
    gather_into_the_beginning,
    exchange_into_the_end,
]


async def expect_as_one_by_one(comm: Comm, steps: Sequence[Step], dtype: torch.dtype, numel: int) -> None:
    """The first rank submits everything before the others submit anything; so nothing is over when the next comes."""
    values = ((torch.arange(numel) * 7 + comm.rank) % 5).to(dtype)
    expected, found = values.clone(), values.clone()
    for step in steps:
        await step(comm, expected)
    if comm.rank:
        await comm.recv(torch.zeros(1), 0)
    works = [step(comm, found) for step in steps]
    for peer in range(1, comm.size if comm.rank == 0 else 0):
        comm.send(torch.zeros(1), peer)
    await asyncio.gather(*works)
    assert torch.equal(bytes_of(found), bytes_of(expected))


RANKS = pytest.mark.ranks(some([2, 1, 3], 2), backend="gloo")
TWO_RANKS = pytest.mark.ranks(2, backend="gloo")
DTYPES = pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float32, torch.int8, torch.complex64], 2))


@RANKS
@DTYPES
async def test_each_after_each(comm: Comm, dtype: torch.dtype) -> None:
    for pair in some(list(itertools.product(STEPS, STEPS)), 85):  # each with every other one
        await expect_as_one_by_one(comm, pair, dtype, N)


@RANKS
@DTYPES
async def test_chains(comm: Comm, dtype: torch.dtype) -> None:
    for seed in range(amount(20, 10)):
        chance = random.Random(seed)
        await expect_as_one_by_one(comm, chance.choices(STEPS, k=chance.randint(2, 10)), dtype, N)


@TWO_RANKS
@DTYPES
async def test_chains_through_both_groups_of_gloo(comm: Comm, dtype: torch.dtype) -> None:
    for seed in range(amount(3, 2)):
        await expect_as_one_by_one(comm, random.Random(seed).choices(STEPS, k=6), dtype, large(dtype))


@TWO_RANKS
async def test_chains_in_inference_mode(comm: Comm) -> None:
    with torch.inference_mode():
        await expect_as_one_by_one(comm, STEPS, torch.bfloat16, N)


@TWO_RANKS
async def test_a_batch_of_vectors_and_others(comm: Comm) -> None:
    group, rank, other = comm._group, comm.rank, 1 - comm.rank
    floats = [torch.full((n,), 1.0 + rank) for n in (3, 1000, 300_000)]
    halves = [torch.full((n,), 1.0 + rank, dtype=torch.bfloat16) for n in (5, 1)]
    moved = [torch.full((4,), rank), torch.full((2, 2), rank + 0.5)]
    single, got = torch.tensor([rank + 1]), torch.zeros(2)
    calls = [
        AllReduce.of_several(group, floats, ReduceOp.SUM),
        AllReduce.of_several(group, halves, ReduceOp.AVG),
        Recv.of(group, got, other, 0),
        Broadcast.of_several(group, moved, 1),
        AllReduce.of(group, single, ReduceOp.MAX),
        Send.of(group, torch.full((2,), rank + 7.0), other, 0),
        Barrier.of(group),
    ]
    works = [comm._submitter.submit_together(calls, "all", None, None) for _ in range(2)]  # of which one must wait
    assert await asyncio.gather(*works) == ["all"] * 2
    assert all(tensor.eq(6).all() for tensor in floats)
    assert all(tensor.eq(1.5).all() for tensor in halves)
    assert [tensor.flatten().tolist() for tensor in moved] == [[1] * 4, [1.5] * 4]
    assert single.item() == 2
    assert got.tolist() == [other + 7] * 2


# -- errors, and the end -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def patched() -> AsyncIterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def waiting_in(comm: Comm) -> int:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, GlooBackend)
    return len(backend.collectives._in_flight._waiting)


@TWO_RANKS
async def test_a_failing_operation_of_a_batch_names_itself_and_fails_what_waits(comm: Comm) -> None:
    async with new_comm("gloo", name="failing") as one, patched() as patch:
        group = one._group
        tensor, half = torch.ones(3), torch.ones(600_000, dtype=torch.bfloat16)  # more than goes with a frame
        vector = [torch.ones(4), torch.ones(5)]

        def broken(*arguments: object) -> None:
            raise ValueError("no luck")

        if one.rank == 0:
            patch.setattr(lowering, "narrow_all", broken)
        calls = [
            AllReduce.of_several(group, vector, ReduceOp.SUM),
            AllReduce.of(group, half, ReduceOp.AVG),
            Broadcast.of(group, tensor, 0),
        ]
        if one.rank == 0:
            works = [one._submitter.submit_together(calls, None, None, None)]
            works += [one.all_reduce(half, op=ReduceOp.AVG), one.all_reduce(torch.ones(1))]
            assert waiting_in(one) == 2
            await comm.barrier()
            for work in works:
                with pytest.raises(BackendError, match=r"gloo failed in all_reduce\(bfloat16\[600000\], AVG\): no"):
                    await work
        else:
            await comm.barrier()  # nothing of the other's can be done before
            with pytest.raises(BrokenError, match="no luck"):
                await one._submitter.submit_together(calls, None, None, None)
                await one.all_reduce(half, op=ReduceOp.AVG)


@TWO_RANKS
async def test_what_waited_and_cannot_be_started_breaks_the_comm(comm: Comm) -> None:
    async with new_comm("gloo", name="unstarted") as one, patched() as patch:
        tensor = torch.ones(300_000)  # more than goes with a frame
        if one.rank == 0:
            works = [one.all_reduce(tensor) for _ in range(3)]

            working = [gloo_collectives.start]

            def broken_from_the_second_on(*arguments: Any) -> Any:
                if working:
                    return working.pop()(*arguments)
                raise ValueError("no luck")

            patch.setattr(gloo_collectives, "start", broken_from_the_second_on)
            await comm.send(torch.zeros(1), 1)  # which is not started there
            await works[0]
            for work in works[1:]:
                with pytest.raises(BackendError, match=r"gloo could not start all_reduce\(.*\): no luck"):
                    await work
        else:
            await comm.recv(torch.zeros(1), 0)
            await one.all_reduce(tensor)
            with pytest.raises(BrokenError, match="no luck"):
                await one.all_reduce(tensor)


@TWO_RANKS
async def test_abort_fails_what_waits(comm: Comm) -> None:
    async with new_comm("gloo", name="aborted") as one:
        await comm.barrier()  # both have it
        if one.rank == 0:
            tensor = torch.ones(3)
            works = [one.all_reduce(tensor) for _ in range(5)]
            backend = one.unsafe_get_backend()
            assert isinstance(backend, GlooBackend)
            assert len(backend.collectives._in_flight._waiting) == 4
            one.abort("enough")
            for work in works:
                with pytest.raises(AbortedError, match="enough"):
                    await work
            await one.aclose()
            assert not backend.collectives._in_flight._waiting
        else:
            with pytest.raises(AbortedError, match="enough"):
                await one.recv(torch.zeros(1), 0)
        await comm.barrier()


@TWO_RANKS
async def test_deadline_of_what_waits(comm: Comm) -> None:
    async with new_comm("gloo", name="late", timeout=60) as one:
        await comm.barrier()  # both have it
        if one.rank == 0:
            tensor = torch.ones(3)
            one.all_reduce(tensor)
            with pytest.raises(CollectiveTimeoutError) as caught:
                await one.all_reduce(tensor, timeout=0.05)
            assert caught.value.seq == 1
            assert caught.value.missing == (1,)
        else:
            with pytest.raises(AbortedError):
                await one.recv(torch.zeros(1), 0)
        await comm.barrier()


@TWO_RANKS
async def test_closing_sees_what_waits_to_its_end(comm: Comm) -> None:
    one = await new_comm("gloo", name="closed")
    tensor = torch.ones(3, dtype=torch.bfloat16)
    if one.rank == 0:
        works = [one.all_reduce(tensor) for _ in range(5)]
        assert waiting_in(one) == 4
        await comm.barrier()
    else:
        await comm.barrier()
        works = [one.all_reduce(tensor) for _ in range(5)]
    await one.aclose()
    assert all(work.done() for work in works)
    assert tensor.tolist() == [32] * 3
