"""The groups that move the data of collectives: gloo's (``torch_gloo.py``), or sockets of our own (``streams.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from asynccomm.ops.reduce_op import ReduceOp

LARGE: Final = 4 << 20  # bytes: two gloo threads are as fast as one (bench/collectives.py, 2 ranks on 2 cores)


class TransferGroup(Protocol):
    """Collectives of plain tensors, without checks. Each returns a work that has a future (``get_future``).

    ``bools``: the elements are bools, as bytes.
    """

    def is_native(self, dtype: torch.dtype, reduction: ReduceOp) -> bool:
        """Whether the group can reduce plain tensors of ``dtype`` without a step before or after."""
        ...

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, bools: bool = False) -> Any:
        """Reduce in place; AVG and PREMUL_SUM are a sum."""
        ...

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp, *, bools: bool = False) -> Any:
        """Reduce in place on the root; elsewhere, ``tensor`` is scratch memory."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> Any: ...

    def all_gather(self, outputs: list[Tensor], input: Tensor) -> Any: ...

    def all_gather_single(self, output: Tensor, input: Tensor) -> Any: ...

    def gather(self, outputs: list[Tensor], input: Tensor, root: int) -> Any: ...

    def scatter(self, output: Tensor, inputs: list[Tensor], root: int) -> Any: ...

    def all_to_all_single(
        self, output: Tensor, input: Tensor, receives: Sequence[int] = (), sends: Sequence[int] = ()
    ) -> Any:
        """Exchange chunks; ``receives`` and ``sends`` are elements from and to each rank, if they are not all equal."""
        ...

    def barrier(self) -> Any: ...


class TransferGroups(NamedTuple):
    """The groups for small and for large transfers. The first carries out its transfers one after the other.

    Between two transfers it runs the callbacks of the first one's future.
    """

    small: TransferGroup
    large: TransferGroup

    def by_size(self, nbytes: int) -> TransferGroup:
        """The group for a transfer of ``nbytes``, which must be equal on all ranks, so that all use the same group."""
        return self.large if nbytes >= LARGE else self.small
