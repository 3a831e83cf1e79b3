"""What the operations of a batch become: calls of NCCL, on which memory, and torch's steps before and after them."""

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
    """What the loaded library can do."""

    dtypes: frozenset[torch.dtype]  #: that it reduces
    native: frozenset[str]  #: of all_to_all, gather and scatter, those that it has as calls of their own


@final
@dataclass(frozen=True, slots=True)
class NcclCall:
    """One call in a group."""

    name: str  #: the method of ``api.Nccl``
    source: Tensor | None
    target: Tensor | None
    count: int  #: as that call counts: of one rank's share
    dtype: torch.dtype
    peer: int = -1  #: the root of a collective, or the other end of a message
    reduction: RedOpType | None = None
    factor: Tensor | None = None  #: of PREMUL_SUM: one element of ``dtype`` on the device
    op: Op | None = None  #: what it is part of, for errors


@final
@dataclass(frozen=True, slots=True)
class Step:
    """Something of torch's to be queued on the stream."""

    op: Op  #: what it is part of, for errors
    run: Callable[[], object]

    def __call__(self) -> object:
        return self.run()


@final
class LoweredBatch:
    """What the operations of a batch become.

    Args:
        empty: new memory on the device, of so many bytes.
    """

    def __init__(self, rank: int, size: int, ability: Capabilities, empty: Callable[[int], Tensor]) -> None:
        self.rank, self.size, self.ability, self._empty = rank, size, ability, empty
        self.op: Op | None = None  #: whose turn it is to be added
        self.before: list[Step] = []  #: to be queued on the stream, in order
        self.calls: list[NcclCall] = []
        self.after: list[Step] = []

    def prepare(self, step: Callable[[], object]) -> None:
        """Have ``step`` queued before the calls."""
        assert self.op is not None
        self.before.append(Step(self.op, step))

    def finish(self, step: Callable[[], object]) -> None:
        """Have ``step`` queued behind the calls."""
        assert self.op is not None
        self.after.append(Step(self.op, step))

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._empty(numel * dtype.itemsize).view(dtype)

    def source(self, tensor: Tensor) -> Tensor:
        """The bytes of ``tensor`` in plain memory: a copy if need be."""
        return bytes_of(tensor if arithmetic.is_plain(tensor) else self.snapshot(tensor))

    def snapshot(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` as it is before the calls."""
        memory = self.room(tensor.numel(), tensor.dtype).view(tensor.shape)
        self.prepare(partial(arithmetic.write, memory, tensor))
        return memory

    def target(self, tensor: Tensor) -> Tensor:
        """Where the bytes of ``tensor`` are to come; if that is not its own memory, they are copied there later."""
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
