"""The parts of a window in shared memory: the layout of its segment, and the access of one rank to one part."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from ctypes import memmove
from dataclasses import dataclass
from typing import Any, Final, final

from torch import Tensor

from asynccomm.backends.shm.bakery import BakeryLock
from asynccomm.backends.shm.doorbell import Bell
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import PAIR, WORD, rounded_up
from asynccomm.backends.shm.segment import Segment
from asynccomm.backends.windows import WindowPart, accumulate
from asynccomm.ops import WindowInfo
from asynccomm.ops.windows import SIGNAL_VALUES

PAGE: Final = 4096  # bytes: the memory of each rank begins at a page
ATOMIC: Final = 8  # word of a block: whether the rank can change words atomically; the words before are for bells
LARGE: Final = 4 << 20  # bytes: a larger copy would flush the caches, and goes past them
HEAD: Final = PAIR // WORD  # words of a block ahead of its locks


@final
@dataclass(frozen=True, slots=True)
class WindowLayout:
    """The offsets of a window's segment: for each rank a block of words, and then the memory of each rank.

    A block has the words for the rank's two bells (``doorbell.py``), whether it has atomic instructions, two locks
    (``bakery.py``), and the signals.

    Args:
        guests: contenders for the locks of each rank, beside the ranks: threads that serve ranks of other hosts.
    """

    window: WindowInfo
    guests: int = 0

    @property
    def size(self) -> int:
        return len(self.window.sizes)

    @property
    def contenders(self) -> int:
        """The number of those that may take a lock: the ranks, and behind them the guests."""
        return self.size + self.guests

    def bell(self, rank: int, bell: Bell) -> int:
        """Index of the word that is set while ``rank`` waits for ``bell``."""
        return self._block(rank) + bell

    def atomic(self, rank: int) -> int:
        """Index of the word in which ``rank`` states that it has atomic instructions."""
        return self._block(rank) + ATOMIC

    def memory_lock(self, rank: int) -> int:
        """Index of the first word of the lock for accumulates to ``rank``."""
        return self._block(rank) + HEAD

    def signal_lock(self, rank: int) -> int:
        """Index of the first word of the lock for the signals of ``rank``."""
        return self._block(rank) + HEAD + 2 * self.contenders

    def signals(self, rank: int) -> int:
        """Index of the first signal of ``rank``."""
        return self._block(rank) + HEAD + 4 * self.contenders

    def memory(self, rank: int) -> int:
        """Start of the memory of ``rank``, in bytes."""
        blocks = rounded_up(self._block(self.size) * WORD, PAGE)
        return blocks + sum([rounded_up(nbytes, PAGE) for nbytes in self.window.sizes[:rank]])

    @property
    def total(self) -> int:
        """Bytes of the segment."""
        return self.memory(self.size)

    def _block(self, rank: int) -> int:
        return rank * rounded_up(HEAD + 4 * self.contenders + self.window.signals, HEAD)


@final
class ShmPart(WindowPart):
    """The part of rank ``target``, as contender ``origin`` reaches it. For one thread at a time, but for ``load``.

    Args:
        bells: eventfds that wake the target: its event loop, and its progress thread.
        store: changes a word atomically (``_core.signal``); None: there is no C.
        copy_large: copies past the caches (``_core.copy``); None: there is no C.
    """

    def __init__(
        self,
        segment: Segment,
        layout: WindowLayout,
        origin: int,
        target: int,
        bells: tuple[int, int],
        store: Callable[..., Any] | None,
        copy_large: Callable[[int, int, int], None] | None = None,
    ) -> None:
        start = layout.memory(target)
        super().__init__(segment.data[start : start + layout.window.sizes[target]])
        words, fence, contenders = segment.words, Fence(), layout.contenders
        self._words = words
        self._fence = fence
        self._signals = layout.signals(target)
        self._bells = [(layout.bell(target, bell), bells[bell]) for bell in Bell]
        self._atomics = [layout.atomic(rank) for rank in range(layout.size)]
        self._store = store
        self._copy_large = copy_large or memmove
        self.memory_lock = BakeryLock(words, layout.memory_lock(target), origin, contenders, fence)
        self._signal_lock = BakeryLock(words, layout.signal_lock(target), origin, contenders, fence)

    def decide(self) -> None:
        """Choose the way to change signals, once all ranks have stated theirs: the same on all ranks."""
        if not all(self._words[word] for word in self._atomics):
            self._store = None

    @property
    def signal_lock(self) -> BakeryLock | None:
        """The lock to be held for a signal; None: signals are atomic."""
        return self._signal_lock if self._store is None else None

    def copy(self, target: int, source: int, nbytes: int) -> None:
        (self._copy_large if nbytes >= LARGE else memmove)(target, source, nbytes)

    def load(self, slot: int) -> int:
        return self._words[self._signals + slot]

    def signal(self, slot: int, value: int, *, add: bool) -> None:
        word = self._signals + slot
        self._fence.full()  # earlier puts are seen first
        if self._store is not None:
            self._store(self._words, word, value, add)
        else:
            self._words[word] = (self._words[word] + value) % SIGNAL_VALUES if add else value
        self._fence.full()
        for asleep, bell in self._bells:
            if self._words[asleep]:
                self._words[asleep] = 0
                os.eventfd_write(bell, 1)


@final
class GuestPart:
    """A rank's own part, for threads that serve ranks which cannot map it: see ``ServedPart``.

    Among the contenders for the part's locks, these threads together are one.

    Args:
        accumulating, signalling: the part as that contender reaches it, once for each kind of operation.
        count: the number of signals.
    """

    def __init__(self, accumulating: ShmPart, signalling: ShmPart, count: int) -> None:
        self.memory: Tensor = accumulating.memory
        self.count: int = count
        self._accumulating = accumulating
        self._signalling = signalling
        self._one_accumulates = threading.Lock()
        self._one_signals = threading.Lock()
        self._ended = False

    def signal(self, slot: int, value: int, *, add: bool) -> None:
        """Set a signal or add to it, and wake the rank; nothing once the part has ended."""
        part = self._signalling
        with self._one_signals:
            lock = part.signal_lock
            if self._take(lock):
                try:
                    part.signal(slot, value, add=add)
                finally:
                    if lock is not None:
                        lock.leave()

    def accumulate(self, start: int, tensor: Tensor) -> None:
        """Add a vector to the memory from byte ``start`` on; nothing once the part has ended."""
        lock = self._accumulating.memory_lock
        with self._one_accumulates:
            if self._take(lock):
                try:
                    accumulate(self.memory[start : start + tensor.nbytes].view(tensor.dtype), tensor)
                finally:
                    lock.leave()

    def _take(self, lock: BakeryLock | None) -> bool:
        if lock is None:
            return not self._ended
        lock.take()
        return lock.wait(lambda: self._ended)

    def end(self) -> None:
        """Wait for no lock any more, and leave memory and signals as they are."""
        self._ended = True

    def close(self) -> None:
        """End, and wait until no thread rings the rank's bells any more."""
        self.end()
        with self._one_signals:
            pass
