"""Agreed ordering: tasks on different ranks issue operations in any order, and all ranks run them in one order.

Each rank has an :class:`Announcer`; rank 0 also has the :class:`OrderCoordinator`. An Announcer *announces* the
operations that its rank has issued. The OrderCoordinator pairs the announcements of all ranks by tag, and under one tag
in the order in which each rank issued them. An operation is *ready* once every rank has announced it, and the
OrderCoordinator then *decides* it: the decisions, in the order in which the operations became ready, cut into batches,
are one message for all ranks.

The transport keeps the order of messages from one rank to another; messages may take any time, and no other order is
needed. The protocol has no timer: the transport calls ``message()`` after new input, and sends the result unless it is
None.

Guarantees:

- All ranks receive the same operations in the same order and the same batches.
- An operation is decided as soon as all ranks have announced it, regardless of incomplete ones.
- Two operations that do not fit each other are detected when the second is announced, and every rank gets the error.
- An operation that was decided before is announced and decided by its id, usually in one byte.
- Work is proportional to the number of new operations, memory to the number of undecided ones, plus :data:`CAPACITY`
  operations with ids.
- A rank may have at most :data:`UNDECIDED` undecided operations: the OrderCoordinator rejects as a whole any
  message that exceeds this limit. An operation takes some hundred bytes there, at worst 6 KiB and 8 bytes per rank.

Why an announced id is always known: the OrderCoordinator evicts an id once it has assigned ``capacity`` later ones. It
assigns an id only with a decision, and decides only operations that this rank, too, has announced. While ``n``
operations of this rank are announced and their decisions not received, the OrderCoordinator is therefore at most ``n``
ids ahead of this rank, and this rank announces in full every operation whose id those ``n`` decisions could evict. (If
the OrderCoordinator still has an id for the operation, the decision uses that id.)

This module uses no event loop, clock, thread or transport.
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
    MessageReader,
    MessageWriter,
    Mismatch,
    OpRequest,
    OrderMessageError,
    ResponseCache,
    op_request,
)

UNDECIDED: Final = 1 << 17  # operations of one rank; a rank that awaits its operations has some thousands

T = TypeVar("T")


@final
class Announcer(Generic[T]):
    """One rank's side: accepts the rank's operations and returns them in the agreed order.

    Args:
        capacity: number of operations with an id; the same on all ranks.
    """

    __slots__ = ("_book", "_lines", "_news", "_unheard")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._book = ResponseCache(capacity)
        self._lines: dict[str, deque[_PendingItem[T]]] = {}  # undecided operations, by tag
        self._news: list[_PendingItem[T]] = []
        self._unheard = 0  # operations announced whose decisions were not received

    def issue(self, tag: str, what: tuple[int, int], text: str, nbytes: int, item: T) -> None:
        """Add an operation.

        Args:
            tag: operations under one tag are paired in the order in which each rank issues them.
            what: two 64-bit words that are equal if operations fit each other.
            text: the description of the operation in a mismatch.
            nbytes: the size that counts in a batch; the largest of all ranks' sizes is used.
            item: the object that :meth:`hear` returns for the operation.

        Raises: ValueError: the tag is too long.
        """
        said = (tag, what, text, nbytes)
        if said not in self._book.ids:  # a cached operation was validated before
            said = op_request(*said)
        op = _PendingItem(said, item)
        line = self._lines.get(tag)
        if line is None:
            line = self._lines[tag] = deque()
        line.append(op)
        self._news.append(op)

    def message(self) -> bytes | None:
        """An announcement of the operations issued since the last call."""
        if not self._news:
            return None
        writer = MessageWriter()
        ids = self._book.ids
        oldest = self._book.oldest(self._unheard)  # the OrderCoordinator reads a whole message before it decides on it
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
        """The decided items, in order, by batches.

        Raises:
            Mismatch: the OrderCoordinator's last message: operations do not fit each other.
            OrderMessageError: no OrderCoordinator of this agreement wrote the message. The Announcer is unusable
                afterwards.
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
            raise OrderMessageError("a batch is empty")
        batches.append(batch)
        return batches

    def outstanding(self, tag: str) -> int:
        """The number of operations under ``tag`` that this rank has issued and that are not decided here."""
        return len(self._lines.get(tag, ()))

    @property
    def undecided(self) -> str | None:
        """The text of an operation that this rank has issued and that is not decided here, if there is one."""
        return next((line[0].said[2] for line in self._lines.values()), None)

    def _decided(self, tag: str) -> _PendingItem[T]:
        line = self._lines.get(tag)
        if line is None or not line[0].announced:
            raise OrderMessageError(f"it decides on {tag!r}, under which this rank has announced nothing more")
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
    """The coordinator's side: receives the announcements of all ranks, its own too, and decides.

    Args:
        size: number of ranks.
        max_ops, max_bytes: limits of a batch; a larger operation is a batch by itself. None: no limit.
        capacity: the same as that of the Announcers.
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
        self._lines: dict[str, _TagQueue] = {}  # operations that are not ready, by tag
        self._heard = [0] * size  # number of operations that each rank has announced and whose decisions were not sent
        self._complete = 0  # the number of these operations that all ranks have announced
        self._ready: list[OpRequest] = []
        self._mismatch: Mismatch | None = None
        self._told = False

    def hear(self, rank: int, message: bytes) -> None:
        """Add an Announcer's announcements; ignored after a mismatch.

        Raises: OrderMessageError: no Announcer of this agreement wrote the message, or the rank has too many undecided
        operations. No part of the message was used.
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
                if not line.waiting:  # all ranks have announced equally many
                    del self._lines[tag]
                self._ready.append(op.said)

    def message(self) -> bytes | None:
        """The decisions since the last call, for all ranks. A mismatch replaces all decisions not sent yet."""
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
        """The text of an operation that only some ranks have announced, if there is one."""
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
                raise OrderMessageError(f"it has announced more than {UNDECIDED} operations that are undecided")
            if token < FULL:
                raise OrderMessageError("a rank announces a decision, and only the coordinator decides")
            found.append(self._book.known(token) if token >= 0 else reader.announced())
        if not found:
            raise OrderMessageError("it announces nothing")
        return found


@final
class _TagQueue:
    """The operations under one tag that only some ranks have announced."""

    __slots__ = ("turns", "waiting")

    def __init__(self, size: int) -> None:
        self.turns = [0] * size  # number of operations that each rank has announced
        self.waiting: dict[int, _Unready] = {}  # by position under the tag


@final
class _Unready:
    """An operation that only some ranks have announced."""

    __slots__ = ("missing", "rank", "said")

    def __init__(self, said: OpRequest, rank: int, missing: int) -> None:
        self.said = said
        self.rank = rank  # the first rank that announced it
        self.missing = missing  # number of ranks that have not announced it
