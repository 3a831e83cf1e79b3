"""The memory of tensors on any device: as bytes, and the overlaps between tensors.

:func:`overlap` decides whether two regions share memory, :class:`RegionSet` finds overlaps among many regions, and
:class:`AccessSet` holds the rule for operations: two operations conflict if one of them writes memory that the other
reads or writes. The caller decides what follows from a conflict: a batch ends, an operation waits, or a tensor is
staged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic

Dims = tuple[tuple[int, int], ...]
#: The first address, the address behind the last byte, and the bytes in between: ``()`` stands for all of them, else
#: the strides in bytes and the extents of the dimensions, the innermost of which are the bytes of one element.
Region = tuple[int, int, Dims]

MOST_TRIES: Final = 2000  # per comparison of strided regions, a few ms; beyond, they count as overlapping


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements of ``tensor`` as flat bytes; in the tensor's own memory if the tensor is plain."""
    return arithmetic.resolved(tensor).view(torch.uint8)


def adjoining(tensors: Sequence[Tensor]) -> Tensor | None:
    """The bytes of ``tensors``, at least one, as one tensor; None unless all are plain and adjoin in memory."""
    there = [tensor for tensor in tensors if tensor.numel()]
    if not there:
        return torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    start = end = there[0].data_ptr()
    storage = there[0].untyped_storage().data_ptr()
    for tensor in there:
        if tensor.data_ptr() != end or not arithmetic.is_plain(tensor):
            return None
        if tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.nbytes
    return bytes_of(there[0]).as_strided((end - start,), (1,))


def region(tensor: Tensor) -> Region:
    """The memory of a ``tensor`` that has elements."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes, ()
    item = tensor.itemsize
    dims = [(stride * item, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and stride]
    end = start + sum([(n - 1) * stride for stride, n in dims]) + item
    if tensor.nbytes == end - start:  # as with a transposed matrix
        return start, end, ()
    return start, end, (*dims, (1, item))


def regions(tensors: Iterable[Tensor]) -> list[Region]:
    """The memory of each of ``tensors`` that has elements."""
    found: list[Region] = []
    for tensor in tensors:
        if not tensor.is_contiguous():
            if tensor.numel():
                found.append(region(tensor))
        elif nbytes := tensor.nbytes:  # the usual case, inlined: a call for each of hundreds of tensors would be slow
            start = tensor.data_ptr()
            found.append((start, start + nbytes, ()))
    return found


def overlap(one: Region, other: Region) -> bool:
    """Whether two regions share a byte. Two strided regions may count as overlapping when the search is too long."""
    start, end, dims = one
    begin, stop, others = other
    if end <= begin or stop <= start:
        return False
    if not dims and not others:
        return True
    return _reach(begin - start, dims or ((1, end - start),), others or ((1, stop - begin),))


def _reach(distance: int, dims: Dims, others: Dims) -> bool:
    """Whether indices exist with ``sum(i * stride) - sum(j * other stride) == distance``.

    The problem is a bounded linear Diophantine equation. The search takes the largest stride first and drops all
    factors that the smaller strides cannot make up for. Few candidates remain for the layouts that views of one tensor
    have.
    """
    spans: dict[int, tuple[int, int]] = {}  # by stride: the least and the largest factor
    for stride, n in dims:
        low, high = spans.get(stride, (0, 0))
        spans[stride] = low, high + n - 1
    for stride, n in others:
        low, high = spans.get(stride, (0, 0))
        spans[stride] = low - n + 1, high
    terms = sorted(((stride, *bounds) for stride, bounds in spans.items()), reverse=True)
    rests = [(0, 0)]  # the least and the largest sum of all smaller strides
    for stride, low, high in reversed(terms):
        least, most = rests[-1]
        rests.append((least + stride * low, most + stride * high))
    rests.reverse()
    left = [MOST_TRIES]

    def search(k: int, rest: int) -> bool:
        if k == len(terms):
            return rest == 0
        stride, low, high = terms[k]
        least, most = rests[k + 1]
        for factor in range(max(low, -((most - rest) // stride)), min(high, (rest - least) // stride) + 1):
            left[0] -= 1
            if left[0] < 0 or search(k + 1, rest - factor * stride):
                return True
        return False

    return search(0, distance)


def disjoint(reads: Sequence[Region], writes: Sequence[Region]) -> bool:
    """Whether no written region touches another region: a quick test, which is almost always true.

    Strided regions count with their gaps, so False means that a closer comparison is needed.
    """
    written = sorted(writes)
    if any(one[1] > other[0] for one, other in pairwise(written)):
        return False
    if not reads:
        return True
    spans = sorted([(start, end, False) for start, end, _ in reads] + [(start, end, True) for start, end, _ in written])
    end = last = 0  # of all regions so far, and of the written ones
    for start, stop, writes_it in spans:
        if start < last or (writes_it and start < end):
            return False
        if stop > end:
            end = stop
        if writes_it and stop > last:
            last = stop
    return True


@final
class RegionSet:
    """A changing set of regions; a region may be in it several times."""

    def __init__(self) -> None:
        # Each layer is sorted, and no two of its spans overlap, so one bisection finds the neighbours of an address.
        # There is more than one layer only while spans overlap.
        self._layers: list[list[Region]] = []

    def add(self, added: Iterable[Region]) -> None:
        for there in added:
            start, end, _ = there
            for layer in self._layers:
                at = bisect_left(layer, there)
                if (not at or layer[at - 1][1] <= start) and (at == len(layer) or end <= layer[at][0]):
                    layer.insert(at, there)
                    break
            else:
                self._layers.append([there])

    def remove(self, removed: Iterable[Region]) -> None:
        """Remove regions added before, once each."""
        for there in removed:
            for layer in self._layers:
                at = bisect_left(layer, there)
                if at < len(layer) and layer[at] == there:
                    del layer[at]
                    if not layer:
                        self._layers.remove(layer)
                    break
            else:
                raise KeyError(there)

    def overlaps(self, others: Iterable[Region]) -> bool:
        """Whether one of ``others`` shares memory with a region of the set."""
        for other in others:
            start, end, _ = other
            for layer in self._layers:
                at = bisect_left(layer, (end,))  # the number of regions that start before the end of ``other``
                while at and layer[at - 1][1] > start:
                    at -= 1
                    if overlap(layer[at], other):
                        return True
        return False


@final
class AccessSet:
    """The memory that a set of operations reads and writes."""

    def __init__(self) -> None:
        self._read = RegionSet()
        self._written = RegionSet()

    def add(self, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        self._read.add(reads)
        self._written.add(writes)

    def remove(self, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        """Remove regions added before, once each."""
        self._read.remove(reads)
        self._written.remove(writes)

    def conflicts(self, reads: Sequence[Region], writes: Sequence[Region]) -> bool:
        """Whether an operation writes memory that the set reads or writes, or reads memory that the set writes."""
        written = self._written
        return written.overlaps(writes) or written.overlaps(reads) or self._read.overlaps(writes)
