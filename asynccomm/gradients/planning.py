"""The division of parameters into buckets, which is the same on all ranks.

A bucket is sent when all of its gradients are there. Parameters therefore share a bucket when backward reaches them one
after the other. Before the first step the reverse order of registration stands for that order, because most models
register their layers in the order of the forward pass.

A bucket holds one dtype. The first bucket of each dtype is smaller than the others, so that communication begins early
in the backward pass. DistributedDataParallel divides parameters by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, Self, final

import torch
from torch import Tensor

ALIGNMENT: Final = 16  # bytes; vectorized kernels of optimizers need gradients at multiples of it
FIRST_BYTES: Final = 1 << 20  # limit of the first bucket of a dtype, as in DistributedDataParallel


@final
class GradientLayout(NamedTuple):
    """The form of one parameter's gradient."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  #: dense; those of the parameter where these are dense
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: Tensor) -> Self:
        """The layout that autograd expects of the gradient of ``parameter``."""
        shape, strides = tuple(parameter.shape), tuple(parameter.stride())
        if not _dense(shape, strides):
            strides = tuple(torch.empty(shape, device="meta").stride())
        return cls(shape, strides, parameter.dtype)

    @property
    def room(self) -> int:
        """Elements that the gradient occupies in a bucket, with its padding."""
        step = max(1, ALIGNMENT // self.dtype.itemsize)
        return -(-math.prod(self.shape) // step) * step

    @property
    def nbytes(self) -> int:
        """Bytes that the gradient occupies in a bucket, with its padding."""
        return self.room * self.dtype.itemsize


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their memory without gaps, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def plan_buckets(layouts: Sequence[GradientLayout], order: Sequence[int], limit: int) -> list[list[int]]:
    """Divide parameters into buckets.

    Args:
        layouts: of all parameters.
        order: the number of each parameter once, in the order in which backward reaches the parameters.
        limit: bytes of a bucket. A larger parameter has a bucket of its own.

    Returns: the numbers of the parameters of each bucket. Buckets are in the order in which they become complete, and
        parameters in the given order.
    """
    open_buckets: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    full: list[list[int]] = []
    begun: set[torch.dtype] = set()  # the dtypes with a full first bucket
    for number in order:
        dtype, nbytes = layouts[number].dtype, layouts[number].nbytes
        most = limit if dtype in begun else min(limit, FIRST_BYTES)
        if dtype in open_buckets and sizes[dtype] + nbytes > most:
            full.append(open_buckets.pop(dtype))
            begun.add(dtype)
        if dtype not in open_buckets:
            open_buckets[dtype], sizes[dtype] = [], 0
        open_buckets[dtype].append(number)
        sizes[dtype] += nbytes
    position = {number: place for place, number in enumerate(order)}
    return sorted([*full, *open_buckets.values()], key=lambda bucket: position[bucket[-1]])


def complete_order(recorded: Sequence[int], count: int) -> list[int]:
    """All ``count`` parameters: those of ``recorded`` first, then the others in reverse order of registration."""
    seen = set(recorded)
    return [*recorded, *(number for number in reversed(range(count)) if number not in seen)]
