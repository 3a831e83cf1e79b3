"""One rank's view of the part of a segment that collectives use: whose slots are filled, and what they hold.

Every collective takes some steps, the same number on all ranks; steps are numbered through the life of the comm. Where
the number is known only once it is under way, it begins with one and is extended when the others are known. In a step
each rank fills its slot and *posts* it, reads what it needs of the others' and *finishes*. In between it may post
a *result*, which the others read too. A slot may be filled again once all have finished the step that used it last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

import torch
from torch import Tensor

from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.segment import HEADER, Layout, Word
from asynccomm.backends.shm.signature import Signature, describe, differing_layout, signature
from asynccomm.errors import CollectiveMismatchError
from asynccomm.ops import Barrier, Op

__all__ = ["Board"]

MIX: Final = 0x9E3779B97F4A7C15  # any odd number whose bits are well mixed
MASK: Final = (1 << 64) - 1
CACHED_VIEWS: Final = 256  # of parts of slots


@final
class Board:
    """Steps of collectives, seen by rank ``rank``.

    Args:
        words, data: the whole segment as 64-bit words and as bytes.
        notify: called after something was posted or finished: others may be asleep for it.
    """

    def __init__(
        self, rank: int, layout: Layout, words: memoryview, data: Tensor, fence: Fence, notify: Callable[[], None]
    ) -> None:
        self.rank = rank
        self.size = layout.size
        self.others = [r for r in range(layout.size) if r != rank]  #: all ranks but this one
        self.layout = layout
        self.chunk = layout.chunk
        self.step = 0  #: the first step of the next collective
        self.signature: Signature = (0, 0)  #: of the collective under way
        self._op: Op = Barrier()  # the same, for errors
        self._history = 0  # a hash of all collectives before it
        self.number = 0  #: of that collective on the comm, for errors
        self._banks = layout.banks
        self._words = words
        self._data = data
        self._order = fence.order
        self._notify = notify
        self._reduced = layout.word(rank, Word.REDUCED)
        self._finished = layout.word(rank, Word.FINISHED)
        self._all_posted = [layout.word(r, Word.POSTED) for r in range(layout.size)]
        self._all_reduced = [layout.word(r, Word.REDUCED) for r in self.others]
        self._all_finished = [layout.word(r, Word.FINISHED) for r in range(layout.size)]
        self._what = [[layout.what(r, bank) for r in range(layout.size)] for bank in range(layout.banks)]
        self._free = layout.banks  # steps below are known to be free
        self._views: dict[tuple[torch.dtype, int, int, int], list[Tensor]] = {}
        base, ranks, banks = data.data_ptr(), range(layout.size), range(layout.banks)
        self._headers = [[layout.header(bank, rank, 0) for rank in ranks] for bank in banks]
        self._slot_addresses = [[base + layout.slot(bank, rank) for rank in ranks] for bank in banks]
        self._result_addresses = [[base + layout.result(bank, rank) for rank in ranks] for bank in banks]
        self._slots: dict[tuple[torch.dtype, int, int], Tensor] = {}
        self._results: dict[tuple[torch.dtype, int, int], Tensor] = {}

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin(self, number: int, op: Op, steps: int) -> int:
        """Take ``steps`` steps for collective ``number``; returns the first."""
        first = self.step
        self.step += steps
        self.number = number
        code, numel = self.signature
        self._history = (self._history * MIX + code * 31 + numel) & MASK
        self.signature = signature(op)
        self._op = op
        return first

    def extend(self, steps: int) -> None:
        """Take ``steps`` more steps for the collective that was begun last; all ranks do, and before the next one."""
        self.step += steps

    def free(self, step: int) -> bool:
        """Whether this rank may fill its slot for ``step``: nobody reads what it held before."""
        if step < self._free:
            return True
        words = self._words
        self._free = min([words[i] for i in self._all_finished]) + self._banks
        self._order()  # what is written now stays behind the readers' last look
        return step < self._free

    def post(self, step: int) -> None:
        """Say that the slot of ``step`` is filled."""
        words = self._words
        what = self._what[step % self._banks][self.rank]
        words[what], words[what + 1] = self.signature
        words[what + 2] = self._history
        self._order()
        words[self._all_posted[self.rank]] = step + 1
        self._notify()

    def posted(self, step: int, ranks: Sequence[int]) -> bool:
        """Whether ``ranks`` have filled their slots of ``step``.

        Raises: CollectiveMismatchError if one has filled it for something else.
        """
        words, posted = self._words, self._all_posted
        for rank in ranks:
            if words[posted[rank]] <= step:
                return False
        self._order()
        code, numel = self.signature
        history = self._history
        what = self._what[step % self._banks]
        for rank in ranks:
            i = what[rank]
            if words[i] != code or words[i + 1] != numel or words[i + 2] != history:
                raise self._mismatch(rank, step)
        return True

    def post_result(self, step: int) -> None:
        """Say that the result of ``step`` is filled."""
        self._order()
        self._words[self._reduced] = step + 1
        self._notify()

    def results_posted(self, step: int) -> bool:
        """Whether all have filled their results of ``step``."""
        words = self._words
        for i in self._all_reduced:
            if words[i] <= step:
                return False
        self._order()
        return True

    def finish(self, step: int) -> None:
        """Say that this rank reads nothing of ``step`` any more."""
        self._order()
        self._words[self._finished] = step + 1
        self._notify()

    def behind(self, rank: int) -> bool:
        """Whether ``rank`` has still to take part in a collective that was begun here."""
        return bool(self._words[self._all_posted[rank]] < self.step)

    def _mismatch(self, rank: int, step: int) -> CollectiveMismatchError:
        i = self._what[step % self._banks][rank]
        words = self._words[i], self._words[i + 1]
        theirs = describe(words)
        if words == self.signature:  # an earlier one differed, that did not have to wait
            theirs += ", and the ranks differed in a collective before it"
        elif differing_layout(words, self.signature):
            theirs += ", divided otherwise"
        return self.mismatch(rank, theirs)

    def mismatch(self, rank: int, theirs: str) -> CollectiveMismatchError:
        """The error for the collective under way, where ``rank`` has something else."""
        return CollectiveMismatchError(self.number, self.rank, str(self._op), rank, theirs)

    # -- memory -------------------------------------------------------------------------------------------------------

    def slot(self, dtype: torch.dtype, step: int, rank: int) -> Tensor:
        """The whole slot of a rank, as a vector of ``dtype``."""
        key = (dtype, step % self._banks, rank)
        view = self._slots.get(key)
        if view is None:
            start = self.layout.slot(key[1], rank)
            view = self._slots[key] = self._data[start : start + self.chunk].view(dtype)
        return view

    def result(self, dtype: torch.dtype, step: int, rank: int) -> Tensor:
        """The whole result of a rank, as a vector of ``dtype``."""
        key = (dtype, step % self._banks, rank)
        view = self._results.get(key)
        if view is None:
            start = self.layout.result(key[1], rank)
            view = self._results[key] = self._data[start : start + self.layout.piece].view(dtype)
        return view

    def slot_address(self, step: int, rank: int) -> int:
        """Where a rank's slot begins in this process."""
        return self._slot_addresses[step % self._banks][rank]

    def result_address(self, step: int, rank: int) -> int:
        """Where a rank's result begins in this process."""
        return self._result_addresses[step % self._banks][rank]

    def put(self, step: int, part: int, header: tuple[int, int, int]) -> None:
        """Write the header of a part of this rank's slot: three 64-bit numbers. To be posted with the slot."""
        words, i = self._words, self._headers[step % self._banks][self.rank] + part * HEADER
        words[i], words[i + 1], words[i + 2] = header

    def get(self, step: int, rank: int, part: int) -> tuple[int, int, int]:
        """The header of a part of a slot that was posted."""
        words, i = self._words, self._headers[step % self._banks][rank] + part * HEADER
        return words[i], words[i + 1], words[i + 2]

    def parts(self, dtype: torch.dtype, step: int, start: int, n: int) -> Sequence[Tensor]:
        """Elements ``start`` to ``start + n`` of every rank's slot. Cached: operations repeat themselves."""
        key = (dtype, step % self._banks, start, n)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= CACHED_VIEWS:
                self._views.clear()
            views = [self.slot(dtype, step, rank)[start : start + n] for rank in range(self.size)]
            self._views[key] = views
        return views
