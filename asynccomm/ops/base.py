"""The parts of every operation: a frozen description, and the checked call that it came from.

An :class:`Op` holds no tensors, so it can be compared, printed, pickled and kept. The :class:`Call` holds the tensors
beside it, and the result of awaiting it.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, cast, final

import torch
from torch import Tensor

from asynccomm.ops.dtypes import CODES, REAL
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import check_label


@dataclass(frozen=True, slots=True)
class Op:
    """The description of an operation. Equal on all ranks unless a field is marked as the rank's own.

    The class attributes and properties classify operations, for the modules that do the same for all operations
    of a class. An operation with one of the properties ``root``, ``reduction`` and ``counts`` has a field of that name,
    which needs an explicit ``field()``: the property would otherwise become its default.

    ``label`` is the ``tag`` argument of a collective; empty if the call gave none. Point-to-point operations have no
    label: their tags are numbers with another meaning. ``method`` is the method of the call where texts and errors show
    it instead of the kind; ranks compare it.
    """

    kind: ClassVar[str]
    p2p: ClassVar[bool] = False  #: point-to-point operations are not part of the sequence of collectives
    sizes_known: ClassVar[bool] = True  #: whether every rank knows the sizes of all ranks' data
    split: ClassVar[bool] = False  #: whether a rank that contributes data has a different part for each rank
    replicates: ClassVar[bool] = False  #: whether all ranks' tensors become equal to the root's
    one_sided: ClassVar[bool] = False  #: whether some ranks may use memory of which the other ranks do not know
    label: str = field(default="", kw_only=True)
    method: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        """The method if the operation names one, else the kind: for texts and profiles."""
        return self.method or self.kind

    @property
    def nbytes(self) -> int:
        """Size of one rank's share, the same on all ranks; the largest share if they differ."""
        return 0

    def part_nbytes(self, size: int) -> int:
        """Size of one part of a rank's data if it is ``split`` among ``size`` ranks, else of the data."""
        return self.nbytes

    @property
    def root(self) -> int | None:
        """The only rank that gives data, or the only one that gets data, of an operation on tensors."""
        return None

    @property
    def reduction(self) -> ReduceOp | None:
        """The way in which the operation combines the ranks' data."""
        return None

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of elements of each rank's share; empty if they are equal."""
        return ()

    @property
    def needs_every_rank(self) -> bool:
        """Whether no rank can complete the operation before every rank has started it: each needs data from all."""
        return False

    @property
    def open_ended(self) -> bool:
        """Whether the operation may stay idle for ever, so that closing the comm ends it."""
        return False

    def fits(self, other: Op) -> bool:
        """Whether ``other``, issued by another rank at the same place, is the same collective."""
        return self == other

    def __str__(self) -> str:
        return self.shown(self.name)

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
    :func:`layout_of`. Data that is only moved is described in reals: see :func:`moved` and :func:`moved_together`.
    """

    dtype: torch.dtype
    numel: int
    layout: int = field(default=0, kw_only=True)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def needs_every_rank(self) -> bool:
        return self.root is None and (min(self.counts) if self.counts else self.numel) > 0

    def fits(self, other: Op) -> bool:
        mine, theirs = self.reduction, other.reduction
        if mine is None or theirs is None:
            return self == other
        # each rank has its own factor, so only the kind of the reduction must agree
        return mine.type is theirs.type and self == replace(cast(Any, other), reduction=mine)

    def __str__(self) -> str:
        root = () if self.root is None else (f"root={self.root}",)
        reduction = () if self.reduction is None else (self.reduction,)
        return self.shown(self.name, described(self), *root, *reduction)


class PeerOp(Op):
    """A point-to-point operation: data to one rank, or from one rank."""

    __slots__ = ()
    p2p = True
    is_send: ClassVar[bool]
    peer: int | None  #: the other rank; None: receive from any rank
    tag: int

    @property
    def key(self) -> int:
        """The tag under which a transport sends the message."""
        return self.tag

    def shown(self, name: str, *arguments: object) -> str:
        end = f"dst={self.peer}" if self.is_send else f"src={'any' if self.peer is None else self.peer}"
        return f"{name}({', '.join([*map(str, arguments), end, f'tag={self.tag}'])})"


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
        twice at the same time for one operation. The allocator must neither block nor write to any tensor. An exception
        fails this rank's Work and discards the payload; nothing else is affected, unless the exception is a
        BrokenError.

        Args:
            head: the head of the parcel.
            lengths: payload bytes that each sending rank, except this rank, sends to this rank in this operation.
        """


Fill = Callable[[Tensor], object]
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
    #: called when all parcels have arrived, to copy this rank's own share to the result: ``place`` only allocates, so
    #: that a device need not run anything before the parcels
    keep: Callable[[], object] | None = None
    #: pairs of a function and a tensor of the caller: when the operation takes effect, the function gets the tensor and
    #: fills memory of the call's own, in which some of ``inputs`` or of the parcels' payloads lie. At the call, an
    #: earlier operation may still be writing the tensor
    copies: tuple[tuple[Fill, Tensor], ...] = ()

    def labelled(self, tag: object) -> Call:
        """This call, with ``tag`` as its operation's label. Raises: TypeError, ValueError naming ``tag``."""
        op = self.op
        assert not op.p2p, f"{op} cannot have a label"
        return self._replace(op=replace(op, label=check_label(tag)))  # equal calls may share one operation

    def named(self, method: str) -> Call:
        """This call, with ``method`` in its operation; ``ops.signature`` lists the methods of each kind."""
        return self._replace(op=replace(self.op, method=method))


class Several(NamedTuple):
    """The checked calls of one method, with one result for all."""

    calls: Sequence[Call]
    result: Any


def layout_of(numbers: Sequence[int]) -> int:
    """A 24-bit number, never 0, that differs for almost all other lists of numbers."""
    return zlib.crc32(array("Q", numbers).tobytes()) % 0xFFFFFF + 1


def layout_of_shares(counts: Sequence[int], dim: int = 0, shape: Sequence[int] = ()) -> int:
    """The layout of shares along ``dim``; ranks that use different dimensions get different layouts.

    Along dim 0 it equals the layout of a list. ``counts`` is empty if all shares are equal. Of ``shape``, that of a
    share, the number of rows before ``dim`` counts; complex shares may meet real ones with a further dimension of 2.
    """
    numbers = [dim, math.prod(shape[:dim]), *counts] if dim else counts
    return layout_of(numbers) if numbers else 0


def moved(dtype: torch.dtype, numel: int) -> tuple[torch.dtype, int]:
    """The description of elements that are only moved: complex elements as reals, since other ranks may pass reals."""
    real = REAL.get(dtype)
    return (dtype, numel) if real is None else (real, 2 * numel)


def moved_together(tensors: Sequence[Tensor]) -> tuple[torch.dtype, list[int]]:
    """The dtype that describes several tensors that are only moved, and numbers for their layout.

    It is their common dtype, complex ones as reals. Tensors of different dtypes are described as bytes: their dtypes
    are compared by the numbers.
    """
    dtypes = [REAL.get(tensor.dtype, tensor.dtype) for tensor in tensors]
    return dtypes[0] if len(set(dtypes)) == 1 else torch.uint8, [CODES[dtype] for dtype in dtypes]


def described(op: TensorOp) -> str:
    """Dtype and number of elements, or the numbers of elements of all ranks."""
    dtype = str(op.dtype).removeprefix("torch.")
    if op.counts:
        return f"{dtype}[{', '.join(map(str, op.counts))}]"
    return f"{dtype}[{op.numel}]" + (" in pieces" if op.layout else "")
