"""What lies where in a shared segment: pure arithmetic, in bytes from its start.

::

    words   one block of 64-bit words per rank; all but SLEEPING are written by that rank alone
    headers per bank, rank and part of its slot: four words that say what is in there
    slots   per bank and rank: what the rank contributes to a step of a collective
    results per bank and rank: the rank's reduced part of a step
    rings   per (source, destination): a queue of bytes for messages

A collective runs in steps, numbered through the life of the comm. Step s uses bank s % banks, so a rank may be that
many steps ahead of the slowest reader. The slots of a bank stand side by side at one stride.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, final

WORD: Final = 8  # bytes; aligned ones are written and read whole on every 64-bit machine
LINE: Final = 64  # bytes of a cache line
HEADER: Final = 4  # words
BLOCK: Final = 4 * LINE  # of one rank's words: processors fetch lines in pairs, so neighbours keep a distance


@final
class Word(IntEnum):
    """A rank's words, by their place in its block."""

    POSTED = 0  #: steps whose slot this rank has filled
    REDUCED = 1  #: steps whose result this rank has filled
    FINISHED = 2  #: steps in which this rank reads no more
    STATE = 3  #: a :class:`State`
    PLACE = 4  #: one more than the processor that this rank's worker has woken up on; 0 while it is asleep
    SLEEPING = 8  #: for each of this rank's two bells, whether to ring it when there is news; whoever rings clears it
    WHAT = 16  #: for each bank, three words that say which collectives the step belongs to, and after which others


@final
class State(IntEnum):
    """How far a rank is with the comm."""

    HERE = 0
    LEFT = 1  #: closed in good order
    ABORTED = 2


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is for so many ranks.

    Args:
        size: ranks.
        chunk: bytes of a slot, a multiple of 64.
        banks: steps that may be under way at once, at most 5.
        ring: bytes of a message ring, a multiple of 64.
    """

    size: int
    chunk: int
    banks: int
    ring: int

    @property
    def piece(self) -> int:
        """Bytes of a result: one rank's part of a chunk, and room for an element more."""
        return rounded_up(self.chunk // self.size + 16)

    def word(self, rank: int, word: int) -> int:
        """Number of a rank's word among all words of the segment."""
        return (rank * BLOCK) // WORD + word

    def what(self, rank: int, bank: int) -> int:
        """Number of the first of the three words that describe a step."""
        return self.word(rank, Word.WHAT) + 3 * bank

    def header(self, bank: int, rank: int, part: int) -> int:
        """Number of the first word of a header; there is one for each rank that may look at a part of its own."""
        return self.size * BLOCK // WORD + ((bank * self.size + rank) * self.size + part) * HEADER

    def slot(self, bank: int, rank: int) -> int:
        """Start of a rank's slot."""
        return self._slots + (bank * self.size + rank) * self.chunk

    def result(self, bank: int, rank: int) -> int:
        """Start of a rank's result."""
        return self._results + (bank * self.size + rank) * self.piece

    def ring_start(self, source: int, destination: int) -> int:
        """Start of the ring from ``source`` to ``destination``: a line with the head, one with the tail, the bytes."""
        return self._rings + (source * self.size + destination) * self._ring_stride

    @property
    def total(self) -> int:
        """Bytes of the segment."""
        return self._rings + self.size * self.size * self._ring_stride

    @property
    def _slots(self) -> int:
        return rounded_up(self.size * BLOCK + self.banks * self.size**2 * HEADER * WORD, 4096)

    @property
    def _results(self) -> int:
        return self._slots + self.banks * self.size * self.chunk

    @property
    def _rings(self) -> int:
        return rounded_up(self._results + self.banks * self.size * self.piece, 4096)

    @property
    def _ring_stride(self) -> int:
        return 2 * LINE + self.ring


def rounded_up(nbytes: int, to: int = LINE) -> int:
    """``nbytes``, or the next multiple of ``to``."""
    return -(-nbytes // to) * to
