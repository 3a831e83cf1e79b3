"""The layout of a shared segment: pure arithmetic, in bytes from the segment's start.

::

    words   one block of 64-bit words per rank; all but SLEEPING are written by that rank alone
    records per bank and rank: the flag that a slot is filled, the collective it is filled for, and room for tiny data
    headers per bank, rank and part of its slot: lengths of data, number of steps (``variable_length``, ``announced``)
    slots   per bank and rank: the rank's contribution to a step of a collective
    results per bank and rank: the rank's reduced part of a step
    rings   per (source, destination): a queue of bytes for messages

A collective runs in steps, numbered through the life of the comm. Step s uses bank s % banks, so a rank may be at most
``banks`` steps ahead of the slowest reader, unless it fills no slots (``programs.Wait``). The slots of a bank are
adjacent, at one stride.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, final

WORD: Final = 8  # bytes; every 64-bit machine reads and writes aligned words whole
LINE: Final = 64  # bytes of a cache line
PAIR: Final = 2 * LINE  # processors fetch lines in pairs: words of different writers or readers are in different pairs
HEADER: Final = 4  # words
RECORD: Final = PAIR // WORD  # words
BLOCK: Final = 4 * PAIR  # bytes of one rank's words


@final
class Word(IntEnum):
    """A rank's words, by their index in its block."""

    REDUCED = 0  #: steps with this rank's result filled
    FINISHED = 16  #: steps in which this rank has finished reading
    SLEEPING = 32  #: for each of this rank's two bells, whether to ring it on a publication; the ringing rank clears it
    STATE = 48  #: a :class:`State`
    PLACE = 49  #: CPU that this rank's progress thread has woken up on, plus one; 0 while it is asleep
    WITHDRAWN = 50  #: whether tensors of this rank that others may read can have changed: an operation has failed here
    #: for single copy (``_single_copy.c``): the process, a random number in its memory and the address of that, and
    #: whether this rank can read the memory of all others: 0 not known yet, 1 yes, 2 no
    PROCESS = 51
    SECRET = 52
    SECRET_AT = 53
    READS = 54
    #: the CPU that this rank has last called on, plus one, and times MOVE the number of its moves to another CPU, see
    #: ``_pace.c``
    CALLER = 55


MOVE: Final = 1 << 32


@final
class RecordWord(IntEnum):
    """The words of a record, which all lie in one pair of lines: a reader fetches them at once."""

    POSTED = 0  #: the last step of this bank for which the rank has filled its slot, plus one
    CODE = 1  #: with NUMEL, the signature of the collective
    NUMEL = 2
    HISTORY = 3  #: a hash of all collectives before
    #: the first word of the data that fit here, and need no slot; or where the tensors lie that the rank lends
    INLINE = 4


@final
class State(IntEnum):
    """The lifecycle state of a rank in the comm."""

    HERE = 0
    LEFT = 1  #: closed orderly
    ABORTED = 2


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """The offsets of a segment for ``size`` ranks.

    Args:
        size: number of ranks.
        chunk: bytes of a slot, a multiple of 64.
        banks: steps that may be in flight at once.
        ring: bytes of a message ring, a multiple of 64.
    """

    size: int
    chunk: int
    banks: int
    ring: int
    _slots: int = field(init=False)  # where the slots start
    _results: int = field(init=False)
    _rings: int = field(init=False)
    _ring_stride: int = field(init=False)

    def __post_init__(self) -> None:
        slots = rounded_up(self.header(self.banks, 0, 0) * WORD, 4096)
        results = slots + self.banks * self.size * self.chunk
        rings = rounded_up(results + self.banks * self.size * self.piece, 4096)
        starts = {"_slots": slots, "_results": results, "_rings": rings, "_ring_stride": 2 * LINE + self.ring}
        for name, start in starts.items():
            object.__setattr__(self, name, start)

    @property
    def piece(self) -> int:
        """Bytes of a result: one rank's part of a chunk, plus room for one element."""
        return rounded_up(self.chunk // self.size + 16)

    def word(self, rank: int, word: int) -> int:
        """Index of a rank's word among all words of the segment."""
        return (rank * BLOCK) // WORD + word

    @property
    def inline(self) -> int:
        """Bytes that fit into a record."""
        return (RECORD - RecordWord.INLINE) * WORD

    @property
    def inline_part(self) -> int:
        """Bytes that fit into a record for each rank: whole words, so that each rank's elements are aligned."""
        return self.inline // self.size // WORD * WORD

    def record(self, bank: int, rank: int) -> int:
        """Index of the first word of a record."""
        return self.size * BLOCK // WORD + (bank * self.size + rank) * RECORD

    def header(self, bank: int, rank: int, part: int) -> int:
        """Index of the first word of a header; each slot has one header per reading rank."""
        return self.record(self.banks, 0) + ((bank * self.size + rank) * self.size + part) * HEADER

    def slot(self, bank: int, rank: int) -> int:
        """Start of a rank's slot."""
        return self._slots + (bank * self.size + rank) * self.chunk

    def result(self, bank: int, rank: int) -> int:
        """Start of a rank's result."""
        return self._results + (bank * self.size + rank) * self.piece

    def ring_start(self, source: int, destination: int) -> int:
        """Start of the ring from ``source`` to ``destination``: one line each for head and tail, then the bytes."""
        return self._rings + (source * self.size + destination) * self._ring_stride

    @property
    def total(self) -> int:
        """Bytes of the segment."""
        return self._rings + self.size * self.size * self._ring_stride


def rounded_up(nbytes: int, to: int = LINE) -> int:
    """``nbytes``, rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to
