"""Matching of messages and receives, by source and tag, both sides in order.

A message goes to the oldest receive that names its source or no source at all. A receive gets the oldest message with
its tag from a source that it accepts. Messages of one source and tag are therefore received in order, and tags and
sources never wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, final

R = TypeVar("R")
M = TypeVar("M")


@final
class MatchQueues(Generic[R, M]):
    """The posted receives and the unexpected messages of one rank.

    Args:
        size: number of ranks; sources are ``range(size)``.
        take: called with a receive from any source that a message is there for; False: it has got another message
            elsewhere, and is dropped.
    """

    __slots__ = ("_arrived", "_posted", "_stamp", "_take")

    def __init__(self, size: int, take: Callable[[R], bool] | None = None) -> None:
        # by source and tag, with a stamp of the age; an empty queue is removed, because tags may be many
        self._arrived: list[dict[int, deque[tuple[int, M]]]] = [{} for _ in range(size)]
        self._posted: list[dict[int, deque[tuple[int, R]]]] = [{} for _ in range(size + 1)]  # the last: any source
        self._stamp = 0
        self._take = take

    def post(self, receive: R, source: int | None, tag: int) -> tuple[int, M] | None:
        """Match a receive with an unexpected message, returned with its source. None: it is posted, or dropped."""
        if source is None:
            source = self._first_source(tag)
            if source is None:
                _append(self._posted[-1], tag, self._stamped(), receive)
                return None
            if self._take is not None and not self._take(receive):
                return None
        elif tag not in self._arrived[source]:
            _append(self._posted[source], tag, self._stamped(), receive)
            return None
        return source, _pop(self._arrived[source], tag)

    def claim(self, source: int, tag: int) -> R | None:
        """Remove and return the receive for an arriving message. None: the caller must ``keep`` the message."""
        while True:
            named = self._posted[source].get(tag)
            anybody = self._posted[-1].get(tag)
            if named is None and anybody is None:
                return None
            if anybody is None or (named is not None and named[0][0] < anybody[0][0]):
                return _pop(self._posted[source], tag)
            receive = _pop(self._posted[-1], tag)
            if self._take is None or self._take(receive):
                return receive

    def next_receive(self, source: int, tag: int) -> R | None:
        """The receive that ``claim`` would return now; None also if one from any source is posted."""
        named = self._posted[source].get(tag)
        return None if named is None or tag in self._posted[-1] else named[0][1]

    def keep(self, message: M, source: int, tag: int) -> None:
        """Queue a message that matches no posted receive."""
        _append(self._arrived[source], tag, self._stamped(), message)

    def kept(self) -> Iterator[tuple[int, int, M]]:
        """Source, tag and content of each unexpected message, those of a source and tag in order."""
        for source, arrived in enumerate(self._arrived):
            for tag, queue in arrived.items():
                for _, message in queue:
                    yield source, tag, message

    def withdraw(self, source: int | None) -> list[R]:
        """Remove and return the receives that name ``source``; with None those that accept any source."""
        posted = self._posted[-1 if source is None else source]
        receives = [receive for queue in posted.values() for _, receive in queue]
        posted.clear()
        return receives

    def withdraw_one(self, receive: R, tag: int) -> bool:
        """Remove one receive from any source. Returns whether it was still posted."""
        queue = self._posted[-1].get(tag, ())
        for i, (_, posted) in enumerate(queue):
            if posted is receive:
                del self._posted[-1][tag][i]
                if not queue:
                    del self._posted[-1][tag]
                return True
        return False

    def forget(self, source: int) -> None:
        """Drop the messages from this source."""
        self._arrived[source].clear()

    def clear(self) -> None:
        """Drop all receives and messages."""
        for arrived in self._arrived:
            arrived.clear()
        for posted in self._posted:
            posted.clear()

    def _first_source(self, tag: int) -> int | None:
        first = None
        oldest = self._stamp
        for source, arrived in enumerate(self._arrived):
            queue = arrived.get(tag)
            if queue is not None and queue[0][0] < oldest:
                first, oldest = source, queue[0][0]
        return first

    def _stamped(self) -> int:
        self._stamp += 1
        return self._stamp - 1


T = TypeVar("T")


def _append(queues: dict[int, deque[tuple[int, T]]], tag: int, stamp: int, item: T) -> None:
    queue = queues.get(tag)
    if queue is None:
        queues[tag] = deque(((stamp, item),))
    else:
        queue.append((stamp, item))


def _pop(queues: dict[int, deque[tuple[int, T]]], tag: int) -> T:
    queue = queues[tag]
    item = queue.popleft()[1]
    if not queue:
        del queues[tag]
    return item
