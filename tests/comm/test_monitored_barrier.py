"""Monitored barriers: the rounds over a store, and what a comm makes of them: who is missing, and that it goes on."""

import asyncio
import math
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from asynccomm import (
    AbortedError,
    ClosedError,
    Comm,
    MemoryStore,
    MonitoredBarrierError,
    Store,
    StoreError,
    StoreTimeoutError,
    TorchStore,
    Work,
    new_comm,
)
from asynccomm.comm.monitored_barrier import MonitoredBarrier, MonitoredBarriers
from asynccomm.core.mailbox import Mailbox
from asynccomm.errors import StoreProtocolError
from asynccomm.ops.validation import CommInfo
from asynccomm.testing.local import loopback_world


def sides(store: Store, size: int) -> list[MonitoredBarriers]:
    return [MonitoredBarriers(CommInfo("c", rank, size, torch.device("cpu")), store) for rank in range(size)]


async def take_part(side: MonitoredBarriers, timeout: float) -> MonitoredBarrierError | None:
    mailbox = Mailbox(asyncio.get_running_loop())
    work: Work[None] = Work(MonitoredBarrier(True), 0, mailbox, value=None, timeout=timeout, on_settled=lambda _: None)
    try:
        await side.pass_through(work)
    except MonitoredBarrierError as exc:
        return exc
    return None


@pytest.fixture(params=["memory", "hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: object) -> Store:
    if request.param == "memory":
        return MemoryStore()
    return TorchStore(dist.HashStore() if request.param == "hash" else dist.FileStore(f"{tmp_path}/store", 1))


async def test_on_every_kind_of_store(store: Store) -> None:
    a, b, c = sides(store, 3)
    assert await asyncio.gather(*(take_part(side, 20) for side in (a, b, c))) == [None] * 3
    errors = await asyncio.gather(*(take_part(side, 0.3) for side in (a, b)))
    assert [error.missing for error in errors if error is not None] == [(2,), (2,)]
    late = await take_part(c, 20)
    assert late is not None
    assert (late.comm, late.rank, late.missing) == ("c", 0, (2,))
    assert await asyncio.gather(*(take_part(side, 20) for side in (c, b, a))) == [None] * 3


async def test_ranks_that_decide_at_once_agree() -> None:
    for _ in range(20):
        store = MemoryStore()
        group = sides(store, 6)
        errors = await asyncio.gather(*(take_part(side, 0.01) for side in group[1:5]))
        assert len({str(error) for error in errors}) == 1
        assert errors[0] is not None


async def test_the_first_verdict_counts() -> None:
    store = MemoryStore()
    a, b = sides(store, 2)
    error = await take_part(b, 0.01)
    assert error is not None
    again = await take_part(a, 10)  # everybody has left word now, too late
    assert again is not None
    assert str(again) == str(error)
    assert (again.rank, again.missing) == (1, (0,))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "text",
    [
        b"nonsense",
        b"\xff",
        b"[" * 10_000,
        b"null",
        b"[]",
        b"{}",
        b'{"rank": 5, "missing": [1], "elapsed": 1.0}',
        b'{"rank": true, "missing": [1], "elapsed": 1.0}',
        b'{"rank": 0, "missing": 1, "elapsed": 1.0}',
        b'{"rank": 0, "missing": ["1"], "elapsed": 1.0}',
        b'{"rank": 0, "missing": [2], "elapsed": 1.0}',
        b'{"rank": 0, "missing": [1, 1, 1], "elapsed": 1.0}',
        b'{"rank": 0, "missing": [1], "elapsed": "1"}',
        b'{"rank": 0, "missing": [1], "elapsed": NaN}',
        b'{"rank": 0, "missing": [1], "elapsed": -1}',
    ],
)
async def test_an_invalid_verdict_is_shown(rank: int, text: bytes) -> None:
    store = MemoryStore()
    side = sides(store, 2)[rank]
    for key in ("decided", "verdict"):
        await store.set(f"monitored/0/{key}", text)
    with pytest.raises(StoreProtocolError, match="invalid verdict for a monitored barrier: b'") as caught:
        await take_part(side, 5)
    assert len(str(caught.value)) < 1000


# -- the method of a comm ----------------------------------------------------------------------------------------------


async def outcomes(works: list[Work[None]]) -> list[BaseException | None]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*works, return_exceptions=True)


