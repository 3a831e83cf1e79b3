"""What every operation is: a frozen description, and the call that it came from.

An :class:`Op` holds no tensors, so it can be compared, printed, pickled and kept. The tensors stand beside it in the
:class:`Call`, with what awaiting is to give.
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
    """What one rank asked for. Equal on all ranks unless a field is marked as the rank's own.

    ``label`` is what the call of a collective gave as its ``tag``; empty: nothing. Point-to-point operations have none:
    their tags are numbers, and mean something else.
    """

    kind: ClassVar[str]
    p2p: ClassVar[bool] = False  # point-to-point operations stand outside the sequence of collectives
    label: str = field(default="", kw_only=True)

    @property
    def nbytes(self) -> int:
        """Size of one rank's share, the same on all ranks; the largest share if they differ."""
        return 0

    def fits(self, other: Op) -> bool:
        """Whether ``other``, issued by another rank at the same place, is the same collective."""
        return self == other

    def shown(self, name: str, *arguments: object) -> str:
        """The text of a collective: as a call, with the tag if it has one."""
        parts = [str(argument) for argument in arguments]
        if self.label:
            parts.append(f"tag={self.label!r}")
        return f"{name}({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class TensorOp(Op):
    """An operation on tensors of one dtype.

    ``numel`` are the elements of one rank's share: its input, or with reduce_scatter and scatter its output. A share
    may be several tensors, which count as one vector; ``layout`` then tells apart how it is divided, and where ranks
    have shares of their own size, these (0: one tensor, and all alike): see :func:`layout_of`. What is only moved is
    described in reals: see :func:`moved`.
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
    """Several operations that were handed on as one batch, and are done when all of them are."""

    kind = "together"
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        first = ", ".join([str(op) for op in self.ops[:4]])
        return f"together({first}{f' and {len(self.ops) - 4} more' if len(self.ops) > 4 else ''})"


class Parcel(NamedTuple):
    """What a rank sends where the receiver does not know what will come: a head that says so, and the payload."""

    head: bytes
    tensors: tuple[Tensor, ...]  #: of any dtype and shape; travel as bytes, one after the other

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum([tensor.nbytes for tensor in self.tensors])


class PayloadAllocator(Protocol):
    """Where the payload of a parcel goes."""

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        """Tensors for the payload of the parcel from rank ``source``: together as many bytes as it has.

        A backend calls this once for each parcel that comes, in order for each source, from any thread, never two at
        a time for one operation. It must not block. What it raises fails this rank's Work, and the payload is thrown
        away; nothing else suffers, unless it is a BrokenError.

        Args:
            head: the parcel's.
            lengths: bytes of payload that each giving rank but this one sends here in this operation.
        """


Begin = Callable[[Sequence[Parcel], Sequence[Tensor]], Sequence[Tensor]]


class Call(NamedTuple):
    """One checked call."""

    op: Op
    inputs: tuple[Tensor, ...]  #: read; never written unless also in ``outputs``
    outputs: tuple[Tensor, ...]  #: written
    result: Any  #: what awaiting gives: a tensor, a list of tensors, or None
    finish: Callable[[Any], Any] | None = None  #: makes of ``result`` what awaiting gives, when it is first asked for
    parcels: tuple[Parcel, ...] = ()  #: what this rank gives: one for everybody, or one for each rank
    place: PayloadAllocator | None = None  #: for the parcels that come
    expected: int = 0  #: bytes that will probably come in parcels, if that is known
    #: is called when an operation with parcels takes effect, before any comes, with the parcels that this rank gives
    #: and the outputs to be filled: those of the call, or stand-ins for ones that share memory; returns the new
    #: tensors of the device that it has made for the result
    begin: Begin | None = None
    #: pairs of memory of the call's own, in which some of ``inputs`` lie, and a tensor of the caller's: the second is
    #: copied to the first when the operation takes effect, for an earlier one may still write it at the call
    copies: tuple[tuple[Tensor, Tensor], ...] = ()

    def labelled(self, tag: object) -> Call:
        """This call, with ``tag`` as its operation's label. Raises: TypeError, ValueError naming ``tag``."""
        op = self.op
        assert not op.p2p, f"{op} cannot have a label"
        return self._replace(op=replace(op, label=check_label(tag)))  # calls that are alike may share one operation


def layout_of(numbers: Sequence[int]) -> int:
    """A number of 24 bits, never 0, that other lists of numbers hardly share."""
    return zlib.crc32(array("Q", numbers).tobytes()) % 0xFFFFFF + 1


def layout_of_shares(counts: Sequence[int], dim: int = 0) -> int:
    """The layout of shares along ``dim``, so that ranks which mean different dimensions see it.

    Along dim 0 it is that of a list. ``counts`` are empty if all shares are equal.
    """
    numbers = [dim, *counts] if dim else counts
    return layout_of(numbers) if numbers else 0


def moved(dtype: torch.dtype, numel: int) -> tuple[torch.dtype, int]:
    """How elements that are only moved are described: complex ones as reals, which other ranks may have instead."""
    real = REAL.get(dtype)
    return (dtype, numel) if real is None else (real, 2 * numel)


def described(op: TensorOp, counts: Sequence[int] = ()) -> str:
    """Dtype and number of elements, or that of each rank."""
    dtype = str(op.dtype).removeprefix("torch.")
    if counts:
        return f"{dtype}[{', '.join(map(str, counts))}]"
    return f"{dtype}[{op.numel}]" + (" in pieces" if op.layout else "")
