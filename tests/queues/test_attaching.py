"""The arguments of attach_queue."""

import asyncio
import socket

import pytest

from asynccomm import BackendError, attach_queue
from asynccomm.queues.options import QueueHandle


async def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="handle must be a queue's handle"):
        await attach_queue("handle")
    handle = QueueHandle("here", "name", "", 0, "a", "b", "reader", "rank 0").text()
    with pytest.raises(ValueError, match="max_bytes must be a positive number of bytes, got 0"):
        await attach_queue(handle, max_bytes=0)
    with pytest.raises(ValueError, match="timeout must be positive"):
        await attach_queue(handle, timeout=0)


async def test_a_queue_that_does_not_answer_is_given_up() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind("")
        silent.listen()
        name = silent.getsockname()[1:].decode()
        handle = QueueHandle("here", name, "", 0, "a", "b", "reader", "rank 0").text()
        with pytest.raises(BackendError, match=r"did not attach to the queue of rank 0 within 0.05 s"):
            await attach_queue(handle, timeout=0.05)
        task = asyncio.ensure_future(attach_queue(handle))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
