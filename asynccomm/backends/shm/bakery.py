"""A lock among ranks, made of loads, stores and fences alone (Lamport's bakery): it needs no atomic instruction.

Each rank has two words: whether it is choosing a ticket, and its ticket, 0 for none. The rank with the lowest ticket
holds the lock; of equal tickets, that of the lower rank counts. Tickets may grow without limit, and stay small in fact:
they begin at 1 again whenever no rank has one.

A rank that ends while it holds the lock leaves it taken. The comm is broken then, and no operation needs the lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, final

from asynccomm.backends.shm.fence import Fence

MOST_NAP: Final = 1e-3  # seconds between two looks at a lock that another rank holds


@final
class BakeryLock:
    """One rank's access to a lock. For one thread at a time.

    Args:
        words: 64-bit words of shared memory, of which the lock uses ``2 * size`` from ``first`` on, zero at first.
        rank, size: this rank, and the number of ranks.
        fence: of this rank.
    """

    def __init__(self, words: memoryview[int], first: int, rank: int, size: int, fence: Fence) -> None:
        self._words = words
        self._choosing = range(first, first + size)
        self._tickets = range(first + size, first + 2 * size)
        self._rank = rank
        self._fence = fence

    def take(self) -> None:
        """Take a ticket; from then on the lock is to be left, whether it was held or not."""
        words, fence = self._words, self._fence
        choosing, mine = self._choosing[self._rank], self._tickets[self._rank]
        words[choosing] = 1
        fence.full()
        words[mine] = 1 + max([words[ticket] for ticket in self._tickets])
        fence.full()
        words[choosing] = 0
        fence.full()

    def held(self) -> bool:
        """Whether it is this rank's turn. Once it is, it stays so until ``leave``."""
        words, fence = self._words, self._fence
        mine = words[self._tickets[self._rank]], self._rank
        for rank, (choosing, ticket) in enumerate(zip(self._choosing, self._tickets, strict=True)):
            if rank == self._rank:
                continue
            if words[choosing]:
                return False
            fence.order()
            theirs = words[ticket]
            if theirs and (theirs, rank) < mine:
                return False
        fence.full()  # the section begins only now
        return True

    def wait(self, ended: Callable[[], bool]) -> bool:
        """Block until it is this rank's turn; if ``ended`` before, leave and return False. After ``take``."""
        nap = 1e-5
        while not ended():
            if self.held():
                return True
            time.sleep(nap)
            nap = min(2 * nap, MOST_NAP)
        self.leave()
        return False

    def leave(self) -> None:
        """Give the lock up, or the place in its queue."""
        self._fence.full()
        self._words[self._tickets[self._rank]] = 0
        self._fence.full()
