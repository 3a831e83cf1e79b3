"""ordering="agreed" on whole comms: any order, one result; and every way in which it can come to an end."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import (
    AbortedError,
    AsyncCommError,
    BackendError,
    BrokenError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Comm,
    MemoryStore,
    NotSentError,
    ReduceOp,
    RendezvousError,
    Work,
    new_comm,
)
from asynccomm.backends import registry
from asynccomm.backends.base import Submission
from asynccomm.backends.loopback import Hub, LoopbackBackend
from asynccomm.batching.ordering import transport as module
from asynccomm.batching.ordering.codec import MessageWriter
from asynccomm.ops import Call, MessageSpace, Op, Parcel, Recv, RecvParcel, SendParcel
from tests.backends.nccl import simulation
from tests.sampling import amount, some
from tests.waiting import until

BACKENDS = ["shm", "gloo"]


@asynccontextmanager
async def agreed(size: int, **options: Any) -> AsyncIterator[list[Comm]]:
    """The comms of all ranks, on loopback."""
    store = MemoryStore()
    timeout = options.pop("timeout", 20)  # of operations: connecting may take long on a busy machine
    options = {"backend": "loopback", "name": "test", "ordering": "agreed", "timeout": 20, "store": store, **options}
    comms = await asyncio.gather(*(new_comm(rank=rank, size=size, **options) for rank in range(size)))
    for comm in comms:
        comm.set_timeout(timeout)
    try:
        yield list(comms)
    finally:
        await asyncio.gather(*(comm.aclose() for comm in comms))


def hub_of(comm: Comm) -> Hub:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, LoopbackBackend)
    return backend.hub


async def turns(count: int = 20) -> None:
    """More turns of the loop than the ranks need to agree."""
    for _ in range(count):
        await asyncio.sleep(0)


async def error_of(work: Awaitable[object]) -> AsyncCommError:
    with pytest.raises(AsyncCommError) as caught:
        async with asyncio.timeout(20):
            await work
    return caught.value


def wait_for_goodbyes(patch: pytest.MonkeyPatch) -> None:
    """Until they come, however slow a rank is; one that never comes fails the test."""
    patch.setattr(module, "GOODBYE_SECONDS", 3600.0)
    patch.setattr(module, "ANSWER_SECONDS", 3600.0)


async def closed(comm: Comm) -> None:
    async with asyncio.timeout(20):
        await comm.aclose()


async def called(comm: Comm, n: int = 2) -> None:
    """An operation whose call may raise already."""
    await comm.all_reduce(ones(n), tag="x")


def ones(n: int = 2, value: float = 1) -> Tensor:
    return torch.full((n,), float(value))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Op]]:
    """All that the ranks hand to loopback, with the rank; receives left out."""
    found: list[tuple[int, Op]] = []
    submit = LoopbackBackend.submit

    def watched(backend: LoopbackBackend, batch: Sequence[Submission]) -> None:
        found.extend([(backend._rank, item.op) for item in batch if not isinstance(item.op, (Recv, RecvParcel))])
        submit(backend, batch)

    monkeypatch.setattr(LoopbackBackend, "submit", watched)
    return found


def messages(sent: list[tuple[int, Op]]) -> Counter[tuple[int, int]]:
    """How many of those were the agreement's, by sender and receiver."""
    return Counter([(rank, op.peer) for rank, op in sent if isinstance(op, SendParcel) and op.method == "agree"])


# -- whole programs ---------------------------------------------------------------------------------------------------

Step = Callable[[Comm, int, str], tuple[Work[Any], Callable[[Any], object]]]  # the Work, and what checks its value