def missing_of(errors: list[BaseException | None]) -> list[tuple[int, ...]]:
    found = []
    for error in errors:
        assert isinstance(error, MonitoredBarrierError), error
        found.append(error.missing)
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
async def test_all_come(size: int) -> None:
    async with loopback_world(size) as comms:
        for turn in range(3):
            works = [comm.monitored_barrier() for comm in comms[1:]]
            await asyncio.sleep(0.005)
            assert not any(work.done() for work in works)
            works.append(comms[0].monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True))
            assert works[-1].seq == turn
            assert str(works[-1].op) == "monitored_barrier()"
            assert await outcomes(works) == [None] * size


async def test_bad_arguments_raise_at_the_call() -> None:
    async with loopback_world(1) as (comm,):
        for timeout in (0, -1.0, math.nan, timedelta(0)):
            with pytest.raises(ValueError, match="timeout must be positive"):
                comm.monitored_barrier(timeout)
        for bad in ("1", True):
            with pytest.raises(TypeError, match="timeout must be seconds or a timedelta"):
                comm.monitored_barrier(bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="wait_all_ranks must be True or False, got 1"):
            comm.monitored_barrier(1.0, 1)  # type: ignore[arg-type]
        assert comm.monitored_barrier(math.inf).seq == 0


@pytest.mark.parametrize(("wait_all_ranks", "missing"), [(False, (1,)), (True, (1, 3))])
async def test_missing_ranks_are_named_on_all_ranks(wait_all_ranks: bool, missing: tuple[int, ...]) -> None:
    async with loopback_world(5) as comms:
        start = time.monotonic()
        works = [comms[rank].monitored_barrier(0.1, wait_all_ranks) for rank in (0, 2, 4)]
        errors = await outcomes(works)
        assert 0.1 <= time.monotonic() - start < 1.5
        assert missing_of(errors) == [missing] * 3
        assert {str(error) for error in errors} == {
            f"monitored_barrier on comm 'test', rank 0: ranks {list(missing)} did not come within 0.1 s"
        }
        for comm in comms:  # the comm goes on
            comm.barrier()
        # who comes late hears of it at once, and which round it was; then all are in step again
        late = await outcomes([comms[rank].monitored_barrier(10) for rank in (1, 3)])
        assert missing_of(late) == [missing] * 2
        assert str(late[0]) == str(errors[0])
        assert await outcomes([comm.monitored_barrier(10) for comm in comms]) == [None] * 5


async def test_rank_0_is_missing() -> None:
    async with loopback_world(3) as comms:
        errors = await outcomes([comms[rank].monitored_barrier(0.1) for rank in (1, 2)])
        assert missing_of(errors) == [(0,), (0,)]
        assert missing_of(await outcomes([comms[0].monitored_barrier(10)])) == [(0,)]
        assert await outcomes([comm.monitored_barrier(10) for comm in comms]) == [None] * 3


async def test_rank_0_and_others_are_missing() -> None:
    async with loopback_world(4) as comms:
        errors = await outcomes([comms[rank].monitored_barrier(0.1, wait_all_ranks=True) for rank in (1, 3)])
        assert missing_of(errors) == [(0, 2), (0, 2)]


async def test_arrivals_of_a_failed_round_do_not_count_in_the_next() -> None:
    async with loopback_world(2) as (a, b):
        for turn in range(3):  # each has given up before the other comes, and leaves word that it came
            first, second = (a, b) if turn % 2 else (b, a)
            missing = [(second.rank,)]
            assert missing_of(await outcomes([first.monitored_barrier(0.02)])) == missing
            assert missing_of(await outcomes([second.monitored_barrier(5)])) == missing
        work = a.monitored_barrier(5)
        await asyncio.sleep(0.02)
        assert not work.done()
        assert await outcomes([work, b.monitored_barrier(5)]) == [None, None]


