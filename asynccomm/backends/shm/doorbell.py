"""Doorbells wake other ranks, and only those that are asleep.

Each rank has two bells, one for its event loop and one for its progress thread, and each bell has a word in the
segment. Before it sleeps, a rank arms a bell by setting its word, checks for publications once more, and then sleeps.
After a publication, the publishing rank reads the words, clears those that are set, and rings their bells. Each side
has a full fence between its two steps, so at least one side sees the other.

Clearing the word merges many rings into one. No ring is lost by it: if a word is cleared late, after its owner has
woken and set it again, the ring that follows the clearing still wakes the owner. This argument holds for each bell
separately, hence two words.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import IntEnum
from typing import final

from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import Layout, Word


@final
class Bell(IntEnum):
    """The threads of a rank that can be woken."""

    LOOP = 0
    WORKER = 1


@final
class Bells:
    """One rank's own bells, to be armed, and the other ranks' bells, to be rung. For one thread at a time.

    Args:
        words: the whole segment as 64-bit words.
        eventfds: by rank, one eventfd for each ``Bell``.
    """

    def __init__(
        self, rank: int, layout: Layout, words: memoryview, fence: Fence, eventfds: Sequence[tuple[int, int]]
    ) -> None:
        self._words = words
        self._full = fence.full
        self._mine = layout.word(rank, Word.SLEEPING)
        self._own_loop = eventfds[rank][Bell.LOOP]
        # by rank: its word, and its eventfds
        self._others = {
            other: ((layout.word(other, Word.SLEEPING), *eventfds[other]),)
            for other in range(layout.size)
            if other != rank
        }
        self._all = [sleeper for (sleeper,) in self._others.values()]

    def arm(self, bell: Bell) -> None:
        """Ask the peers to ring ``bell``. The caller must check for publications once more afterwards."""
        self._words[self._mine + bell] = 1
        self._full()

    def disarm(self) -> None:
        """Withdraw the request to be rung, once awake."""
        words, mine = self._words, self._mine
        if words[mine]:
            words[mine] = 0
        if words[mine + 1]:
            words[mine + 1] = 0

    def ring_all(self) -> None:
        """Wake all sleeping ranks, after a publication for all."""
        self._wake(self._all)

    def ring(self, rank: int) -> None:
        """Wake ``rank`` if it is asleep, after a publication for it."""
        self._wake(self._others[rank])

    def _wake(self, sleepers: Sequence[tuple[int, int, int]]) -> None:
        self._full()
        words = self._words
        for word, loop, worker in sleepers:
            if words[word]:
                words[word] = 0
                os.eventfd_write(loop, 1)
            if words[word + 1]:
                words[word + 1] = 0
                os.eventfd_write(worker, 1)

    def ring_own_loop(self) -> None:
        """Wake this rank's own event loop."""
        os.eventfd_write(self._own_loop, 1)
