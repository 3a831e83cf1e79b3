"""Operations that become several gloo operations: several tensors per rank, or a different size on each rank.

Each gloo operation costs as much as copying a megabyte. Small tensors therefore travel in packs, which are packed and
unpacked on gloo's thread, in one piece of staging memory (``transfers.py``); a large tensor travels by itself, from and
to its own memory. The packs depend only on sizes, which are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.groups import TransferGroups
from asynccomm.backends.gloo.reduction import (
    gather_rows,
    narrow_all,
    reduce_rows,
    row_bytes,
    wide_dtype,
    widen_all,
    widened_bytes,
)
from asynccomm.backends.gloo.staging import Finish, pack, room, unpack
from asynccomm.backends.gloo.transfers import Transfer
from asynccomm.backends.hazards import Buffers
from asynccomm.backends.regions import adjoining
from asynccomm.ops import AllGather, AllReduce, Broadcast, Op, ReduceScatter

SMALL = 1 << 20  # bytes: up to this size, copying costs less than another operation (2 ranks on 2 cores)
PACK = 4 << 20  # maximum bytes of a pack

Lines = list[list[Transfer]]


def groups_of(sizes: Sequence[int]) -> list[list[int]]:
    """The groups of tensors, of these sizes in bytes, that travel together; smaller groups first."""
    groups: list[list[int]] = []
    pack: list[int] = []
    left = PACK
    for i, nbytes in enumerate(sizes):
        if nbytes > SMALL:
            groups.append([i])
            continue
        if nbytes > left:
            groups.append(pack)
            pack, left = [], PACK
        pack.append(i)
        left -= nbytes
    if pack:
        groups.append(pack)
    return sorted(groups, key=lambda group: sum([sizes[i] for i in group]))


def is_divided(submission: Submission) -> bool:
    """Whether an operation has several tensors, or shares of different sizes."""
    op = submission.op
    match op:
        case AllReduce() | Broadcast():
            return op.layout != 0
        case AllGather():
            return bool(op.counts) or len(submission.inputs) > 1
        case ReduceScatter():
            return bool(op.counts) or len(submission.outputs) > 1
        case _:
            return False


def chains_of(gloos: TransferGroups, op: Op, buffers: Buffers, rank: int, size: int) -> Lines:
    """The transfers of an operation that has a ``layout``, in chains, each run by one gloo group."""
    inputs, outputs = buffers.inputs, buffers.outputs
    match op:
        case AllReduce():
            return _all_reduce(gloos, inputs, outputs, op, size)
        case Broadcast(root=root):
            return _broadcast(gloos, inputs or outputs, root, rank)
        case AllGather():
            return _all_gather(gloos, inputs, outputs, rank, size)
        case ReduceScatter():
            return _reduce_scatter(gloos, inputs, outputs, op, rank, size)
        case other:
            raise AssertionError(f"no such collective of several: {other}")


@final
class _TransferChains:
    """Puts transfers in chains: one chain for all on the group with one thread, and one for each other transfer.

    Args:
        lengths: bytes that each transfer moves for one rank.
        late: whether the transfer may be filled right before it starts, and so must be in that chain whatever its size.
    """

    def __init__(self, gloos: TransferGroups, lengths: Sequence[int], late: Sequence[bool]) -> None:
        self._small = gloos.small
        self._lengths = lengths
        pairs = zip(lengths, late, strict=True)
        self.gloos = [gloos.small if staged else gloos.by_size(length) for length, staged in pairs]
        standing = [length for length, gloo in zip(lengths, self.gloos, strict=True) if gloo is gloos.small]
        self._most = max(standing, default=0)
        self._shared: dict[str, Tensor] = {}
        self._line: list[Transfer] = []
        self._alone: Lines = []

    def memory(self, i: int, name: str, times: int = 1) -> Tensor:
        """Staging memory for transfer ``i``: transfers in the common chain share memory of the same name."""
        if self.gloos[i] is not self._small:
            return room(times * self._lengths[i])
        if name not in self._shared:
            self._shared[name] = room(times * self._most)
        return self._shared[name][: times * self._lengths[i]]

    def add(self, i: int, transfer: Transfer) -> None:
        if self.gloos[i] is self._small:
            self._line.append(transfer)
        else:
            self._alone.append([transfer])

    def all(self) -> Lines:
        return [self._line, *self._alone] if self._line else self._alone


def _all_reduce(
    gloos: TransferGroups, inputs: Sequence[Tensor], outputs: Sequence[Tensor], op: AllReduce, size: int
) -> Lines:
    dtype, reduction = op.dtype, op.reduction
    direct = gloos.small.is_native(dtype, reduction)
    wide = dtype if direct else wide_dtype(dtype, reduction)
    groups = groups_of([tensor.nbytes for tensor in outputs])
    numels = [sum([outputs[i].numel() for i in group]) for group in groups]
    lengths = [n * dtype.itemsize if direct else widened_bytes(dtype, reduction, n) for n in numels]
    lines = _TransferChains(gloos, lengths, [not direct or len(group) > 1 for group in groups])
    for i, group in enumerate(groups):
        sources, targets = [inputs[j] for j in group], [outputs[j] for j in group]
        fill: Finish | None = None
        if direct and len(group) == 1 and _same(sources[0], targets[0]):  # gloo reduces in the input's own memory
            values = arithmetic.resolved(sources[0])
            finish: Finish | None = None
        else:
            memory = lines.memory(i, "sums")
            values = memory.view(wide)
            if direct:
                fill, finish = partial(pack, memory, sources), partial(unpack, memory, targets)
            else:
                fill = partial(widen_all, memory, sources, reduction)
                finish = partial(narrow_all, values, targets, reduction, size)
        start = partial(lines.gloos[i].all_reduce, values, reduction, bools=dtype == torch.bool)
        lines.add(i, Transfer(start, finish, fill))
    return lines.all()


def _broadcast(gloos: TransferGroups, tensors: Sequence[Tensor], root: int, rank: int) -> Lines:
    sizes = [tensor.nbytes for tensor in tensors]
    groups = groups_of(sizes)
    lines = _TransferChains(
        gloos, [sum([sizes[j] for j in group]) for group in groups], [len(group) > 1 for group in groups]
    )
    for i, group in enumerate(groups):
        items = [tensors[j] for j in group]
        data = adjoining(items)
        fill = finish = None
        if data is None:
            data = lines.memory(i, "moved")
            if rank == root:
                fill = partial(pack, data, items)
            else:
                finish = partial(unpack, data, items)
        lines.add(i, Transfer(partial(lines.gloos[i].broadcast, data, root), finish, fill))
    return lines.all()


def _all_gather(
    gloos: TransferGroups, inputs: Sequence[Tensor], outputs: Sequence[Tensor], rank: int, size: int
) -> Lines:
    k = len(inputs)
    shares = [outputs[r * k : r * k + k] for r in range(size)]
    sizes = [[tensor.nbytes for tensor in share] for share in shares]
    groups = groups_of([max(column) for column in zip(*sizes, strict=True)])
    lengths = [[sum([row[j] for j in group]) for row in sizes] for group in groups]
    lines = _TransferChains(gloos, [max(ranks) for ranks in lengths], [len(group) > 1 for group in groups])
    for i, group in enumerate(groups):
        sources = [inputs[j] for j in group]
        targets = [[share[j] for j in group] for share in shares]
        if size * max(lengths[i]) <= 2 * sum(lengths[i]):
            _gather_at_once(lines, i, sources, targets, lengths[i], rank)
        else:
            _gather_one_by_one(lines, i, sources, targets, lengths[i], rank)
    return lines.all()


def _gather_at_once(
    lines: _TransferChains,
    i: int,
    sources: Sequence[Tensor],
    targets: Sequence[Sequence[Tensor]],
    lengths: Sequence[int],
    rank: int,
) -> None:
    """Gather with every rank sending as much as the rank that has most."""
    most = max(lengths)
    source = adjoining(sources) if lengths[rank] == most else None
    target = adjoining([tensor for share in targets for tensor in share]) if min(lengths) == most else None
    fill = finish = None
    if source is None:
        source = lines.memory(i, "sent")
        fill = partial(pack, source[: lengths[rank]], sources)
    if target is None:
        target = lines.memory(i, "gathered", len(targets))
        finish = partial(_unpack_rows, target.view(len(targets), most), targets, lengths)
    lines.add(i, Transfer(partial(lines.gloos[i].all_gather_single, target, source), finish, fill))


def _unpack_rows(rows: Tensor, targets: Sequence[Sequence[Tensor]], lengths: Sequence[int]) -> None:
    for row, share, length in zip(rows.unbind(), targets, lengths, strict=True):
        unpack(row[:length], share)


def _gather_one_by_one(
    lines: _TransferChains,
    i: int,
    sources: Sequence[Tensor],
    targets: Sequence[Sequence[Tensor]],
    lengths: Sequence[int],
    rank: int,
) -> None:
    """Broadcast from each rank that has data: used where padding would be most of the traffic."""
    for root, (share, length) in enumerate(zip(targets, lengths, strict=True)):
        if not length:
            continue
        tensors = sources if root == rank else share
        data = adjoining(tensors)
        fill: Finish | None = None
        finish: Finish | None = None
        if data is None:
            data = lines.memory(i, "moved")[:length]
            if root == rank:
                fill = partial(pack, data, sources)
            else:
                finish = partial(unpack, data, share)
        if root == rank and not all(map(_same, sources, share)):
            finish = partial(unpack, data, share)
        lines.add(i, Transfer(partial(lines.gloos[i].broadcast, data, root), finish, fill))


def _reduce_scatter(
    gloos: TransferGroups, inputs: Sequence[Tensor], outputs: Sequence[Tensor], op: ReduceScatter, rank: int, size: int
) -> Lines:
    k, reduction, dtype = len(outputs), op.reduction, op.dtype
    numels = [[tensor.numel() for tensor in inputs[r * k : r * k + k]] for r in range(size)]
    groups = groups_of([max(column) * dtype.itemsize for column in zip(*numels, strict=True)])
    lengths = [[row_bytes(dtype, reduction, sum([row[j] for j in group])) for row in numels] for group in groups]
    # a single group is filled at once in any case
    lines = _TransferChains(gloos, [max(ranks) for ranks in lengths], [len(groups) > 1] * len(groups))
    for i, group in enumerate(groups):
        sources = [inputs[r * k + j] for r in range(size) for j in group]
        rows, fill = adjoining(sources) if reduction.factor is None else None, None
        if rows is None:
            rows = lines.memory(i, "sent", size)[: sum(lengths[i])]
            fill = partial(gather_rows, rows, sources, reduction)
        received = lines.memory(i, "received", size)[: size * lengths[i][rank]]
        uneven = min(lengths[i]) != max(lengths[i])
        splits = ([lengths[i][rank]] * size, lengths[i]) if uneven else ()
        finish = partial(reduce_rows, received, [outputs[j] for j in group], reduction, size)
        lines.add(i, Transfer(partial(lines.gloos[i].all_to_all_single, received, rows, *splits), finish, fill))
    return lines.all()


def _same(tensor: Tensor, other: Tensor) -> bool:
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.nbytes == other.nbytes
        and arithmetic.is_plain(tensor)
        and arithmetic.is_plain(other)
    )