async def test_a_rank_that_missed_several_catches_up() -> None:
    async with loopback_world(2) as (a, b):
        for _ in range(4):
            await outcomes([a.monitored_barrier(0.01)])
        work = a.monitored_barrier(10)
        failures = 0
        while isinstance((await outcomes([b.monitored_barrier(10)]))[0], MonitoredBarrierError):
            failures += 1
        assert failures == 4
        await work


async def test_a_rank_with_less_patience_fails_the_round_for_all() -> None:
    """Otherwise it would have raised where others pass; and it names who is missing, not rank 0 who waits for them."""
    async with loopback_world(4) as comms:
        works = [comms[0].monitored_barrier(30), comms[1].monitored_barrier(0.05), comms[2].monitored_barrier(30)]
        start = time.monotonic()
        assert missing_of(await outcomes(works)) == [(3,)] * 3
        assert time.monotonic() - start < 5
        assert missing_of(await outcomes([comms[3].monitored_barrier(30)])) == [(3,)]


async def test_rank_0_arrives_and_publishes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(2) as (a, b):

        async def stuck(*_: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(a._session.barriers, "_decide", stuck)
        works = [comm.monitored_barrier(0.05) for comm in (a, b)]
        assert missing_of(await outcomes(works[1:])) == [(0,)]
        assert isinstance((await outcomes(works[:1]))[0], StoreTimeoutError)


async def test_a_slightly_late_verdict_of_rank_0_counts() -> None:
    async with loopback_world(3) as comms:
        early = comms[1].monitored_barrier(0.1)
        await asyncio.sleep(0.05)
        errors = await outcomes([early, comms[0].monitored_barrier(0.1)])
        assert missing_of(errors) == [(2,), (2,)]
        assert {error.rank for error in errors if isinstance(error, MonitoredBarrierError)} == {0}


async def test_several_calls_at_once_keep_their_order() -> None:
    async with loopback_world(3) as comms:
        works = [comm.monitored_barrier(10) for comm in comms for _ in range(5)]
        assert comms[0].statistics().in_flight == 5
        assert comms[0].statistics().submitted == 5
        assert await outcomes(works) == [None] * 15
        assert comms[0].statistics().in_flight == 0


async def test_it_stands_outside_of_the_sequence_of_collectives() -> None:
    async with loopback_world(2) as (a, b):
        pending = a.all_reduce(torch.ones(1))
        first = a.monitored_barrier(10)
        assert b.monitored_barrier(10).seq == 0
        await first
        assert not pending.done()
        assert b.barrier().seq == 0


async def test_it_works_where_the_transport_hangs_and_on_children() -> None:
    async with loopback_world(2) as comms:
        hub = comms[0].unsafe_get_backend().hub  # type: ignore[attr-defined]
        hub.hold()
        stuck = [comm.barrier() for comm in comms]
        children = await asyncio.gather(*(comm.dup() for comm in comms))
        assert await outcomes([comm.monitored_barrier(10) for comm in comms]) == [None, None]
        assert missing_of(await outcomes([children[1].monitored_barrier(0.02)])) == [(0,)]
        assert await outcomes([comm.monitored_barrier(10) for comm in comms]) == [None, None]
        assert not stuck[0].done()
        hub.release()
        await asyncio.gather(*stuck, *(child.aclose() for child in children))


async def test_it_fails_when_the_comm_breaks() -> None:
    async with loopback_world(3) as comms:
        works = [comm.monitored_barrier() for comm in comms[:2]]
        await asyncio.sleep(0.005)
        comms[2].abort("no more")
        for error in await outcomes(works):
            assert isinstance(error, AbortedError)
        with pytest.raises(AbortedError):
            comms[0].monitored_barrier()
        await asyncio.sleep(0.005)
        assert not [task for task in asyncio.all_tasks() if "pass_through" in repr(task) or "_run_aside" in repr(task)]


async def test_a_comm_that_breaks_before_the_loop_turns() -> None:
    async with loopback_world(2) as (a, _):

        def call_and_abort() -> Work[None]:
            work = a.monitored_barrier()
            a.abort("at once")
            return work

        work = await asyncio.to_thread(call_and_abort)
        assert isinstance(work.exception(), AbortedError)


async def test_closing_waits_for_it() -> None:
    async with loopback_world(2) as (a, b):
        work = a.monitored_barrier(10)
        closing = asyncio.ensure_future(a.aclose())
        await asyncio.sleep(0.005)
        assert not closing.done()
        with pytest.raises(ClosedError):
            a.monitored_barrier()
        await b.monitored_barrier(10)
        await closing
        assert work.exception() is None


async def test_from_a_thread() -> None:
    async with loopback_world(2) as (a, b):
        threads: list[threading.Thread] = []

        def call(comm: Comm) -> None:
            threads.append(threading.current_thread())
            for _ in range(3):
                comm.monitored_barrier(10).wait()

        async with asyncio.timeout(20):
            await asyncio.gather(*(asyncio.to_thread(call, comm) for comm in (a, b)))
        assert threading.main_thread() not in threads


async def test_the_store_stays_small() -> None:
    store = MemoryStore()
    comms = await asyncio.gather(*(new_comm("loopback", store=store, rank=rank, size=3) for rank in range(3)))
    await outcomes([comms[0].monitored_barrier(0.01)])
    await outcomes([comm.monitored_barrier(5) for comm in comms[1:]])
    keys = []
    for _ in range(5):
        await outcomes([comm.monitored_barrier(5) for comm in comms])
        keys.append(await store.num_keys())
    assert keys == [keys[0]] * 5
    await asyncio.gather(*(comm.aclose() for comm in comms))


async def test_a_store_that_fails_is_no_end_of_the_comm(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as (comm,):

        async def fail(*_: Any) -> None:
            raise StoreError("the store is gone")

        monkeypatch.setattr(MemoryStore, "set", fail)
        with pytest.raises(StoreError, match="the store is gone"):
            await comm.monitored_barrier()
        monkeypatch.undo()
        await comm.barrier()


async def test_a_store_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as (comm,):

        async def hang(*_: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(MemoryStore, "set", hang)
        start = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="the store did not answer"):
            await comm.monitored_barrier(0.05)
        assert time.monotonic() - start < 5
        monkeypatch.undo()


def test_waiting_in_a_thread_while_the_loop_is_blocked() -> None:
    with asyncio.Runner() as runner:
        comm = runner.run(_open_one())
        work = comm.monitored_barrier(0.05)
        with pytest.raises(TimeoutError):
            work.wait(0.1)
        runner.run(comm.aclose())
        assert work.done()
        comm = runner.run(_open_one())
        work = comm.monitored_barrier(0.05)
        with pytest.raises(StoreTimeoutError, match=r"monitored_barrier\(\) was not done within 0.05 s"):
            work.wait()
        runner.run(comm.aclose())


async def _open_one() -> Comm:
    return await new_comm("loopback", store=MemoryStore(), rank=0, size=1)


# -- on processes -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3, backend=["shm", "gloo"])
async def test_on_processes(comm: Comm) -> None:
    for turn in range(3):
        await comm.monitored_barrier(20)
        if comm.rank != turn:
            with pytest.raises(MonitoredBarrierError) as caught:
                await comm.monitored_barrier(0.3, wait_all_ranks=True)
            assert caught.value.missing == (turn,)
            assert caught.value.rank != turn
        await comm.barrier()
        if comm.rank == turn:
            start = time.monotonic()
            with pytest.raises(
                MonitoredBarrierError, match=rf"ranks \[{turn}\] did not come within 0\.[3-9] s|1\.\d s"
            ):
                await comm.monitored_barrier(20)
            assert time.monotonic() - start < 10
    await comm.monitored_barrier(20)
    async with comm.split([2, 0], "some") if comm.rank != 1 else comm.split([], "some") as child:
        if child is not None:
            await child.monitored_barrier(20)
            if child.rank == 0:
                with pytest.raises(MonitoredBarrierError, match=r"'test/some', rank 0: ranks \[1\]"):
                    await child.monitored_barrier(0.1)
            await child.barrier()
    assert float(await comm.all_reduce(torch.ones(()))) == 3


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_where_the_transport_hangs(comm: Comm) -> None:
    stuck = comm.recv(torch.ones(1), 1 - comm.rank)
    await comm.monitored_barrier(20)
    comm.send(torch.ones(1), 1 - comm.rank)
    await stuck
