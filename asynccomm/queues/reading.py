"""The reading end of a queue: items of one writer or of several, in the order in which this end finds them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Final, final

from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.segment import Segment
from asynccomm.core.native import CoreUnavailable, load
from asynccomm.errors import AsyncCommError, BackendError, ClosedError, PayloadError
from asynccomm.options import seconds
from asynccomm.queues.doorbell import Doorbell
from asynccomm.queues.errors import EndOfQueueError, QueueError
from asynccomm.queues.items import IncomingItem, check_class, decode
from asynccomm.queues.layout import ENDED, FAILED, OPEN, SLEEPING, STATE, WAITING, slot_word
from asynccomm.queues.options import QueueOptions, QueueWelcome
from asynccomm.queues.ring import RingFrame, RingReader
from asynccomm.queues.waiters import Waiters

AHEAD: Final = 64  # items that are read at once
AHEAD_BYTES: Final = 1 << 20
POLL_SECONDS: Final = 50e-6  # to look for the next item before sleeping, about the time of a wake-up
PAUSE_SECONDS: Final = 1e-6  # to which the kernel adds its slack, of about 50 us
VAIN: Final = 16  # sleeps without a look after a look that was in vain
FLOOD: Final = 100_000  # items per second from which a reader lets several items come before it reads
COUNTED: Final = 64  # items between two measurements of this rate
BUDGET: Final = 4 << 20  # bytes that are copied before other tasks run

_core: Final[Any] = load("asynccomm.queues._ring")
_work: Final[Any] = load("asynccomm.core._work")

Found = Any  # bytes of an item of bytes; the source and the data of another item; the error of an item


@final
class Source:
    """A writer's ring, as one of its readers has it."""

    def __init__(self, segment: Segment, welcome: QueueWelcome, label: str, lost: AsyncCommError) -> None:
        ring, slot, drops = welcome.ring, welcome.slot, welcome.drops
        self.label, self.lost_error = label, lost
        self.bell: Doorbell | None = None
        self.gone = False  #: the connection has ended
        self.left = False  #: it has ended in order; with an open state, since the comm of the writer has failed
        self._words = segment.words
        self._reader: Any = RingReader(segment.raw, segment.data.data_ptr(), ring, slot, drops)
        self._reader.expected = welcome.number
        self._sleeping = slot_word(slot) + SLEEPING
        self._fence = Fence()
        self._ring, self._told = ring, self._reader.tail
        self._item: IncomingItem | None = None
        self._patience = 1
        self._flooded = False
        self._counted, self._counted_at = welcome.number, time.perf_counter()
        self._broken = 0  # items that were dropped in their middle

    @property
    def dropped(self) -> int:
        """Items that were overwritten before they were read."""
        return int(self._reader.dropped) + self._broken

    @property
    def behind(self) -> int:
        """Bytes that are not read."""
        return int(self._words[0] - self._reader.tail)

    def read(self, found: deque[Found], options: QueueOptions) -> int:
        """Append items that are there to ``found``; returns the number of bytes or items read. Raises: BackendError."""
        before = self._reader.tail
        if self._item is None:
            found.extend(self._reader.take(self, AHEAD, AHEAD_BYTES))
            if self._reader.tail != before:
                self._publish()
                return 1
        moved = 0
        while moved < BUDGET and (frame := self._reader.peek()) is not None:
            moved += self._read_frame(RingFrame(*frame), found, options) + 1
            if self._item is None:
                break
        return moved

    def _read_frame(self, frame: RingFrame, found: deque[Found], options: QueueOptions) -> int:
        item = self._item
        if frame.first or (item is not None and item.number != frame.number):
            if item is not None:  # its later frames were overwritten
                self._broken += 1
            item = IncomingItem(frame, options) if frame.first else None
        if item is not None and not item.feed(frame.address, frame.nbytes) and self._reader.valid():
            raise BackendError(f"the ring of a queue is corrupt: an item of {self.label} is longer than it says")
        if not self._reader.valid():
            if item is not None and not frame.first:
                self._broken += 1
            self._item = None
            return frame.nbytes
        wake = self._reader.free()
        self._ring_writer(wake)
        self._item = item
        if item is not None and item.done:
            found.append((self, item))
            self._item = None
        return frame.nbytes

    def _publish(self) -> None:
        self._ring_writer(self._reader.publish())

    def _ring_writer(self, waits: int) -> None:
        """Wake a waiting writer for each quarter of the ring."""
        if waits and self._reader.tail - self._told >= self._ring // 4:
            self._told = self._reader.tail
            self._words[WAITING] = 0
            if self.bell is not None:
                self.bell.ring()

    def poll(self, *, always: bool = False) -> bool:
        """Look for a frame before the end sleeps; not after looks that were in vain, unless ``always``.

        In a flood of items the look is a pause: the writer has the core, and the items that come are read at once.
        """
        if self._patience <= 0 and not always:
            self._patience += 1
            return False
        count = self._reader.expected - self._counted
        if count >= COUNTED:
            now = time.perf_counter()
            self._flooded = count > FLOOD * (now - self._counted_at)
            self._counted, self._counted_at = self._reader.expected, now
        if self._flooded:
            time.sleep(PAUSE_SECONDS)
        found = bool(self._reader.poll(0.0 if self._flooded else POLL_SECONDS))
        self._patience = 1 if found else self._patience - 1
        if self._patience == 0:
            self._patience = -VAIN
        return found

    def arm(self) -> bool:
        """Ask the writer for a wake-up; False: there is something to read, or an end to be seen."""
        if self.gone:
            return False
        self._words[self._sleeping] = 1
        self._fence.full()
        try:
            return self._words[STATE] == OPEN and self._reader.peek() is None
        except BackendError:  # which the next read raises
            return False

    def ending(self) -> AsyncCommError | None:
        """Once nothing is left to read: the end of the source, None: it is open."""
        gone, state = self.gone, self._words[STATE]  # in this order: a writer that leaves sets its state before
        if state == OPEN and not gone:
            return None
        if self._reader.peek() is not None:
            return None
        if state == ENDED:
            return EndOfQueueError(f"{self.label} has closed the queue")
        if state == FAILED or self.left:
            return QueueError(f"{self.label} has left the queue by an exception")
        return self.lost_error

    def close(self) -> None:
        if self.bell is not None:
            self.bell.leave()


