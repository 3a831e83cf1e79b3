"""Agreed ordering: tasks on different ranks issue operations in any order, and all ranks run them in one.

Each rank has an :class:`Announcer`, rank 0 also the :class:`OrderCoordinator`. An Announcer *announces* what its rank
has issued. The OrderCoordinator pairs the announcements of all ranks by tag, under one tag in the order in which each
rank issued them. Once every rank has announced an operation it is *ready*, and the OrderCoordinator *decides* it: the
decisions, in the order in which the operations became ready, cut into batches, are one message for all ranks.

Whoever carries the messages keeps the order of those from one to another; they may take any time, and no other order
is needed. There is no timer: ask for a ``message()`` after there was news, and send it unless it is None.

Guarantees:

- all ranks hear the same operations in the same order and the same batches;
- an operation is decided as soon as all ranks have announced it, whatever else is missing elsewhere;
- two operations that do not fit together are found when the second is announced, and every rank hears of it;
- an operation that was decided before is announced and decided by its id, usually in one byte;
- work is proportional to what is new, memory to what is undecided, plus :data:`CAPACITY` known operations;
- a rank of whose operations more than :data:`UNDECIDED` are undecided is not listened to: the OrderCoordinator refuses
  the message, before it takes any of it. An operation takes some hundred bytes there, at worst 6 KiB and 8 bytes per
  rank.

How an id is never announced in vain. The OrderCoordinator has forgotten an id once it has given out ``capacity`` later
ones. It gives one out only with a decision, and decides only what this rank, too, has announced. So while ``n``
operations of this rank are announced and their decisions not heard, the OrderCoordinator is at most ``n`` ids ahead of
it, and this rank announces in full whatever those ``n`` could have made it forget. (An id that the OrderCoordinator
still has decides it anyway.)

Nothing here knows of loops, clocks, threads or transports.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, Generic, TypeVar, final

from asynccomm.batching.ordering.codec import (
    BATCH_END,
    CAPACITY,
    FULL,
    MISMATCH,
    GarbledError,
    MessageReader,
    MessageWriter,
    Mismatch,
    OpRequest,
    ResponseCache,
    op_request,
)

UNDECIDED: Final = 1 << 17  # operations of one rank; whoever waits for what it issued has some thousands

T = TypeVar("T")


@final
class Announcer(Generic[T]):
    """One rank's side: takes what the rank issues and gives it back in the agreed order.

    Args:
        capacity: operations that are known by an id; the same on all ranks.
    """

    __slots__ = ("_book", "_lines", "_news", "_unheard")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._book = ResponseCache(capacity)
        self._lines: dict[str, deque[_PendingItem[T]]] = {}  # what is undecided, by tag
        self._news: list[_PendingItem[T]] = []
        self._unheard = 0  # announced, but no decision was heard

    def issue(self, tag: str, what: tuple[int, int], text: str, nbytes: int, item: T) -> None:
        """Take an operation.

        Args:
            tag: whose turn it takes: the operations under one tag are paired in the order of each rank's issues.
            what: two words of 64 bits that are equal where operations fit together.
            text: the operation for people who read of a mismatch.
            nbytes: that it counts in a batch, where the rank that has most of it counts.
            item: what :meth:`hear` gives back.

        Raises: ValueError: the tag is too long.
        """
        said = (tag, what, text, nbytes)
        if said not in self._book.ids:  # those were looked at before
            said = op_request(*said)
        op = _PendingItem(said, item)
        line = self._lines.get(tag)
        if line is None:
            line = self._lines[tag] = deque()
        line.append(op)
        self._news.append(op)

    def message(self) -> bytes | None:
        """Announce what was issued since the last call."""
        if not self._news:
            return None
        writer = MessageWriter()
        ids = self._book.ids
        oldest = self._book.oldest(
            self._unheard
        )  # the OrderCoordinator reads a message as a whole, before it decides on it
        for op in self._news:
            number = ids.get(op.said)
            if number is None or number < oldest:
                writer.announced(op.said)
            else:
                writer.known(number)
            op.announced = True
        self._unheard += len(self._news)
        self._news.clear()
        return writer.written()

    def hear(self, message: bytes) -> list[list[T]]:
        """The items that were decided, in order, by batches.

        Raises:
            Mismatch: it is what the OrderCoordinator has found, and the last that is heard of it.
            GarbledError: no OrderCoordinator of this agreement said this. The Announcer is of no more use.
        """
        batches: list[list[T]] = []
        batch: list[T] = []
        reader = MessageReader(message)
        for token in reader:
            if token >= 0:
                batch.append(self._decided(self._book.known(token)[0]).item)
            elif token == FULL:
                op = self._decided(reader.tag())
                self._book.add(op.said)
                batch.append(op.item)
            elif token == BATCH_END and batch:
                batches.append(batch)
                batch = []
            elif token == MISMATCH:
                raise reader.mismatch()
            else:
                break
        if not batch:
            raise GarbledError("a batch is empty")
        batches.append(batch)
        return batches

    def outstanding(self, tag: str) -> int:
        """How many operations under ``tag`` this rank has issued whose decision it has not heard."""
        return len(self._lines.get(tag, ()))

    @property
    def undecided(self) -> str | None:
        """The text of an operation that this rank has issued and whose decision it has not heard, if there is one."""
        return next((line[0].said[2] for line in self._lines.values()), None)

    def _decided(self, tag: str) -> _PendingItem[T]:
        line = self._lines.get(tag)
        if line is None or not line[0].announced:
            raise GarbledError(f"it decides on {tag!r}, under which this rank has announced nothing more")
        op = line.popleft()
        if not line:
            del self._lines[tag]
        self._unheard -= 1
        return op


@final
class _PendingItem(Generic[T]):
    """An operation of this rank."""

    __slots__ = ("announced", "item", "said")

    def __init__(self, said: OpRequest, item: T) -> None:
        self.said = said
        self.item = item
        self.announced = False


@final
class OrderCoordinator:
    """The coordinator's side: hears all ranks, its own too, and decides.

    Args:
        size: number of ranks.
        max_ops, max_bytes: of a batch; an operation that is larger goes alone. None: no limit.
        capacity: as that of the Announcers.
    """

    __slots__ = (
        "_book",
        "_complete",
        "_heard",
        "_lines",
        "_max_bytes",
        "_max_ops",
        "_mismatch",
        "_ready",
        "_size",
        "_told",
    )

    def __init__(
        self, size: int, max_ops: int | None = None, max_bytes: int | None = None, capacity: int = CAPACITY
    ) -> None:
        self._size = size
        self._max_ops = math.inf if max_ops is None else max_ops
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._book = ResponseCache(capacity)
        self._lines: dict[str, _TagQueue] = {}  # what is not ready, by tag
        self._heard = [0] * size  # operations that each rank has announced and that were not told as decided
        self._complete = 0  # of these, how many all ranks have announced
        self._ready: list[OpRequest] = []
        self._mismatch: Mismatch | None = None
        self._told = False

    def hear(self, rank: int, message: bytes) -> None:
        """Take an Announcer's announcements; after a mismatch, not any more.

        Raises: GarbledError: no Announcer of this agreement said this, or too much is undecided. Nothing of it was
            taken.
        """
        assert 0 <= rank < self._size, f"there is no rank {rank}"
        if self._mismatch is not None:
            return
        announced = self._announced(message, UNDECIDED + self._complete - self._heard[rank])
        self._heard[rank] += len(announced)
        for said in announced:
            tag = said[0]
            line = self._lines.get(tag)
            if line is None:
                line = self._lines[tag] = _TagQueue(self._size)
            turn = line.turns[rank]
            line.turns[rank] = turn + 1
            op = line.waiting.get(turn)
            if op is None:
                op = line.waiting[turn] = _Unready(said, rank, self._size)
            elif op.said is not said:
                if op.said[1] != said[1]:
                    self._mismatch = Mismatch(tag, op.rank, op.said[2], rank, said[2])
                    self._ready.clear()
                    return
                op.said = (*op.said[:3], max(op.said[3], said[3]))
            op.missing -= 1
            if not op.missing:
                del line.waiting[turn]
                self._complete += 1
                if not line.waiting:  # so all ranks have taken the same number of turns
                    del self._lines[tag]
                self._ready.append(op.said)

    def message(self) -> bytes | None:
        """What was decided since the last call, for all ranks. A mismatch takes the place of what was not told yet."""
        writer = MessageWriter()
        if self._mismatch is not None and not self._told:
            self._told = True
            writer.mismatch(self._mismatch)
        elif self._ready:
            self._decide(writer)
        else:
            return None
        return writer.written()

    @property
    def undecided(self) -> str | None:
        """The text of an operation that some ranks have announced and others have not, if there is one."""
        for line in self._lines.values():
            for op in line.waiting.values():
                return op.said[2]
        return None

    def _decide(self, writer: MessageWriter) -> None:
        book = self._book
        ops = nbytes = 0
        for said in self._ready:
            if ops and (ops >= self._max_ops or nbytes + said[3] > self._max_bytes):
                writer.cut()
                ops = nbytes = 0
            ops += 1
            nbytes += said[3]
            number = book.ids.get(said)
            if number is not None:
                writer.known(number)
            else:
                writer.decided(said[0])
                book.add(said)
        self._ready.clear()
        self._heard = [heard - self._complete for heard in self._heard]
        self._complete = 0

    def _announced(self, message: bytes, most: int) -> list[OpRequest]:
        reader = MessageReader(message)
        found: list[OpRequest] = []
        for token in reader:
            if len(found) == most:
                raise GarbledError(f"it has announced more than {UNDECIDED} operations that are undecided")
            if token < FULL:
                raise GarbledError("a rank announces what only the coordinator decides")
            found.append(self._book.known(token) if token >= 0 else reader.announced())
        if not found:
            raise GarbledError("it announces nothing")
        return found


@final
class _TagQueue:
    """The operations under one tag that some ranks have not announced."""

    __slots__ = ("turns", "waiting")

    def __init__(self, size: int) -> None:
        self.turns = [0] * size  # operations that each rank has announced
        self.waiting: dict[int, _Unready] = {}  # by turn


@final
class _Unready:
    """An operation that some ranks have not announced."""

    __slots__ = ("missing", "rank", "said")

    def __init__(self, said: OpRequest, rank: int, missing: int) -> None:
        self.said = said
        self.rank = rank  # the first to announce it
        self.missing = missing  # ranks
