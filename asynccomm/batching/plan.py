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

from collections.abc import Sequence
from typing import Final, final

from torch import Tensor

from asynccomm.backends.regions import AccessSet, Region, RegionSet, disjoint, regions
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

MERGED_BYTES: Final = 1 << 20  # of one operation that is merged, unless the backend says otherwise

Batch = list[list[int]]  # lots: the numbers of operations that move as one


# an operation, and the memory that it reads and writes on this rank
Item = tuple[Op, Sequence[Region], Sequence[Region]]


def item_of(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], given: Sequence[Tensor] = ()) -> Item:
    """Of an operation on these tensors, inputs and outputs being the same object where it works in place.

    Args:
        given: what it reads besides: the tensors of its parcels, and those that its inputs are copies of.
    """
    if inputs is outputs and len(inputs) == 1 and (tensor := inputs[0]).is_contiguous():  # the usual case, in short
        start, nbytes = tensor.data_ptr(), tensor.nbytes
        return op, (), ((start, start + nbytes, ()),) if nbytes else ()
    writes = regions(outputs)
    if inputs is outputs and not given:
        return op, (), writes
    return op, regions((*inputs, *given)), writes


@final
class BatchLimiter:
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
    fused_ops: dict[object, list[int]] = {}
    meter = BatchLimiter(max_ops, max_bytes)
    limited = meter.limited
    sorts: dict[int, object] = {}  # of operations that are shared by many calls
    for i, (op, _, _) in enumerate(items):
        if i in cuts or (limited and not meter.admits(op)):
            batches.append(list(fused_ops.values()))
            fused_ops = {}
            meter.clear()
        sort = sorts.get(id(op), sorts)
        if sort is sorts:
            sort = sorts[id(op)] = fusion_key(op, merged_bytes)
        if sort is None:
            fused_ops[i] = [i]
        elif (fused := fused_ops.get(sort)) is None:
            fused_ops[sort] = [i]
        else:
            fused.append(i)
        if limited:
            meter.count(op)
    if fused_ops:
        batches.append(list(fused_ops.values()))
    return batches


def fusion_key(op: Op, merged_bytes: int = MERGED_BYTES) -> object:
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
    """Whether nothing that is written is touched by anything else, as far as is quickly seen."""
    read: list[Region] = []
    written: list[Region] = []
    for op, reads, writes in items:
        written += writes
        if reads:
            (written if isinstance(op, Broadcast) else read).extend(reads)
    return disjoint(read, written)


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
    messages, others = AccessSet(), AccessSet()
    for i, item in enumerate(items):
        op, *access = item
        apart = (messages, others) if op.p2p else (messages,)
        if any(accesses.conflicts(*access) for accesses in apart):
            other = next(before for before in items[:i] if (before[0].p2p or op.p2p) and conflict(item, before))
            raise _shared(*(item, other) if op.p2p else (other, item))
        (messages if op.p2p else others).add(*access)


def check_apart(items: Sequence[Item]) -> None:
    """Raise ValueError if any of ``items``, which one call has sent together, share memory that is written."""
    if _disjoint(items):
        return
    before = AccessSet()
    for i, item in enumerate(items):
        if before.conflicts(*item[1:]):
            raise _shared(item, next(other for other in items[:i] if conflict(item, other)))
        before.add(*item[1:])


def _shared(item: Item, other: Item) -> ValueError:
    return ValueError(
        f"{item[0]} shares memory with {other[0]}, which is sent together with it; await one of them before the other "
        f"is called"
    )


def conflict(one: Item, other: Item) -> bool:
    """Whether one of them writes what the other reads or writes."""
    accesses = AccessSet()
    accesses.add(*one[1:])
    return accesses.conflicts(*other[1:])


def on_all_ranks(item: Item) -> Item:
    """As it counts on all ranks."""
    op, reads, writes = item
    return (op, (), [*reads, *writes]) if isinstance(op, Broadcast) else item


@final
class _Memory:
    """What the operations of the batch under way read and write."""

    def __init__(self) -> None:
        self._accesses = AccessSet()
        self._broadcast: dict[int, RegionSet] = {}  # by root: written by broadcasts, and by nothing else

    def conflicts(self, item: Item) -> bool:
        """Whether ``item`` must come after what is there."""
        op, reads, writes = on_all_ranks(item)
        if self._accesses.conflicts(reads, writes):
            return True
        root = op.root if isinstance(op, Broadcast) else None
        touched = [*reads, *writes]
        return any(written.overlaps(touched) for other, written in self._broadcast.items() if other != root)

    def add(self, item: Item) -> None:
        op, reads, writes = on_all_ranks(item)
        if isinstance(op, Broadcast):
            self._broadcast.setdefault(op.root, RegionSet()).add(writes)
        else:
            self._accesses.add(reads, writes)


# those with which a rank may touch memory that others know nothing of; of the last two, if the shares are uneven
_ONE_SIDED: Final[frozenset[type[Op]]] = frozenset(
    {Gather, Scatter, Reduce, AllToAll, Parcels, AllGather, ReduceScatter}
)
