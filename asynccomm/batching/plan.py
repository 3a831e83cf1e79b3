"""The plan that turns held operations into batches: pure functions, with the same result on all ranks.

A batch takes effect all at once, so its operations must not depend on one another: a batch ends before an operation
that touches memory which an earlier operation of the batch writes, or that writes memory which an earlier one reads.
Collectives within a batch have no order, so collectives of one kind are fused and move as one vector.

Every rank has to arrive at the same batches. The planner therefore uses only facts that are the same on all ranks (the
operations), or that are so in any program whose ranks do the same (which operations share memory). Where ranks have
different parts in an operation, the rule is stricter than this rank's own memory would require:

- ``broadcast`` counts as writing its tensor on every rank. Two broadcasts from one root may write the same memory,
  though, since the root only reads it.
- ``reduce``, ``gather`` and ``scatter`` are batches by themselves, since on the root they may use memory unknown to the
  other ranks. So are uneven operations, where a rank may have an empty share, and parcels: their memory is not known
  yet.

Point-to-point operations differ from rank to rank. They are part of the current batch, in their order; they neither end
the batch nor count towards its limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from torch import Tensor

from asynccomm.backends.regions import AccessSet, Region, RegionSet, disjoint, regions
from asynccomm.batching.fusion import MERGED_BYTES, fusion_key
from asynccomm.ops import Op

UNLIMITED: Final = 1 << 62
Batch = list[list[int]]  # fused operations: the indices of operations that move as one


# an operation, and the memory that it reads and writes on this rank
Item = tuple[Op, Sequence[Region], Sequence[Region]]


def item_of(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], given: Sequence[Tensor] = ()) -> Item:
    """The planner's view of an operation; inputs and outputs are the same object if it works in place.

    Args:
        given: other tensors that it reads: those of its parcels, and those that its inputs are copies of.
    """
    if inputs is outputs and len(inputs) == 1 and (tensor := inputs[0]).is_contiguous():  # the usual case, inlined
        start, nbytes = tensor.data_ptr(), tensor.nbytes
        return op, (), ((start, start + nbytes, ()),) if nbytes else ()
    writes = regions(outputs)
    if inputs is outputs and not given:
        return op, (), writes
    return op, regions((*inputs, *given)), writes


@final
class BatchLimiter:
    """The fill level of the current batch, in operations and bytes, which are the same on all ranks.

    Args:
        max_ops, max_bytes: limits of a batch; None: no limit. A single operation may be larger, and is then a batch.
    """

    def __init__(self, max_ops: int | None = None, max_bytes: int | None = None) -> None:
        self.limited: bool = max_ops is not None or max_bytes is not None  #: if False, every operation fits
        self._max_ops = float("inf") if max_ops is None else max_ops
        self._max_bytes = float("inf") if max_bytes is None else max_bytes
        self.clear()

    def clear(self) -> None:
        """Start the next batch."""
        self._ops = self._bytes = 0

    def admits(self, op: Op) -> bool:
        """Whether ``op`` fits into the current batch."""
        return op.p2p or not self._ops or (self._ops < self._max_ops and self._bytes + op.nbytes <= self._max_bytes)

    def count(self, op: Op) -> bool:
        """Count ``op``; returns whether the batch is now full."""
        if op.p2p:
            return False
        self._ops += 1
        self._bytes += op.nbytes
        return self._ops >= self._max_ops or self._bytes >= self._max_bytes


def plan(
    items: Sequence[Item],
    *,
    max_ops: int | None = None,
    max_bytes: int | None = None,
    fusion_limit: int = MERGED_BYTES,
    fused_limit: int = UNLIMITED,
) -> list[Batch]:
    """Batches of ``items``, as indices, each index once. Fused operations stand at the place of their first member.

    Args:
        max_ops, max_bytes: limits of a batch.
        fusion_limit: size of the largest operation that is fused; a larger operation gains nothing from fusion.
        fused_limit: size of operations that are fused with each other, together.

    Raises: ValueError if a message shares memory with another operation sent with it: their order is undefined.
    """
    if _disjoint(items):
        cuts = _cuts_by_kind(items)
    else:
        check_messages(items)
        cuts = _cuts_by_memory(items)
    batches: list[Batch] = []
    fused_ops: list[list[int]] = []
    latest: dict[object, list[int]] = {}  # by kind: the last of ``fused_ops``
    sizes: dict[object, int] = {}
    meter = BatchLimiter(max_ops, max_bytes)
    limited = meter.limited
    sorts: dict[int, object] = {}  # by operation, since equal calls share one
    for i, (op, _, _) in enumerate(items):
        if i in cuts or (limited and not meter.admits(op)):
            batches.append(fused_ops)
            fused_ops, latest = [], {}
            meter.clear()
        sort = sorts.get(id(op), sorts)
        if sort is sorts:
            sort = sorts[id(op)] = fusion_key(op, fusion_limit)
        if sort is None:
            fused_ops.append([i])
        elif (fused := latest.get(sort)) is None or sizes[sort] + op.nbytes > fused_limit:
            latest[sort] = [i]
            sizes[sort] = op.nbytes
            fused_ops.append(latest[sort])
        else:
            fused.append(i)
            sizes[sort] += op.nbytes
        if limited:
            meter.count(op)
    if fused_ops:
        batches.append(fused_ops)
    return batches


# -- memory -----------------------------------------------------------------------------------------------------------


def _disjoint(items: Sequence[Item]) -> bool:
    """Whether no written memory is touched by another operation, as far as a quick test shows."""
    read: list[Region] = []
    written: list[Region] = []
    for op, reads, writes in items:
        written += writes
        if reads:
            (written if op.replicates else read).extend(reads)
    return disjoint(read, written)


def _cuts_by_kind(items: Sequence[Item]) -> set[int]:
    """The places where a batch must end because ranks have different parts in the operation before or after it."""
    alone = [op.one_sided for op, _, _ in items]
    if not any(alone):
        return set()
    cuts = set()
    before: bool | None = None
    for i, (op, _, _) in enumerate(items):
        if not op.p2p:
            if before is not None and (alone[i] or before):
                cuts.add(i)
            before = alone[i]
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
    """Raise ValueError if a message shares memory with any other operation: their order is undefined."""
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
    """Raise ValueError if any of ``items``, the operations of one call, share memory that is written."""
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
    """Whether one operation writes memory that the other reads or writes."""
    accesses = AccessSet()
    accesses.add(*one[1:])
    return accesses.conflicts(*other[1:])


def on_all_ranks(item: Item) -> Item:
    """The item as it counts on all ranks."""
    op, reads, writes = item
    return (op, (), [*reads, *writes]) if op.replicates else item


@final
class _Memory:
    """The memory that the operations of the current batch read and write."""

    def __init__(self) -> None:
        self._accesses = AccessSet()
        self._broadcast: dict[int | None, RegionSet] = {}  # by root: memory written only by broadcasts

    def conflicts(self, item: Item) -> bool:
        """Whether ``item`` must run after the operations of the batch."""
        op, reads, writes = on_all_ranks(item)
        if self._accesses.conflicts(reads, writes):
            return True
        root = op.root if op.replicates else None
        touched = [*reads, *writes]
        return any(written.overlaps(touched) for other, written in self._broadcast.items() if other != root)

    def add(self, item: Item) -> None:
        op, reads, writes = on_all_ranks(item)
        if op.replicates:
            self._broadcast.setdefault(op.root, RegionSet()).add(writes)
        else:
            self._accesses.add(reads, writes)
