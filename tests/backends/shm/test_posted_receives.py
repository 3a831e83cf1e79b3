"""Receives that are posted before their messages come: in C until they are awaited, or until Python takes them over."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import types
from collections.abc import Sequence
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
    Work,
    new_comm,
)
from asynccomm.backends.shm.backend import ShmBackend
from asynccomm.comm.flight import calls_of
from asynccomm.core.native import CoreUnavailable, load_core
from tests.sampling import amount
from tests.waiting import until

from .paths import counted

pytestmark = pytest.mark.skipif(isinstance(load_core(), CoreUnavailable), reason="the executor in C was not built")


def posted(comm: Comm) -> Sequence[Work[Any]]:
    """The Works of the receives that are in C."""
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, ShmBackend)
    return [held.work for held in backend._engine._position.posted]


def post(comm: Comm, output: Tensor, source: int, tag: int = 0) -> Work[Tensor]:
    """A receive whose message has not come."""
    work = comm.recv(output, source, tag=tag)
    assert not work.done()
    assert posted(comm)[-1] is work
    return work


async def send_late(comm: Comm, output: Tensor, tag: int = 0) -> None:
    """Send ones to rank 0, which has posted its receive, and calls a barrier."""
    await comm.barrier()
    await comm.send(torch.ones_like(output), 0, tag=tag)


@pytest.mark.ranks(2)
async def test_ranks_that_receive_and_send_at_once() -> None:
    async with counted() as (comm, paths):
        other = 1 - comm.rank
        for round in range(300):
            output = torch.empty(round % 7 + 1, dtype=torch.int64)
            receive = comm.recv(output, other, tag=round % 3)
            send = comm.send(torch.full_like(output, 2 * round + comm.rank), other, tag=round % 3)
            await send
            assert await receive is output
            assert receive.source == other
            assert output.eq(2 * round + other).all()
        assert paths.ordinary < 300, "some receives are taken by C, however busy the machine is"
        assert comm.statistics()[:2] == (600, 0)
        assert [work.seq for work in (receive, send)] == [598, 599]
        assert receive.duration is not None


@pytest.mark.ranks(3)
async def test_rings_of_tasks() -> None:
    async with counted() as (comm, _):
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for round in range(100):
            outputs = [torch.empty(3), torch.empty(5)]
            await asyncio.gather(
                *(comm.recv(output, previous, tag=tag) for tag, output in enumerate(outputs)),
                *(comm.send(torch.full_like(outputs[tag], comm.rank + round), following, tag=tag) for tag in (1, 0)),
            )
            assert all(output.eq(previous + round).all() for output in outputs)


@pytest.mark.ranks(3)
async def test_any_order_of_messages() -> None:
    """Messages of one tag arrive in their order, whoever receives them; other ranks and tags do not matter."""
    async with counted() as (comm, _):
        chance = random.Random(3)
        for _ in range(amount(300, 80)):
            tags = [chance.randrange(3) for _ in range(chance.randrange(1, 9))]
            orders = [chance.sample(range(len(tags)), len(tags)) for _ in range(comm.size)]
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            outputs = {(rank, k): torch.empty(tags[k] + 1) for rank in others for k in range(len(tags))}
            receives = {(rank, k): comm.recv(output, rank, tag=tags[k]) for (rank, k), output in outputs.items()}
            sends = []
            for rank in others:
                counts = [0, 0, 0]
                for k in orders[comm.rank]:
                    tag = tags[k]
                    sends.append(comm.send(torch.full((tag + 1,), 10.0 * comm.rank + counts[tag]), rank, tag=tag))
                    counts[tag] += 1
            for key in chance.sample(sorted(receives), len(receives)):
                await receives[key]
            await asyncio.gather(*sends)
            for (rank, k), output in outputs.items():
                assert output.eq(10.0 * rank + tags[:k].count(tags[k])).all()


@pytest.mark.ranks(2)
async def test_a_message_for_no_receive_comes_first() -> None:
    async with counted(hints={"spin_us": "0"}) as (comm, _):
        first, second = torch.empty(2), torch.empty(2)
        if comm.rank == 0:
            work = post(comm, first, 1, tag=1)
            await comm.barrier()
            await comm.barrier()
            await work
            assert not posted(comm)
            await comm.recv(second, 1, tag=2)
            assert first.eq(1).all()
            assert second.eq(2).all()
        else:
            await comm.barrier()
            await comm.send(torch.full((2,), 2.0), 0, tag=2)
            await comm.send(torch.full((2,), 1.0), 0, tag=1)
            await comm.barrier()


@pytest.mark.ranks(2)
async def test_the_loop_leaves_messages_to_c_when_nothing_is_pending() -> None:
    """Python would keep them, and have to take their receives."""
    async with counted() as (comm, _):
        position = comm.unsafe_get_backend()._engine._position  # type: ignore[attr-defined]
        fast = 0
        for _ in range(100):
            outputs = [torch.empty(1), torch.empty(1)]
            if comm.rank == 0:
                first = comm.recv(outputs[0], 1)
            await comm.barrier()
            if comm.rank == 1:
                for k in range(2):
                    await comm.send(torch.full((1,), float(k)), 0)
            await comm.barrier()
            if comm.rank == 0:
                await first
                for _ in range(4):
                    await asyncio.sleep(0)
                assert position.kept <= 1
                fast += position.kept == 0
                await comm.recv(outputs[1], 1)
                assert [int(output) for output in outputs] == [0, 1]
        assert comm.rank == 1 or fast > 0, "all of them were late"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("awaited", [True, False])
async def test_the_loop_goes_on_with_them(awaited: bool) -> None:
    async with counted(hints={"spin_us": "0"}) as (comm, _):
        output = torch.empty(4)
        if comm.rank == 0:
            work = post(comm, output, 1)
            waiting = asyncio.ensure_future(work) if awaited else None
            async with asyncio.timeout(30):
                while posted(comm):
                    await asyncio.sleep(0)
            await comm.barrier()
            async with asyncio.timeout(30):
                while not work.done():
                    await asyncio.sleep(0.001)
            if waiting is not None:
                await waiting
            assert output.eq(1).all()
        else:
            await send_late(comm, output)


@pytest.mark.ranks(2)
async def test_a_thread_waits_for_one() -> None:
    async with counted(hints={"spin_us": "0"}) as (comm, _):
        output = torch.empty(4)
        if comm.rank == 0:
            work = post(comm, output, 1)
            waiting = asyncio.ensure_future(asyncio.to_thread(work.wait))
            await comm.barrier()
            await waiting
            assert output.eq(1).all()
        else:
            await send_late(comm, output)


@pytest.mark.ranks(2)
async def test_a_thread_and_a_task_wait_for_one() -> None:
    """The thread begins to wait while the engine is busy, and cannot have it take the receive over."""
    async with counted() as (comm, _):
        if comm.rank == 0:
            engine: Any = comm.unsafe_get_backend()._engine  # type: ignore[attr-defined]
            work = post(comm, torch.zeros(4), 1)
            engine._lock._lock.acquire()
            waiting = threading.Thread(target=work.wait)
            waiting.start()
            while work not in engine._waited:
                time.sleep(0.001)  # the loop must not run
            engine._lock._lock.release()
            await comm.barrier()
            await work
            await asyncio.to_thread(waiting.join)
            await until(lambda: not engine._waited)  # the thread that settles it takes it out afterwards
        else:
            await send_late(comm, torch.zeros(4))


@pytest.mark.ranks(2)
async def test_collectives_and_long_messages_beside_them() -> None:
    async with counted() as (comm, _):
        other = 1 - comm.rank
        for nbytes in (100, 300_000, 5 << 20):
            output, long = torch.empty(3), torch.empty(nbytes, dtype=torch.uint8)
            short_work, long_work = comm.recv(output, other, tag=1), comm.recv(long, other, tag=2)
            total = await comm.all_reduce(torch.ones(2))
            sends = [comm.send(torch.full((nbytes,), 9, dtype=torch.uint8), other, tag=2)]
            sends.append(comm.send(torch.full((3,), float(comm.rank)), other, tag=1))
            await asyncio.gather(short_work, *sends)
            await long_work
            assert total.eq(2).all()
            assert output.eq(other).all()
            assert long.eq(9).all()


@pytest.mark.ranks(2)
async def test_more_than_there_is_room_for() -> None:
    async with counted() as (comm, _):
        other = 1 - comm.rank
        outputs = [torch.empty(1) for _ in range(200)]
        works = [comm.recv(output, other) for output in outputs]
        for k in range(200):
            comm.send(torch.full((1,), float(k)), other)
        await asyncio.gather(*works)
        assert [int(output) for output in outputs] == list(range(200))
        assert [work.seq for work in works] == list(range(200))


@pytest.mark.ranks(2)
async def test_the_memory_stays_what_it_was_at_the_call() -> None:
    async with counted() as (comm, _):
        other = 1 - comm.rank
        output = torch.zeros(4)
        before = output.detach()
        work = comm.recv(output, other)
        output.data = torch.zeros(4)
        await comm.send(torch.ones(4), other)
        await work
        assert before.eq(1).all()
        assert output.eq(0).all()
        await comm.barrier()

        work = comm.recv(torch.zeros(4), other)  # nothing else owns the tensor
        gc.collect()
        await comm.send(torch.ones(4), other)
        assert (await work).eq(1).all()


@pytest.mark.ranks(2)
async def test_freed_memory_breaks_the_comm() -> None:
    comm = await new_comm("shm", timeout=30)
    if comm.rank == 0:
        output = torch.zeros(4)
        work = post(comm, output, 1)
        output.untyped_storage().resize_(0)
        with pytest.raises(BackendError, match=r"tensor \(shape \(4,\), torch.float32\) was freed"):
            await work
    else:
        with pytest.raises(BrokenError):
            await comm.recv(torch.zeros(4), 0)
    await comm.aclose()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sent", [torch.ones(3), torch.ones(4, dtype=torch.int32), torch.ones(100_000)])
async def test_a_message_that_does_not_fit(sent: Tensor) -> None:
    comm = await new_comm("shm", timeout=30)
    if comm.rank == 0:
        work = post(comm, torch.zeros(4), 1)
        await comm.barrier()
        with pytest.raises(CollectiveMismatchError) as found:
            await work
        assert "rank 0 has recv(float32[4], src=1, tag=0)" in str(found.value)
    else:
        await comm.barrier()
        with pytest.raises(BrokenError):
            await comm.send(sent, 0)
            await comm.recv(torch.zeros(4), 0)
    await comm.aclose()


@pytest.mark.ranks(2)
async def test_a_deadline_is_kept() -> None:
    comm = await new_comm("shm", timeout=0.3)
    if comm.rank == 0:
        work = post(comm, torch.zeros(4), 1)
        with pytest.raises(CollectiveTimeoutError) as found:
            await work
        assert found.value.missing == (1,)
    else:
        with pytest.raises(BrokenError):
            await comm.recv(torch.zeros(4), 0, timeout=30)
    await comm.aclose()


@pytest.mark.ranks(2)
async def test_an_abort_ends_them() -> None:
    comm = await new_comm("shm", timeout=30)
    await comm.barrier()
    if comm.rank == 0:
        work = post(comm, torch.zeros(4), 1)
        comm.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            await work
    else:
        with pytest.raises(AbortedError):
            await comm.recv(torch.zeros(4), 0)
    await comm.aclose()


@pytest.mark.ranks(2)
async def test_the_end_of_a_rank_ends_them() -> None:
    comm = await new_comm("shm", timeout=30)
    if comm.rank == 0:
        work = post(comm, torch.zeros(4), 1)
        await comm.send(torch.ones(1), 1)
        with pytest.raises(BackendError, match="rank 1 has closed the comm"):
            await work
    else:
        await comm.recv(torch.zeros(1), 0)
    await comm.aclose()


@pytest.mark.ranks(2)
async def test_a_cancelled_await_leaves_it_posted() -> None:
    async with counted(hints={"spin_us": "0"}) as (comm, _):
        output = torch.zeros(4)
        if comm.rank == 0:
            work = post(comm, output, 1)
            waiting = asyncio.ensure_future(work)
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await comm.barrier()
            await work
            assert output.eq(1).all()
        else:
            await send_late(comm, output)


@pytest.mark.ranks(2)
async def test_errors_and_statistics_name_them() -> None:
    async with counted(hints={"spin_us": "0"}) as (comm, _):
        if comm.rank == 0:
            work = post(comm, torch.zeros(4), 1, tag=3)
            assert comm.statistics()[:3] == (1, 1, 16)
            assert str(work.op) == "recv(float32[4], src=1, tag=3)"
            assert work.seq == 0
            await comm.barrier()
            await work
            assert comm.statistics()[:3] == (2, 0, 0)
        else:
            await send_late(comm, torch.zeros(4), tag=3)


@pytest.mark.ranks(2)
async def test_an_awaited_receive_that_comes_soon_runs_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Work[Any]] = []
    forward = Work._wait

    def wait(work: Work[Any]) -> Any:
        waits.append(work)
        return forward(work)

    async with counted() as (comm, _):
        other, output = 1 - comm.rank, torch.empty(4)
        for _ in range(300):
            receive = comm.recv(output, other)
            await comm.send(torch.ones(4), other)
            monkeypatch.setattr(Work, "_wait", wait)
            await receive
            monkeypatch.setattr(Work, "_wait", forward)
        assert len(waits) < 300, "some come soon, however busy the machine is"
        assert comm.statistics()[:3] == (600, 0, 0)
        calls = [(call.op.p2p, call.finished is not None, call.error) for call in calls_of(comm._submitter)]
        assert calls == [(True, True, None)] * 256


@pytest.mark.ranks(2)
async def test_a_task_that_waits_for_room_goes_on_when_a_posted_receive_is_done() -> None:
    async with new_comm("shm", name="room", max_ops=1) as comm:
        if comm.rank == 0:
            receive = post(comm, torch.empty(3), 1)
            waiting = asyncio.ensure_future(comm.ready())
            await until(lambda: comm.statistics().waiting == 1)
            await comm.send(torch.ones(3), 1, tag=1)
            await receive
            await asyncio.wait_for(waiting, 30)
        else:
            await comm.recv(torch.empty(3), 0, tag=1)
            await comm.send(torch.ones(3), 0)
        await comm.barrier()


@pytest.mark.ranks(1)
async def test_a_receive_is_awaited_on_the_loop_of_its_comm_only() -> None:
    async with new_comm("shm") as comm:
        receive = comm.recv(torch.empty(3), 0)

        async def other_loop() -> None:
            with pytest.raises(RuntimeError, match="belongs to the event loop its comm was made on"):
                await receive

        await asyncio.to_thread(asyncio.run, other_loop())
        await comm.send(torch.ones(3), 0)
        await receive


@pytest.mark.ranks(1, backend="shm")
async def test_a_program_that_goes_on_exchanging_keeps_its_messages_in_c(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each turn of the loop, which a streak of awaits grants from time to time, it has another message posted."""
    engine: Any = comm.unsafe_get_backend()._engine  # type: ignore[attr-defined]
    taken: list[object] = []
    monkeypatch.setattr(engine, "_drive", lambda: taken.extend(engine._position.posted))
    posted = engine._position.posted
    posted.append(object())
    engine._arm_soon()
    for _ in range(20):
        await asyncio.sleep(0)
        posted[:] = [object()]  # C has settled the one before
        assert engine._position.arming
    left = posted[0]
    await until(lambda: taken)
    assert taken == [left], "the loop turns, and the message stays"
    posted.clear()
    assert not engine._position.arming
    engine._arm_soon()
    await until(lambda: not engine._position.arming)
    assert taken == [left]


@pytest.mark.ranks(2)
async def test_an_interruption_while_a_receive_is_posted_breaks_the_comm(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = await new_comm("shm", name="interrupted", timeout=60)
    await comm.barrier()
    if comm.rank == 0:
        engine = comm.unsafe_get_backend()._engine  # type: ignore[attr-defined]

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        await comm.send(torch.ones(3), 1)
        await comm.recv(torch.empty(3), 1)
        await until(lambda: not engine._position.arming)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # of the Work
        monkeypatch.setattr(engine, "_loop", types.SimpleNamespace(call_soon=interrupted))
        with pytest.raises(KeyboardInterrupt):
            comm.recv(torch.empty(3), 1)
        monkeypatch.undo()
        with pytest.raises(BrokenError):
            await comm.barrier()
    else:
        await comm.recv(torch.empty(3), 0)
        await comm.send(torch.ones(3), 0)
        with pytest.raises(BrokenError):
            await comm.recv(torch.empty(3), 0)
    await comm.aclose()
