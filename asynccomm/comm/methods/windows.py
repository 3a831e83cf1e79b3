"""Making windows."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any, Final, SupportsIndex

import torch
from torch import Tensor

from asynccomm.backends.base import Backend, BackendWindow
from asynccomm.comm.methods.base import CommBase
from asynccomm.core.tasks import shielded_acquire
from asynccomm.core.work import Work
from asynccomm.errors import BackendError
from asynccomm.ops import AllGatherSingle, Barrier, MakeWindow, WindowInfo
from asynccomm.ops.validation import check_tensor
from asynccomm.ops.windows import check_nbytes, check_signals
from asynccomm.store.base import within
from asynccomm.windows.window import Window

SIGNALS: Final = 256  # of each rank, as in torchcomms
_ALL_GATHER_SINGLE, _BARRIER = AllGatherSingle.of, Barrier.of  # see collectives.py


class Windows(CommBase):
    """Memory of one rank that the other ranks read and write."""

    _made = 0  # windows so far

    async def window(
        self,
        nbytes: SupportsIndex | None = None,
        *,
        like: Tensor | None = None,
        signals: SupportsIndex = SIGNALS,
        timeout: float | timedelta | None = None,
    ) -> Window:
        """Make a window: memory and signals on each rank, which all ranks reach. Collective.

        ::

            async with await comm.window(like=gradient) as window:
                await window.put(gradient, 0)
                await window.signal(0, slot=comm.rank)

        The memory and the signals are zero at first. The ranks may differ in ``nbytes``, also 0, but not in
        ``signals``. Cancelling abandons the wait: the window is made, and the other ranks may use this rank's memory
        until the comm closes. A rank without the window cannot take part in closing it: the others leave that to the
        comm, or their ``aclose`` is a collective that differs.

        Args:
            nbytes: bytes of this rank's memory.
            like: in place of ``nbytes``: as much memory as this tensor has elements; ``Window.tensor`` has its shape
                and dtype then. The tensor's data is not used.
            signals: the number of signals of each rank.
            timeout: seconds or a timedelta; None: the comm's time limit.

        Raises: NotImplementedError on a backend without windows; ValueError on all ranks if ``signals`` differ;
            UnsuitableError on all ranks if there is no memory, or NCCL is older than 2.29; the errors of all
            operations.
        """
        if (nbytes is None) == (like is None):
            raise TypeError(f"give one of nbytes and like, got nbytes={nbytes!r} and like={like!r}")
        if like is not None:
            check_tensor(self._group, "like", like)
            nbytes = like.numel() * like.itemsize
        own = torch.tensor([check_nbytes(nbytes), check_signals(signals)], device=self._group.device)
        self._check_windows()
        # called before the first await, and so in the program's order
        given = self._call(timeout, None, None, _ALL_GATHER_SINGLE, None, own)
        number, self._made = self._made, self._made + 1  # a refused call has no number
        made = self._make(number, given, timeout)
        info, backend = await shielded_acquire(made, lambda made: made[1].abort())
        shape = None if like is None else (like.shape, like.dtype)
        barrier = _BARRIER(self._group).labelled(f"end of window {number}")  # no other barrier fits it
        closing = partial(self._submitter.submit, barrier, None, None)
        return Window(self._submitter, info, backend, backend.fast_path(self._fast), shape, closing)

    def _check_windows(self) -> None:
        """Raise NotImplementedError if the backend has no windows: all ranks do."""
        backend = self.unsafe_get_backend()
        if type(backend).window is Backend.window:
            raise NotImplementedError(f"backend {backend.name!r} has no windows")

    async def _make(
        self, number: int, given: Work[Any], timeout: float | timedelta | None
    ) -> tuple[WindowInfo, BackendWindow]:
        sizes, signals = (await given).view(-1, 2).T.tolist()
        if len(set(signals)) > 1:
            raise ValueError(f"signals must be the same on all ranks, got {signals} in rank order")
        info = WindowInfo(self._group, number, tuple(sizes), signals[0])
        made: list[BackendWindow] = []

        async def steps(work: Work[Any]) -> None:
            try:
                async with within(work.timeout):
                    made.append(await self.unsafe_get_backend().window(info))
            except TimeoutError:
                raise BackendError(f"window {number} was not made within {work.timeout:g} s") from None

        await self._session.run_aside(MakeWindow(number, None), steps, timeout)
        return info, made[0]
