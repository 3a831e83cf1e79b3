"""Memory that gloo can use, in place of memory that it cannot.

gloo moves plain memory of some dtypes. So tensors travel as bytes if need be; what is strided, or should go together
with others, is copied into plain memory before the transfer (``pack``) or out of it afterwards (``unpack``). What lies
side by side already (``adjoining``) is used as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Final, final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.dtypes import in_reals

__all__ = [
    "AS_IT_IS",
    "Finish",
    "Occupied",
    "adjoining",
    "bytes_of",
    "collected",
    "movable",
    "pack",
    "place",
    "room",
    "spread",
    "unpack",
]

Finish = Callable[[], object]

AS_IT_IS: Final = frozenset(
    {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)  # by gloo


def movable(tensor: Tensor) -> Tensor:
    """The elements of ``tensor`` as a flat tensor of a dtype that gloo can move."""
    values = in_reals(arithmetic.resolved(tensor)).view(-1)
    return values if values.dtype in AS_IT_IS else values.view(torch.uint8)


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements of ``tensor`` as flat bytes; its own memory if that is plain."""
    return arithmetic.resolved(tensor).view(torch.uint8)


def place(output: Tensor) -> tuple[Tensor, Finish | None]:
    """Where gloo may put what ``output`` is to hold, and what then brings it there, if that is not its own memory."""
    if output.is_inference():  # torch's own thread, which writes some of them, may not
        memory = room(output.nbytes).view(output.dtype).view(output.shape)
        return movable(memory), partial(arithmetic.write, output, memory)
    memory, copy_back = arithmetic.landing(output)
    return movable(memory), copy_back


def room(nbytes: int) -> Tensor:
    """New memory, which also gloo's threads may write when the caller is in inference mode."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def adjoining(tensors: Sequence[Tensor]) -> Tensor | None:
    """The bytes of ``tensors`` in one, if they are plain and lie in memory one behind the other."""
    there = [tensor for tensor in tensors if tensor.numel()]
    if not there:
        return room(0)
    start = end = there[0].data_ptr()
    storage = there[0].untyped_storage().data_ptr()
    for tensor in there:
        if tensor.data_ptr() != end or not arithmetic.is_plain(tensor):
            return None
        if tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.nbytes
    return bytes_of(there[0]).as_strided((end - start,), (1,))


def pack(memory: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the bytes of ``tensors`` into ``memory``, one after the other."""
    torch.cat([bytes_of(tensor) for tensor in tensors], out=memory)


def unpack(memory: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy ``memory`` into ``tensors``, one after the other, whatever their strides."""
    parts = memory.split_with_sizes([tensor.nbytes for tensor in tensors])
    targets, sources = [], []
    for tensor, part in zip(tensors, parts, strict=True):
        if arithmetic.is_plain(tensor):
            targets.append(bytes_of(tensor))
            sources.append(part)
        else:  # a copy, because a part may begin at any byte, and a dtype wants to be aligned
            arithmetic.write(tensor, part.clone().view(tensor.dtype).view(tensor.shape))
    if targets:
        with torch.inference_mode(any(target.is_inference() for target in targets)):
            torch._foreach_copy_(targets, sources)


def collected(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of ``tensors``, one after the other; their own memory if possible."""
    found = adjoining(tensors)
    return found if found is not None else torch.cat([bytes_of(tensor) for tensor in tensors])


def spread(tensors: Sequence[Tensor]) -> tuple[Tensor, Finish | None]:
    """Where gloo may put the bytes of ``tensors``, one after the other, and what then brings them there, if needed."""
    found = adjoining(tensors)
    if found is not None:
        return found, None
    memory = room(sum([tensor.nbytes for tensor in tensors]))
    return memory, partial(unpack, memory, tensors)


@final
class Occupied:
    """The memory of some tensors; the gaps between the elements of a strided one count, too."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        spans = sorted([_span(tensor) for tensor in tensors if tensor.numel()])
        self._starts = [start for start, _ in spans]
        self._ends = list(accumulate([end for _, end in spans], max))  # of all that start no later
        #: whether two of them share memory
        self.twice = any(start < end for start, end in zip(self._starts[1:], self._ends, strict=False))

    def touches(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares memory with one of them."""
        if not tensor.numel():
            return False
        start, end = _span(tensor)
        before = bisect_right(self._starts, end - 1)
        return before > 0 and self._ends[before - 1] > start


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum([(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    return start, start + (last + 1) * tensor.itemsize
