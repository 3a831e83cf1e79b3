"""The blocking form of a stream of events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self, final

from asynccomm.blocking.portal import Portal
from asynccomm.blocking.twins import Twin
from asynccomm.core.handles import Handle
from asynccomm.observe.events import Event, EventStream


@final
class BlockingEvents(Handle, Twin[EventStream], Iterator[Event]):
    """The events of a comm, for one thread: ``for event in comm.events()``; see ``asynccomm.Comm.events``.

    The loop ends when the comm is closed, and after ``close()`` from any thread, once the events so far were read.
    """

    _instead = "call comm.events() there"

    def __init__(self, stream: EventStream, portal: Portal) -> None:
        """Not for users: see ``BlockingComm.events``."""
        self._hold(stream, portal)

    @property
    def dropped(self) -> int:
        """Notes that were dropped because the reader was too slow."""
        return self._original.dropped

    def close(self) -> None:
        """End the stream after the events so far. Idempotent, from any thread, and without blocking it."""
        self._original.close()

    async def _leave(self, exc: BaseException | None) -> None:
        self._original.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        """The next event. Raises: WouldBlockError on a thread with a running event loop; ClosedError in a child."""
        if not self._portal.held:
            raise StopIteration
        try:
            return self._portal.call(self._original.__anext__)
        except StopAsyncIteration:
            self._portal.release()
            raise StopIteration from None

    def __repr__(self) -> str:
        return f"<BlockingEvents, {self.dropped} dropped>"
