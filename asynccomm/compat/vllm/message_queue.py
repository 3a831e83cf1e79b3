"""Queues of objects, with the names of vLLM's MessageQueue."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Final, Self, final

from asynccomm.blocking.portal import made
from asynccomm.blocking.queue import BlockingQueue, attach_queue
from asynccomm.compat.either import at_once
from asynccomm.core.handles import Handle
from asynccomm.ops.renamed import Renamed
from asynccomm.options import seconds
from asynccomm.queues.attaching import attach_queue as attach_awaitable
from asynccomm.queues.queue import MessageQueue as AwaitableQueue

CAPACITY = 6 << 22  # bytes of a ring: vLLM's six chunks of 4 MiB
_OBJ: Final = Renamed({"item": "obj"})


@final
class MessageQueue(Handle):
    """One end of a queue from one writer to its readers; made by GroupCoordinator, and from another end's handle.

    On a thread without a loop the methods block; in a coroutine their results are awaited. Items are safe values,
    unless the environment, or the maker, says otherwise. ``asynccomm.MessageQueue`` has the rules of losses.

    Args:
        queue: the awaitable queue.
        loop: of the queue.
        readers: the number of readers for which ``wait_until_ready`` waits; of a reader, not used.
        blocking: the blocking form of the queue, if it keeps the loop.
    """

    _instead = "send export_handle(), and make an end there by create_from_handle()"

    def __init__(
        self,
        queue: AwaitableQueue,
        loop: asyncio.AbstractEventLoop,
        readers: int,
        blocking: BlockingQueue | None = None,
    ) -> None:
        """Not for users: see ``GroupCoordinator.create_mq_broadcaster``."""
        self.queue: AwaitableQueue = queue  #: the awaitable queue
        self._loop, self._readers, self._blocking = loop, readers, blocking

    @classmethod
    def create_from_handle(cls, handle: str, rank: int = 0, *, weights_only: bool = True) -> Any:
        """A reader of the queue of ``handle``, in any process of the host, or of the group's hosts.

        In a coroutine, ``await`` the call.

        Args:
            rank: not used: the queue gives each reader a place.
            weights_only: whether items are safe values only; as at the writer.

        Raises: the errors of ``asynccomm.attach_queue``.
        """
        if asyncio._get_running_loop() is None:
            blocking = attach_queue(handle, weights_only=weights_only)
            return cls(blocking.queue, blocking.loop, 0, blocking)

        async def attached() -> Self:
            queue = await attach_awaitable(handle, weights_only=weights_only)
            return cls(queue, asyncio.get_running_loop(), 0)

        return attached()

    def export_handle(self) -> str:
        """A string by which other processes attach. It has secrets: a process that has it may read the queue."""
        return self.queue.handle

    def wait_until_ready(self) -> Any:
        """At the writer, wait until all readers have attached; a reader has attached when it is made."""
        if self.queue.role == "reader":
            return at_once(None)
        return made(self._loop, lambda: self.queue.wait_readers(self._readers))

    def enqueue(self, obj: object, timeout: float | timedelta | None = None) -> Any:
        """Put ``obj`` for all readers, once they have made room.

        Raises: TimeoutError after ``timeout`` seconds, and ``obj`` is put all the same; RuntimeError at a reader; the
            errors of ``asynccomm.MessageQueue.put``. Cancelling is safe, as the end of ``timeout``.
        """
        if asyncio._get_running_loop() is None:
            with _OBJ:
                return self.queue.put_sync(obj, timeout)

        async def put() -> None:
            with _OBJ:
                async with asyncio.timeout(_limit(timeout)):
                    await self.queue.put(obj)

        return made(self._loop, put)

    def dequeue(self, timeout: float | timedelta | None = None) -> Any:
        """The next object. Cancelling is safe, and loses none.

        Raises: TimeoutError after ``timeout`` seconds; RuntimeError at the writer; the errors of
            ``asynccomm.MessageQueue.get``.
        """
        if asyncio._get_running_loop() is None:
            return self.queue.get_sync(timeout)

        async def get() -> Any:
            async with asyncio.timeout(_limit(timeout)):
                return await self.queue.get()

        return made(self._loop, get)

    def broadcast_object(self, obj: object = None) -> Any:
        """Put ``obj`` at the writer, and give it; at a reader, the next object."""
        if self.queue.role == "reader":
            return self.dequeue()
        if asyncio._get_running_loop() is None:
            self.enqueue(obj)
            return obj
        return self._put_and_give(obj)

    async def _put_and_give(self, obj: object) -> object:
        await self.enqueue(obj)
        return obj

    def close(self) -> Any:
        """Leave the queue; in a coroutine, ``await`` the call. Idempotent. After the writer, readers get the end."""
        if self._blocking is None:
            return made(self._loop, self.queue.aclose)
        close = self._blocking.close
        return close() if asyncio._get_running_loop() is None else asyncio.to_thread(close)

    def __repr__(self) -> str:
        return f"<vLLM's queue over {self.queue!r}>"


def _limit(timeout: float | timedelta | None) -> float | None:
    return None if timeout is None else seconds("timeout", timeout, 0)
