"""The operations on windows: memory and signals of one rank that the other ranks reach without its help.

A window has some bytes of memory and some signals on each rank. A signal is an unsigned number of 64 bits. Positions
are counted in elements of the tensor's dtype, from the start of the target's memory.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, SupportsIndex, final

import torch
from torch import Tensor

from asynccomm.ops.base import Call, Op
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo, as_index, check_rank, check_tensor
from asynccomm.options import check_bool

SIGNAL_VALUES: Final = 1 << 64  # a signal is below


@final
class SignalCmpOp(enum.Enum):
    """A comparison of a signal with a value; the signal is on the left."""

    EQ = "=="
    NE = "!="
    GT = ">"
    GE = ">="
    LT = "<"
    LE = "<="

    @property
    def holds(self) -> Callable[[int, int], bool]:
        """Compares a signal with a value."""
        return _COMPARISONS[self]


_COMPARISONS: Final[dict[SignalCmpOp, Callable[[int, int], bool]]] = {
    SignalCmpOp.EQ: operator.eq,
    SignalCmpOp.NE: operator.ne,
    SignalCmpOp.GT: operator.gt,
    SignalCmpOp.GE: operator.ge,
    SignalCmpOp.LT: operator.lt,
    SignalCmpOp.LE: operator.le,
}


@final
@dataclass(frozen=True, slots=True)
class WindowInfo:
    """A window, seen from one rank: all that argument checks need."""

    group: CommInfo
    number: int  #: of the comm's windows, from 0
    sizes: tuple[int, ...]  #: bytes of memory, by rank
    signals: int  #: on each rank

    def check_position(self, rank: int, dtype: torch.dtype, numel: int, offset: object) -> int:
        """Check that ``numel`` elements from ``offset`` on are in the memory of ``rank``; returns the offset."""
        start = as_index(offset)
        if start is None:
            raise TypeError(f"offset must be an integer, got {offset!r}")
        end = (start + numel) * dtype.itemsize
        if start < 0 or end > self.sizes[rank]:
            raise ValueError(
                f"offset must leave room for the tensor: {numel} elements of {dtype} from offset {start} on end at "
                f"byte {end}, but window {self.number} has {self.sizes[rank]} bytes on rank {rank}"
            )
        return start

    def check_slot(self, slot: object) -> int:
        """Check the number of a signal."""
        number = as_index(slot)
        if number is None:
            raise TypeError(f"slot must be an integer, got {slot!r}")
        if not 0 <= number < self.signals:
            raise ValueError(f"slot must be in [0, {self.signals}), the signals of window {self.number}, got {number}")
        return number


def check_signal_value(value: object) -> int:
    """Check the value of a signal."""
    number = as_index(value)
    if number is None:
        raise TypeError(f"value must be an integer, got {value!r}")
    if not 0 <= number < SIGNAL_VALUES:
        raise ValueError(f"value must be in [0, 2**64), got {number}")
    return number


@dataclass(frozen=True, slots=True)
class WindowOp(Op):
    """An operation on a window; ``peer`` is the rank of the part that it uses, None: no rank in particular."""

    p2p = True
    window: int
    peer: int | None

    def shown(self, name: str, *arguments: object) -> str:
        return f"{name}({', '.join([*map(str, arguments), f'window={self.window}'])})"


@dataclass(frozen=True, slots=True)
class WindowTransfer(WindowOp):
    """Elements to or from the memory of ``peer``, from element ``offset`` on."""

    peer: int
    dtype: torch.dtype
    numel: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def start(self) -> int:
        """The first byte in the memory of ``peer``."""
        return self.offset * self.dtype.itemsize

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return self.shown(self.kind, f"{dtype}[{self.numel}]", f"rank={self.peer}", f"offset={self.offset}")


@final
@dataclass(frozen=True, slots=True)
class WindowPut(WindowTransfer):
    """Write a tensor to the memory of ``peer``."""

    kind = "put"

    @classmethod
    def of(cls, window: WindowInfo, tensor: Tensor, rank: SupportsIndex, offset: SupportsIndex) -> Call:
        return Call(_transfer(cls, window, tensor, rank, offset, written=False), (tensor,), (), tensor)


@final
@dataclass(frozen=True, slots=True)
class WindowGet(WindowTransfer):
    """Read a tensor from the memory of ``peer``."""

    kind = "get"

    @classmethod
    def of(cls, window: WindowInfo, tensor: Tensor, rank: SupportsIndex, offset: SupportsIndex) -> Call:
        return Call(_transfer(cls, window, tensor, rank, offset, written=True), (), (tensor,), tensor)


@final
@dataclass(frozen=True, slots=True)
class WindowAccumulate(WindowTransfer):
    """Add a tensor to the memory of ``peer``."""

    kind = "accumulate"

    @classmethod
    def of(cls, window: WindowInfo, tensor: Tensor, rank: SupportsIndex, offset: SupportsIndex) -> Call:
        op = _transfer(cls, window, tensor, rank, offset, written=False)
        ReduceOp.SUM.check(op.dtype)
        return Call(op, (tensor,), (), tensor)


def _transfer(
    kind: Callable[..., Any], window: WindowInfo, tensor: Tensor, rank: object, offset: object, *, written: bool
) -> Any:
    peer = check_rank(window.group, "rank", rank)
    check_tensor(window.group, "tensor", tensor, written=written)
    start = window.check_position(peer, tensor.dtype, tensor.numel(), offset)
    return kind(window.number, peer, tensor.dtype, tensor.numel(), start)


@final
@dataclass(frozen=True, slots=True)
class WindowSignal(WindowOp):
    """Set a signal of ``peer`` to ``value``, or ``add`` the value to it, modulo 2**64."""

    kind = "signal"
    peer: int
    slot: int
    value: int
    add: bool

    @classmethod
    def of(cls, window: WindowInfo, rank: SupportsIndex, slot: SupportsIndex, value: SupportsIndex, add: bool) -> Call:
        check_bool("add", add)
        peer = check_rank(window.group, "rank", rank)
        op = cls(window.number, peer, window.check_slot(slot), check_signal_value(value), add)
        return Call(op, (), (), None)

    def __str__(self) -> str:
        value = f"{'add' if self.add else 'value'}={self.value}"
        return self.shown(self.kind, f"rank={self.peer}", f"slot={self.slot}", value)


@final
@dataclass(frozen=True, slots=True)
class WindowWait(WindowOp):
    """Wait until a signal of this rank compares true with ``value``."""

    kind = "wait_signal"
    peer: None
    slot: int
    value: int
    cmp: SignalCmpOp = field()

    @classmethod
    def of(cls, window: WindowInfo, slot: SupportsIndex, value: SupportsIndex, cmp: SignalCmpOp) -> Call:
        if not isinstance(cmp, SignalCmpOp):
            raise TypeError(f"cmp must be a SignalCmpOp, got {cmp!r}")
        return Call(cls(window.number, None, window.check_slot(slot), check_signal_value(value), cmp), (), (), None)

    @property
    def open_ended(self) -> bool:
        return True

    def __str__(self) -> str:
        return self.shown(self.kind, f"slot={self.slot} {self.cmp.value} {self.value}")


@final
@dataclass(frozen=True, slots=True)
class WindowFence(WindowOp):
    """Wait until this rank's earlier operations have taken effect on ``peer``; None: on all ranks."""

    kind = "fence"

    @classmethod
    def of(cls, window: WindowInfo, rank: SupportsIndex | None) -> Call:
        return Call(cls(window.number, None if rank is None else check_rank(window.group, "rank", rank)), (), (), None)

    def __str__(self) -> str:
        return self.shown(self.kind, "all ranks" if self.peer is None else f"rank={self.peer}")


