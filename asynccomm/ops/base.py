"""The parts of every operation: a frozen description, and the checked call that it came from.

An :class:`Op` holds no tensors, so it can be compared, printed, pickled and kept. The :class:`Call` holds the tensors
beside it, and the result of awaiting it.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, final

import torch
from torch import Tensor

from asynccomm.ops.dtypes import REAL
from asynccomm.ops.validation import check_label


@dataclass(frozen=True, slots=True)
class Op:
    """The description of an operation. Equal on all ranks unless a field is marked as the rank's own.

    ``label`` is the ``tag`` argument of a collective; empty if the call gave none. Point-to-point operations have no
    label: their tags are numbers with another meaning.
    """

    kind: ClassVar[str]
    p2p: ClassVar[bool] = False  # point-to-point operations are not part of the sequence of collectives
    label: str = field(default="", kw_only=True)

    @property
    def nbytes(self) -> int:
        """Size of one rank's share, the same on all ranks; the largest share if they differ."""
        return 0

    def fits(self, other: Op) -> bool:
        """Whether ``other``, issued by another rank at the same place, is the same collective."""
        return self == other

    def shown(self, name: str, *arguments: object) -> str:
        """The text of a collective, written as a call, with the tag if it has one."""
        parts = [str(argument) for argument in arguments]
        if self.label:
            parts.append(f"tag={self.label!r}")
        return f"{name}({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class TensorOp(Op):
    """An operation on tensors of one dtype.

    ``numel`` is the number of elements of one rank's share: of its input, or with reduce_scatter and scatter of its
    output. A share may be several tensors, which count as one vector; ``layout`` then encodes the sizes of these
    tensors, and the sizes of the ranks' shares if they differ (0: one tensor, and all shares equal): see
    :func:`layout_of`. Data that is only moved is described in reals: see :func:`moved`.
    """

    dtype: torch.dtype
    numel: int
    layout: int = field(default=0, kw_only=True)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@final
@dataclass(frozen=True, slots=True)
class GroupedOp(Op):
    """Several operations submitted as one batch; the group is done when all of them are done."""

    kind = "together"
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        first = ", ".join([str(op) for op in self.ops[:4]])
        return f"together({first}{f' and {len(self.ops) - 4} more' if len(self.ops) > 4 else ''})"


class Parcel(NamedTuple):
    """A message of a size that the receiver does not know: a head that describes the payload, and the payload."""

    head: bytes
    tensors: tuple[Tensor, ...]  #: of any dtype and shape; sent as bytes, one after the other

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum([tensor.nbytes for tensor in self.tensors])


class PayloadAllocator(Protocol):
    """Allocates the memory for the payload of a parcel."""

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        """Tensors for the payload of the parcel from rank ``source``: together as many bytes as the payload.

        A backend calls the allocator once for each arriving parcel, in order for each source, from any thread, never
        twice at the same time for one operation. The allocator must not block. An exception fails this rank's Work and
        discards the payload; nothing else is affected, unless the exception is a BrokenError.

        Args:
            head: the head of the parcel.
            lengths: payload bytes that each sending rank, except this rank, sends to this rank in this operation.
        """


Begin = Callable[[Sequence[Parcel], Sequence[Tensor]], Sequence[Tensor]]


class Call(NamedTuple):
    """One checked call."""

    op: Op
    inputs: tuple[Tensor, ...]  #: read; never written unless also in ``outputs``
    outputs: tuple[Tensor, ...]  #: written
    result: Any  #: the result of awaiting: a tensor, a list of tensors, or None
    finish: Callable[[Any], Any] | None = None  #: makes the awaited value of ``result``, at the first await
    parcels: tuple[Parcel, ...] = ()  #: the parcels to send: one for all ranks, or one for each rank
    place: PayloadAllocator | None = None  #: allocates the payloads of arriving parcels
    expected: int = 0  #: estimated bytes of arriving parcels, if known
    #: called when an operation with parcels takes effect, before any parcel arrives, with this rank's own parcels and
    #: the outputs to be filled: those of the call, or stand-ins for outputs that share memory; returns the new device
    #: tensors that it allocated for the result
    begin: Begin | None = None
    #: pairs of the call's own memory, in which some of ``inputs`` lie, and a tensor of the caller: the tensor is copied
    #: to that memory when the operation takes effect, because an earlier operation may still be writing the tensor at
    #: the call
    copies: tuple[tuple[Tensor, Tensor], ...] = ()

    def labelled(self, tag: object) -> Call:
        """This call, with ``tag`` as its operation's label. Raises: TypeError, ValueError naming ``tag``."""
        op = self.op
        assert not op.p2p, f"{op} cannot have a label"
        return self._replace(op=replace(op, label=check_label(tag)))  # equal calls may share one operation


def layout_of(numbers: Sequence[int]) -> int:
    """A 24-bit number, never 0, that differs for almost all other lists of numbers."""
    return zlib.crc32(array("Q", numbers).tobytes()) % 0xFFFFFF + 1


def layout_of_shares(counts: Sequence[int], dim: int = 0) -> int:
    """The layout of shares along ``dim``; ranks that use different dimensions get different layouts.

    Along dim 0 it equals the layout of a list. ``counts`` is empty if all shares are equal.
    """
    numbers = [dim, *counts] if dim else counts
    return layout_of(numbers) if numbers else 0


def moved(dtype: torch.dtype, numel: int) -> tuple[torch.dtype, int]:
    """The description of elements that are only moved: complex elements as reals, since other ranks may pass reals."""
    real = REAL.get(dtype)
    return (dtype, numel) if real is None else (real, 2 * numel)


def described(op: TensorOp, counts: Sequence[int] = ()) -> str:
    """Dtype and number of elements, or the numbers of elements of all ranks."""
    dtype = str(op.dtype).removeprefix("torch.")
    if counts:
        return f"{dtype}[{', '.join(map(str, counts))}]"
    return f"{dtype}[{op.numel}]" + (" in pieces" if op.layout else "")
