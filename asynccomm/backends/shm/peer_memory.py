"""The tensors of the other ranks in shared memory: extents of their arenas (``arena.py``), mapped for reading only.

An extent is mapped when a collective first needs it. A rank says where its tensor lies, and is believed as far as no
access leaves its file, which never shrinks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, final

from asynccomm.backends.shm.mapping import Mapping
from asynccomm.errors import BackendError

MOST_EXTENTS: Final = 1024  # of a rank that stay mapped; then all are unmapped


@final
class PeerMemory:
    """The mapped extents of all ranks. For one thread at a time.

    Args:
        arenas: by rank, a descriptor of its arena, which must stay open; empty: there are none.
    """

    def __init__(self, arenas: Sequence[int] = ()) -> None:
        self._arenas = arenas
        self._mapped: list[dict[tuple[int, int], Mapping]] = [{} for _ in arenas]

    def address(self, rank: int, start: int, nbytes: int) -> int:
        """The address of an extent of ``rank``. Raises: BackendError if there is no such extent, or no room to map it.

        The addresses of earlier extents of the rank stay valid until ``make_room``.
        """
        mapped = self._mapped[rank] if self._arenas else {}
        found = mapped.get((start, nbytes))
        if found is None:
            try:
                if not self._arenas or start + nbytes > os.fstat(self._arenas[rank]).st_size:
                    raise BackendError(f"rank {rank} has no tensor at byte {start} of its memory")
                found = mapped[start, nbytes] = Mapping(self._arenas[rank], start, nbytes, writable=False)
            except OSError as exc:
                raise BackendError(f"cannot map a tensor of rank {rank} of {nbytes} bytes: {exc.strerror}") from exc
        return found.address

    def make_room(self, rank: int) -> bool:
        """Unmap the extents of ``rank`` if there are many; returns whether that was so. Before a use of addresses."""
        if not self._arenas or len(self._mapped[rank]) < MOST_EXTENTS:
            return False
        self._mapped[rank].clear()
        return True
