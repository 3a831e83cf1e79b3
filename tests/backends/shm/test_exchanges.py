"""Ranks that send long messages to each other at once: they read each other's memory, and all of that is in C."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import (
    AbortedError,
    BackendError,
    BrokenError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Comm,
    new_comm,
)
from asynccomm.backends.shm.layout import Word
from asynccomm.comm.submission import Submitter
from asynccomm.core.native import CoreUnavailable, load_core
from tests.waiting import until

from .paths import Paths, counted
from .test_posted_receives import posted
from .test_single_copy import needs_reading

pytestmark = [
    needs_reading,
    pytest.mark.skipif(isinstance(load_core(), CoreUnavailable), reason="the executor in C was not built"),
]

LONG = 300_000  # bytes: more than is sent eagerly
Exchange = Callable[[Comm, Tensor, int, Tensor, int], Awaitable[object]]


async def ready(comm: Comm) -> None:
    """Exchange until all ranks know that they can read each other's memory."""
    board = comm.unsafe_get_backend()._engine._board  # type: ignore[attr-defined]
    words = [board.layout.word(rank, Word.READS) for rank in range(comm.size)]
    knowing = 0
    while knowing < comm.size:
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        await receive_first(comm, torch.empty(LONG), following, torch.empty(LONG), previous)
        knows = all(board._words[word] == 1 for word in words)
        knowing = int(await comm.all_reduce(torch.tensor(int(knows))))


@asynccontextmanager
async def readers(hints: dict[str, str] | None = None) -> AsyncIterator[tuple[Comm, Paths]]:
    async with counted(hints=hints) as (comm, paths):
        await ready(comm)
        yield comm, paths


async def receive_first(comm: Comm, source: Tensor, following: int, output: Tensor, previous: int) -> None:
    receive = comm.recv(output, previous)
    await comm.send(source, following)
    await receive


async def gathered(comm: Comm, source: Tensor, following: int, output: Tensor, previous: int) -> None:
    await asyncio.gather(comm.recv(output, previous), comm.send(source, following))


async def send_first(comm: Comm, source: Tensor, following: int, output: Tensor, previous: int) -> None:
    send = comm.send(source, following)
    await comm.recv(output, previous)
    await send


EXCHANGES = [receive_first, gathered, send_first]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("exchange", EXCHANGES)
async def test_rings(exchange: Exchange) -> None:
    async with readers() as (comm, _):
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for round in range(30):
            n = [LONG, 1 << 20, 3_000_000][round % 3]
            source, output = (
                torch.full((n,), 3 * round % 200 + comm.rank, dtype=torch.uint8),
                torch.empty(n, dtype=torch.uint8),
            )
            await exchange(comm, source, following, output, previous)
            source.fill_(255)  # the program may change it now
            assert output.eq(3 * round % 200 + previous).all()
            if round % 4 == 0:
                await comm.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("exchange", EXCHANGES)
async def test_all_of_it_is_in_c_unless_a_rank_is_late(exchange: Exchange) -> None:
    async with readers() as (comm, paths):
        other = 1 - comm.rank
        source, output = torch.ones(LONG), torch.empty(LONG)
        fast = 0
        for _ in range(50):
            await comm.barrier()
            paths.took()
            await exchange(comm, source, other, output, other)
            fast += not (paths.ordinary or paths.adopted)
        assert fast > 0, "however busy the machine is"


@pytest.mark.ranks(3)
async def test_any_order_of_messages_of_any_length() -> None:
    async with readers() as (comm, _):
        chance = random.Random(5)
        for _ in range(60):
            sizes = [chance.choice([10, 5000, LONG, 700_000]) for _ in range(chance.randrange(1, 5))]
            orders = [chance.sample(range(len(sizes)), len(sizes)) for _ in range(comm.size)]
            first = [chance.random() < 0.5 for _ in range(comm.size)]
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            outputs = {(rank, k): torch.empty(n, dtype=torch.uint8) for rank in others for k, n in enumerate(sizes)}
            data = [torch.full((n,), 10 * comm.rank + k, dtype=torch.uint8) for k, n in enumerate(sizes)]
            sends = [(rank, k) for rank in others for k in orders[comm.rank]]
            works: list[Any] = []
            if first[comm.rank]:
                works += [comm.send(data[k], rank, tag=k) for rank, k in sends]
            works += [comm.recv(output, rank, tag=k) for (rank, k), output in outputs.items()]
            if not first[comm.rank]:
                works += [comm.send(data[k], rank, tag=k) for rank, k in sends]
            for work in chance.sample(works, len(works)):
                await work
            for (rank, k), output in outputs.items():
                assert output.eq(10 * rank + k).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("awaited", [True, False])
async def test_the_loop_goes_on_with_a_send_for_which_the_other_rank_is_late(awaited: bool) -> None:
    async with readers({"spin_us": "0"}) as (comm, _):
        data = torch.full((LONG,), 7.0)
        if comm.rank == 0:
            work = comm.send(data, 1)
            assert posted(comm) == [work]
            waiting = asyncio.ensure_future(work) if awaited else None
            async with asyncio.timeout(30):
                while posted(comm):
                    await asyncio.sleep(0)
            await comm.barrier()
            await until(work.done)
            if waiting is not None:
                await waiting
        else:
            await comm.barrier()
            assert (await comm.recv(torch.empty(LONG), 0)).eq(7).all()


