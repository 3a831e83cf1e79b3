"""Queues of a comm."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import torch

import asynccomm
from asynccomm import AbortedError, BackendError, ClosedError, Comm
from asynccomm.queues.options import QueueHandle
from asynccomm.testing.local import loopback_world
from tests.pretended_hosts import comm_on


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
        with pytest.raises(BackendError, match=r"rank 0 did not come to the queue within 0.05 s"):
            await comms[1].queue(name="b", timeout=0.05)


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


async def test_a_comm_of_one_rank_has_queues_for_others() -> None:
    async with asynccomm.new_comm("loopback", alone=True) as comm, comm.queue() as queue:
        await queue.put("before")
        async with await asynccomm.attach_queue(queue.handle) as reader:
            await queue.put("after")
            assert await reader.get() == "after"
