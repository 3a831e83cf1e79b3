"""Kinds of collectives that frames carry, and the memory of their calls: for ``FrameExchange.carry``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias, final

from torch import Tensor

from asynccomm.backends.arithmetic import is_plain
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.frames import combined_as_stored, has_parts, heading_of, is_carried, room_of
from asynccomm.backends.kernels import exact_kernel
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Gather,
    Op,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)

_MOVES: Final = -1, 0  # in place of the numbers of a kernel
_BY_PYTHON: Final = -2, 0


class CarriedMemory(NamedTuple):
    """Addresses of one call; 0: there is none.

    Attributes:
        gives: by rank, the contribution to send.
        takes: by rank, the place of the contribution that comes; any number where it is reduced.
        source: this rank's own contribution.
        target: its place, or that of the result of a reduction.
    """

    gives: Sequence[int]
    takes: Sequence[int]
    source: int = 0
    target: int = 0


Addresses: TypeAlias = Sequence[int]
Layout: TypeAlias = Callable[[Any, int, int, Addresses, Addresses], CarriedMemory]


def _for(root: int, address: int, size: int) -> list[int]:
    return [address if peer == root else 0 for peer in range(size)]


def _barrier(_: Op, __: int, size: int, ___: Addresses, ____: Addresses) -> CarriedMemory:
    return CarriedMemory([0] * size, [0] * size)


def _broadcast(op: Broadcast, rank: int, size: int, inputs: Addresses, outputs: Addresses) -> CarriedMemory:
    if rank == op.root:
        return CarriedMemory([inputs[0]] * size, [0] * size)
    return CarriedMemory([0] * size, _for(op.root, outputs[0], size))


def _all_reduce(_: AllReduce, __: int, size: int, inputs: Addresses, outputs: Addresses) -> CarriedMemory:
    return CarriedMemory([inputs[0]] * size, [1] * size, inputs[0], outputs[0])


def _reduce(op: Reduce, rank: int, size: int, inputs: Addresses, outputs: Addresses) -> CarriedMemory:
    if rank == op.root:
        return CarriedMemory([0] * size, [1] * size, inputs[0], outputs[0])
    return CarriedMemory(_for(op.root, inputs[0], size), [0] * size)


def _gather(op: Gather, rank: int, size: int, inputs: Addresses, outputs: Addresses) -> CarriedMemory:
    if rank == op.root:
        return CarriedMemory([0] * size, outputs, inputs[0], outputs[rank])
    return CarriedMemory(_for(op.root, inputs[0], size), [0] * size)


def _scatter(op: Scatter, rank: int, size: int, inputs: Addresses, outputs: Addresses) -> CarriedMemory:
    if rank == op.root:
        return CarriedMemory(inputs, [0] * size, inputs[rank], outputs[0])
    return CarriedMemory([0] * size, _for(op.root, outputs[0], size))


def _all_gather(_: AllGather, rank: int, size: int, inputs: Addresses, outputs: Addresses) -> CarriedMemory:
    return CarriedMemory([inputs[0]] * size, outputs, inputs[0], outputs[rank])


def _all_gather_single(
    op: AllGatherSingle, rank: int, size: int, inputs: Addresses, outputs: Addresses
) -> CarriedMemory:
    places = [outputs[0] + peer * op.nbytes for peer in range(size)]
    return CarriedMemory([inputs[0]] * size, places, inputs[0], places[rank])


def _reduce_scatter(_: ReduceScatter, rank: int, size: int, inputs: Addresses, outputs: Addresses) -> CarriedMemory:
    return CarriedMemory(inputs, [1] * size, inputs[rank], outputs[0])


def _reduce_scatter_single(
    op: ReduceScatterSingle, rank: int, size: int, inputs: Addresses, outputs: Addresses
) -> CarriedMemory:
    parts = [inputs[0] + peer * op.nbytes for peer in range(size)]
    return CarriedMemory(parts, [1] * size, parts[rank], outputs[0])


def _all_to_all_single(
    op: AllToAllSingle, rank: int, size: int, inputs: Addresses, outputs: Addresses
) -> CarriedMemory:
    n = op.part_nbytes(size)
    parts, places = ([start + peer * n for peer in range(size)] for start in (inputs[0], outputs[0]))
    return CarriedMemory(parts, places, parts[rank], places[rank])


_LAYOUTS: Final[Mapping[type[Op], Layout]] = {
    AllGather: _all_gather,
    AllGatherSingle: _all_gather_single,
    AllReduce: _all_reduce,
    AllToAllSingle: _all_to_all_single,
    Barrier: _barrier,
    Broadcast: _broadcast,
    Gather: _gather,
    Reduce: _reduce,
    ReduceScatter: _reduce_scatter,
    ReduceScatterSingle: _reduce_scatter_single,
    Scatter: _scatter,
}


@final
class CarriedCall:
    """A kind of collective that frames carry, of plain tensors without a conversion.

    Attributes:
        heading: of every call of the kind.
        nbytes: of each contribution.
        kernel: numbers of dtype and operator of a kernel in C; (-1, 0): nothing is reduced; (-2, 0): Python does it.
    """

    def __init__(self, op: Any, rank: int, size: int, heading: bytes, kernel: tuple[int, int]) -> None:
        self.heading = heading
        self.nbytes: int = op.part_nbytes(size)
        self.kernel = kernel
        self._layout = _LAYOUTS[type(op)]
        self._op = op
        self._rank = rank
        self._size = size

    @classmethod
    def of(cls, submission: Submission, rank: int, size: int) -> CarriedCall | None:
        """The kind of ``submission``; None if it is no such call."""
        op: Any = submission.op
        if type(op) not in _LAYOUTS or getattr(op, "layout", None) or not is_carried(submission, size):
            return None
        # the contribution of another rank may be too long
        if op.part_nbytes(size) * (size if has_parts(op) else 1) > room_of(op, size):
            return None
        kernel = _MOVES
        if isinstance(op, (AllReduce, Reduce, ReduceScatter, ReduceScatterSingle)):
            kernel = (combined_as_stored(op) and exact_kernel(op.dtype, op.reduction.type)) or _BY_PYTHON
        if not op.nbytes and not isinstance(op, Barrier):
            return None
        return cls(op, rank, size, heading_of(submission), kernel)

    def memory(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> CarriedMemory | None:
        """The memory of a call; None unless all tensors are plain and have any, and the outputs are apart."""
        tensors = inputs if outputs is inputs else (*inputs, *outputs)
        if any(tensor.is_inference() or not is_plain(tensor) for tensor in tensors):
            return None
        read = [tensor.data_ptr() for tensor in inputs]
        written = [tensor.data_ptr() for tensor in outputs]
        if any(after - before < self.nbytes for before, after in pairwise(sorted(written))):
            return None
        if 0 in read or 0 in written:  # of a subclass without memory of its own
            return None
        memory = self._layout(self._op, self._rank, self._size, read, written)
        apart = abs(memory.source - memory.target)
        if self.kernel != _MOVES and memory.target and 0 < apart < self.nbytes:
            return None
        return memory
