"""The memory of tensors, on any device: as bytes, what lies side by side in it, what lies in it twice, or meanwhile."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic

__all__ = ["Occupied", "Span", "Spans", "adjoining", "bytes_of", "span"]

Span = tuple[int, int]  # the first address, and the one behind the last


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements of ``tensor`` as flat bytes; its own memory if that is plain."""
    return arithmetic.resolved(tensor).view(torch.uint8)


def adjoining(tensors: Sequence[Tensor]) -> Tensor | None:
    """The bytes of ``tensors``, at least one, in one, if they are plain and lie in memory one behind the other."""
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


@final
class Occupied:
    """The memory of some tensors; the gaps between the elements of a strided one count, too."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        spans = sorted([span(tensor) for tensor in tensors if tensor.numel()])
        self._starts = [start for start, _ in spans]
        self._ends = list(accumulate([end for _, end in spans], max))  # of all that start no later
        #: whether two of them share memory
        self.twice = any(start < end for start, end in zip(self._starts[1:], self._ends, strict=False))

    def touches(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares memory with one of them."""
        if not tensor.numel():
            return False
        start, end = span(tensor)
        before = bisect_right(self._starts, end - 1)
        return before > 0 and self._ends[before - 1] > start


@final
class Spans:
    """Memory that comes into use and goes out of it again, often; some of it may be in use several times."""

    def __init__(self) -> None:
        # each in order and without two that share memory, so one look finds what is touched; there is more than one
        # only while spans lie over each other
        self._layers: list[list[Span]] = []

    def add(self, spans: Sequence[Span]) -> None:
        for there in spans:
            start, end = there
            for layer in self._layers:
                at = bisect_left(layer, there)
                if (not at or layer[at - 1][1] <= start) and (at == len(layer) or end <= layer[at][0]):
                    layer.insert(at, there)
                    break
            else:
                self._layers.append([there])

    def remove(self, spans: Sequence[Span]) -> None:
        """Take out what was added, once each."""
        for there in spans:
            for layer in self._layers:
                at = bisect_left(layer, there)
                if at < len(layer) and layer[at] == there:
                    del layer[at]
                    if not layer:
                        self._layers.remove(layer)
                    break
            else:
                raise KeyError(there)

    def touch(self, spans: Sequence[Span]) -> bool:
        """Whether any byte of ``spans`` is in use."""
        for layer in self._layers:
            for start, end in spans:
                before = bisect_left(layer, (end,))  # so many start before its end
                if before and layer[before - 1][1] > start:
                    return True
        return False


def span(tensor: Tensor) -> Span:
    """Where the elements of ``tensor``, which has some, begin and end; what lies in between counts, too."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum([(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    return start, start + (last + 1) * tensor.itemsize
