"""A lowered batch: NCCL calls, their memory, and torch's steps before and after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.regions import bytes_of
from asynccomm.ops import Op
from asynccomm.ops.reduce_op import RedOpType

_BYTE: Final = torch.uint8


@final
@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of the loaded library on this device."""

    dtypes: frozenset[torch.dtype]  #: dtypes with reductions
    native: frozenset[str]  #: optional calls that the library has, such as all_to_all, gather and scatter


@final
@dataclass(slots=True)  # not frozen: that takes three times as long to make, and a list of tensors has hundreds
class NcclCall:
    """One NCCL call in a group."""

    name: str  #: name of a method of ``api.Nccl``
    source: Tensor | None
    target: Tensor | None
    count: int  #: elements, as the call counts them: of one rank's share
    dtype: torch.dtype
    peer: int = -1  #: the root of a collective, or the other end of a message
    reduction: RedOpType | None = None
    factor: Tensor | None = None  #: factor of PREMUL_SUM: one element of ``dtype`` on the device
    op: Op | None = None  #: the operation that the call is part of, for errors


@final
@dataclass(frozen=True, slots=True)
class Step:
    """A torch operation to be queued on the stream."""

    op: Op  #: the operation that the step is part of, for errors
    run: Callable[[], object]

    def __call__(self) -> object:
        return self.run()


@final
class LoweredBatch:
    """The NCCL calls and the steps of a batch, as they are collected.

    Args:
        empty: allocates a number of bytes on the device.
    """

    def __init__(self, rank: int, size: int, ability: Capabilities, empty: Callable[[int], Tensor]) -> None:
        self.rank: int = rank
        self.size: int = size
        self.ability: Capabilities = ability
        self._empty = empty
        self.op: Op | None = None  #: the operation being lowered
        self.before: list[Step] = []  #: steps before the calls, in order
        self.calls: list[NcclCall] = []
        self.after: list[Step] = []

    def prepare(self, step: Callable[[], object]) -> None:
        """Queue ``step`` before the calls."""
        assert self.op is not None
        self.before.append(Step(self.op, step))

    def finish(self, step: Callable[[], object]) -> None:
        """Queue ``step`` after the calls."""
        assert self.op is not None
        self.after.append(Step(self.op, step))

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._empty(numel * dtype.itemsize).view(dtype)

    def source(self, tensor: Tensor) -> Tensor:
        """The bytes of ``tensor`` in plain memory: its own, or a copy."""
        return bytes_of(tensor if arithmetic.is_plain(tensor) else self.snapshot(tensor))

    def snapshot(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` in its state before the calls."""
        memory = self.room(tensor.numel(), tensor.dtype).view(tensor.shape)
        self.prepare(partial(arithmetic.write, memory, tensor))
        return memory

    def target(self, tensor: Tensor) -> Tensor:
        """Memory for the new bytes of ``tensor``: its own if plain, else new memory with a later copy to ``tensor``."""
        if arithmetic.is_plain(tensor):
            return bytes_of(tensor)
        memory = self.room(tensor.numel(), tensor.dtype)
        self.finish(partial(arithmetic.write, tensor, memory.view(tensor.shape)))
        return memory.view(_BYTE)

    def call(
        self,
        name: str,
        source: Tensor | None,
        target: Tensor | None,
        count: int,
        dtype: torch.dtype = _BYTE,
        peer: int = -1,
        reduction: RedOpType | None = None,
        factor: Tensor | None = None,
    ) -> None:
        if count:
            self.calls.append(NcclCall(name, source, target, count, dtype, peer, reduction, factor, self.op))
