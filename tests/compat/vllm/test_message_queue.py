"""vLLM's MessageQueue by itself: roles, time limits and ends."""

from __future__ import annotations

import asyncio

import pytest

from asynccomm import ClosedError, EndOfQueueError
from asynccomm.compat.vllm import MessageQueue
from tests.queues.rings import hosted


async def test_ends_time_limits_and_roles() -> None:
    async with hosted(capacity=4096) as (_, inner):
        writer = MessageQueue(inner, asyncio.get_running_loop(), 2)
        waiting = asyncio.ensure_future(writer.wait_until_ready())
        first = await MessageQueue.create_from_handle(writer.export_handle())
        await first.wait_until_ready()
        await asyncio.sleep(0)
        assert not waiting.done()
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(first.dequeue, 0.01)

        def program() -> list[object]:
            reader = MessageQueue.create_from_handle(writer.export_handle(), 1)
            with pytest.raises(RuntimeError, match="for writers"):
                reader.enqueue(1)
            got = [reader.dequeue(20), reader.broadcast_object()]
            with pytest.raises(EndOfQueueError):
                reader.dequeue(20)
            reader.close()
            reader.close()
            return got

        reading = asyncio.create_task(asyncio.to_thread(program))
        await waiting
        with pytest.raises(RuntimeError, match="for readers"):
            await writer.dequeue()
        for put in (writer.enqueue, writer.broadcast_object):
            with pytest.raises(TypeError, match="obj cannot be sent"):
                await put(object())
            with pytest.raises(TypeError, match="obj cannot be sent"):
                await asyncio.to_thread(put, object())
        await asyncio.to_thread(writer.enqueue, "by a thread", 20)
        assert await asyncio.to_thread(writer.broadcast_object, "last") == "last"
        assert await first.dequeue() == "by a thread"
        await first.close()
        await writer.close()
        assert await reading == ["by a thread", "last"]
        with pytest.raises(ClosedError):
            await writer.enqueue(1)


async def test_a_put_that_finds_no_room_ends_at_its_limit() -> None:
    async with hosted(capacity=4096) as (_, inner):
        writer = MessageQueue(inner, asyncio.get_running_loop(), 1)
        reader = await MessageQueue.create_from_handle(writer.export_handle())
        with pytest.raises(TimeoutError):
            await writer.enqueue(bytes(20000), timeout=0.01)
        assert await reader.dequeue() == bytes(20000)  # put all the same
        await reader.close()
