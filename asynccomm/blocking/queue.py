"""The blocking form of a queue, and attaching to one without an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, Self, final

from asynccomm.blocking.portal import Portal
from asynccomm.blocking.twins import Place, Twin, here, made, there
from asynccomm.core.handles import Handle
from asynccomm.queues.attaching import attach_queue as attach_awaitable
from asynccomm.queues.errors import EndOfQueueError
from asynccomm.queues.queue import MessageQueue, QueueStatistics

P = ParamSpec("P")


@final
class BlockingQueue(Handle, Twin[MessageQueue], Iterator[Any]):
    """One end of a queue, for programs without an event loop; made by ``BlockingComm.queue`` and ``attach_queue``.

    ``put`` and ``get`` block the calling thread, without a hand-over to the loop's thread, and raise ``TimeoutError``
    after ``timeout`` seconds. ``for item in queue`` reads until the writers have closed the queue. Errors, order and
    losses are those of :class:`asynccomm.MessageQueue`. ``with`` closes the queue.
    """

    _instead = "send its handle, and attach there by asynccomm.blocking.attach_queue()"

    def __init__(self, queue: MessageQueue, portal: Portal) -> None:
        """Not for users: see ``BlockingComm.queue`` and :func:`attach_queue`."""
        self._hold(queue, portal)

    @property
    def queue(self) -> MessageQueue:
        """The awaitable queue, for functions that take one; its loop runs in a thread."""
        return self._original

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the awaitable queue."""
        return self._portal.loop

    @property
    def handle(self) -> str:
        """See :attr:`asynccomm.MessageQueue.handle`."""
        return self._original.handle

    @property
    def role(self) -> str:
        """See :attr:`asynccomm.MessageQueue.role`."""
        return self._original.role

    @property
    def dropped(self) -> int:
        """See :attr:`asynccomm.MessageQueue.dropped`."""
        return self._original.dropped

    def statistics(self) -> QueueStatistics:
        """See :meth:`asynccomm.MessageQueue.statistics`."""
        return self._original.statistics()

    @here(MessageQueue.put_sync)
    def put(self) -> Any: ...

    @here(MessageQueue.put_nowait)
    def put_nowait(self) -> Any: ...

    @here(MessageQueue.get_sync)
    def get(self) -> Any: ...

    @here(MessageQueue.get_nowait)
    def get_nowait(self) -> Any: ...

    @there(MessageQueue.get_many)
    def get_many(self) -> Any: ...

    @there(MessageQueue.wait_readers)
    def wait_readers(self) -> Any: ...

    def leave(self, *, failed: bool) -> None:
        """See :meth:`asynccomm.MessageQueue.leave`."""

        async def leave() -> None:
            self._original.leave(failed=failed)

        self._end(leave)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next item, until the writers have closed the queue."""
        try:
            return self.get()
        except EndOfQueueError:
            raise StopIteration from None

    def __repr__(self) -> str:
        return f"<BlockingQueue of {self._original!r}>"


def _attaching(attach: Callable[P, Any]) -> Callable[[Place], Callable[P, BlockingQueue]]:
    @functools.wraps(attach)
    def blocking(*args: P.args, **kwargs: P.kwargs) -> BlockingQueue:
        return made(lambda: attach(*args, **kwargs), BlockingQueue)

    blocking.__doc__ = """The blocking twin of :func:`asynccomm.attach_queue`, with the same arguments.

    ::

        with blocking.attach_queue(handle) as queue:
            for item in queue: ...

    Raises: the errors of the call; WouldBlockError on a thread with a running event loop. Ctrl-C cancels it.
    """
    return lambda _: blocking


@_attaching(attach_awaitable)
def attach_queue() -> Any: ...
