"""The queue as its users have it: one object for all ends."""

from __future__ import annotations

import asyncio
import math
import os
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, SupportsIndex, final

from asynccomm.core.handles import Handle
from asynccomm.errors import AsyncCommError, ClosedError, PeerLostError
from asynccomm.ops.validation import as_index
from asynccomm.options import seconds
from asynccomm.queues.reading import ReadingEnd
from asynccomm.queues.writing import WritingEnd

CLOSE_SECONDS: Final = 30.0  # for bridges to send the last items


@final
@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """The state of one end of a queue."""

    role: str  #: "writer" or "reader"
    items: int  #: items that this end has put; 0 for a reader
    dropped: int  #: items that were overwritten before this end read them
    #: bytes that are not read, by the reader or the writer; ends of one process have numbers; none at a closed reader
    behind: dict[str, int] = field(default_factory=dict)


@final
class MessageQueue(Handle, AsyncIterator[Any]):
    """One end of a queue; made by ``comm.queue`` and ``asynccomm.attach_queue``.

    A writer puts items, and a reader gets them; a call of the other kind raises RuntimeError. All methods without
    ``_sync`` belong to the event loop that made the queue. ``async with`` closes the queue; a queue that is dropped
    unclosed gives a ResourceWarning, and leaves as one that has failed. In a forked child, putting and getting items,
    and waiting for readers, raise ClosedError.

    A put is acknowledged when its call or await returns: the item is in memory that its readers share. Each of them
    gets the item, also if the writer is killed, unless the reader itself is lost, or the queue drops its oldest items.
    A reader on another host gets it unless the writer's process is lost before the item is sent.
    """

    _instead = "send its handle, and attach there by asynccomm.attach_queue()"

    def __init__(
        self,
        end: ReadingEnd | WritingEnd,
        handle: str,
        close: Callable[[], object],
        dismiss: Callable[[], object],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        """Not for users: see ``Comm.queue`` and ``attach_queue``."""
        self._end = end
        self._handle = handle
        self._close, self._dismiss, self._tasks = close, dismiss, tasks
        self._closed = self._comm_over = False
        self._in_child = False
        _alive.add(self)

    @property
    def handle(self) -> str:
        """A string by which other processes attach. It has secrets: a process that has it may use the queue."""
        return self._handle

    @property
    def role(self) -> str:
        """``"writer"`` or ``"reader"``."""
        return "writer" if isinstance(self._end, WritingEnd) else "reader"

    def statistics(self) -> QueueStatistics:
        """Counts of this end, and how far the readers are behind: a put that waits, waits for the last of them."""
        end = self._end
        if isinstance(end, WritingEnd):
            return QueueStatistics("writer", end.number, 0, end.behind())
        return QueueStatistics("reader", 0, end.dropped, end.behind())

    @property
    def dropped(self) -> int:
        """Items that were overwritten before this reader read them."""
        return self.statistics().dropped

    # -- writing ------------------------------------------------------------------------------------------------------

    def _writing(self) -> WritingEnd:
        if not isinstance(self._end, WritingEnd):
            raise RuntimeError("this process reads the queue: putting items and waiting for readers are for writers")
        return self._end

    async def put(self, item: object) -> None:
        """Put ``item``, once all readers have made room for it.

        Cancelling is safe: it abandons the wait, and the item is put all the same. Tensors in ``item`` must not be
        changed before the call returns; after a cancelled call, before the next call that returns.

        Args:
            item: bytes, or an object as in ``send_object``. An item that is larger than the ring streams through it.

        Raises: TypeError if ``item`` cannot be sent; PeerLostError, ParticipantLostError for a lost reader;
            ClosedError, BrokenError.
        """
        end = self._writing()
        if not end.put_short(item) and not end.put_bytes(item):
            put = end.put(end.encode(item))
            if not put.done:
                await end.waiters.wait(end.finished(put))
        if end.waiters.streak.should_yield():
            await asyncio.sleep(0)

    def put_nowait(self, item: object) -> None:
        """Put ``item`` now, or raise ``asyncio.QueueFull``. From any thread.

        Raises: ValueError if ``item`` is larger than the ring, and the errors of :meth:`put`.
        """
        end = self._writing()
        if not (end.put_short(item) or end.put_bytes(item) or end.put_now(item)):
            raise asyncio.QueueFull

    def put_sync(self, item: object, timeout: float | timedelta | None = None) -> None:
        """:meth:`put` on a thread without a running event loop, while the queue's loop runs in another thread.

        Args:
            timeout: seconds; after them, TimeoutError, and the item is put all the same.

        Raises: WouldBlockError on a thread with a running loop; the errors of :meth:`put`.
        """
        end = self._writing()
        limit = seconds("timeout", timeout, math.inf)
        put = None

        def attempt() -> bool | None:
            nonlocal put
            if put is None:  # not before the check of the thread
                put = end.put(end.encode(item))
            return end.finished(put)()

        end.waiters.block(attempt, limit, "the item was not written to the ring")

    async def wait_readers(self, count: SupportsIndex = 1) -> None:
        """Wait until the queue has ``count`` readers: those that attach later get only the items from then on.

        Cancelling is safe. Raises: RuntimeError for a reader; the errors of :meth:`put`.
        """
        number = as_index(count)
        if number is None or number < 0:
            raise ValueError(f"count must be an integer, and not negative, got {count!r}")
        await self._writing().arrived(number)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _reading(self) -> ReadingEnd:
        if not isinstance(self._end, ReadingEnd):
            raise RuntimeError("this process writes to the queue: getting items is for readers")
        return self._end

    async def get(self) -> Any:
        """The next item. Cancelling is safe, and loses no item.

        Raises: EndOfQueueError after the last item; PayloadError for an item that cannot be read, and the next call
            goes on with the item after it; PeerLostError, ParticipantLostError for a lost writer, after its last
            acknowledged item; ClosedError, BrokenError.
        """
        end = self._reading()
        if end.waiters.streak.should_yield():
            await asyncio.sleep(0)
        found = end.ready() or end.next()
        if found is None:
            found = await end.waiters.wait(end.next)
        return found[0]

    def get_nowait(self) -> Any:
        """The next item, or ``asyncio.QueueEmpty``. From any thread. Raises: the errors of :meth:`get`."""
        found = self._reading().next()
        if found is None:
            raise asyncio.QueueEmpty
        return found[0]

    async def get_many(self, limit: SupportsIndex = 64) -> list[Any]:
        """Up to ``limit`` items: those that are there, and at least one. Cancelling and errors as in :meth:`get`.

        An item that cannot be read ends the batch; the next call raises its PayloadError.
        """
        end = self._reading()
        most = as_index(limit)
        if most is None or most < 1:
            raise ValueError(f"limit must be a positive integer, got {limit!r}")
        if end.waiters.streak.should_yield():
            await asyncio.sleep(0)
        return await end.waiters.wait(lambda: end.many(most))

    def get_sync(self, timeout: float | timedelta | None = None) -> Any:
        """:meth:`get` on a thread without a running event loop, while the queue's loop runs in another thread.

        Raises: TimeoutError after ``timeout`` seconds; WouldBlockError on a thread with a running loop; the errors of
            :meth:`get`.
        """
        end = self._reading()
        return end.waiters.block(end.next, seconds("timeout", timeout, math.inf), "no item came")[0]

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[Any]:
        """The next item, until the writers have closed the queue. Cancelling and other errors as in :meth:`get`."""
        return self._reading().item(self)

    # -- ending -------------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Leave the queue. A writer first waits until its items are in the ring; then the readers get the end.

        Idempotent. Cancelling it leaves at once, as a writer that has failed. A forked child leaves nothing: the end is
        its parent's.
        """
        if self._in_child:
            return
        failed = True
        try:
            if isinstance(self._end, WritingEnd):
                await self._end.waiters.wait(self._end.flushed)
            failed = False
        except ClosedError:
            failed = False  # the comm has closed meanwhile
        except AsyncCommError:
            pass  # the puts have raised it
        finally:
            self.leave(failed=failed)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CLOSE_SECONDS)

    def leave(self, *, failed: bool) -> None:
        """Leave the queue at once.

        Args:
            failed: the readers get a QueueError in place of the end of the queue.
        """
        if self._closed or self._in_child:
            return
        self._closed = True
        _leave(self._end, self._close, failed=failed)

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or self._in_child:
            return
        leave = partial(_leave, self._end, self._close, failed=True)  # without the queue, which is no more
        try:
            self._end.waiters.loop.call_soon_threadsafe(leave)
        except RuntimeError:  # the loop is closed: nothing else uses the end
            with suppress(RuntimeError):  # nor are there connections to end in order
                leave()
        # last, as it is an error where the program says so
        warnings.warn(f"{self!r} was never closed: use it in a `with` block, or close it", ResourceWarning, 1, self)

    def _detach_in_child(self) -> None:
        """Refuse all calls in a forked child, which shares the ring but not the counters of its end."""
        self._in_child = True
        self._end.detach_in_child(ClosedError("the queue was made before this process was forked; make a new one"))

    def comm_ended(self, error: AsyncCommError) -> None:
        """The comm of the queue has ended. A lost rank shows by its connection to the queue. From any thread."""
        if isinstance(error, PeerLostError):
            return
        self._end.fail(error)
        with suppress(RuntimeError):  # the loop is closed
            self._end.waiters.loop.call_soon_threadsafe(self._tell, error)

    def _tell(self, error: AsyncCommError) -> None:
        """Let the other ends know that the comm has ended by ``error``."""
        if self._closed or self._comm_over:
            return
        self._comm_over = True
        if isinstance(error, ClosedError):  # which the comms of other ranks do not get
            self.leave(failed=False)
            self._end.fail(error)
        else:  # other ranks get it by their comms, and should not get a QueueError before
            self._dismiss()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            self.leave(failed=True)
        else:
            await self.aclose()

    def __repr__(self) -> str:
        return f"<MessageQueue, {self.role}{', closed' if self._closed else ''}>"


def _leave(end: ReadingEnd | WritingEnd, close: Callable[[], object], *, failed: bool) -> None:
    if isinstance(end, WritingEnd):
        end.end(failed=failed)
    end.close()
    close()


_alive: weakref.WeakSet[MessageQueue] = weakref.WeakSet()


def _detach_all() -> None:
    for queue in list(_alive):
        queue._detach_in_child()


os.register_at_fork(after_in_child=_detach_all)