@pytest.mark.ranks(2)
async def test_a_receiver_that_sends_nothing_is_sent_the_data() -> None:
    async with readers() as (comm, _):
        for round in range(20):
            if comm.rank == 0:
                work = comm.send(torch.full((LONG,), float(round)), 1)
                await comm.barrier()
                await work
            else:
                await comm.barrier()
                assert (await comm.recv(torch.empty(LONG), 0)).eq(round).all()


@pytest.mark.ranks(2)
async def test_a_withdrawn_tensor_is_not_read() -> None:
    async with readers({"spin_us": "0"}) as (comm, _):
        board: Any = comm.unsafe_get_backend()._engine._board  # type: ignore[attr-defined]
        at = board.layout.word(comm.rank, Word.WITHDRAWN)
        board._words[at] = 1  # as if the sender's operation had failed
        other = 1 - comm.rank
        output = torch.empty(LONG)
        await receive_first(comm, torch.full((LONG,), float(comm.rank)), other, output, other)
        assert output.eq(other).all()  # by way of the ring
        await comm.barrier()
        board._words[at] = 0


@pytest.mark.ranks(2)
async def test_freed_memory_breaks_the_comm() -> None:
    comm = await new_comm("shm", timeout=30, hints={"spin_us": "0"})
    await ready(comm)
    if comm.rank == 0:
        data = torch.zeros(LONG)
        work = comm.send(data, 1)
        assert posted(comm) == [work]
        data.untyped_storage().resize_(0)
        with pytest.raises(BackendError, match=r"tensor \(shape \(300000,\), torch.float32\) was freed"):
            await work
    else:
        with pytest.raises(BrokenError):
            await comm.recv(torch.zeros(1), 0, tag=5)
    await comm.aclose()


@pytest.mark.ranks(2)
async def test_a_message_that_does_not_fit() -> None:
    comm = await new_comm("shm", timeout=30)
    await ready(comm)
    other, n = 1 - comm.rank, LONG + comm.rank
    receive = comm.recv(torch.zeros(n), other)
    with pytest.raises(CollectiveMismatchError) as found:
        await comm.send(torch.zeros(n), other)
        await receive
    assert "float32[300000]" in str(found.value)
    assert "float32[300001]" in str(found.value)
    assert str(receive.exception()) == str(found.value)
    await comm.aclose()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("end", ["deadline", "abort", "close"])
async def test_the_end_of_a_comm_ends_a_posted_send(end: str) -> None:
    comm = await new_comm("shm", timeout=0.5 if end == "deadline" else 30, hints={"spin_us": "0"})
    await ready(comm)
    if comm.rank == 0:
        work = comm.send(torch.zeros(LONG), 1)
        assert posted(comm) == [work] or end == "close"  # which the engine may have noticed
        if end == "deadline":
            with pytest.raises(CollectiveTimeoutError) as found:
                await work
            assert found.value.missing == (1,)
        elif end == "abort":
            comm.abort("enough")
            with pytest.raises(AbortedError, match="enough"):
                await work
        else:
            with pytest.raises(BackendError, match="rank 1 has closed the comm"):
                await work
    elif end != "close":
        with pytest.raises(BrokenError):
            await comm.recv(torch.zeros(1), 0, tag=5, timeout=30)
    await comm.aclose()


@pytest.mark.ranks(2)
async def test_a_thread_takes_posted_sends_over_while_another_send_is_handed_over() -> None:
    """The answer to the latter may come meanwhile."""
    async with readers({"spin_us": "0"}) as (comm, _):
        count = 65  # more than may be posted: the last one is handed over
        values = [torch.full((LONG,), float(k)) for k in range(count)]
        if comm.rank == 1:
            await comm.barrier()
            for value in values:
                assert (await comm.recv(torch.empty(LONG), 0)).eq(value).all()
            return
        engine: Any = comm.unsafe_get_backend()._engine  # type: ignore[attr-defined]
        position = engine._position
        works: list[Any] = []
        waiting = threading.Thread(target=lambda: works[0].wait())
        work = Submitter._work

        def interrupted(*args: Any) -> Any:
            assert position.adopting
            waiting.start()
            while position.messages < count - 1 or engine._lock.locked():
                time.sleep(0.001)  # the loop must not run
            assert position.adopting
            return work(*args)

        with pytest.MonkeyPatch.context() as patch:
            for k, value in enumerate(values):
                if k == count - 1:
                    patch.setattr(Submitter, "_work", interrupted)
                works.append(comm.send(value, 1))
        assert not position.adopting
        await comm.barrier()
        await asyncio.gather(*works)
        await asyncio.to_thread(waiting.join)


@pytest.mark.ranks(2)
async def test_posted_sends_are_in_the_statistics() -> None:
    async with counted(hints={"spin_us": "0"}) as (comm, _):
        await ready(comm)
        count = comm.statistics()[0]
        if comm.rank == 0:
            work = comm.send(torch.ones(LONG), 1, tag=3)
            assert posted(comm) == [work]
            assert comm.statistics()[:3] == (count + 1, 1, 4 * LONG)
            assert str(work.op) == "send(float32[300000], dst=1, tag=3)"
            assert work.seq < count  # messages and collectives have numbers of their own
            await comm.barrier()
            await work
            assert comm.statistics()[1:3] == (0, 0)
        else:
            await comm.barrier()
            await comm.recv(torch.empty(LONG), 0, tag=3)
