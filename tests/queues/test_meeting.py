"""Ends that attach, and ends that are lost: processes that are killed and stopped."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

from asynccomm import MessageQueue, ParticipantLostError, PeerLostError, attach_queue, new_comm
from asynccomm.errors import BackendError
from asynccomm.queues.layout import SLOTS
from asynccomm.queues.meeting import QueueHost, attach
from asynccomm.queues.options import QueueHandle, QueueOptions
from tests.forkserver import Nursery
from tests.queues.rings import from_afar, hosted, readers_of
from tests.waiting import until

PROGRAM = Path(__file__).parent / "participant.py"


@asynccontextmanager
async def participant(part: str, handle: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has attached; it is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, PROGRAM, part, handle, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def test_another_process_reads_and_its_loss_is_an_error_of_the_writer() -> None:
    async with hosted() as (_, queue), participant("read", queue.handle) as process:
        assert await line(process) == "attached"
        await queue.put(7)
        assert await line(process) == "7"
        process.kill()

        async def put_until_lost() -> None:
            while True:
                await queue.put(bytes(1 << 16))

        with pytest.raises(ParticipantLostError, match=rf"process {process.pid} on .* was lost"):
            await put_until_lost()


async def test_a_stopped_reader_is_waited_for_and_named() -> None:
    async with hosted(capacity=4096) as (_, queue), participant("read", queue.handle) as process:
        assert await line(process) == "attached"
        process.send_signal(signal.SIGSTOP)
        put = asyncio.ensure_future(queue.put(bytes(1 << 16)))
        await until(lambda: max(queue.statistics().behind.values()) > 2000)
        ((label, _),) = queue.statistics().behind.items()
        assert label.startswith(f"process {process.pid} on")
        assert not put.done()
        process.send_signal(signal.SIGCONT)
        await put


async def test_a_queue_may_go_on_without_a_lost_reader() -> None:
    async with hosted(on_lost="continue", capacity=4096) as (host, queue):
        (reader,) = await readers_of(queue, 1)
        async with participant("read", queue.handle) as process:
            assert await line(process) == "attached"
            process.send_signal(signal.SIGSTOP)
            put = asyncio.ensure_future(queue.put(bytes(1 << 16)))
            get = asyncio.ensure_future(reader.get())
            await until(lambda: max(queue.statistics().behind.values()) > 2000)
            process.kill()
            await put
            assert await get == bytes(1 << 16)
            assert len(host.end.targets) == 1
        await reader.aclose()


@pytest.mark.parametrize("on_lost", ["raise", "continue"])
async def test_acknowledged_items_of_a_killed_writer_arrive(on_lost: str) -> None:
    async with hosted(writes=False, on_lost=on_lost) as (_, queue):
        async with participant("write", queue.handle) as process:
            while (last := int(await line(process))) < 200:
                pass
            process.kill()
            text = (await process.communicate())[0].decode()
            last = max([last, *map(int, text[: text.rfind("\n") + 1].split())])
        (other,) = await readers_of(queue, 1)
        await other.put("other")
        got: list[Any] = []
        if on_lost == "continue":
            while "other" not in got or last not in got:
                got.append(await queue.get())
        else:
            with pytest.raises(ParticipantLostError):
                while True:
                    got.append(await queue.get())
        numbers = [item for item in got if item != "other"]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > last
        await other.aclose()


async def test_a_writer_killed_in_the_middle_of_an_item_leaves_the_items_before_it() -> None:
    async with hosted(writes=False, capacity=1 << 16) as (_, queue), participant("large", queue.handle) as process:
        assert await line(process) == "attached"
        assert await queue.get() == b"short"
        with pytest.raises(asyncio.QueueEmpty):
            for _ in range(10):
                queue.get_nowait()
        process.kill()
        with pytest.raises(ParticipantLostError, match="was lost"):
            await queue.get()


async def test_a_queue_has_a_limited_number_of_readers() -> None:
    async with hosted() as (_, queue):
        readers = await readers_of(queue, SLOTS)
        with pytest.raises(BackendError, match=f"the queue has {SLOTS} readers already"):
            await attach_queue(queue.handle)
        await readers.pop().aclose()
        await until(lambda: len(queue.statistics().behind) < SLOTS or not readers[0].dropped)
        for reader in readers:
            await reader.aclose()


async def test_a_rank_that_has_no_part_is_refused() -> None:
    async with hosted() as (_, queue):
        with pytest.raises(BackendError, match="rank 3 has attached already, or has no part in it"):
            await attach(QueueHandle.parse(queue.handle), QueueOptions(), 3)


async def test_ends_come_and_go_while_every_item_arrives_in_order() -> None:
    async with hosted(capacity=1 << 14) as (_, queue):

        async def visit(number: int) -> None:
            for _ in range(10):
                async with await attach_queue(queue.handle) as reader:
                    got = [await reader.get() for _ in range(number * 3)]
                    assert [item[0] for item in got] == list(range(got[0][0], got[0][0] + len(got)))

        async def write() -> None:
            for number in range(1 << 30):
                await queue.put((number, bytes(number % 3000)))

        writing = asyncio.ensure_future(write())
        await asyncio.gather(*(visit(number) for number in range(1, 5)))
        writing.cancel()


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery(__file__)
    yield found
    found.close()


async def lose_a_rank(rank: int, one: str, victim: int) -> list[int]:
    """Rank ``victim`` is killed; returns the lost rank of the error of the other one."""
    comm = await new_comm("shm", name="lost")
    arguments: dict[str, Any] = {one: 0}
    queue = await comm.queue(**arguments)
    try:
        for number in range(1 << 30):
            if rank == victim and number == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            if queue.role == "writer":
                await queue.put(bytes(5000))
            else:
                await queue.get()
    except PeerLostError as exc:
        return [exc.rank]
    return []


@pytest.mark.parametrize(("one", "victim"), [("writer", 0), ("writer", 1), ("reader", 0), ("reader", 1)])
def test_a_lost_rank_is_an_error_of_the_other_end(nursery: Nursery, one: str, victim: int) -> None:
    assert nursery.run(lose_a_rank, 2, one, victim) == {1 - victim: [victim]}


def mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:asynccomm")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("writes", [True, False], ids=["writes", "reads"])
def test_a_queue_that_is_open_at_the_end_of_its_loop_leaves_no_descriptors(
    writes: bool, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def made() -> MessageQueue:
        host = QueueHost(writes, QueueOptions(), -1, "", ())
        return host.queue(await host.open())

    new_loop().close()  # uvloop keeps a pipe from its first loop on
    gc.collect()
    before = os.listdir("/proc/self/fd")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the queue and its socket
        loop = new_loop()
        queue = loop.run_until_complete(made())
        del queue
        loop.close()  # nothing that was posted runs any more
        gc.collect()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("remote", [False, True], ids=["local", "tcp"])
@pytest.mark.parametrize("writes", [True, False], ids=["writes", "reads"])
async def test_closed_ends_free_their_memory_without_the_garbage_collector(writes: bool, remote: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        before = mapped_segments()
        for _ in range(3):
            async with hosted(writes, **({"address": "127.0.0.1"} if remote else {})) as (_, queue):
                other = await attach_queue(from_afar(queue.handle) if remote else queue.handle)
                writer, reader = (queue, other) if writes else (other, queue)
                await writer.put(b"first")
                await writer.put([torch.ones(3)])
                assert await reader.get() == b"first"
                assert (await reader.get())[0].sum() == 3
                async with other:
                    pass
            del writer, reader, queue, other, _
        await until(lambda: mapped_segments() <= before)
    finally:
        gc.enable()
