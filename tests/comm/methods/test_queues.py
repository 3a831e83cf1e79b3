"""Queues of a comm."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import torch

import asynccomm
from asynccomm import (
    AbortedError,
    BackendError,
    BrokenError,
    ClosedError,
    Comm,
    EndOfQueueError,
    MessageQueue,
    PeerLostError,
    QueueError,
    attach_queue,
)
from asynccomm.queues.meeting import attach
from asynccomm.queues.options import QueueHandle
from asynccomm.queues.terms import QueueMeeting
from asynccomm.testing.local import loopback_world
from tests.pretended_hosts import comm_on
from tests.queues.rings import from_afar
from tests.waiting import until


@pytest.mark.ranks(3)
async def test_one_writer_and_all_readers(comm: Comm) -> None:
    async with comm.queue(writer=1, capacity=1 << 16) as queue:
        if comm.rank == 1:
            for k in range(500):
                await queue.put({"k": k, "t": torch.full((k,), k)})
        else:
            got = [item async for item in queue]
            assert [item["k"] for item in got] == list(range(500))
            assert all(torch.equal(item["t"], torch.full((k,), k)) for k, item in enumerate(got))


@pytest.mark.ranks(3)
async def test_many_writers_and_one_reader_and_an_answer(comm: Comm) -> None:
    async with comm.queue(reader=0) as results:
        if comm.rank == 1:
            await results.put("idle")
            return
        async with comm.queue(readers=[2]) as questions:
            if comm.rank == 0:
                await questions.put("question")
                assert sorted([item async for item in results]) == ["answer", "idle"]
            else:
                await results.put("answer" if await questions.get() == "question" else "wrong")
                await results.aclose()


@pytest.mark.ranks(3, backend="gloo")
async def test_ranks_on_other_hosts_come_over_the_network(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    async with comm_on(monkeypatch, "aab") as hosts, hosts.queue(writer=0) as queue:
        if comm.rank == 0:
            assert QueueHandle.parse(queue.handle).port > 0
            await queue.put(torch.arange(3))
        else:
            assert (await queue.get()).tolist() == [0, 1, 2]
        if comm.rank < 2:
            async with hosts.queue(writer=0, readers=[1]) as local:
                assert QueueHandle.parse(local.handle).port == 0  # no other host needs it
        await hosts.barrier()


async def both(comms: tuple[Comm, ...], **arguments: Any) -> list[Any]:
    return list(await asyncio.gather(*(comm.queue(**arguments) for comm in comms)))


@pytest.mark.parametrize("address", ["203.0.113.7", "300.1.1.1", "x\0y"])
@pytest.mark.ranks(2)
async def test_an_address_of_another_host_is_refused_on_all_ranks(address: str, comm: Comm) -> None:
    async with asyncio.timeout(20):
        with pytest.raises(BackendError, match=re.escape(f"the queue cannot be made at address {address!r}")):
            await comm.queue(address=address)
        async with comm.queue() as queue:
            if comm.rank == 0:
                await queue.put(1)
            else:
                assert await queue.get() == 1


async def test_bad_arguments_are_named_and_nothing_is_made() -> None:
    async with loopback_world(3) as (comm, *_):
        for arguments, text in [
            ({"writer": 3}, "writer must"),
            ({"writer": 0, "reader": 1}, "reader must be None if there is one writer, got reader=1, writer=0"),
            ({"writers": [1]}, r"writers must be None if there is one writer, got \[1\]"),
            ({"reader": 0, "readers": [1]}, "readers must be None if there is one reader"),
            ({"readers": [0, 1]}, r"readers must not have the writer, 0, got \[0, 1\]"),
            ({"writer": 1, "readers": [2]}, r"readers must have this rank, 0, got \[2\]"),
            ({"readers": [1, 1]}, "readers"),
            ({"name": ""}, "name"),
            ({"timeout": -1}, "timeout must be positive"),
            ({"overflow": "x"}, "overflow"),
        ]:
            with pytest.raises(ValueError, match=text):
                comm.queue(**arguments)  # type: ignore[arg-type]


async def test_ranks_that_do_not_come_are_named() -> None:
    async with loopback_world(3) as comms:
        with pytest.raises(BackendError, match=r"ranks \[1, 2\] did not come to the queue within 0.05 s"):
            await comms[0].queue(name="a", timeout=0.05)
        with pytest.raises(BackendError, match=r"ranks \[0, 2\] did not come to the queue within 0.05 s"):
            await comms[1].queue(name="b", timeout=0.05)


async def carries_an_item(comm: Comm, **arguments: Any) -> bool:
    async with comm.queue(**arguments) as queue:
        if queue.role == "writer":
            await queue.put(1)
            return True
        return await queue.get() == 1


@pytest.mark.ranks(2)
async def test_ranks_meet_at_the_next_call_after_one_of_them_came_too_late(comm: Comm) -> None:
    for early in (0, 1):
        if comm.rank == early:
            with pytest.raises(BackendError, match=rf"ranks \[{1 - early}\] did not come to the queue within 0.05 s"):
                await comm.queue(timeout=0.05)
            await comm.barrier()
        else:
            await comm.barrier()
            with pytest.raises(BackendError, match=rf"within 0.05 s, the limit of rank {early}"):
                await comm.queue()
        assert await carries_an_item(comm)


@pytest.mark.ranks(2)
async def test_ranks_that_disagree_on_the_writer_are_told_and_meet_at_the_next_call(comm: Comm) -> None:
    assert await carries_an_item(comm)
    for number, arguments in enumerate([{"writer": comm.rank}, {"writer": 1 - comm.rank}]):
        text = f"writer must be the same on all ranks of the queue, got {number} on rank 0 and {1 - number} on rank 1"
        with pytest.raises(ValueError, match=text):
            await comm.queue(**arguments)
    with pytest.raises(ValueError, match="writer must be the same on all ranks of the queue, got 0 on rank 0 and None"):
        await comm.queue(**{"reader" if comm.rank else "writer": 0})  # type: ignore[arg-type]
    assert await carries_an_item(comm)
    assert await carries_an_item(comm, writer=1)


@pytest.mark.parametrize(("name", "choices"), [("capacity", (1 << 14, 1 << 18)), ("overflow", ("drop_oldest", "wait"))])
@pytest.mark.ranks(2, backend="gloo")
async def test_ranks_that_disagree_on_an_argument_of_the_queue_are_told(
    name: str, choices: tuple[Any, Any], comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        f"{name} must be the same on all ranks of the queue, got {choices[0]!r} on rank 0 and {choices[1]!r} on rank 1"
    )
    async with comm_on(monkeypatch, "ab") as hosts:
        for each in (comm, hosts):
            with pytest.raises(ValueError, match=text):
                await each.queue(**{name: choices[comm.rank]})
            assert await carries_an_item(each)


async def test_arguments_of_one_end_may_differ() -> None:
    async with loopback_world(2) as comms:
        own: list[dict[str, Any]] = [
            {"address": "127.0.0.1"},
            {"expect": int, "max_bytes": 1 << 10, "busy_poll": 0.001},
        ]
        assert await asyncio.gather(*(carries_an_item(comm, **each) for comm, each in zip(comms, own, strict=True)))


async def test_a_rank_that_is_cancelled_gives_up_on_all_ranks() -> None:
    async with loopback_world(3) as comms:
        waiting = [asyncio.ensure_future(comm.queue()._connect()) for comm in comms[:2]]
        await asyncio.sleep(0)
        waiting[1].cancel()
        for call in (waiting[0], comms[2].queue()):
            with pytest.raises(BackendError, match="rank 1 gave up the queue: it was cancelled"):
                await call
        assert await asyncio.gather(*map(carries_an_item, comms)) == [True] * 3


@contextmanager
def stuck(monkeypatch: pytest.MonkeyPatch, *ranks: int) -> Iterator[list[int]]:
    """Let ``ranks`` never attach; yields the other ones that have attached."""
    done: list[int] = []

    async def attach_or_wait(handle: QueueHandle, options: Any, rank: int, comm: str) -> MessageQueue:
        if rank in ranks:
            await asyncio.Event().wait()
        queue = await attach(handle, options, rank, comm)
        done.append(rank)
        return queue

    with monkeypatch.context() as patch:
        patch.setattr("asynccomm.comm.methods.queues.attach", attach_or_wait)
        yield done


@pytest.mark.parametrize("gives_up", [0, 1, 2])
@pytest.mark.parametrize("one", ["writer", "reader"])
async def test_a_rank_that_gives_up_before_all_have_attached_ends_the_call_on_all_ranks(
    one: str, gives_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loopback_world(3) as comms:
        with stuck(monkeypatch, 2) as done:
            calls = [asyncio.ensure_future(comm.queue(**{one: 0})._connect()) for comm in comms]  # type: ignore[arg-type]
            await until(lambda: done)
            calls[gives_up].cancel()
            for rank, call in enumerate(calls):
                if rank == gives_up:
                    with pytest.raises(asyncio.CancelledError):
                        await call
                else:
                    with pytest.raises(BackendError, match=f"^rank {gives_up} gave up the queue: it was cancelled$"):
                        await call
        assert await asyncio.gather(*map(carries_an_item, comms)) == [True] * 3


@pytest.mark.parametrize("impatient", [0, 1])
async def test_ranks_that_do_not_attach_are_named(impatient: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(2) as comms:
        with stuck(monkeypatch, 1):
            text = rf"ranks \[1\] did not attach to the queue within 0.05 s, the limit of rank {impatient}"
            limits = [0.05 if rank == impatient else 30 for rank in range(2)]
            calls = [comm.queue(timeout=limit)._connect() for comm, limit in zip(comms, limits, strict=True)]
            for got in await asyncio.gather(*calls, return_exceptions=True):
                with pytest.raises(BackendError, match=text):
                    raise got  # type: ignore[misc]
        assert await asyncio.gather(*map(carries_an_item, comms)) == [True] * 2


async def test_ranks_get_the_loss_of_the_host_in_place_of_their_failure_to_attach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with loopback_world(2) as comms:

        async def refused(*_: object) -> None:
            comms[1]._session.fail(PeerLostError(0, "it was killed"))
            raise BackendError("connection refused")

        monkeypatch.setattr("asynccomm.comm.methods.queues.attach", refused)
        host = asyncio.ensure_future(comms[0].queue()._connect())
        with pytest.raises(PeerLostError, match="rank 0 was lost: it was killed"):
            await comms[1].queue()
        with pytest.raises(BrokenError):
            await host


async def test_no_call_leaves_keys_in_the_store() -> None:
    async with loopback_world(2) as comms:
        store = comms[0]._session.identity.room
        keys = await store.num_keys()

        async def all_deleted() -> bool:
            return await store.num_keys() == keys

        for arguments in ({"writer": 0}, {"writer": 0, "timeout": 1e-4}, {"overflow": "drop_oldest"}):
            calls = comms[0].queue(**arguments)._connect(), comms[1].queue(writer=0)._connect()  # type: ignore[arg-type]
            for queue in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(queue, MessageQueue):
                    await queue.aclose()
            while not await all_deleted():
                await asyncio.sleep(0)


async def test_a_comm_closes_after_the_keys_of_its_queues_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    leave, answers = QueueMeeting.leave, asyncio.Event()

    async def slow(meeting: QueueMeeting, reason: str | None = None) -> None:
        await answers.wait()
        await leave(meeting, reason)

    monkeypatch.setattr(QueueMeeting, "leave", slow)
    async with loopback_world(2) as comms:
        for queue in await both(comms):
            await queue.aclose()
        closing = asyncio.gather(*(comm.aclose() for comm in comms))
        assert await asyncio.wait([closing], timeout=0.1) == (set(), {closing})
        answers.set()
        await closing


async def test_a_comm_closes_also_if_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccomm.comm.methods.queues.STORE_SECONDS", 0.01)
    answers = asyncio.Event()

    async def wait(*_: object) -> None:
        await answers.wait()

    monkeypatch.setattr(QueueMeeting, "leave", wait)
    async with loopback_world(2) as comms:
        for queue in await both(comms):
            await queue.aclose()
    answers.set()


async def put_until_it_fails(queue: MessageQueue) -> None:
    while True:
        await queue.put(bytes(1 << 20))


async def test_queues_of_the_same_ranks_are_told_apart() -> None:
    async with loopback_world(2) as comms:
        (w1, r1), (w2, r2) = await both(comms), await both(comms)
        await w1.put(1)
        await w2.put(2)
        assert (await r1.get(), await r2.get()) == (1, 2)
        for queue in (w1, w2, r1, r2):
            await queue.aclose()


async def test_a_comm_that_is_aborted_ends_puts_and_gets() -> None:
    async with loopback_world(2) as comms:
        writer, reader = await both(comms, capacity=4096)
        get = asyncio.ensure_future(reader.get())
        await writer.put(1)
        assert await get == 1
        get = asyncio.ensure_future(reader.get())
        await asyncio.sleep(0)
        comms[1].abort("enough")
        with pytest.raises(AbortedError, match="aborted by rank 1: enough"):
            await get
        with pytest.raises((AbortedError, ClosedError)):
            while True:
                await writer.put(bytes(1000))
        await writer.aclose()
        await reader.aclose()


async def test_an_abort_ends_the_making_of_a_queue() -> None:
    async with loopback_world(2) as comms:
        making = [asyncio.ensure_future(comms[0].queue(name="a")._connect())]
        await asyncio.sleep(0.01)
        comms[0].abort("enough")
        with pytest.raises(AbortedError):
            await making[0]
        with pytest.raises(AbortedError):
            comms[0].queue()


async def test_closing_the_comm_ends_its_queues() -> None:
    async with loopback_world(2) as comms:
        writer, reader = await both(comms)
        get = asyncio.ensure_future(reader.get())
        await asyncio.sleep(0)
        await comms[1].aclose()
        with pytest.raises(ClosedError):
            await get
        await writer.aclose()
        await reader.aclose()


@asynccontextmanager
async def attached(handle: str) -> AsyncIterator[list[MessageQueue]]:
    """Ends that are no ranks, here and on another host."""
    async with await attach_queue(handle) as here, await attach_queue(from_afar(handle)) as there:
        yield [here, there]


async def test_a_comm_and_its_queue_that_close_together_end_the_queue_in_order() -> None:
    async with loopback_world(2) as comms:
        writer, reader = await both(comms)
        await writer.put(1)
        await asyncio.gather(comms[0].aclose(), writer.aclose())
        assert [item async for item in reader] == [1]
        await reader.aclose()


async def test_closing_the_comm_of_the_writer_ends_the_queue_of_its_readers() -> None:
    async with loopback_world(2) as comms:
        writer, reader = await both(comms, address="127.0.0.1")
        async with attached(writer.handle) as others:
            await writer.wait_readers(3)
            await writer.put(1)
            await comms[0].aclose()
            for each in (reader, *others):
                assert [item async for item in each] == [1]
            with pytest.raises(ClosedError, match="comm 'test' is closed"):
                await writer.put(2)
            with pytest.raises(BackendError, match="cannot attach"):
                await attach_queue(writer.handle)
        await writer.aclose()
        await reader.aclose()


async def test_closing_the_comm_before_all_is_put_is_a_failure_of_the_writer() -> None:
    async with loopback_world(2) as comms:
        writer, reader = await both(comms, capacity=4096)
        await writer.put(1)
        put = asyncio.ensure_future(writer.put(bytes(10_000)))
        await asyncio.sleep(0)
        await comms[0].aclose()
        with pytest.raises(ClosedError):
            await put
        assert await reader.get() == 1
        with pytest.raises(QueueError, match="rank 0 has left the queue by an exception"):
            await reader.get()
        await writer.aclose()
        await reader.aclose()


async def test_closing_the_comm_of_a_reader_holds_no_writer_back() -> None:
    async with loopback_world(3) as comms:
        writer, leaves, stays = await both(comms, capacity=4096)
        put = asyncio.ensure_future(writer.put(bytes(100_000)))
        await comms[1].aclose()
        assert await stays.get() == bytes(100_000)
        await put
        with pytest.raises(ClosedError, match="comm 'test' is closed"):
            await leaves.get()
        for queue in (writer, leaves, stays):
            await queue.aclose()


async def test_closing_the_comm_of_the_single_reader_is_an_error_of_its_writers() -> None:
    async with loopback_world(2) as comms:
        reader, writer = await both(comms, reader=0, capacity=4096, address="127.0.0.1")
        async with attached(reader.handle) as others:
            await until(lambda: len(reader.statistics().behind) == 3)
            puts = [asyncio.ensure_future(each.put(bytes(1 << 20))) for each in (writer, *others)]
            await asyncio.sleep(0)
            await comms[0].aclose()
            for put in puts:
                with pytest.raises(ClosedError, match="rank 0 has closed the queue"):
                    await put
        await writer.aclose()
        await reader.aclose()


async def test_closing_the_comm_of_one_of_many_writers_ends_its_part() -> None:
    async with loopback_world(3) as comms:
        reader, leaves, stays = await both(comms, reader=0)
        await leaves.put(1)
        await comms[1].aclose()
        assert await reader.get() == 1
        await stays.put(2)
        await stays.aclose()
        assert [item async for item in reader] == [2]
        await leaves.aclose()
        await reader.aclose()


@pytest.mark.parametrize("aborts", [0, 1])
async def test_an_abort_is_an_error_of_readers_that_are_no_ranks(aborts: int) -> None:
    async with loopback_world(2) as comms:
        writer, reader = await both(comms, address="127.0.0.1")
        async with attached(writer.handle) as others:
            await writer.wait_readers(3)
            await writer.put(1)
            assert await reader.get() == 1
            get = asyncio.ensure_future(reader.get())
            await asyncio.sleep(0)
            comms[aborts].abort("enough")
            for each in others:
                assert await each.get() == 1
                with pytest.raises(QueueError, match="rank 0 has left the queue by an exception"):
                    await each.get()
            with pytest.raises(AbortedError, match=f"aborted by rank {aborts}: enough"):
                await get
            with pytest.raises(BackendError, match="cannot attach"):
                await attach_queue(writer.handle)
            await comms[0].aclose()
            with pytest.raises(AbortedError, match=f"aborted by rank {aborts}: enough"):
                await writer.put(2)
        await writer.aclose()
        await reader.aclose()


async def test_an_abort_is_an_error_of_writers_that_are_no_ranks() -> None:
    async with loopback_world(2) as comms:
        reader, writer = await both(comms, reader=0, capacity=4096, address="127.0.0.1")
        async with attached(reader.handle) as others:
            await until(lambda: len(reader.statistics().behind) == 3)
            puts = [asyncio.ensure_future(each.put(bytes(1 << 20))) for each in (writer, *others)]
            await asyncio.sleep(0)
            comms[0].abort("enough")
            with pytest.raises(AbortedError, match="enough"):
                await puts[0]
            for put in puts[1:]:
                with pytest.raises(ClosedError, match="rank 0 has closed the queue"):
                    await put
        await writer.aclose()
        await reader.aclose()


@pytest.mark.ranks(2)
async def test_ranks_get_the_reason_of_an_abort_and_the_end_of_a_closed_comm(comm: Comm) -> None:
    for ending in ("abort", "close"):
        async with comm.split([0, 1], ending) as part:
            assert part is not None
            queue = await part.queue(writer=0)
            handle = await comm.broadcast_object(queue.handle, 0)
            async with await attach_queue(handle) as other:
                if comm.rank == 1:
                    ended = AbortedError if ending == "abort" else EndOfQueueError
                    with pytest.raises(ended):
                        await queue.get()
                elif ending == "abort":
                    await queue.wait_readers(3)
                    part.abort("enough")
                else:
                    await queue.wait_readers(3)
                    await part.aclose()
                with pytest.raises(QueueError if ending == "abort" else EndOfQueueError):
                    await other.get()
            await comm.barrier()
            await queue.aclose()


async def test_a_comm_of_one_rank_has_queues_for_others() -> None:
    async with asynccomm.new_comm("loopback", alone=True) as comm, comm.queue() as queue:
        await queue.put("before")
        async with await asynccomm.attach_queue(queue.handle) as reader:
            await queue.put("after")
            assert await reader.get() == "after"
