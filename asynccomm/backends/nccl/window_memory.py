"""The memory of a window: allocated by NCCL, and freed with the last tensor in it."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Final, final

import anyio.to_thread
from torch import Tensor

from asynccomm.backends.base import BackendContext, UnsuitableError
from asynccomm.backends.nccl.api import Nccl, dotted
from asynccomm.backends.nccl.device import Device
from asynccomm.backends.nccl.shared import DeviceRuntime
from asynccomm.errors import BackendError
from asynccomm.ops import WindowInfo

PIECE: Final = 4 << 20  # bytes that a put copies into the window at a time
_PAGE: Final = 4096  # NCCL's alignment of windows
_NEEDED: Final = 22900  # the first NCCL with one-sided calls of the host


@final
class WindowMemory:
    """The memory of one rank, and behind it a piece through which other tensors are put. Raises: BackendError."""

    def __init__(self, nccl: Nccl, device: Device, window: WindowInfo) -> None:
        #: bytes of all: the same on all ranks, as NCCL requires
        self.nbytes: int = -(-max(window.sizes) // _PAGE) * _PAGE + PIECE
        with device.here():
            self.address: int = nccl.mem_alloc(self.nbytes)
        weakref.finalize(self, _free, nccl, device, self.address).atexit = False
        self._size = window.sizes[window.group.rank]

    def tensors(self, device: Device) -> tuple[Tensor, Tensor]:
        """The memory of the rank and the piece, as bytes; they keep this object."""
        whole = device.bytes_at(self.address, self.nbytes, self)
        return whole[: self._size], whole[-PIECE:]


def _free(nccl: Nccl, device: Device, address: int) -> None:
    with device.here():
        device.synchronize()  # kernels in flight may use the memory
        nccl.mem_free(address)


async def allocate(context: BackendContext, window: WindowInfo, runtime: DeviceRuntime) -> WindowMemory:
    """The memory of this rank. Collective. Raises: UnsuitableError on all ranks, if one of them has no windows."""
    nccl, memory, problem = runtime.nccl, None, ""
    if "windows" not in nccl.native:
        needed = f"windows on backend 'nccl' need {dotted(_NEEDED)} or newer"
        problem = f"NCCL {dotted(nccl.version)} has no one-sided calls, and {needed}"
    else:
        try:
            memory = await anyio.to_thread.run_sync(partial(WindowMemory, nccl, runtime.device, window))
        except BackendError as exc:
            problem = str(exc)
    if found := await context.first_problem(problem):
        memory = None  # the error keeps this frame
        raise UnsuitableError(f"rank {found[0]}: {found[1]}")
    assert memory is not None
    return memory
