"""The parts of a window in shared memory: the layout of its segment, and the access of one rank to one part."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

from asynccomm.backends.shm.bakery import BakeryLock
from asynccomm.backends.shm.doorbell import Bell
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import PAIR, WORD, rounded_up
from asynccomm.backends.shm.segment import Segment
from asynccomm.backends.windows import WindowPart
from asynccomm.ops import WindowInfo
from asynccomm.ops.windows import SIGNAL_VALUES

PAGE: Final = 4096  # bytes: the memory of each rank begins at a page
ATOMIC: Final = 8  # word of a block: whether the rank can change words atomically; the words before are for bells
HEAD: Final = PAIR // WORD  # words of a block ahead of its locks


@final
@dataclass(frozen=True, slots=True)
class WindowLayout:
    """The offsets of a window's segment: for each rank a block of words, and then the memory of each rank.

    A block has the words for the rank's two bells (``doorbell.py``), whether it has atomic instructions, two locks
    (``bakery.py``), and the signals.
    """

    window: WindowInfo

    @property
    def size(self) -> int:
        return len(self.window.sizes)

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
        return self._block(rank) + HEAD + 2 * self.size

    def signals(self, rank: int) -> int:
        """Index of the first signal of ``rank``."""
        return self._block(rank) + HEAD + 4 * self.size

    def memory(self, rank: int) -> int:
        """Start of the memory of ``rank``, in bytes."""
        blocks = rounded_up(self._block(self.size) * WORD, PAGE)
        return blocks + sum([rounded_up(nbytes, PAGE) for nbytes in self.window.sizes[:rank]])

    @property
    def total(self) -> int:
        """Bytes of the segment."""
        return self.memory(self.size)

    def _block(self, rank: int) -> int:
        return rank * rounded_up(HEAD + 4 * self.size + self.window.signals, HEAD)


@final
class ShmPart(WindowPart):
    """The part of rank ``target``, as rank ``origin`` reaches it. For one thread at a time, but for ``load``.

    Args:
        bells: eventfds that wake the target: its event loop, and its progress thread.
        store: changes a word atomically (``_core.signal``); None: there is no C.
    """

    def __init__(
        self,
        segment: Segment,
        layout: WindowLayout,
        origin: int,
        target: int,
        bells: tuple[int, int],
        store: Callable[..., Any] | None,
    ) -> None:
        start = layout.memory(target)
        super().__init__(segment.data[start : start + layout.window.sizes[target]])
        words, fence, size = segment.words, Fence(), layout.size
        self._words = words
        self._fence = fence
        self._signals = layout.signals(target)
        self._bells = [(layout.bell(target, bell), bells[bell]) for bell in Bell]
        self._atomics = [layout.atomic(rank) for rank in range(size)]
        self._store = store
        self.memory_lock = BakeryLock(words, layout.memory_lock(target), origin, size, fence)
        self._signal_lock = BakeryLock(words, layout.signal_lock(target), origin, size, fence)

    def decide(self) -> None:
        """Choose the way to change signals, once all ranks have stated theirs: the same on all ranks."""
        if not all(self._words[word] for word in self._atomics):
            self._store = None

    @property
    def signal_lock(self) -> BakeryLock | None:
        """The lock to be held for a signal; None: signals are atomic."""
        return self._signal_lock if self._store is None else None

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
