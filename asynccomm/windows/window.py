"""The window of a comm: its methods check their arguments and submit operations, as those of the comm do."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, Self, SupportsIndex, final

import torch
from torch import Tensor

from asynccomm.backends.base import BackendWindow, FastWindow
from asynccomm.core.callsite import CallSite
from asynccomm.core.handles import Handle
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, ClosedError
from asynccomm.ops import (
    Call,
    SignalCmpOp,
    WindowAccumulate,
    WindowFence,
    WindowGet,
    WindowInfo,
    WindowPut,
    WindowSignal,
    WindowWait,
)
from asynccomm.ops.dtypes import UNCOPIED
from asynccomm.ops.validation import check_rank
from asynccomm.ops.windows import check_shape

Timeout = float | timedelta | None


class WindowComm(Protocol):
    """The part of a comm that its windows use."""

    @property
    def error(self) -> AsyncCommError | None:
        """The error that later calls raise."""

    @property
    def in_child(self) -> bool:
        """Whether this process is a forked child of the comm's."""

    def check_open(self) -> None:
        """Raise that error."""

    def submit_to(self, window: BackendWindow, call: Call, timeout: Timeout) -> Work[Any]:
        """Number a call and hand it to a window."""


@final
class Window(Handle):
    """Memory and signals on each rank that all ranks reach; made by ``await comm.window(...)``.

    Each method submits one operation and returns its Work, as the methods of a comm do, with the same time limits and
    errors; a scope of ``coalesce()`` does not hold it. Positions (``offset``) are counted in elements of the tensor's
    dtype, from the start of the target's memory.

    ``put``, ``get``, ``accumulate``, ``signal`` and ``fence`` to one rank take effect in the order of this rank's
    calls. ``wait_signal`` is outside of this order. Accesses of different ranks to the same memory have no order but
    that by signals and fences; the program keeps conflicting ones apart.

    Any thread may call the methods. Cancelling an await is safe and leaves the operation running.
    """

    _instead = "make one there, by comm.window()"

    def __init__(
        self,
        comm: WindowComm,
        info: WindowInfo,
        backend: BackendWindow,
        fast: FastWindow | None,
        like: tuple[torch.Size, torch.dtype] | None,
        barrier: Callable[[CallSite | None], Work[Any]],
    ) -> None:
        """Not for users: see ``comm.window``."""
        self._comm = comm
        self._info = info
        self._backend = backend
        self._fast = fast  #: None, too, once the window is closing
        self._like = like
        self._barrier = barrier
        self._closing: asyncio.Task[None] | None = None

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank."""
        return self._info.group.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._info.group.size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of memory, by rank."""
        return self._info.sizes

    @property
    def signals(self) -> int:
        """The number of signals on each rank."""
        return self._info.signals

    def get_size(self) -> int:
        """Bytes of this rank's memory; torchcomms' name."""
        return self.sizes[self.rank]

    def can_map(self, rank: SupportsIndex) -> bool:
        """Whether ``tensor(rank)`` gives the memory of ``rank``: on this rank always."""
        return self._backend.memory(check_rank(self._info.group, "rank", rank)) is not None

    # -- memory -------------------------------------------------------------------------------------------------------

    def tensor(
        self,
        rank: SupportsIndex | None = None,
        shape: Sequence[SupportsIndex] | None = None,
        dtype: torch.dtype | None = None,
        offset: SupportsIndex = 0,
    ) -> Tensor:
        """The memory of ``rank`` as a tensor, which reads and writes it directly.

        Another rank may write the memory at any time: read it after a signal, a fence and a barrier, or the like. The
        tensor stays valid after the window or the comm has ended, and then is memory like any other.

        Args:
            rank: None: this rank.
            shape, dtype: None: those of ``like``; without ``like`` all of the memory as a vector, in ``torch.uint8``.
            offset: elements from the start of the memory.

        Raises: ValueError if the tensor would not fit into the memory, torch cannot copy ``dtype``, or the memory
            cannot be mapped here: ``can_map`` tells.
        """
        self._check_open()
        info = self._info
        peer = self.rank if rank is None else check_rank(info.group, "rank", rank)
        like_shape, like_dtype = self._like if self._like is not None else (None, torch.uint8)
        kind = like_dtype if dtype is None else dtype
        if not isinstance(kind, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {kind!r}")
        if kind in UNCOPIED:
            raise ValueError(f"dtype must be one that torch can copy, got {kind}")
        if shape is not None:
            sizes = check_shape(shape)
        elif like_shape is not None:
            sizes = tuple(like_shape)
        else:
            first = info.check_position(peer, kind, 0, offset)
            sizes = (info.sizes[peer] // kind.itemsize - first,)
        numel = math.prod(sizes)
        start = info.check_position(peer, kind, numel, offset) * kind.itemsize
        memory = self._backend.memory(peer)
        if memory is None:
            raise ValueError(f"rank must be one whose memory can be mapped here, got {peer}: use get() and put()")
        return memory[start : start + numel * kind.itemsize].view(kind).view(sizes)

    # -- operations ---------------------------------------------------------------------------------------------------

    def put(
        self, tensor: Tensor, rank: SupportsIndex, offset: SupportsIndex = 0, *, timeout: Timeout = None
    ) -> Work[Tensor]:
        """Write ``tensor`` to the memory of ``rank``.

        The Work is done when ``tensor`` may be changed. The target may read the memory after a later ``signal``, or
        after a ``fence`` here and a barrier.

        Returns: Work of ``tensor``.
        """
        fast = self._fast if timeout is None else None
        if fast is not None and (work := fast.put(tensor, rank, offset)) is not None:
            return work
        return self._submit(WindowPut.of(self._info, tensor, rank, offset), timeout)

    def get(
        self, tensor: Tensor, rank: SupportsIndex, offset: SupportsIndex = 0, *, timeout: Timeout = None
    ) -> Work[Tensor]:
        """Read from the memory of ``rank`` into ``tensor``.

        Returns: Work of ``tensor``.

        Raises: NotImplementedError on ``nccl``, as for ``accumulate``.
        """
        fast = self._fast if timeout is None else None
        if fast is not None and (work := fast.get(tensor, rank, offset)) is not None:
            return work
        return self._submit(WindowGet.of(self._info, tensor, rank, offset), timeout)

    def accumulate(
        self, tensor: Tensor, rank: SupportsIndex, offset: SupportsIndex = 0, *, timeout: Timeout = None
    ) -> Work[Tensor]:
        """Add ``tensor`` to the memory of ``rank``; the Work is done as that of ``put``.

        Accumulates of all ranks to one rank take place one after the other, so that none is lost. They are not apart
        from ``put``, ``get`` and direct access to the memory. The order of several ranks' accumulates is open, and with
        it the rounding of floating-point sums.

        Returns: Work of ``tensor``.
        """
        return self._submit(WindowAccumulate.of(self._info, tensor, rank, offset), timeout)

    def signal(
        self,
        rank: SupportsIndex,
        slot: SupportsIndex = 0,
        value: SupportsIndex = 1,
        *,
        add: bool = False,
        timeout: Timeout = None,
    ) -> Work[None]:
        """Set signal ``slot`` of ``rank`` to ``value``, or ``add`` the value to it modulo 2**64; either is atomic.

        A rank that sees the signal sees the earlier puts and accumulates of this rank to it. A signal keeps its value;
        a rank resets its own by a signal to itself.
        """
        fast = self._fast if timeout is None else None
        if fast is not None and (work := fast.signal(rank, slot, value, add)) is not None:
            return work
        return self._submit(WindowSignal.of(self._info, rank, slot, value, add), timeout)

    def wait_signal(
        self,
        slot: SupportsIndex = 0,
        value: SupportsIndex = 1,
        cmp: SignalCmpOp = SignalCmpOp.GE,
        *,
        timeout: Timeout = None,
    ) -> Work[None]:
        """Wait until signal ``slot`` of this rank compares true with ``value``.

        The signal is compared when it changes. Of values that follow each other at once, a wait may see the last only,
        so ``EQ`` is for signals that stay. A wait is not bound to a rank: where the signalling rank has closed the comm
        in order, the wait ends at its time limit.
        """
        fast = self._fast if timeout is None else None
        if fast is not None and (work := fast.wait_signal(slot, value, cmp)) is not None:
            return work
        return self._submit(WindowWait.of(self._info, slot, value, cmp), timeout)

    def signal_value(self, slot: SupportsIndex = 0) -> int:
        """The present value of signal ``slot`` of this rank. On ``nccl`` only ``wait_signal`` shows the puts before."""
        self._check_open()
        return self._backend.load(self._info.check_slot(slot))

    def fence(self, rank: SupportsIndex | None = None, *, timeout: Timeout = None) -> Work[None]:
        """Wait until this rank's earlier operations have taken effect on ``rank``; None: on all ranks.

        They are done then. Not collective: with a barrier behind it, all ranks may read all memory.
        """
        fast = self._fast if timeout is None else None
        if fast is not None and (work := fast.fence(rank)) is not None:
            return work
        return self._submit(WindowFence.of(self._info, rank), timeout)

    def _submit(self, call: Call, timeout: Timeout) -> Work[Any]:
        self._check_open()
        return self._comm.submit_to(self._backend, call, timeout)

    # -- ending -------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        self._comm.check_open()
        if self._closing is not None:
            raise self._closed()

    def _closed(self) -> ClosedError:
        return ClosedError(f"window {self._info.number} of comm {self._info.group.name!r} is closed")

    async def aclose(self) -> None:
        """Refuse further calls, fail pending ``wait_signal``, and wait until all ranks have closed. Idempotent.

        Collective, as the other ranks may still use this rank's memory. On a comm that is broken or closed it waits for
        no rank. Closing the comm closes its windows, and waits for no rank either. Cancelling is safe: the window
        closes all the same. A forked child closes nothing: the window is its parent's.
        """
        await self._end(together=True)

    async def _end(self, *, together: bool) -> None:
        if self._comm.in_child:
            return
        self._start_closing(together=together)
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def _start_closing(self, *, together: bool) -> None:
        if self._closing is not None:
            return
        fence = self.fence() if together and self._comm.error is None else None
        self._fast = None
        self._closing = asyncio.ensure_future(self._close(fence))
        self._backend.end_waits(self._closed())

    async def _close(self, fence: Work[None] | None) -> None:
        try:
            if fence is not None:
                with contextlib.suppress(AsyncCommError):  # the comm has broken, and later calls raise its error
                    await fence
                    await self._barrier(fence.site)  # this task's stack has no call
        finally:
            self._backend.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; after an exception without waiting for the other ranks."""
        await self._end(together=exc is None)

    def __repr__(self) -> str:
        info, closed = self._info, "" if self._closing is None else ", closed"
        return (
            f"<Window {info.number} of comm {info.group.name!r}, {self.get_size()} bytes and {info.signals} signals on "
            f"rank {self.rank}{closed}>"
        )
