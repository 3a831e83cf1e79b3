"""The arenas of a rank as tensors, and views of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asynccomm import Comm
from asynccomm.backends.shm.arena import arena as shared

from .program import Arena, View, torch_dtype
from .values import content

UNIT = 16  # bytes; the largest element


class Memory:
    """The arenas of one rank: bytes, which views are made of."""

    def __init__(self, arenas: Sequence[Arena], rank: int, comm: Comm | None = None) -> None:
        """With a ``comm`` in shared memory, some arenas lie there, too."""
        self.arenas = [_bytes(arena, rank) for arena in arenas]
        if comm is not None and comm.backend in ("shm", "hierarchical"):
            for number, whole in enumerate(self.arenas):
                if (len(whole) // UNIT + rank + number) % 3:
                    self.arenas[number] = shared().bytes(len(whole)).copy_(whole)  # also if the comm is broken by now

    def tensor(self, view: View) -> Tensor:
        """The tensor that a view stands for."""
        base = self.arenas[view.arena].view(torch_dtype(view.dtype))
        tensor = base.as_strided(view.shape, view.strides, view.offset)
        if view.conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if view.neg else tensor


def nbytes_of(arena: Arena) -> int:
    """The bytes of an arena: some more than its elements, so that any dtype divides them."""
    return -(-max(1, arena.numel * torch_dtype(arena.dtype).itemsize) // UNIT) * UNIT


def _bytes(arena: Arena, rank: int) -> Tensor:
    values = content(arena, rank).view(torch.uint8) if arena.numel else torch.empty(0, dtype=torch.uint8)
    whole = torch.full((nbytes_of(arena),), 1, dtype=torch.uint8)
    whole[: len(values)] = values
    return whole


def bytes_of(tensor: Tensor) -> Tensor:
    """A copy of the elements' bytes, one after the other."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).clone()


def _places(view: View, memory: Tensor, start: int) -> Tensor:
    """The bytes that a view reaches of ``memory``, which begins with byte ``start`` of the arena."""
    size = view.itemsize
    dims = [(n, stride * size) for n, stride in zip(view.shape, view.strides, strict=True) if stride]
    shape, strides = zip(*dims, (size, 1), strict=True)
    return memory.as_strided(shape, strides, view.offset * size - start)


def overlaps_itself(view: View) -> bool:
    """Whether two indices of a view are the same memory, as far as strides alone tell."""
    reach = 1
    for stride, extent in sorted(zip(view.strides, view.shape, strict=True)):
        if extent > 1 and view.numel:
            if stride < reach:
                return True
            reach += stride * (extent - 1)
    return False


def touch(one: View, other: View) -> bool:
    """Whether the two spans share a byte; gaps between elements count."""
    (start, end), (begin, stop) = one.span, other.span
    return one.arena == other.arena and start < stop and begin < end


def share(one: View, other: View) -> bool:
    """Whether two views really share a byte."""
    if not touch(one, other) or not one.numel or not other.numel:
        return False
    start, end = min(one.span[0], other.span[0]), max(one.span[1], other.span[1])
    memory = torch.zeros(end - start, dtype=torch.bool)
    _places(one, memory, start).fill_(True)
    return bool(_places(other, memory, start).any())
