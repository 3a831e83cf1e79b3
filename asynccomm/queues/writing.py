"""The writing end of a queue: one ring, and the readers that it waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.segment import Segment
from asynccomm.core.state import ReentrantLock
from asynccomm.errors import AsyncCommError, ClosedError
from asynccomm.queues.doorbell import Doorbell
from asynccomm.queues.items import OutgoingItem
from asynccomm.queues.layout import (
    ENDED,
    FAILED,
    HEAD,
    SLEEPING,
    SLOTS,
    STATE,
    TAIL,
    WAITING,
    largest_payload,
    slot_word,
)
from asynccomm.queues.options import QueueOptions
from asynccomm.queues.ring import FULL, WAKE, RingWriter
from asynccomm.queues.waiters import Waiters

BUDGET: Final = 4 << 20  # bytes that are copied before other tasks run


@final
@dataclass(slots=True)
class Target:
    """A reader, as its writer has it."""

    label: str
    bell: Doorbell | None
    bridged: bool = False  #: it is on another host


@final
class Put:
    """A put that has to wait, with the wait of its caller."""

    __slots__ = ("done", "error", "item")

    def __init__(self, item: OutgoingItem) -> None:
        self.item = item
        self.done = False
        self.error: AsyncCommError | None = None


@final
class WritingEnd:
    """Puts items into the ring, in the order of the calls.

    Args:
        ring: bytes of the ring.
    """

    def __init__(self, segment: Segment, ring: int, drops: bool, options: QueueOptions) -> None:
        self.targets: dict[int, Target] = {}  #: by slot
        self.waiters: Waiters = Waiters(self._arm, self.pump)
        self._arrivals = Waiters(lambda: self._error is None)  #: waits for readers
        self._segment, self._words, self._ring, self._drops = segment, segment.words, ring, drops
        self._options = options
        self._most = largest_payload(ring)
        self._writer: Any = RingWriter(segment.raw, segment.data.data_ptr(), ring, drops)
        #: puts a short item of bytes, if the ring has room and no other item waits; False: use another way
        self.put_short: Callable[[object], bool] = self._writer.put_short
        self._fence = Fence()
        self._pending: deque[Put] = deque()
        self._error: AsyncCommError | None = None
        self._failed = False
        self._lock: AbstractContextManager[Any] = self._writer.lock

    @property
    def number(self) -> int:
        """Of the next item."""
        return int(self._writer.number)

    # -- readers ------------------------------------------------------------------------------------------------------

    def attach(self, target: Target) -> tuple[int, int]:
        """A slot for a new reader (-1: there is none), and the number of the first item that it gets."""
        with self._lock:
            slot = next((slot for slot in range(SLOTS) if slot not in self.targets), -1)
            if slot >= 0:
                word = slot_word(slot)
                self._words[word + SLEEPING] = 0
                self._words[word + TAIL] = self._writer.head
                self._fence.full()
                self._add(slot, target)
            return slot, self.number + int(bool(self._pending) and self._pending[0].item.begun)

    def write_to(self, target: Target) -> int:
        """The slot of the only reader, which has made the ring, and may sleep in it already."""
        with self._lock:
            self._add(0, target)
        return 0

    def _add(self, slot: int, target: Target) -> None:
        self.targets[slot] = target
        self._writer.set_bell(slot, -1)
        self._writer.set_slots(tuple(self.targets))
        if target.bell is not None:
            self.connect(slot, target.bell)
        self._arrivals.wake()

    def connect(self, slot: int, bell: Doorbell) -> None:
        """Wake the reader in ``slot`` by this bell from now on. On the loop."""
        self.targets[slot].bell = bell
        self._writer.set_bell(slot, bell.fileno)
        bell.before_close = partial(self._writer.set_bell, slot, -1)

    async def arrived(self, count: int) -> None:
        """Wait until there are ``count`` readers. Cancelling is safe. Raises: the error of later puts."""

        def attempt() -> bool | None:
            self.check()
            return len(self.targets) >= count or None

        await self._arrivals.wait(attempt)

    def detach(self, slot: int) -> None:
        """Wait for this reader no more. On the loop."""
        with self._lock:
            self.targets.pop(slot, None)
            self._writer.set_slots(tuple(self.targets))
        self.pump()

    def behind(self) -> dict[str, int]:
        """Bytes that each reader has not read."""
        words = self._words
        return {target.label: words[HEAD] - words[slot_word(slot) + TAIL] for slot, target in self.targets.items()}

    # -- items --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def encode(self, item: object) -> OutgoingItem:
        outgoing = OutgoingItem(item, weights_only=self._options.weights_only)
        if self._drops and outgoing.frames(self._most) > self._ring:
            raise ValueError(
                f"item must fit into the ring of {self._ring} bytes where the oldest items are dropped, "
                f"got {outgoing.total} bytes"
            )
        return outgoing

    def put_bytes(self, item: object) -> bool:
        """As ``put_short``, for items of bytes of up to a frame, and readers that C cannot wake."""
        with self._lock:
            if type(item) is not bytes or self._pending or len(item) > self._most or self._error is not None:
                return False
            result = self._writer.put_bytes(item)
            if result == FULL:
                return False
            if result == WAKE:
                self._wake()
            return True

    def put_now(self, item: object) -> bool:
        """Put an item if the ring has room for the whole of it. Raises: ValueError for a larger item."""
        outgoing = self.encode(item)
        need = outgoing.frames(self._most)
        if need > self._ring:
            raise ValueError(f"item must fit into the ring of {self._ring} bytes: use put(), got {outgoing.total}")
        with self._lock:
            self.check()
            room = self._ring - max((self._behind(slot) for slot in self.targets), default=0)
            if self._pending or (need > room and not self._drops):
                return False
            self._queue(Put(outgoing))
            while self._pending:
                self._advance()
            self.check()
            return True

    def _behind(self, slot: int) -> int:
        return int(self._writer.head - self._words[slot_word(slot) + TAIL])

    def put(self, outgoing: OutgoingItem) -> Put:
        """Put an item once the ring has room."""
        with self._lock:
            self.check()
            put = Put(outgoing)
            self._queue(put)
            if len(self._pending) == 1:
                self._advance()
            return put

    def finished(self, put: Put) -> Callable[[], bool | None]:
        """An attempt for ``Waiters``: True once ``put`` is done."""

        def attempt() -> bool | None:
            if put.error is not None:
                raise put.error
            if not put.done:
                with self._lock:
                    if self._pending:
                        self._advance()
            return put.done or None

        return attempt

    def flushed(self) -> bool | None:
        """An attempt for ``Waiters``: True once nothing waits."""
        with self._lock:
            self.check()
            if self._pending:
                self._advance()
            return None if self._pending else True

    def _queue(self, put: Put) -> None:
        self._writer.held = True  # first, so that an interrupt never leaves an item that short ones could get into
        self._pending.append(put)

    def _advance(self) -> bool:
        """Write the first waiting item as far as the ring has room; returns whether anything has changed."""
        put = self._pending[0]
        try:
            done, sleeping, moved = put.item.write(self._writer, self.number, self._most, BUDGET)
        except AsyncCommError as exc:
            self._fail(exc)
            return True
        if sleeping:
            self._wake()
        if done:
            self._writer.number += 1
            self._pending.popleft()
            self._writer.held = bool(self._pending)
            put.done = True
        return done or moved > 0

    def pump(self) -> None:
        """Go on with the waiting items: a reader has made room or has gone, or a wait was abandoned. On the loop."""
        self.waiters.wake()
        with self._lock:
            if self._pending and self._error is None:  # puts with abandoned waits
                self._advance()
                if self._pending and not self._arm():
                    self.waiters.loop.call_soon(self.pump)

    def _arm(self) -> bool:
        """Ask the readers for a wake-up; False: the first waiting item can go on, or nothing waits."""
        with self._lock:
            if not self._pending or self._error is not None:
                return False
            self._words[WAITING] = 1
            self._fence.full()
            return not self._advance()

    def _wake(self) -> None:
        for slot, target in self.targets.items():
            word = slot_word(slot) + SLEEPING
            if self._words[word]:
                self._words[word] = 0
                if target.bell is not None:
                    target.bell.ring()

    # -- ending -------------------------------------------------------------------------------------------------------

    def fail(self, error: AsyncCommError) -> None:
        """Raise ``error`` from now on. From any thread."""
        with self._lock:
            self._fail(error)
        self.waiters.wake_soon()
        self._arrivals.wake_soon()

    def _fail(self, error: AsyncCommError) -> None:
        self._writer.held = True
        self._error = self._error or error
        # the puts that wait, and by another error all later ones, are items that no reader gets
        self._failed = self._failed or bool(self._pending) or not isinstance(error, ClosedError)
        while self._pending:
            self._pending.popleft().error = self._error

    def detach_in_child(self, error: AsyncCommError) -> None:
        """Raise ``error`` from all calls in a forked child, also from the puts that wait."""
        self._lock = ReentrantLock()  # a thread of the parent may have held the old one
        self._error = error
        self._fail(error)
        self.waiters.detach_in_child(error)
        self._arrivals.detach_in_child(error)

    def end(self, *, failed: bool) -> None:
        """Tell the readers that no more items come; after a loss or a put that has failed, the writer has failed."""
        self.fail(ClosedError("the queue was closed here"))
        self._words[STATE] = FAILED if failed or self._failed else ENDED
        self._fence.full()
        for slot, target in self.targets.items():
            self._words[slot_word(slot) + SLEEPING] = 0
            if target.bell is not None:
                target.bell.ring()

    def close(self) -> None:
        """Leave the local readers; a bridge leaves when it has sent all. On the loop."""
        for target in self.targets.values():
            if target.bell is not None and not target.bridged:
                target.bell.leave()
        self.waiters.release()
        self._arrivals.release()
