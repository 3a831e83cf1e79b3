"""The board: one rank's view of the slots that collectives exchange data through.

A collective takes the same number of steps on all ranks; steps are numbered through the life of the comm. A collective
with an unknown number of steps begins with one step, and is extended when all ranks have the number. In a
step, each rank fills its slot and *posts* it, reads the slots of other ranks, and *finishes*. In between, a rank may
post a *result*, which the others read too. A slot may be filled again when all ranks have finished the step that used
it last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from asynccomm.backends.base import HeldCall
from asynccomm.backends.shm.arena import Lent
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import HEADER, WORD, Layout, RecordWord, Word
from asynccomm.backends.shm.peer_memory import PeerMemory
from asynccomm.backends.shm.programs import Space
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import Barrier, Op
from asynccomm.ops.signature import Signature, describe, differing_layout, signature

MIX: Final = 0x9E3779B97F4A7C15  # any odd number with well-mixed bits
MASK: Final = (1 << 64) - 1
CACHED_VIEWS: Final = 4096  # views of memory of the segment
LARGEST: Final = 1 << 48  # upper limit of a number in a header: exceeds the bytes or steps of any memory


@final
class Fault(IntEnum):
    """Numbers in place of a step, for other faults of a rank than a difference; as in ``_core.h``."""

    SIZES = 1 << 62  #: plus the first step: it has announced other sizes than this rank has for it
    UNREADABLE = MASK - 2  #: the memory of its tensor cannot be read
    IMPOSSIBLE = MASK - 1  #: its tensor is smaller than the collective needs
    WITHDRAWN = MASK  #: its tensor may have changed


@final
class RankPosition:
    """The position of a rank in the sequence of collectives, and its messages; ``_core`` has it in C."""

    __slots__ = (
        "adopting",
        "alone",
        "arming",
        "calls_ahead",
        "code",
        "collective_wait",
        "dead",
        "history",
        "kept",
        "message_wait",
        "messages",
        "number",
        "numel",
        "op",
        "posted",
        "step",
    )

    def __init__(self) -> None:
        self.step: int = 0  #: the first step of the next collective
        #: the signature of the current collective
        self.code: int = 0
        self.numel: int = 0
        #: a hash of all collectives before the current one; every bit depends on the last of them
        self.history: int = 0
        self.number: int = 0  #: sequence number of the current collective on the comm, for errors
        self.op: Op = Barrier()  #: the current collective, for errors
        self.messages: int = 0  #: point-to-point operations that are pending
        self.posted: list[HeldCall] = []  #: messages that only the fast path knows of, in their order
        self.kept: int = 0  #: messages that have arrived, and that no receive was posted for
        #: seconds that the last small collective that C did not end has waited, and the last message that C did not end
        #: in its call (``spinning.waited``)
        self.collective_wait: float = 0.0
        self.message_wait: float = 0.0
        self.dead: bool = False  #: nothing is submitted any more
        #: whether the program calls messages while others are pending: waiting inside such a call would be in vain
        self.calls_ahead: bool = False
        self.alone: int = 0  #: number of the last message that was called while no other was pending
        self.arming: bool = False  #: the loop is going to call the engine
        self.adopting: bool = False  #: C has begun a message that no submission stands for yet


class Places(NamedTuple):
    """The places in segments of one layout that a rank uses: indices of words, and starts in bytes."""

    reduced: int
    finished: int
    all_reduced: list[int]  #: of the other ranks
    all_finished: list[int]  #: by rank
    withdrawn: list[tuple[int, int]]  #: the other ranks, and their words
    records: list[list[int]]  #: by bank and rank, as the following
    headers: list[list[int]]
    starts: dict[int, list[list[int]]]  #: by ``Space``


@lru_cache(maxsize=64)
def places(layout: Layout, rank: int) -> Places:
    """The places that ``rank`` uses; cached, because the comms of a process are often alike."""
    ranks, others = range(layout.size), [other for other in range(layout.size) if other != rank]

    def table(place: Callable[[int, int], int]) -> list[list[int]]:
        return [[place(bank, each) for each in ranks] for bank in range(layout.banks)]

    return Places(
        layout.word(rank, Word.REDUCED),
        layout.word(rank, Word.FINISHED),
        [layout.word(other, Word.REDUCED) for other in others],
        [layout.word(each, Word.FINISHED) for each in ranks],
        [(other, layout.word(other, Word.WITHDRAWN)) for other in others],
        table(layout.record),
        table(lambda bank, each: layout.header(bank, each, 0)),
        {
            Space.SLOT: table(layout.slot),
            Space.RESULT: table(layout.result),
            Space.RECORD: table(lambda bank, each: (layout.record(bank, each) + RecordWord.INLINE) * WORD),
        },
    )


@final
class Board:
    """The steps of collectives, as rank ``rank`` sees them.

    Args:
        state: a new ``RankPosition``, or its form in C.
        words, data: the whole segment as 64-bit words and as bytes.
        notify: called after each post and finish, for which other ranks may be asleep.
        peers: the tensors that the other ranks lend.
    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        words: memoryview,
        data: Tensor,
        fence: Fence,
        notify: Callable[[], None],
        state: Any = None,
        peers: PeerMemory | None = None,
    ) -> None:
        self.rank = rank
        self.size: int = layout.size
        self.others: list[int] = [r for r in range(layout.size) if r != rank]  #: all ranks but this one
        self.layout = layout
        self.chunk: int = layout.chunk
        self.state: RankPosition = RankPosition() if state is None else state
        self.peers: PeerMemory = PeerMemory() if peers is None else peers
        self._banks = layout.banks
        self._words = words
        self._data = data
        self._base = data.data_ptr()
        self._order = fence.order
        self._notify = notify
        self._free = layout.banks  # the slots of all steps below this one are known to be free
        place = places(layout, rank)
        self._reduced, self._finished, self._withdrawn = place.reduced, place.finished, place.withdrawn
        self._all_reduced, self._all_finished = place.all_reduced, place.all_finished
        self._records, self._headers, self._starts = place.records, place.headers, place.starts
        self._elements: dict[tuple[int, torch.dtype, int, int, int, int], Tensor] = {}

    @property
    def signature(self) -> Signature:
        """The signature of the current collective."""
        return self.state.code, self.state.numel

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin(self, number: int, op: Op, steps: int, words: Signature | None = None) -> int:
        """Take ``steps`` steps for collective ``number``; returns the first.

        Args:
            words: the signature to use instead of the operation's.
        """
        state = self.state
        first = state.step
        state.step += steps
        state.number = number
        state.history = (state.history + state.code * 31 + state.numel) * MIX & MASK
        state.code, state.numel = signature(op) if words is None else words
        state.op = op
        return first

    def extend(self, steps: int) -> None:
        """Take ``steps`` more steps for the current collective; all ranks do so before they begin the next."""
        self.state.step += steps

    def free(self, step: int) -> bool:
        """Whether this rank may fill its slot for ``step``: all ranks have finished the step that used it before."""
        if step < self._free:
            return True
        words = self._words
        self._free = min([words[i] for i in self._all_finished]) + self._banks
        self._order()  # later writes stay behind the readers' last reads
        return step < self._free

    def post(self, step: int, lent: Sequence[int] = ()) -> None:
        """Publish that this rank's slot of ``step`` is filled.

        Args:
            lent: where this rank's tensors lie, for the first step of a collective that may lend them.
        """
        words = self._words
        record = self._records[step % self._banks][self.rank]
        state = self.state
        for k, word in enumerate(lent, record + RecordWord.INLINE):
            words[k] = word
        words[record + RecordWord.CODE], words[record + RecordWord.NUMEL] = state.code, state.numel
        words[record + RecordWord.HISTORY] = state.history
        self._order()
        words[record] = step + 1
        self._notify()

    def posted(self, step: int, ranks: Sequence[int]) -> bool:
        """Whether ``ranks`` have filled their slots of ``step``.

        Raises: CollectiveMismatchError if a rank has filled its slot for another collective.
        """
        words, records = self._words, self._records[step % self._banks]
        for rank in ranks:
            if words[records[rank]] <= step:
                return False
        self._order()
        code, numel, history = self.state.code, self.state.numel, self.state.history
        for rank in ranks:
            i = records[rank]
            if words[i + 1] != code or words[i + 2] != numel or words[i + 3] != history:
                raise self.difference(rank, step)
        return True

    def lent(self, rank: int, step: int) -> tuple[Lent, Lent]:
        """Where the tensors of a rank lie that has posted ``step``: those for its slots, and for its results."""
        start = self._records[step % self._banks][rank] + RecordWord.INLINE
        words = self._words[start : start + 6].tolist()
        return Lent(*words[:3]), Lent(*words[3:])

    def finished(self, step: int, ranks: Sequence[int]) -> bool:
        """Whether ``ranks`` have finished reading in ``step``."""
        words = self._words
        for rank in ranks:
            if words[self._all_finished[rank]] <= step:
                return False
        self._order()  # later writes of lent tensors stay behind the readers' last reads
        return True

    def check_lent(self) -> None:
        """Raise the error for a rank that has withdrawn its tensors, behind the last read of them."""
        self._order()
        for rank, word in self._withdrawn:
            if self._words[word]:
                raise self.difference(rank, Fault.WITHDRAWN)

    def post_result(self, step: int) -> None:
        """Publish that this rank's result of ``step`` is filled."""
        self._order()
        self._words[self._reduced] = step + 1
        self._notify()

    def results_posted(self, step: int) -> bool:
        """Whether all ranks have filled their results of ``step``."""
        words = self._words
        for i in self._all_reduced:
            if words[i] <= step:
                return False
        self._order()
        return True

    def finish(self, step: int) -> None:
        """Publish that this rank has finished reading in ``step``."""
        self._order()
        self._words[self._finished] = step + 1
        self._notify()

    def behind(self, rank: int) -> bool:
        """Whether ``rank`` has not posted all steps of the collectives that this rank has begun."""
        last = self.state.step - 1
        return bool(self._words[self._records[last % self._banks][rank]] <= last)

    def difference(self, rank: int, step: int) -> BrokenError:
        """The error for a rank that has filled its slot of ``step`` for another collective, or for a ``Fault``."""
        if step == Fault.WITHDRAWN:
            return BackendError(f"an operation has failed on rank {rank} while {self.state.op} read the rank's tensor")
        if step == Fault.IMPOSSIBLE:
            return BackendError(f"rank {rank} lends for {self.state.op} a tensor that cannot be")
        if step == Fault.UNREADABLE:
            return BackendError(f"the tensor that rank {rank} lends for {self.state.op} cannot be read")
        if step >= Fault.SIZES:
            return self._other_sizes(rank, step - Fault.SIZES)
        i = self._records[step % self._banks][rank]
        words = self._words[i + RecordWord.CODE], self._words[i + RecordWord.NUMEL]
        described = describe(words)
        if self._words[i + RecordWord.HISTORY] != self.state.history:  # this rank did not wait for the other one there
            described += ", and the ranks differed in a collective before it"
        elif differing_layout(words, self.signature):
            described += ", of other sizes or dtypes"
        return self.mismatch(rank, described)

    def _other_sizes(self, rank: int, first: int) -> BrokenError:
        op: Any = self.state.op
        head, body, steps = self.get(first, rank, self.rank)
        if head or body == op.receives[rank] * op.dtype.itemsize:
            return BackendError(f"rank {rank} announces for {op} what cannot be: {body} bytes in {steps} steps")
        return self.mismatch(rank, op.of_sender(body, self.rank))

    def mismatch(self, rank: int, theirs: str) -> CollectiveMismatchError:
        """The error for the current collective when ``rank`` has issued another, described by ``theirs``."""
        return CollectiveMismatchError(self.state.number, self.rank, str(self.state.op), rank, theirs)

    # -- memory -------------------------------------------------------------------------------------------------------

    def address(self, space: int, step: int, rank: int) -> int:
        """The address of a rank's memory in ``space``, in this process."""
        return self._base + self._starts[space][step % self._banks][rank]

    def elements(self, space: int, dtype: torch.dtype, step: int, rank: int, offset: int, nbytes: int) -> Tensor:
        """Bytes of a rank's memory in ``space``, as a vector of ``dtype``. Cached, because operations repeat."""
        bank = step % self._banks
        key = (space, dtype, bank, rank, offset, nbytes)
        view = self._elements.get(key)
        if view is None:
            if len(self._elements) >= CACHED_VIEWS:
                self._elements.clear()
            start = self._starts[space][bank][rank] + offset
            view = self._elements[key] = self._data[start : start + nbytes].view(dtype)
        return view

    def put(self, step: int, part: int, header: tuple[int, int, int]) -> None:
        """Write the header of a part of this rank's slot, three 64-bit numbers, before the slot is posted."""
        words, i = self._words, self._headers[step % self._banks][self.rank] + part * HEADER
        words[i], words[i + 1], words[i + 2] = header

    def get(self, step: int, rank: int, part: int) -> tuple[int, int, int]:
        """The header of a part of a posted slot. Raises: BackendError for impossible numbers."""
        words, i = self._words, self._headers[step % self._banks][rank] + part * HEADER
        header = words[i], words[i + 1], words[i + 2]
        if max(header) > LARGEST:
            raise BackendError(f"rank {rank} announces for {self.state.op} what cannot be: {header}")
        return header