@final
class ReadingEnd:
    """The items of all sources, for the tasks and threads that get them.

    Args:
        expected: writers that are ranks; the queue ends after all of them have come and all writers have closed it.
            None: there is one writer, without which the queue cannot go on.
    """

    def __init__(self, options: QueueOptions, expected: int | None) -> None:
        self.sources: list[Source] = []
        self.waiters: Waiters = Waiters(self._arm)
        self._options, self._expected = options, expected
        self._plain = options.max_bytes if options.expect is None else -1  # items of so many bytes need no more checks
        self._busy_poll = seconds("busy_poll", options.busy_poll, 0.0)
        self._busy_until = 0.0  # while there is nothing to read; 0: there was something
        self._came = self._dropped = 0
        self._found: deque[Found] = deque()
        self._error: AsyncCommError | None = None
        self._lock = threading.Lock()
        #: its await takes the next item, or raises StopAsyncIteration; other errors as in ``next``; the argument is the
        #: queue, which must not be dropped meanwhile
        self.item: Callable[[object], Awaitable[Any]] = partial(_NextItem, self)
        if not isinstance(_core, CoreUnavailable) and not isinstance(_work, CoreUnavailable):
            streak = self.waiters.streak
            self.item = _core.Next(self._found, streak.should_yield, _work.finished, _next_item, self, self._plain)

    @property
    def dropped(self) -> int:
        with self._lock:  # another thread moves the counts of sources that end
            return self._dropped + sum(source.dropped for source in self.sources)

    def behind(self) -> dict[str, int]:
        """Bytes of each writer that are not read."""
        with self._lock:  # another thread changes the order of the sources
            return {source.label: source.behind for source in self.sources}

    def add(self, source: Source) -> None:
        with self._lock:
            self.sources.append(source)
            self._came += 1
        self.waiters.wake()

    def fail(self, error: AsyncCommError) -> None:
        """Raise ``error`` from now on. From any thread."""
        with self._lock:
            self._error = error
            self._found.clear()
        self.waiters.wake_soon()

    def _arm(self) -> bool:
        with self._lock:
            polls = self._polls()
            if (len(self.sources) == 1 and self.sources[0].poll(always=polls)) or polls:
                return False
            armed = [source.arm() for source in self.sources]
            return all(armed) and not self._found and self._error is None and not self._ended()

    def _polls(self) -> bool:
        """Whether this end looks again in place of a sleep, after other tasks have run."""
        if not self._busy_poll:
            return False
        now = time.perf_counter()
        self._busy_until = self._busy_until or now + self._busy_poll
        return now < self._busy_until

    def _ended(self) -> bool:
        return not self.sources and self._came >= max(self._expected or 0, 1)

    def _refill(self) -> bool:
        """Read the items that are there; True: there are some now."""
        for source in list(self.sources):
            try:
                moved = source.read(self._found, self._options)
                ending = None if moved else source.ending()
            except BackendError as exc:
                moved, ending = 0, exc
            if ending is not None:
                self._end_of(source, ending)
        if len(self.sources) > 1:
            self.sources.append(self.sources.pop(0))  # in turn, so that no writer waits for another
        if self._found:
            self._busy_until = 0.0
        return bool(self._found)

    def _end_of(self, source: Source, ending: AsyncCommError) -> None:
        self.sources.remove(source)
        self._dropped += source.dropped
        self.waiters.loop.call_soon_threadsafe(source.close)
        if not isinstance(ending, EndOfQueueError) and (self._options.on_lost == "raise" or self._expected is None):
            self._error = self._error or ending

    def next(self) -> tuple[Any] | None:
        """The next item, in a tuple; None: there is none yet.

        Raises: EndOfQueueError, PeerLostError, ParticipantLostError, QueueError, PayloadError, BackendError.
        """
        with self._lock:
            found = self._pop()
            if found is not None:
                return (self._deliver(found),)
            if self._error is not None:
                raise self._error
            if self._ended():
                raise EndOfQueueError("the queue was closed by its writers, and all items have been read")
            return None

    def ready(self) -> tuple[Any] | None:
        """As :meth:`next`, for items that were read ahead. No lock is taken, so a call takes half as long."""
        if not self._found:
            return None
        try:
            found = self._found.popleft()
        except IndexError:  # another thread was first
            return None
        if type(found) is bytes and len(found) <= self._plain:
            return (found,)
        return (self._deliver(found),)

    def _pop(self) -> Found | None:
        """The next thing to deliver; None: there is none. Under the lock."""
        while self._found or (self._error is None and self._refill()):
            try:
                return self._found.popleft()
            except IndexError:  # ``ready`` was first
                continue
        return None

    def _deliver(self, found: Found) -> Any:
        options = self._options
        if type(found) is bytes:
            if len(found) > options.max_bytes:
                raise PayloadError(f"an item has {len(found)} bytes, but max_bytes is {options.max_bytes}")
            if options.expect is not None:
                check_class(found, "a writer", options)
            return found
        if isinstance(found, PayloadError):
            raise found
        source, data = found
        return decode(data, source.label, options)

    def many(self, limit: int) -> list[Any] | None:
        """Up to ``limit`` items that are there; None: there is none yet."""
        first = self.next()
        if first is None:
            return None
        items = [first[0]]
        with self._lock:
            while len(items) < limit and (found := self._pop()) is not None:
                try:
                    items.append(self._deliver(found))
                except PayloadError as exc:  # for the next call
                    self._found.appendleft(exc)
                    break
        return items

    def detach_in_child(self, error: AsyncCommError) -> None:
        """Raise ``error`` from all calls in a forked child, also for the items that were read ahead."""
        self._lock = threading.Lock()  # a thread of the parent may have held the old one
        self._error = error
        self._found.clear()
        self.waiters.detach_in_child(error)

    def close(self) -> None:
        """Leave the queue: later calls raise ClosedError. On the loop."""
        self.fail(ClosedError("the queue was closed here"))
        with self._lock:  # the rings are freed with their sources
            sources, self.sources = self.sources, []
            self._dropped += sum(source.dropped for source in sources)
        for source in sources:
            source.close()


async def _next_item(end: ReadingEnd, yields: bool, queue: object) -> Any:
    """The next item; the loop runs other tasks first if ``yields``. The coroutine keeps ``queue`` alive."""
    if yields:
        await asyncio.sleep(0)
    try:
        found = end.ready() or end.next()
        if found is None:
            found = await end.waiters.wait(end.next)
    except EndOfQueueError:
        raise StopAsyncIteration from None
    return found[0]


@final
class _NextItem:
    """``ReadingEnd.item`` in Python; in C, an item of bytes that was read ahead needs no coroutine."""

    def __init__(self, end: ReadingEnd, queue: object) -> None:
        self._end, self._queue = end, queue

    def __await__(self) -> Generator[Any, None, Any]:
        return _next_item(self._end, self._end.waiters.streak.should_yield(), self._queue).__await__()