def mine(comm: Comm, n: int, count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """What this rank brings to step ``n``."""
    return of(comm.rank, n, count, dtype)


def of(rank: int, n: int, count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(count) + 10 * rank + 100 * n).to(dtype)


def equals(expected: Any) -> Callable[[Any], object]:
    def check(value: Any) -> None:
        if isinstance(expected, list):
            assert len(value) == len(expected)
            for a, b in zip(value, expected, strict=True):
                equals(b)(a)
        elif isinstance(expected, Tensor):
            assert torch.equal(value, expected), (value, expected)
        else:
            assert value == expected

    return check


def everybody(comm: Comm, n: int, count: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [of(rank, n, count, dtype) for rank in range(comm.size)]


def total(comm: Comm, n: int, count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack(everybody(comm, n, count, dtype)).sum(0, dtype=dtype)


def all_reduce(comm: Comm, n: int, tag: str) -> Any:
    return comm.all_reduce(mine(comm, n), tag=tag), equals(total(comm, n))


def all_reduce_max(comm: Comm, n: int, tag: str) -> Any:
    work = comm.all_reduce(mine(comm, n, dtype=torch.int64), ReduceOp.MAX, tag=tag)
    return work, equals(of(comm.size - 1, n, dtype=torch.int64))


def large_all_reduce(comm: Comm, n: int, tag: str) -> Any:
    return comm.all_reduce(ones(1 << 17, comm.rank + n), tag=tag), equals(
        ones(1 << 17, sum(range(comm.size)) + n * comm.size)
    )


def broadcast(comm: Comm, n: int, tag: str) -> Any:
    root = n % comm.size
    return comm.broadcast(mine(comm, n), root, tag=tag), equals(of(root, n))


def reduce(comm: Comm, n: int, tag: str) -> Any:
    root = n % comm.size
    return comm.reduce(mine(comm, n), root, tag=tag), equals(total(comm, n) if comm.rank == root else None)


def all_gather(comm: Comm, n: int, tag: str) -> Any:
    return comm.all_gather(None, mine(comm, n), tag=tag), equals(everybody(comm, n))


def all_gather_single(comm: Comm, n: int, tag: str) -> Any:
    return comm.all_gather_single(None, mine(comm, n), tag=tag), equals(torch.cat(everybody(comm, n)))


def all_gather_single_strided(comm: Comm, n: int, tag: str) -> Any:
    output = torch.zeros(comm.size * 2, 2).T  # whose rows the ranks do not divide
    return (
        comm.all_gather_single(output, mine(comm, n), tag=tag),
        equals(torch.cat(everybody(comm, n)).view(output.shape)),
    )


def reduce_scatter(comm: Comm, n: int, tag: str) -> Any:
    inputs = [mine(comm, n + i) for i in range(comm.size)]
    return comm.reduce_scatter(None, inputs, tag=tag), equals(total(comm, n + comm.rank))


def reduce_scatter_single(comm: Comm, n: int, tag: str) -> Any:
    work = comm.reduce_scatter_single(None, mine(comm, n, 2 * comm.size), tag=tag)
    return work, equals(total(comm, n, 2 * comm.size)[2 * comm.rank :][:2])


def scatter(comm: Comm, n: int, tag: str) -> Any:
    root = n % comm.size
    inputs = [mine(comm, n + i) for i in range(comm.size)] if comm.rank == root else None
    return comm.scatter(torch.empty(4), inputs, root, tag=tag), equals(of(root, n + comm.rank))


def gather(comm: Comm, n: int, tag: str) -> Any:
    root = n % comm.size
    return comm.gather(None, mine(comm, n), root, tag=tag), equals(everybody(comm, n) if comm.rank == root else None)


def all_to_all(comm: Comm, n: int, tag: str) -> Any:
    inputs = [mine(comm, n + i) for i in range(comm.size)]
    return comm.all_to_all(None, inputs, tag=tag), equals([of(rank, n + comm.rank) for rank in range(comm.size)])


def all_to_all_single(comm: Comm, n: int, tag: str) -> Any:
    expected = [of(rank, n, 2 * comm.size)[2 * comm.rank :][:2] for rank in range(comm.size)]
    return comm.all_to_all_single(None, mine(comm, n, 2 * comm.size), tag=tag), equals(torch.cat(expected))


def all_gather_v(comm: Comm, n: int, tag: str) -> Any:
    expected = torch.cat([of(rank, n, rank + 1) for rank in range(comm.size)])
    return comm.all_gather_v(None, mine(comm, n, comm.rank + 1), tag=tag), equals(expected)


def all_gather_v_of_sizes(comm: Comm, n: int, tag: str) -> Any:
    sizes = list(range(1, comm.size + 1))
    expected = torch.cat([of(rank, n, rank + 1) for rank in range(comm.size)])
    return comm.all_gather_v(None, mine(comm, n, comm.rank + 1), sizes, tag=tag), equals(expected)


def several_dtypes(comm: Comm, n: int, tag: str) -> Any:
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.float32]
    work = comm.all_reduce_coalesced([mine(comm, n % 2, 3, dtype) for dtype in dtypes], tag=tag)
    return work, equals([total(comm, n % 2, 3, dtype) for dtype in dtypes])


def broadcast_several(comm: Comm, n: int, tag: str) -> Any:
    root = n % comm.size
    dtypes = [torch.float32, torch.int32]
    work = comm.broadcast_coalesced([mine(comm, n, 3, dtype) for dtype in dtypes], root, tag=tag)
    return work, equals([of(root, n, 3, dtype) for dtype in dtypes])


def all_gather_object(comm: Comm, n: int, tag: str) -> Any:
    return comm.all_gather_object((comm.rank, n), tag=tag), equals([(rank, n) for rank in range(comm.size)])


def broadcast_object(comm: Comm, n: int, tag: str) -> Any:
    root = n % comm.size
    return comm.broadcast_object({"n": n} if comm.rank == root else None, root, tag=tag), equals({"n": n})


def scatter_objects(comm: Comm, n: int, tag: str) -> Any:
    root = n % comm.size
    objects = [f"{n} for {rank}" for rank in range(comm.size)]
    return comm.scatter_object_list(objects if comm.rank == root else None, root, tag=tag), equals(
        f"{n} for {comm.rank}"
    )


def broadcast_dict(comm: Comm, n: int, tag: str) -> Any:
    root = n % comm.size
    work = comm.broadcast_tensor_dict({"a": mine(comm, n), "n": n} if comm.rank == root else None, root, tag=tag)

    def check(value: Any) -> None:
        assert value["n"] == n
        assert torch.equal(value["a"], of(root, n))

    return work, check


def barrier(comm: Comm, n: int, tag: str) -> Any:
    return comm.barrier(tag=tag), equals(None)


STEPS: list[Step] = [
    all_reduce,
    all_reduce_max,
    broadcast,
    several_dtypes,
    reduce,
    all_gather,
    all_gather_object,
    all_gather_single,
    all_gather_single_strided,
    reduce_scatter,
    broadcast_dict,
    reduce_scatter_single,
    scatter,
    gather,
    barrier,
    all_to_all,
    all_to_all_single,
    all_gather_v,
    broadcast_object,
    all_gather_v_of_sizes,
    large_all_reduce,
    broadcast_several,
    scatter_objects,
]

Log = list[tuple[str, str, int]]  # tag, operation, number


async def task(comm: Comm, number: int, length: int, chance: random.Random, log: Log) -> None:
    """Steps under one tag, some awaited at once and some later, with suspensions that other ranks do not have."""
    tag = f"task {number}"
    ahead: list[Any] = []
    for n in range(length):
        for _ in range(chance.choice([0, 0, 1, 3, 8])):
            await asyncio.sleep(0)
        ahead.append(STEPS[(3 * number + n) % len(STEPS)](comm, 7 * number + n, tag))
        while len(ahead) > chance.randrange(3):
            await finished(*ahead.pop(0), tag, log)
    for work, check in ahead:
        await finished(work, check, tag, log)


async def finished(work: Work[Any], check: Callable[[Any], object], tag: str, log: Log) -> None:
    check(await work)
    log.append((tag, str(work.op), work.seq))


async def program(comm: Comm, seed: int, tasks: int, length: int) -> Log:
    """Many tasks, in an order of this rank's own."""
    chance = random.Random(1000 * seed + comm.rank)
    log: Log = []
    async with asyncio.TaskGroup() as group:
        for number in chance.sample(range(tasks), tasks):
            group.create_task(task(comm, number, length, chance, log))
    assert comm.statistics()[1:4] == (0, 0, 0)
    return log


def numbers(log: Log) -> dict[str, list[int]]:
    """Of operations that all ranks describe alike, and so not of what only has to fit."""
    found: dict[str, list[int]] = {}
    for tag, _, number in log:
        found.setdefault(tag, []).append(number)
    return found


TASKS = amount(12, 6)


@pytest.mark.parametrize(("size", "seed"), some(list(itertools.product([2, 3, 5], range(6))), 3))
async def test_any_order_gives_the_right_results_in_one_order(size: int, seed: int) -> None:
    async with agreed(size) as comms:
        logs = await asyncio.gather(*(program(comm, seed, TASKS, len(STEPS)) for comm in comms))
        assert all(numbers(log) == numbers(logs[0]) for log in logs)
        for found in numbers(logs[0]).values():
            assert found == sorted(found), "under one tag it is the order of the calls"
        assert sum([len(found) for found in numbers(logs[0]).values()]) == TASKS * len(STEPS)
        orders = {tuple([tag for tag, _, _ in log]) for log in logs}
        assert len(orders) == size, "the ranks did have orders of their own"


@pytest.mark.ranks(some([3, 1, 2, 4], 1), backend=BACKENDS)
async def test_any_order_between_processes(comm: Comm) -> None:
    async with new_comm(comm.backend, name="agreed", ordering="agreed", timeout=30) as shared:
        for seed in some(range(3), 1):
            log = await program(shared, seed, amount(8, 4), len(STEPS))
            logs: list[Any] = await comm.all_gather_object(numbers(log))
            assert all(found == logs[0] for found in logs)


async def test_any_order_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN, "simulated", (simulation.__name__, "SimulatedBackend"))
    monkeypatch.setattr(simulation.SimulatedBackend, "settings", {"connects": True})
    async with agreed(3, backend="simulated", hints={"side": "loopback"}) as comms:
        logs = await asyncio.gather(*(program(comm, 1, 3, amount(12, 8)) for comm in comms))
        assert all(numbers(log) == numbers(logs[0]) for log in logs)
    assert not simulation.SimulatedNccl.comms


async def test_two_that_cannot_be_divided_go_apart() -> None:
    """A tensor whose rows the ranks do not divide cannot be merged where it is not contiguous, which one rank knows."""
    async with agreed(2) as comms:
        works = []
        for comm in comms:
            for i in range(3):
                output = torch.zeros(4, 3).T if comm.rank == 1 else torch.zeros(3, 4)
                works.append(comm.all_gather_single(output, ones(6, comm.rank + i), tag=f"{i}"))
        for i, work in enumerate(works):
            assert torch.equal(await work, torch.cat([ones(6, i % 3), ones(6, 1 + i % 3)]).view(3, 4))
        assert [comm.statistics().batches for comm in comms] == [0, 0]


# -- pairing ----------------------------------------------------------------------------------------------------------


async def test_untagged_operations_pair_in_order_whatever_has_a_tag() -> None:
    async with agreed(3) as comms:
        works = []
        for comm in comms:
            calls: list[Any] = [("", i) for i in range(5)] + [("b", 7), ("a", 8)]
            tagged = {0: [5, 6], 1: [6, 5], 2: [6, 5]}[comm.rank]
            order = {0: [*tagged, 0, 1, 2, 3, 4], 1: [0, tagged[0], 1, 2, tagged[1], 3, 4], 2: [0, 1, 2, 3, 4, *tagged]}
            for tag, value in [calls[i] for i in order[comm.rank]]:
                options = {"tag": tag} if tag else {}
                works.append((comm, tag, value, comm.all_reduce(ones(1, value), **options)))
        found: dict[int, list[tuple[int, str, int]]] = {comm.rank: [] for comm in comms}
        for comm, tag, value, work in works:
            assert (await work).item() == 3 * value
            found[comm.rank].append((work.seq, tag, value))
        assert sorted(found[0]) == sorted(found[1]) == sorted(found[2])
        untagged = [value for _, tag, value in sorted(found[1]) if not tag]
        assert untagged == [0, 1, 2, 3, 4]


async def test_many_outstanding_under_one_tag_pair_in_the_order_of_the_calls() -> None:
    async with agreed(3) as comms:
        works = [[comm.all_gather_object((comm.rank, i), tag="x") for i in range(100)] for comm in comms[:2]]
        await turns()
        assert [comm.statistics().held for comm in comms] == [100, 100, 0]
        works.append([comms[2].all_gather_object((2, i), tag="x") for i in range(100)])
        for rank_works in works:
            for i, work in enumerate(rank_works):
                assert await work == [(rank, i) for rank in range(3)]
                assert work.seq == i


async def test_a_tag_is_used_again_and_again() -> None:
    async with agreed(2) as comms:

        async def one(comm: Comm) -> None:
            for i in range(200):
                assert (await comm.all_reduce(ones(1, i), tag="again")).item() == 2 * i

        await asyncio.gather(*map(one, comms))


async def test_a_scope_on_one_rank_is_nothing_to_the_others() -> None:
    async with agreed(2) as (a, b):
        async with a.coalesce() as batch:
            a.all_reduce(ones(), tag="x")
            a.all_reduce(ones(), tag="y")
            a.barrier(tag="z")
            await turns()
            assert a.statistics().held == 3
        works = [b.barrier(tag="z"), b.all_reduce(ones(), tag="y")]
        await asyncio.gather(*works)
        assert not batch.works[0].done()
        await b.all_reduce(ones(), tag="x")
        assert sorted([work.seq for work in batch.works]) == [0, 1, 2]
        await batch


async def test_what_a_scope_drops_was_never_announced() -> None:
    async with agreed(2, timeout=0.3) as (a, b):
        with pytest.raises(ZeroDivisionError):
            async with a.coalesce():
                first = a.all_reduce(ones(), tag="x")
                await turns()
                raise ZeroDivisionError
        assert isinstance(await error_of(first), NotSentError)
        works = [comm.all_reduce(ones(), tag="y") for comm in (a, b)]
        assert [(await work).tolist() for work in works] == [[2, 2]] * 2
        error = await error_of(b.all_reduce(ones(), tag="x"))
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (0,)


async def test_an_operation_of_a_scope_is_awaited_within() -> None:
    async with agreed(2) as (a, b):
        async with a.coalesce():
            work = a.all_reduce(ones(), tag="x")
            other = b.all_reduce(ones(), tag="x")
            assert (await work).tolist() == [2, 2]
        await other


async def test_messages_are_sent_at_once() -> None:
    async with agreed(2) as (a, b):
        received = torch.zeros(2)
        works = [a.send(ones(), 1), b.recv(received, 0), a.send_object("o", 1), b.recv_object(0)]
        assert [work.done() for work in works] == [True] * 4
        assert works[3].result() == "o"
        async with a.coalesce():
            a.all_reduce(ones(), tag="x")
            held = a.send(ones(2, 3), 1)
            assert held.seq < 0
        assert held.seq == 2  # the scope is over, and nobody has to agree
        await b.recv(received, 0)
        assert received.tolist() == [3, 3]
        await b.all_reduce(ones(), tag="x")


async def test_split_and_dup_agree_too() -> None:
    async with agreed(3) as comms:
        pair: list[Any] = list(await asyncio.gather(*(comm.split([0, 2], "pair") for comm in (comms[0], comms[2]))))
        copies = list(await asyncio.gather(*(comm.dup() for comm in comms)))
        for some in (pair, copies):
            works = []
            for comm in some:
                assert comm.options.ordering == "agreed"
                for tag in "ab" if comm.rank else "ba":
                    works.append(comm.all_reduce(ones(1, ord(tag)), tag=tag))
            assert len({(await work).item() for work in works}) == 2
        await asyncio.gather(*(comm.aclose() for comm in (*pair, *copies)))


async def test_a_dict_that_is_sent_in_another_order_says_what_it_is() -> None:
    """Of a dict's form only the first would tell otherwise, and that may be the last to be sent."""
    async with agreed(2) as (a, b):
        for root, other in ((a, b), (b, a)):
            given = {"w": ones(2, 1), "n": 1}
            sent = [root.broadcast_tensor_dict({**given, "n": i}, root.rank, tag=f"{i}") for i in range(4)]
            await turns()
            for i in (3, 1, 0, 2):
                value = await other.broadcast_tensor_dict(None, root.rank, tag=f"{i}")
                assert (value["n"], value["w"].tolist()) == (i, [1, 1])
            await asyncio.gather(*sent)


async def test_one_rank_agrees_with_itself() -> None:
    async with agreed(1) as (comm,):
        works = [comm.all_reduce(ones(2, i), ReduceOp.AVG, tag=f"{i}") for i in range(4)]
        together = comm.all_reduce_coalesced([ones(), torch.ones(1, dtype=torch.int64)], tag="t")
        assert [(await work).tolist() for work in works] == [[i, i] for i in range(4)]
        assert [work.seq for work in works] == [0, 1, 2, 3]
        await together
        assert await comm.all_gather_object(5) == [5]
        assert comm.statistics().batches == 1


# -- threads ----------------------------------------------------------------------------------------------------------


async def test_calls_and_waits_in_threads() -> None:
    async with agreed(2) as comms:

        def many(comm: Comm, number: int) -> None:
            for i in range(20):
                work = comm.all_reduce(ones(1, i), tag=f"{number}")
                assert work.wait(20).item() == 2 * i

        calls = [asyncio.to_thread(many, comm, number) for number in range(4) for comm in comms]
        await asyncio.gather(*calls)


@pytest.mark.ranks(2, backend=BACKENDS)
async def test_calls_and_waits_in_threads_between_processes(comm: Comm) -> None:
    async with new_comm(comm.backend, name="agreed", ordering="agreed", timeout=30) as shared:

        def many(number: int) -> None:
            for i in range(20):
                work = shared.all_reduce(ones(1 << 10, i), tag=f"{number}")
                assert work.wait(20)[0].item() == 2 * i

        numbers = [0, 1, 2] if comm.rank else [2, 0, 1]
        await asyncio.gather(*(asyncio.to_thread(many, number) for number in numbers))


# -- who does not fit -------------------------------------------------------------------------------------------------


async def test_a_mismatch_under_a_tag_is_told_to_all_ranks() -> None:
    async with agreed(3) as comms:
        pending = comms[2].barrier(tag="another")
        works = [
            comms[0].all_reduce(ones(3), tag="x"),
            comms[1].all_reduce(ones(4), tag="x"),
        ]
        for work in [*works, pending]:
            error = await error_of(work)
            assert isinstance(error, CollectiveMismatchError)
            assert {error.rank, error.other_rank} == {0, 1}
            assert {error.op, error.other_op} == {f"all_reduce(float32[{n}], SUM, tag='x')" for n in (3, 4)}
        for comm in comms:
            with pytest.raises(CollectiveMismatchError, match=r"tag='x'"):
                comm.barrier(tag="y")


@pytest.mark.parametrize("ranks", [(0, 2), (1, 2)])
async def test_a_mismatch_reaches_an_idle_rank(ranks: tuple[int, int]) -> None:
    async with agreed(3) as comms:
        works = [comms[ranks[0]].broadcast(ones(), 0, tag="x"), comms[ranks[1]].broadcast(ones(), 1, tag="x")]
        for work in works:
            assert isinstance(await error_of(work), CollectiveMismatchError)
        await until(lambda: all("broken" in repr(comm) for comm in comms))


@pytest.mark.ranks(3, backend=BACKENDS)
async def test_a_mismatch_between_processes(comm: Comm) -> None:
    for i in range(5):
        async with new_comm(comm.backend, name=f"doomed {i}", ordering="agreed", timeout=30) as shared:
            await shared.barrier(tag="before")
            await comm.barrier()  # all are through that one
            size = 5 if comm.rank == i % 3 else 4
            error = await error_of(called(shared, size))
            assert isinstance(error, CollectiveMismatchError), repr(error)
            assert {error.op, error.other_op} == {f"all_reduce(float32[{n}], SUM, tag='x')" for n in (4, 5)}
            assert i % 3 in (error.rank, error.other_rank)
            with pytest.raises(CollectiveMismatchError):
                shared.barrier()
        await comm.barrier()


# -- who does not come ------------------------------------------------------------------------------------------------


async def test_the_deadline_names_the_rank_and_the_tag() -> None:
    async with agreed(3, timeout=0.3) as comms:
        works = [comm.all_reduce(ones(), tag="layer3.bias") for comm in comms[:2]]
        error = await error_of(works[0])
        assert isinstance(error, CollectiveTimeoutError)
        assert (error.missing, error.seq) == ((2,), -1)
        assert "rank 2 has not issued 'layer3.bias'" in str(error)
        await error_of(works[1])
        await until(lambda: "broken" in repr(comms[2]))
        with pytest.raises(AbortedError, match=r"aborted by rank [01]: .*rank 2 has not issued 'layer3.bias'"):
            comms[2].barrier(tag="y")


async def test_the_deadline_names_several_ranks() -> None:
    async with agreed(4) as comms:
        first = [comm.all_reduce(ones(), tag="x") for comm in comms]
        await asyncio.gather(*first)
        works = [comms[3].all_reduce(ones(), tag="x", timeout=0.1), comms[1].all_reduce(ones(), tag="x")]
        comms[0].barrier()  # something else
        error = await error_of(works[0])
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (0, 2)
        assert "ranks [0, 2] have not issued 'x'" in str(error)


async def test_the_deadline_of_what_has_no_tag() -> None:
    async with agreed(2) as comms:
        work = comms[0].all_gather_object(1, timeout=0.1)
        comms[1].all_gather_object(1, tag="x")
        error = await error_of(work)
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (1,)
        assert "rank 1 has not issued it" in str(error)


async def test_each_operation_of_a_scope_has_its_deadline() -> None:
    async with agreed(2, timeout=0.3) as (a, b):
        async with a.coalesce() as batch:
            a.all_reduce(ones(), tag="x")
            a.all_reduce(ones(), tag="y")
        await b.all_reduce(ones(), tag="x")
        error = await error_of(batch.works[1])
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (1,)


async def test_an_operation_in_a_scope_there_has_not_been_issued() -> None:
    async with agreed(2) as (a, b):
        work = a.all_reduce(ones(), tag="x", timeout=0.1)
        with pytest.raises(AbortedError):
            async with b.coalesce():
                held = b.all_reduce(ones(), tag="x")
                error = await error_of(work)
                await until(lambda: "broken" in repr(b))
                await held
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (1,)


@pytest.mark.ranks(3, backend=BACKENDS)
async def test_a_deadline_between_processes(comm: Comm) -> None:
    async with new_comm(comm.backend, name="late", ordering="agreed", timeout=30) as shared:
        await shared.barrier()
        await comm.barrier()  # all are through that one
        if comm.rank == 2:
            await until(lambda: "broken" in repr(shared))
            with pytest.raises(AbortedError, match=r"rank 2 has not issued 'x'"):
                shared.barrier()
        else:
            with pytest.raises((CollectiveTimeoutError, AbortedError), match=r"rank 2 has not issued 'x'"):
                await shared.all_reduce(ones(), tag="x", timeout=0.3)
    await comm.barrier()


# -- who fits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [0, 2])
async def test_ranks_must_have_the_same_ordering(odd: int) -> None:
    store = MemoryStore()
    connecting = [
        new_comm(
            "loopback",
            store=store,
            rank=rank,
            size=3,
            timeout=10,
            ordering="agreed" if rank == odd else "program",
        )
        for rank in range(3)
    ]
    errors = await asyncio.gather(*(asyncio.ensure_future(_awaited(one)) for one in connecting), return_exceptions=True)
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert "ordering differs: rank 0 has" in str(error)
        assert "'agreed'" in str(error)
        assert "'program'" in str(error)


async def _awaited(connecting: Awaitable[object]) -> object:
    return await connecting


@pytest.mark.parametrize("ordering", ["wrong", "", None, 3])
def test_an_unknown_ordering_is_named(ordering: Any) -> None:
    with pytest.raises(ValueError, match=r"ordering must be one of 'program', 'agreed', got"):
        new_comm("loopback", store=MemoryStore(), rank=0, size=1, ordering=ordering)


# -- what it costs ----------------------------------------------------------------------------------------------------


async def test_statistics_tell_what_is_held_and_what_went_together() -> None:
    async with agreed(2) as (a, b):
        works = [a.all_reduce(ones(), tag=tag) for tag in "abc"]
        await turns()
        assert a.statistics()[:5] == (3, 3, 24, 3, 0)
        works += [b.all_reduce(ones(), tag=tag) for tag in "cab"]
        await asyncio.gather(*works)
        assert a.statistics()[:5] == (3, 0, 0, 0, 1)
        await asyncio.gather(a.barrier(), b.barrier())
        assert b.statistics()[:5] == (4, 0, 0, 0, 1)


async def test_ready_waits_for_what_was_agreed_on_and_not_for_what_others_have_to_call() -> None:
    async with agreed(2, max_ops=2) as (a, b):
        works = [a.all_reduce(ones(), tag=tag) for tag in "abc"]
        await turns()
        await a.ready()  # else two ranks that call in different orders might wait for each other
        assert a.statistics().waits == 0
        hub = hub_of(a)
        works += [b.all_reduce(ones(), tag=tag) for tag in "ab"]
        stalled = hub._run_or_hold
        held: list[Callable[[], None]] = []

        def stall(ranks: frozenset[int], run: Callable[[], None]) -> None:
            if len(ranks) == 2 and a.statistics().held == 1 and not released:
                held.append(run)
            else:
                stalled(ranks, run)

        released = False
        hub._run_or_hold = stall  # type: ignore[method-assign]
        await until(lambda: len(held) > 0)
        waiting = asyncio.ensure_future(a.ready())
        await turns()
        assert not waiting.done()
        released = True
        for run in held:
            run()
        await waiting
        works.append(b.all_reduce(ones(), tag="c"))
        await asyncio.gather(*works)


async def test_what_is_called_in_one_turn_is_announced_in_one_message(sent: list[tuple[int, Op]]) -> None:
    async with agreed(3) as comms:

        async def one(comm: Comm, number: int) -> None:
            await comm.all_reduce(ones(1, number), tag=f"{number}")

        for _ in range(3):
            sent.clear()
            tasks = [one(comm, number) for comm in comms for number in random.sample(range(50), 50)]
            await asyncio.gather(*tasks)
            assert messages(sent) == {(1, 0): 1, (2, 0): 1, (0, 1): 1, (0, 2): 1}
            carried = [rank for rank, op in sent if not op.p2p]
            assert Counter(carried) == {0: 1, 1: 1, 2: 1}, "one vector of fifty"
        assert [comm.statistics().batches for comm in comms] == [3, 3, 3]


async def test_a_round_of_one_operation_is_one_message_each_way(sent: list[tuple[int, Op]]) -> None:
    async with agreed(3) as comms:
        for i in range(5):
            sent.clear()
            await asyncio.gather(*(comm.all_reduce(ones(), tag=f"{i % 2}") for comm in comms))
            assert messages(sent) == {(1, 0): 1, (2, 0): 1, (0, 1): 1, (0, 2): 1}


async def test_news_wait_while_a_message_is_being_sent(sent: list[tuple[int, Op]]) -> None:
    async with agreed(2) as (a, b):
        hub = hub_of(a)
        hub.hold()
        works = []
        for i in range(10):
            works.append(b.all_reduce(ones(), tag=f"{i}"))
            await turns()
        assert messages(sent) == {(1, 0): 1}
        hub.release()
        await turns()
        assert messages(sent) == {(1, 0): 2}
        works += [a.all_reduce(ones(), tag=f"{i}") for i in range(10)]
        await asyncio.gather(*works)


async def test_nothing_happens_when_there_is_nothing_to_tell(sent: list[tuple[int, Op]]) -> None:
    async with agreed(3, timeout=math.inf) as comms:
        works = [comm.all_reduce(ones(), tag="x") for comm in comms]
        await asyncio.gather(*works)
        waiting = comms[1].barrier(tag="y")
        await turns()
        loop: Any = asyncio.get_running_loop()
        sent.clear()
        assert [handle for handle in loop._scheduled if not handle._cancelled] == []
        for _ in range(50):
            await asyncio.sleep(0)
            assert len(loop._ready) <= 1, "nothing but this task runs"
        assert sent == []
        await asyncio.gather(comms[0].barrier(tag="y"), comms[2].barrier(tag="y"), waiting)


# -- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_ranks_close_one_after_the_other(monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]) -> None:
    wait_for_goodbyes(monkeypatch)
    async with agreed(3) as comms:
        await asyncio.gather(*(comm.barrier() for comm in comms))
        for rank in order:
            await closed(comms[rank])
            assert "closed" in repr(comms[rank])


@pytest.mark.parametrize("closing", [0, 1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_rank_that_closes_is_named_to_those_who_go_on(closing: int, when: str) -> None:
    async with agreed(3) as comms:
        await asyncio.gather(*(comm.barrier() for comm in comms))
        rest = [comm for comm in comms if comm.rank != closing]
        works = [rest[1].all_reduce(ones(), tag="x")] if when == "before" else []
        await comms[closing].aclose()
        if when == "after":
            works.append(rest[1].all_reduce(ones(), tag="x"))
        for work in works:
            error = await error_of(work)
            assert isinstance(error, BackendError)
            assert f"rank {closing} has closed the comm and takes no part in all_reduce" in str(error)
        await until(lambda: all("broken" in repr(comm) for comm in rest))


async def test_what_was_called_before_closing_is_done() -> None:
    async with agreed(3) as comms:
        works = [comms[0].all_reduce(ones(), tag="x")]
        closing = [asyncio.ensure_future(comms[0].aclose())]
        await turns()
        works.append(comms[1].all_reduce(ones(), tag="x"))
        closing.append(asyncio.ensure_future(comms[1].aclose()))
        await turns()
        assert not any(one.done() for one in closing)
        works.append(comms[2].all_reduce(ones(), tag="x"))
        assert [(await work).tolist() for work in works] == [[3, 3]] * 3
        await asyncio.gather(*closing)


async def test_messages_go_on_after_a_rank_has_closed() -> None:
    async with agreed(3) as comms:
        await comms[1].aclose()
        value = torch.zeros(2)
        await asyncio.gather(comms[2].send(ones(), 0), comms[0].recv(value, 2))
        assert value.tolist() == [1, 1]


async def test_a_rank_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GOODBYE_SECONDS", 0.05)
    async with agreed(2) as (a, b):
        hub_of(a).hold()
        await a.aclose()
        await b.aclose()


async def test_abort_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_goodbyes(monkeypatch)
    async with agreed(3) as comms:
        works = [comm.all_reduce(ones(), tag="x") for comm in comms[:2]]
        await turns()
        comms[1].abort("enough")
        for work in works:
            assert str(await error_of(work)) == "aborted by rank 1: enough"
        await until(lambda: "broken" in repr(comms[2]))
        await asyncio.gather(*(closed(comm) for comm in comms))


async def test_abort_while_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_goodbyes(monkeypatch)
    async with agreed(2) as (a, _):
        a.barrier(tag="x")
        closing = asyncio.ensure_future(closed(a))
        await turns()
        a.abort("enough")
        await closing


async def test_what_cannot_be_submitted_breaks_the_comm(monkeypatch: pytest.MonkeyPatch) -> None:
    async with agreed(2) as (a, b):
        submit = LoopbackBackend.submit

        def fail(backend: LoopbackBackend, batch: Any) -> None:
            if backend is a.unsafe_get_backend() and not batch[0].op.p2p:
                raise ValueError("no room")
            submit(backend, batch)

        monkeypatch.setattr(LoopbackBackend, "submit", fail)
        works = [comm.all_reduce(ones(), tag="x") for comm in (a, b)]
        for work in works:
            error = await error_of(work)
            assert isinstance(error, BackendError)
            assert "the agreed operations cannot be submitted: ValueError: no room" in str(error)
        monkeypatch.undo()


async def test_a_comm_that_is_dropped_unclosed_is_reported_and_leaves_nothing() -> None:
    store = MemoryStore()
    comms = await asyncio.gather(
        *(new_comm("loopback", ordering="agreed", store=store, rank=rank, size=2) for rank in range(2))
    )
    work = comms[0].all_reduce(ones(), tag="x")
    await turns()
    with pytest.warns(ResourceWarning, match="was never closed"):
        del comms
        gc.collect()
    error = await error_of(work)
    assert "dropped unclosed" in str(error)
    await until(lambda: len(asyncio.all_tasks()) == 1)


@pytest.mark.ranks(3, backend=BACKENDS)
async def test_closing_between_processes_is_quick_and_leaves_nothing(comm: Comm) -> None:
    """Quick: no goodbye is waited for in vain, however slow the machine is."""

    async def once(first: int | None) -> None:
        shared = await new_comm(comm.backend, name="agreed", ordering="agreed", timeout=30)
        await shared.barrier()
        if first is not None and comm.rank != first:
            await comm.barrier()
        await closed(shared)
        if first is not None and comm.rank == first:
            await comm.barrier()
        await comm.barrier()

    def held() -> tuple[int, int]:
        gc.collect()  # a segment may wait for the collector, behind a cancelled task
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("asynccomm")]  # not those of pools
        return len(ours), len(os.listdir("/proc/self/fd"))

    for _ in range(6):  # what a comm has once its calls are predicted counts as held
        await comm.barrier()
    await comm.all_reduce(torch.ones(2 << 20))  # on the thread for large operations, which stays
    await once(None)
    threads, descriptors = held()
    with pytest.MonkeyPatch.context() as patch:  # on this rank, which runs other tests, too
        wait_for_goodbyes(patch)
        for first in (None, 0, 1, 2):
            await once(first)
    await until(lambda: held()[0] <= threads and held()[1] <= descriptors)


@pytest.mark.ranks(3, backend=BACKENDS)
async def test_a_rank_that_closes_between_processes_is_named(comm: Comm) -> None:
    for closing in range(3):
        shared = await new_comm(comm.backend, name=f"left {closing}", ordering="agreed", timeout=30)
        await shared.barrier()
        await comm.barrier()  # all are through that one
        if comm.rank == closing:
            await shared.aclose()
        else:
            error = await error_of(called(shared))
            assert isinstance(error, BackendError), repr(error)
            assert f"rank {closing} has closed the comm and takes no part in all_reduce" in str(error)
            await shared.aclose()
        await comm.barrier()


@pytest.mark.ranks(2, backend=BACKENDS)
@pytest.mark.parametrize("busy", [0, 1])
async def test_a_rank_that_is_busy_while_the_other_closes(comm: Comm, busy: int) -> None:
    """It has not said goodbye, and finds the other gone when it comes to that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GOODBYE_SECONDS", 0.2)
        for use in (False, True):
            shared = await new_comm(comm.backend, name=f"busy {use}", ordering="agreed", timeout=30)
            await shared.barrier()
            await comm.barrier()
            if comm.rank == busy:
                await asyncio.sleep(0)
                time.sleep(module.GOODBYE_SECONDS + 0.5)
                if use:
                    error = await error_of(called(shared))
                    assert isinstance(error, BackendError)
                    assert f"rank {1 - busy} has closed the comm" in str(error), str(error)
                else:
                    await asyncio.sleep(0.1)
                    assert "open" in repr(shared), repr(shared._session.error)
            await shared.aclose()
            await comm.barrier()


@pytest.mark.ranks(2, backend=BACKENDS)
async def test_abort_between_processes(comm: Comm) -> None:
    async with new_comm(comm.backend, name="aborted", ordering="agreed", timeout=30) as shared:
        await shared.barrier()
        work = shared.all_reduce(ones(), tag=f"{comm.rank}")
        await comm.barrier()  # all have called it
        if comm.rank == 1:
            shared.abort("enough")
        assert str(await error_of(work)) == "aborted by rank 1: enough"
    await comm.barrier()


KILLED = """
import asyncio, os, signal
import torch
import asynccomm

async def main():
    try:
        async with asynccomm.new_comm("shm", ordering="agreed", timeout=60) as comm:
            await comm.barrier()
            work = comm.all_reduce(torch.ones(4), tag="x") if comm.rank != {victim} else None
            await asyncio.sleep(0.2)
            if comm.rank == {victim}:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                await work
            except asynccomm.PeerLostError as exc:
                print("lost", exc.rank, flush=True)
                raise
    except asynccomm.PeerLostError:
        pass

asynccomm.run(main())
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_lost_to_the_others(tmp_path: Path, victim: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED.format(victim=victim))
    command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", "3", "--no-prefix", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stdout.splitlines() if line.startswith("lost")]
    assert lines == [f"lost {victim}"] * 2, done.stdout + done.stderr


# -- who says nonsense ------------------------------------------------------------------------------------------------


def decided(tag: str) -> bytes:
    writer = MessageWriter()
    writer.decided(tag)
    return writer.written()


NONSENSE: dict[str, Parcel] = {
    "empty": Parcel(b"", ()),
    "news of nothing": Parcel(b"\0", ()),
    "of another sort": Parcel(b"\5hello", ()),
    "a goodbye and more": Parcel(b"\1x", ()),
    "no id": Parcel(b"\0\7\7", ()),
    "what was not announced": Parcel(b"\0" + decided("x"), ()),
    "with a payload": Parcel(b"\0", (torch.ones(3),)),
}


def push(comm: Comm, peer: int, parcel: Parcel) -> None:
    """Send ``parcel`` as the agreement would."""
    op = SendParcel("agree", peer, module._TAG, MessageSpace.INTERNAL)
    session = comm._session
    work: Work[Any] = Work(op, 0, session.mailbox, value=None, timeout=math.inf, on_settled=lambda _: None)
    comm.unsafe_get_backend().submit((Submission(Call(op, (), (), None, parcels=(parcel,)), work),))


@pytest.mark.parametrize("what", NONSENSE)
@pytest.mark.parametrize("source", [0, 1, 2])
async def test_nonsense_breaks_the_comm_everywhere(what: str, source: int) -> None:
    async with agreed(3) as comms:
        victim = 0 if source else 1
        work = comms[2].barrier()
        push(comms[source], victim, NONSENSE[what])
        error = await error_of(work)
        assert isinstance(error, BackendError)
        assert f"rank {source} sent an invalid message of agreed ordering: " in str(error)
        await until(lambda: all("broken" in repr(comm) for comm in comms))


@pytest.mark.ranks(2, backend=BACKENDS)
async def test_nonsense_between_processes(comm: Comm) -> None:
    for source in range(2):
        async with new_comm(comm.backend, name=f"nonsense {source}", ordering="agreed", timeout=30) as shared:
            await shared.barrier()
            await comm.barrier()  # the other is through that one, too
            if comm.rank == source:
                push(shared, 1 - source, NONSENSE["with a payload"])
            await until(lambda: "broken" in repr(shared))
            with pytest.raises(BackendError, match=f"rank {source} sent an invalid message"):
                shared.barrier()
        await comm.barrier()


async def test_calls_after_the_end_are_refused() -> None:
    async with agreed(2) as (a, b):
        await asyncio.gather(a.aclose(), b.aclose())
        with pytest.raises(ClosedError):
            a.barrier()
    with pytest.raises(BrokenError):
        async with agreed(2) as (a, _):
            a.abort()
            a.barrier(tag="x")


@pytest.mark.ranks(3, backend=BACKENDS)
async def test_much_at_once_and_much_that_waits_for_a_busy_rank(comm: Comm) -> None:
    async with new_comm(comm.backend, name="much", ordering="agreed", timeout=60) as shared:
        tags = [f"{'long' * 250} {i}" for i in range(amount(3000, 200))]  # nearly as long as they may be
        random.Random(comm.rank).shuffle(tags)
        for repeat in range(2):  # announced in full, and then by number
            if comm.rank == 0:
                time.sleep(0.5)
            works = []
            for i, tag in enumerate(tags):
                works.append(shared.all_gather_object((comm.rank, repeat), tag=tag))
                if repeat and i % 10 == 0:
                    await asyncio.sleep(0)  # so that there are many messages
            for work in works:
                assert await work == [(rank, repeat) for rank in range(3)]
            found: list[Any] = await comm.all_gather_object(
                {tag: work.seq for tag, work in zip(tags, works, strict=True)}
            )
            assert found[0] == found[1] == found[2]


async def test_memory_that_one_rank_alone_shares() -> None:
    """What conflicts there is decided in batches of its own on all ranks."""
    async with agreed(2) as comms:
        for _ in range(3):
            works = []
            for comm in comms:
                tensor = torch.ones(4)
                other = tensor if comm.rank == 0 else torch.empty(4)
                works.append((comm.broadcast(other, 0, tag="a"), comm.all_reduce(tensor, out=torch.empty(4), tag="b")))
            for first, second in works:
                assert (await first).tolist() == [1] * 4
                assert (await second).tolist() == [2] * 4


async def test_a_producer_that_never_waits_is_heard_all_the_same() -> None:
    async with agreed(2, max_ops=8) as comms:

        async def produce(comm: Comm) -> int:
            works, most = [], 0
            for _ in range(200):
                await comm.ready()
                works.append(comm.all_reduce(ones(), tag="x"))
                most = max(most, comm.statistics().in_flight)
            await asyncio.gather(*works)
            return most

        assert max(await asyncio.gather(*map(produce, comms))) < 50


async def test_messages_in_a_scope_share_no_memory_with_collectives() -> None:
    async with agreed(2) as (a, _):
        tensor = ones()
        with pytest.raises(ValueError, match="shares memory with"):
            async with a.coalesce():
                work = a.all_reduce(tensor)
                a.send(tensor, 1)
        with pytest.raises(NotSentError):
            await work
        assert a.statistics().in_flight == 0
