"""The part of a window that one rank gives: its memory and signals, the operations on them, and waits for signals."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from ctypes import memmove
from typing import Protocol, final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.regions import overlap, region
from asynccomm.backends.spinning import waited
from asynccomm.errors import AsyncCommError
from asynccomm.ops import (
    WindowAccumulate,
    WindowGet,
    WindowInfo,
    WindowPut,
    WindowSignal,
    WindowTransfer,
    WindowWait,
)
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.windows import SIGNAL_VALUES


class WindowPart(abc.ABC):
    """The memory and the signals of one rank, where this process can access them.

    Args:
        memory: a flat tensor of bytes.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._address = memory.data_ptr()

    @abc.abstractmethod
    def load(self, slot: int) -> int:
        """The value of a signal."""

    @abc.abstractmethod
    def signal(self, slot: int, value: int, *, add: bool) -> None:
        """Set a signal or add to it, and have the rank look at its waits. Earlier writes to the memory are seen."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between addresses, right also where they overlap."""
        memmove(target, source, nbytes)

    def place(self, op: WindowTransfer) -> Tensor:
        """The elements that ``op`` is about, as a vector."""
        return self.memory[op.start : op.start + op.nbytes].view(op.dtype)

    def apply(self, submission: Submission) -> None:
        """Carry out a transfer or a signal. The caller keeps accumulates to one part apart."""
        op = submission.op
        if isinstance(op, WindowSignal):
            self.signal(op.slot, op.value, add=op.add)
            return
        assert isinstance(op, WindowTransfer), op
        if not isinstance(op, WindowAccumulate):  # of bytes as they are: torch's views would take most of a short copy
            (tensor,) = submission.inputs or submission.outputs
            if arithmetic.is_plain(tensor):
                here, there = tensor.data_ptr(), self._address + op.start
                target, source = (there, here) if isinstance(op, WindowPut) else (here, there)
                self.copy(target, source, op.nbytes)
                return
        place = self.place(op)
        if isinstance(op, WindowGet):
            output = submission.outputs[0]
            arithmetic.write(output, apart(place, output).view(output.shape))
        elif isinstance(op, WindowPut):
            put(place, submission.inputs[0])
        else:
            assert isinstance(op, WindowAccumulate), op
            accumulate(place, submission.inputs[0])


def apart(source: Tensor, target: Tensor) -> Tensor:
    """``source``, or a copy of it if it shares memory with ``target``, as two parts of one window may."""
    if source.numel() and overlap(region(source), region(target)):
        return source.clone()
    return source


def put(place: Tensor, tensor: Tensor) -> None:
    """Copy ``tensor`` to ``place``, a vector of the same dtype."""
    place.view(tensor.shape).copy_(apart(tensor, place))


def accumulate(place: Tensor, tensor: Tensor) -> None:
    """Add ``tensor`` to ``place``, a vector of the same dtype; the sum is that of the collectives."""
    dtype, tensor = place.dtype, apart(tensor, place)
    if arithmetic.accumulator(dtype, ReduceOp.SUM.type) == dtype:
        place.view(tensor.shape).add_(tensor)
        return
    rows = [arithmetic.widen(place, ReduceOp.SUM), arithmetic.widen(tensor, ReduceOp.SUM)]
    total = arithmetic.combine(rows, ReduceOp.SUM, bools=dtype == torch.bool)
    arithmetic.narrow(total, place, ReduceOp.SUM, len(rows))


@final
class SignalWaits:
    """The waits of one rank for its signals. From any thread.

    Args:
        load: the value of a signal of this rank.
    """

    def __init__(self, load: Callable[[int], int]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._pending: list[Submission] = []
        self.waited: float = 0.0  #: seconds for the last signal that had not come when it was waited for

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, submission: Submission) -> None:
        """Add a wait, which the next ``look`` may settle."""
        with self._lock:
            self._pending.append(submission)

    def look(self) -> None:
        """Settle the waits with a condition that holds, and drop those that have ended otherwise."""
        if not self._pending:
            return
        with self._lock:
            over = [wait for wait in self._pending if wait.work.done() or self._holds(wait.op)]
            if over:
                self._pending = [wait for wait in self._pending if wait not in over]
        for wait in over:
            self.waited = waited(wait.work.started)
            wait.work.settle()

    def _holds(self, op: object) -> bool:
        assert isinstance(op, WindowWait), op
        return op.cmp.holds(self._load(op.slot), op.value)

    def end(self, error: AsyncCommError | None = None) -> None:
        """Drop all waits; ``error`` fails those that are pending."""
        with self._lock:
            dropped, self._pending = self._pending, []
        if error is not None:
            for wait in dropped:
                wait.work.settle(error)


class ServedPart(Protocol):
    """A rank's own part of a window, for threads that carry out the operations of ranks that cannot map it.

    They write and read ``memory`` themselves. All methods may be called from several threads at once.
    """

    @property
    def memory(self) -> Tensor:
        """The memory as a flat tensor of bytes."""

    @property
    def count(self) -> int:
        """The number of signals."""

    def signal(self, slot: int, value: int, *, add: bool) -> None:
        """Set a signal or add to it; this thread's earlier writes to the memory are seen before."""

    def accumulate(self, start: int, tensor: Tensor) -> None:
        """Add a vector to the memory from byte ``start`` on, apart from all other accumulates."""

    def end(self) -> None:
        """Stop waiting: the window or the comm has ended."""


@final
class LocalPart(WindowPart):
    """A rank's own part, in the ordinary memory of its process."""

    def __init__(self, window: WindowInfo, rank: int) -> None:
        super().__init__(torch.zeros(window.sizes[rank], dtype=torch.uint8, device="cpu"))
        self.count: int = window.signals  #: of signals
        self._signals = [0] * window.signals
        self._lock = threading.Lock()
        self._accumulating = threading.Lock()
        self.waits: SignalWaits = SignalWaits(self.load)

    def load(self, slot: int) -> int:
        return self._signals[slot]

    def signal(self, slot: int, value: int, *, add: bool) -> None:
        with self._lock:
            self._signals[slot] = (self._signals[slot] + value) % SIGNAL_VALUES if add else value
        self.waits.look()

    def apply(self, submission: Submission) -> None:
        """Carry out any operation, also accumulates of several threads at once."""
        if isinstance(submission.op, WindowAccumulate):
            with self._accumulating:
                super().apply(submission)
        else:
            super().apply(submission)

    def accumulate(self, start: int, tensor: Tensor) -> None:
        """Add a vector to the memory from byte ``start`` on."""
        with self._accumulating:
            accumulate(self.memory[start : start + tensor.nbytes].view(tensor.dtype), tensor)

    def wait(self, submission: Submission) -> None:
        """Settle a wait for a signal once its condition holds."""
        self.waits.add(submission)
        self.waits.look()

    def end(self) -> None:
        """Drop the waits for signals."""
        self.waits.end()
