"""Ends on other hosts: the frames travel over TCP, here on one machine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asynccomm import ClosedError, ParticipantLostError, QueueError, attach_queue
from asynccomm.queues.bridge import bell_pair, receive_frames
from asynccomm.queues.layout import STATE, header
from tests.queues.rings import from_afar, hosted, new_segment
from tests.waiting import until

ADDRESS = "127.0.0.1"


async def test_a_remote_reader_gets_every_item_in_order() -> None:
    items = [bytes(k) for k in range(0, 3000, 50)] + [{"t": torch.arange(50_000)}]
    async with hosted(address=ADDRESS, capacity=1 << 14) as (host, queue):
        reader = await attach_queue(from_afar(queue.handle))
        await until(lambda: host.end.targets)

        async def read() -> list[Any]:
            return [item async for item in reader]

        reading = asyncio.ensure_future(read())
        for item in items:
            await queue.put(item)
        await queue.aclose()
        *got, last = await reading
        assert got == items[:-1]
        assert torch.equal(last["t"], items[-1]["t"])
        await reader.aclose()


async def test_a_remote_writer_is_read_in_order() -> None:
    async with hosted(writes=False, address=ADDRESS, capacity=1 << 14) as (_, queue):

        async def write() -> None:
            async with await attach_queue(from_afar(queue.handle)) as writer:
                for k in range(300):
                    await writer.put((k, bytes(k)))

        writing = asyncio.ensure_future(write())
        assert [item[0] async for item in queue] == list(range(300))
        await writing


async def test_a_remote_reader_that_does_not_read_holds_the_writer_back() -> None:
    async with hosted(address=ADDRESS, capacity=1 << 14, on_lost="continue") as (host, queue):
        reader = await attach_queue(from_afar(queue.handle))
        await until(lambda: host.end.targets)
        put = asyncio.ensure_future(queue.put(bytes(64 << 20)))
        await until(lambda: max(queue.statistics().behind.values()) > 4000)
        await reader.aclose()
        await put
        await until(lambda: not host.end.targets)


async def test_a_remote_reader_counts_the_items_that_it_has_lost() -> None:
    async with hosted(address=ADDRESS, capacity=4096, overflow="drop_oldest") as (host, queue):
        reader = await attach_queue(from_afar(queue.handle))
        await until(lambda: host.end.targets)
        for k in range(50):  # without a turn of the loop, so that the bridge cannot follow
            queue.put_nowait((k, bytes(500)))
        await queue.aclose()
        got = [item[0] async for item in reader]
        assert got[-1] == 49
        assert reader.dropped == 50 - len(got) > 0
        await reader.aclose()


async def test_a_remote_writer_that_fails_or_is_lost_is_an_error() -> None:
    async with hosted(address=ADDRESS, on_lost="continue") as (host, queue):
        readers = [await attach_queue(from_afar(queue.handle)) for _ in range(2)]
        await until(lambda: len(host.end.targets) == 2)
        await queue.put(1)
        assert [await reader.get() for reader in readers] == [1, 1]
        (task, *_) = readers[0]._tasks
        task.cancel()  # as if the connection had broken
        with pytest.raises(ParticipantLostError):
            await readers[0].get()
        await until(lambda: len(host.end.targets) == 1)
        queue.leave(failed=True)
        with pytest.raises(QueueError, match="by an exception"):
            await readers[1].get()
        for reader in readers:
            await reader.aclose()
    with pytest.raises(ClosedError):
        await queue.put(1)


@pytest.mark.parametrize(
    "data",
    [
        b"short",
        header.pack(1 << 31, 2, 1, 0, 5, 0),
        header.pack(5, 9, 1, 0, 5, 0) + b"12345",
        header.pack(5, 2, 1, 0, 5, 0) + b"123",
    ],
)
async def test_damaged_frames_end_the_bridge_as_a_loss(data: bytes) -> None:
    served: list[asyncio.StreamWriter] = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(writer)
        writer.write(data)
        writer.write_eof()

    server = await asyncio.start_server(serve, ADDRESS, 0)
    streams = await asyncio.open_connection(*server.sockets[0].getsockname())
    segment = new_segment(4096)
    ours, theirs = bell_pair()
    await asyncio.wait_for(receive_frames(segment, 4096, theirs, streams), 20)
    assert ours.recv(10) == b""
    assert segment.words[STATE] == 0
    ours.close()
    server.close()
    for writer in served:
        writer.close()
        await writer.wait_closed()
