"""Queues without an event loop."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading

import pytest
import torch

from asynccomm import ClosedError, Comm, EndOfQueueError, MessageQueue, QueueError, attach_queue, blocking
from asynccomm.blocking import BlockingQueue
from tests.blocking.test_window import public
from tests.forking import fork
from tests.queues.rings import hosted
from tests.waiting import until

ELSEWHERE = {"aclose": "close", "get_sync": "get", "put_sync": "put"}


def test_every_method_of_a_queue_is_there() -> None:
    theirs = {ELSEWHERE.get(name, name) for name in public(MessageQueue)}
    assert theirs - {"comm_ended"} == public(BlockingQueue) - {"end_of_process", "loop", "queue"}
    mine = inspect.signature(blocking.attach_queue)
    assert list(mine.parameters.values()) == list(inspect.signature(attach_queue).parameters.values())


def program(backend: str) -> None:
    with blocking.new_comm(backend, name="queues", timeout=40) as comm:
        with comm.queue(writer=0) as queue:
            assert queue.role == ("reader" if comm.rank else "writer")
            if comm.rank == 0:
                queue.wait_readers(1)
                for number in range(5):
                    queue.put({"n": number, "t": torch.ones(3)}, timeout=20)
                queue.put_nowait("last")
                assert queue.statistics().items == 6
            else:
                assert queue.get(timeout=20)["n"] == 0
                assert queue.get_many(1)[0]["n"] == 1
                assert [item["n"] for item in (queue.get(), queue.get(), queue.get())] == [2, 3, 4]
                assert list(queue) == ["last"]
                assert list(queue) == []
                assert queue.dropped == 0
                with pytest.raises(EndOfQueueError):
                    queue.get()
        queue.close()
        results = comm.queue(reader=0)
        with pytest.raises(TimeoutError if comm.rank == 0 else ZeroDivisionError), results:
            if comm.rank:
                results.put(1)
                comm.barrier().wait()
                raise ZeroDivisionError
            assert results.get() == 1
            with pytest.raises(TimeoutError):
                results.get(timeout=0.01)
            comm.barrier().wait()
            with pytest.raises(QueueError):
                results.get(timeout=20)
            raise TimeoutError


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_a_queue_without_a_loop(comm: Comm) -> None:
    await asyncio.to_thread(program, comm.backend)


def forking_program() -> None:
    with blocking.new_comm("shm", name="forked", timeout=40) as comm, comm.queue(writer=0) as queue:
        if comm.rank == 0:
            queue.put(b"first")
            calls = [lambda: queue.put(b"child", 5), lambda: queue.put_nowait(b"child"), queue.wait_readers]
        else:
            calls = [lambda: queue.get(5), queue.get_nowait, queue.get_many, lambda: next(queue)]
        child = fork()
        if child == 0:
            refused = False
            try:
                for call in calls:
                    with pytest.raises(ClosedError, match="forked"):
                        call()
                queue.close()
                refused = True
            finally:
                os._exit(0 if refused else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        comm.barrier().wait()  # the children have ended
        if comm.rank == 0:
            queue.put(b"second")
        else:
            assert [queue.get(20), queue.get(20)] == [b"first", b"second"]


@pytest.mark.ranks(2)
async def test_a_forked_child_cannot_use_a_queue_of_its_parent() -> None:
    await asyncio.to_thread(forking_program)


async def test_attaching_without_a_comm_ends_with_its_loop() -> None:
    async with hosted() as (_, queue):

        def read() -> list[object]:
            with blocking.attach_queue(queue.handle, timeout=20) as reader:
                assert reader.handle == reader.queue.handle
                return list(reader)

        reading = asyncio.create_task(asyncio.to_thread(read))
        await queue.wait_readers(1)
        await queue.put("item")
        await queue.aclose()
        assert await reading == ["item"]
        await until(lambda: not [thread for thread in threading.enumerate() if "portal" in thread.name])


async def test_errors_name_no_method_of_the_awaitable_queue() -> None:
    async with hosted() as (_, queue):

        def read() -> list[str]:
            with blocking.attach_queue(queue.handle, timeout=20) as reader:
                texts = []
                for call in (lambda: reader.get(0.01), lambda: reader.put(1), lambda: reader.put_nowait(1)):
                    with pytest.raises((TimeoutError, RuntimeError)) as caught:
                        call()
                    texts.append(str(caught.value))
                return texts

        texts = await asyncio.to_thread(read)
        assert texts[0] == "no item came within 0.01 s"
        assert texts[1] == texts[2]
        assert "for writers" in texts[1]


async def test_leaving_at_once_fails_the_readers() -> None:
    async with hosted(writes=False) as (_, queue):

        def write() -> None:
            writer = blocking.attach_queue(queue.handle)
            writer.put(1)
            writer.leave(failed=True)
            with pytest.raises(ClosedError):
                writer.put(2)

        await asyncio.to_thread(write)
        assert await queue.get() == 1
        with pytest.raises(QueueError):
            await queue.get()


async def test_a_blocking_queue_that_was_dropped_leaves_its_queue() -> None:
    async with hosted() as (_, queue):
        readers = [await asyncio.to_thread(blocking.attach_queue, queue.handle)]
        with pytest.warns(ResourceWarning, match="<MessageQueue, reader> was never closed"):
            readers.clear()
            gc.collect()
            await until(lambda: not queue.statistics().behind)