@final
@dataclass(frozen=True, slots=True)
class MakeWindow(WindowOp):
    """All ranks make a window; beside the sequence of collectives."""

    kind = "window"

    def __str__(self) -> str:
        return self.shown(self.kind)


def check_nbytes(nbytes: object) -> int:
    """Check the size of this rank's part of a window."""
    number = as_index(nbytes)
    if number is None:
        raise TypeError(f"nbytes must be an integer, got {nbytes!r}")
    if not 0 <= number < 1 << 62:
        raise ValueError(f"nbytes must be in [0, 2**62), got {number}")
    return number


def check_signals(signals: object) -> int:
    """Check the number of signals of each rank."""
    number = as_index(signals)
    if number is None:
        raise TypeError(f"signals must be an integer, got {signals!r}")
    if not 0 <= number <= 1 << 20:
        raise ValueError(f"signals must be in [0, 2**20], got {number}")
    return number


def check_shape(shape: object, name: str = "shape") -> tuple[int, ...]:
    """Check the shape of a view of a window's memory, or other numbers for its dimensions."""
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence):
        raise TypeError(f"{name} must be a list or tuple of integers, got {shape!r}")
    sizes = [as_index(size) for size in shape]
    found = tuple([size for size in sizes if size is not None])
    if len(found) != len(sizes):
        raise TypeError(f"{name} must be integers, got {shape!r}")
    if found and min(found) < 0:
        raise ValueError(f"{name} must not be negative, got {shape!r}")
    return found
