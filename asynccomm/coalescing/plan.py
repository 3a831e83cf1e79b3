"""From the operations that a scope has held to batches: pure, and the same on all ranks.

A batch takes effect all at once, so what is in it must not depend on one another: it ends before an operation that
touches memory which an earlier one of the batch writes, or writes what an earlier one reads. Within a batch there is
no order among collectives, so those of one sort become one *lot*, which moves as one vector.

Every rank has to come to the same batches. All that is looked at here is therefore either the same everywhere (the
operations), or is so in any program whose ranks do the same: which operations share memory. Where ranks have different
parts in an operation, the rule is wider than this rank's own memory would need:

- ``broadcast`` counts as writing its tensor on every rank; but two of one root may write the same memory, as on the
  root they only read it;
- ``reduce``, ``gather`` and ``scatter``, which on the root may use memory that the others do not know, uneven
  operations, of which a rank may have an empty share, and parcels, whose memory is not known yet, are batches by
  themselves.

Messages are each rank's own business. They go with the batch under way, in their order, and neither end it nor count.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, final

from torch import Tensor

from asynccomm.backends.regions import Span, span
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    Op,
    Parcels,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)

__all__ = ["Batch", "Item", "Meter", "Use", "check_messages", "conflict", "everywhere", "item_of", "plan", "sort_of"]

MERGED_BYTES: Final = 1 << 20  # of one operation that is merged, unless the backend says otherwise

Batch = list[list[int]]  # lots: the numbers of operations that move as one


Item = tuple[Op, Sequence[Span], Sequence[Span]]  # an operation, and the memory that it reads and writes on this rank


def item_of(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], given: Sequence[Tensor] = ()) -> Item:
    """Of an operation on these tensors, inputs and outputs being the same object where it works in place.

    Args:
        given: what it reads besides: the tensors of its parcels.
    """
    if inputs is outputs and len(inputs) == 1 and (tensor := inputs[0]).is_contiguous():  # the usual case, in short
        start, nbytes = tensor.data_ptr(), tensor.nbytes
        return op, (), ((start, start + nbytes),) if nbytes else ()
    writes = [span(tensor) for tensor in outputs if tensor.numel()]
    if inputs is outputs and not given:
        return op, (), writes
    return op, [span(tensor) for tensor in (*inputs, *given) if tensor.numel()], writes


@final
class Meter:
    """How full the batch under way is, counted in operations and bytes that are the same on all ranks.

    Args:
        max_ops, max_bytes: of a batch; None: no limit. One operation may be larger, and is a batch then.
    """

    def __init__(self, max_ops: int | None = None, max_bytes: int | None = None) -> None:
        self.limited = max_ops is not None or max_bytes is not None  #: else everything has room
        self._max_ops = float("inf") if max_ops is None else max_ops
        self._max_bytes = float("inf") if max_bytes is None else max_bytes
        self.clear()

    def clear(self) -> None:
        """Begin with the next batch."""
        self._ops = self._bytes = 0

    def admits(self, op: Op) -> bool:
        """Whether ``op`` has room in the batch under way."""
        return op.p2p or not self._ops or (self._ops < self._max_ops and self._bytes + op.nbytes <= self._max_bytes)

    def count(self, op: Op) -> bool:
        """Put ``op`` in; returns whether the batch is full now."""
        if op.p2p:
            return False
        self._ops += 1
        self._bytes += op.nbytes
        return self._ops >= self._max_ops or self._bytes >= self._max_bytes


def plan(
    items: Sequence[Item], *, max_ops: int | None = None, max_bytes: int | None = None, merged_bytes: int = MERGED_BYTES
) -> list[Batch]:
    """Batches of ``items``, as numbers; each number once. Lots stand in the order of their first operation.

    Args:
        max_ops, max_bytes: of a batch.
        merged_bytes: of an operation that may share a lot; a larger one gains nothing by that.

    Raises: ValueError if a message shares memory with anything else that is sent with it: no order is promised there.
    """
    if _disjoint(items):
        cuts = _cuts_by_kind(items)
    else:
        check_messages(items)
        cuts = _cuts_by_memory(items)
    batches: list[Batch] = []
    lots: dict[object, list[int]] = {}
    meter = Meter(max_ops, max_bytes)
    limited = meter.limited
    sorts: dict[int, object] = {}  # of operations that are shared by many calls
    for i, (op, _, _) in enumerate(items):
        if i in cuts or (limited and not meter.admits(op)):
            batches.append(list(lots.values()))
            lots = {}
            meter.clear()
        sort = sorts.get(id(op), sorts)
        if sort is sorts:
            sort = sorts[id(op)] = sort_of(op, merged_bytes)
        if sort is None:
            lots[i] = [i]
        elif (lot := lots.get(sort)) is None:
            lots[sort] = [i]
        else:
            lot.append(i)
        if limited:
            meter.count(op)
    if lots:
        batches.append(list(lots.values()))
    return batches


def sort_of(op: Op, merged_bytes: int = MERGED_BYTES) -> object:
    """What must be equal for operations to move as one; None: this one goes by itself."""
    if op.nbytes > merged_bytes:
        return None
    match op:
        case AllReduce(reduction=reduction) if reduction.factor is None:
            return AllReduce, op.dtype, reduction.type
        case ReduceScatter(reduction=reduction, counts=()) | ReduceScatterSingle(reduction=reduction) if (
            reduction.factor is None
        ):
            return ReduceScatter, op.dtype, reduction.type
        case Broadcast(root=root):
            return Broadcast, root
        case AllGather(counts=()) | AllGatherSingle():
            return AllGather
        case _:
            return None


# -- memory -----------------------------------------------------------------------------------------------------------


def _disjoint(items: Sequence[Item]) -> bool:
    """Whether nothing that is written is touched by anything else: almost always so, and quickly seen."""
    read: list[Span] = []
    written: list[Span] = []
    for op, reads, writes in items:
        written += writes
        if reads:
            (written if isinstance(op, Broadcast) else read).extend(reads)
    written.sort()
    if any(end > start for (_, end), (start, _) in pairwise(written)):
        return False
    if not read:
        return True
    spans = sorted([(start, end, False) for start, end in read] + [(start, end, True) for start, end in written])
    end = last = 0  # of all so far, and of what is written
    for start, stop, writes_it in spans:
        if start < last or (writes_it and start < end):
            return False
        if stop > end:
            end = stop
        if writes_it and stop > last:
            last = stop
    return True


def _cuts_by_kind(items: Sequence[Item]) -> set[int]:
    """Where a batch must end because ranks have different parts in what follows or has come."""
    if not _ONE_SIDED & {type(op) for op, _, _ in items}:
        return set()
    cuts = set()
    before: bool | None = None
    for i, (op, _, _) in enumerate(items):
        if not op.p2p:
            alone = isinstance(op, (Gather, Scatter, Reduce, AllToAll, Parcels)) or bool(getattr(op, "counts", ()))
            if before is not None and (alone or before):
                cuts.add(i)
            before = alone
    return cuts


def _cuts_by_memory(items: Sequence[Item]) -> set[int]:
    cuts = _cuts_by_kind(items)
    memory = _Memory()
    for i, item in enumerate(items):
        if item[0].p2p:
            continue
        if i in cuts:
            memory = _Memory()
        elif memory.conflicts(item):
            cuts.add(i)
            memory = _Memory()
        memory.add(item)
    return cuts


def check_messages(items: Sequence[Item]) -> None:
    """Raise ValueError if a message shares memory with anything else: no order is promised there."""
    if not any(op.p2p for op, _, _ in items) or _disjoint(items):
        return
    messages, others = Use(), Use()
    for item in items:
        apart = (messages, others) if item[0].p2p else (messages,)
        if any(use.conflicts(item) for use in apart):
            other = next(b for b in items if b is not item and (b[0].p2p or item[0].p2p) and conflict(item, b))
            message, other = (item, other) if item[0].p2p else (other, item)
            raise ValueError(
                f"{message[0]} shares memory with {other[0]}, which is sent together with it; await one of them "
                f"before the other is called"
            )
        (messages if item[0].p2p else others).add(item)


def conflict(one: Item, other: Item) -> bool:
    """Whether one of them writes what the other touches."""
    _, reads, writes = one
    _, others_reads, others_writes = other
    return _touch(writes, others_writes) or _touch(writes, others_reads) or _touch(reads, others_writes)


def _touch(spans: Iterable[Span], others: Sequence[Span]) -> bool:
    return any(start < end and begin < stop for start, stop in spans for begin, end in others)


def everywhere(item: Item) -> Item:
    """As it counts on all ranks."""
    op, reads, writes = item
    return (op, (), [*reads, *writes]) if isinstance(op, Broadcast) else item


@final
class _Memory:
    """What the operations of the batch under way read and write."""

    def __init__(self) -> None:
        self._read = _Spans()
        self._written = _Spans()
        self._broadcast: dict[int, _Spans] = {}  # by root: written by broadcasts, and by nothing else

    def conflicts(self, item: Item) -> bool:
        """Whether ``item`` must come after what is there."""
        op, reads, writes = everywhere(item)
        root = op.root if isinstance(op, Broadcast) else None
        touched = [*reads, *writes]
        if self._written.touch(touched) or self._read.touch(writes):
            return True
        return any(spans.touch(touched) for other, spans in self._broadcast.items() if other != root)

    def add(self, item: Item) -> None:
        op, reads, writes = everywhere(item)
        self._read.add(reads)
        if isinstance(op, Broadcast):
            self._broadcast.setdefault(op.root, _Spans()).add(writes)
        else:
            self._written.add(writes)


@final
class Use:
    """What some operations read and write on this rank."""

    def __init__(self) -> None:
        self._read = _Spans()
        self._written = _Spans()

    def conflicts(self, item: Item) -> bool:
        """Whether ``item`` writes what they use, or uses what they write."""
        _, reads, writes = item
        return self._written.touch(writes) or self._written.touch(reads) or self._read.touch(writes)

    def add(self, item: Item) -> None:
        _, reads, writes = item
        self._read.add(reads)
        self._written.add(writes)


@final
class _Spans:
    """A set of addresses, as spans that are apart."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def touch(self, spans: Iterable[Span]) -> bool:
        """Whether one of ``spans`` has an address of the set."""
        for start, end in spans:
            i = bisect_left(self._starts, end)
            if i and self._ends[i - 1] > start:
                return True
        return False

    def add(self, spans: Iterable[Span]) -> None:
        for start, end in spans:
            i = bisect_left(self._ends, start)  # the first that is not wholly before
            j = bisect_right(self._starts, end)  # the first that is wholly behind
            if i < j:
                start, end = min(start, self._starts[i]), max(end, self._ends[j - 1])
            self._starts[i:j] = [start]
            self._ends[i:j] = [end]


# those with which a rank may touch memory that others know nothing of; of the last two, if the shares are uneven
_ONE_SIDED: Final[frozenset[type[Op]]] = frozenset(
    {Gather, Scatter, Reduce, AllToAll, Parcels, AllGather, ReduceScatter}
)
