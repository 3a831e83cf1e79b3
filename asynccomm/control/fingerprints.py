"""Compares the fingerprints of all ranks of a comm, to find ranks that issue different collectives. Pure.

A fingerprint is the number of a collective, the two words of its signature (``ops.signature``), and the length of its
batch if it is the first of one. A table keeps a fingerprint only until all ranks have sent theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple, final

OPEN: Final = 1 << 16  # collectives by which a rank may be ahead of another; beyond, the oldest are not checked
COMMS: Final = 1024  # tables that are kept

Fingerprint = tuple[int, int, int, int]  # number, two words, length of the batch


class FingerprintMismatch(NamedTuple):
    """Two ranks with different collectives under one number."""

    seq: int
    rank: int
    other: int


@final
class FingerprintTable:
    """The fingerprints of one comm."""

    __slots__ = ("_differs", "_open", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._open: OrderedDict[int, tuple[Fingerprint, int, set[int]]] = OrderedDict()
        self._differs = False

    def take(self, rank: int, fingerprints: list[Fingerprint]) -> FingerprintMismatch | None:
        """Compare the fingerprints of ``rank``. Returns the first mismatch of the comm, once."""
        for one in fingerprints:
            if self._differs:
                return None
            seq = one[0]
            entry = self._open.get(seq)
            if entry is None:
                if self._size > 1:
                    self._open[seq] = one, rank, {rank}
                    if len(self._open) > OPEN:
                        self._open.popitem(last=False)
                continue
            first, whose, seen = entry
            if first != one:
                self._differs = True
                self._open.clear()
                return FingerprintMismatch(seq, whose, rank)
            seen.add(rank)
            if len(seen) == self._size:
                del self._open[seq]
        return None


@final
class FingerprintTables:
    """The fingerprint tables of all comms of a job, at its root."""

    def __init__(self) -> None:
        self._comms: OrderedDict[str, FingerprintTable] = OrderedDict()

    def take(self, key: str, rank: int, size: int, fingerprints: list[Fingerprint]) -> FingerprintMismatch | None:
        """As :meth:`FingerprintTable.take`."""
        table = self._comms.get(key)
        if table is None:
            table = self._comms[key] = FingerprintTable(size)
            if len(self._comms) > COMMS:
                self._comms.popitem(last=False)
        return table.take(rank, fingerprints)

    def forget(self, key: str) -> None:
        """Drop the table of comm ``key``, which some rank has closed."""
        self._comms.pop(key, None)
