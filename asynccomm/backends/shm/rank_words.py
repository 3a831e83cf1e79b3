"""A rank's words in the segment for its lifecycle, and those of the other ranks: whether a rank is there, and where.

An engine publishes here that its rank leaves or aborts, so that the peers know the meaning of the EOF on its liveness
pipe; that tensors which others may read can have changed; and the CPU of its progress thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from asynccomm.backends.base import RankInfo
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import Layout, State, Word


@final
class RankWords:
    """The lifecycle words of one comm, as rank ``rank`` uses them. From any thread.

    Args:
        words: of the segment.
        members: all ranks, in order.
    """

    def __init__(self, rank: int, layout: Layout, words: memoryview, members: Sequence[RankInfo]) -> None:
        self._words = words
        self._state = layout.word(rank, Word.STATE)
        self._states = [layout.word(other, Word.STATE) for other in range(layout.size)]
        self._place = layout.word(rank, Word.PLACE)
        self._withdrawn = layout.word(rank, Word.WITHDRAWN)
        homes = [(member.host, member.pid) for member in members]
        self._places = [  # without ranks of this process, which share one progress thread
            layout.word(other, Word.PLACE) for other, home in enumerate(homes) if home != homes[rank]
        ]

    def state_of(self, rank: int) -> int:
        """The :class:`State` of a rank."""
        return self._words[self._states[rank]]

    def end(self, state: State) -> None:
        """Publish that this rank has left or aborted; only the first end counts."""
        if self._words[self._state] == State.HERE:
            self._words[self._state] = state
        Fence().full()  # the engine's own fence belongs to the lock holder

    def withdraw_tensors(self) -> None:
        """Make peers fail that read this rank's tensors from now on: see ``programs``."""
        self._words[self._withdrawn] = 1
        Fence().full()  # as above

    def settle_on(self, cpu: int) -> list[int]:
        """Publish that the progress thread runs on ``cpu``; returns the CPUs of other processes' progress threads."""
        words = self._words
        words[self._place] = cpu + 1
        return [place - 1 for word in self._places if (place := words[word])]

    def leave_cpu(self) -> None:
        """Publish that the progress thread runs nothing for this rank."""
        self._words[self._place] = 0
