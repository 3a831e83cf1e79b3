"""Waking other ranks, but only those that are asleep.

Going to sleep is a handshake, through two words of the sleeper: one for each of its bells, that of its event loop and
that of its worker thread. It sets the word of the bell that it will hear, looks once more whether anything has come,
and sleeps. Whoever has news publishes them, then looks at the words, clears those that are set, and rings. Each side
has a full fence between its two steps, so one of the two sees the other.

Clearing is what makes one ring of many. It cannot take a ring away that somebody else waits for: a word that is cleared
late, after its owner was awake in between and set it again, is followed by the ring that it stands for. That holds for
each bell by itself, hence two words.
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
    """Who can be woken in a rank."""

    LOOP = 0
    WORKER = 1


@final
class Bells:
    """One rank's own sleep, and the other ranks' bells. For one thread at a time, as the fence.

    Args:
        words: the whole segment as 64-bit words.
        eventfds: by rank, one for each ``Bell``.
    """

    def __init__(
        self, rank: int, layout: Layout, words: memoryview, fence: Fence, eventfds: Sequence[tuple[int, int]]
    ) -> None:
        self._words = words
        self._full = fence.full
        self._mine = layout.word(rank, Word.SLEEPING)
        self._own_loop = eventfds[rank][Bell.LOOP]
        # for each rank its words, and its eventfds
        self._others = {
            other: ((layout.word(other, Word.SLEEPING), *eventfds[other]),)
            for other in range(layout.size)
            if other != rank
        }
        self._all = [sleeper for (sleeper,) in self._others.values()]

    def arm(self, bell: Bell) -> None:
        """Ask to be woken by ``bell``. What has come before must be looked for after this."""
        self._words[self._mine + bell] = 1
        self._full()

    def disarm(self) -> None:
        """Awake: nobody needs to ring."""
        words, mine = self._words, self._mine
        if words[mine]:
            words[mine] = 0
        if words[mine + 1]:
            words[mine + 1] = 0

    def ring_all(self) -> None:
        """Wake whoever is asleep: something was published for all."""
        self._wake(self._all)

    def ring(self, rank: int) -> None:
        """Wake ``rank`` if it is asleep: something was published for it."""
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
        """Have this rank's own event loop come back."""
        os.eventfd_write(self._own_loop, 1)
