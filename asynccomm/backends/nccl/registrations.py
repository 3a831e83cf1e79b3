"""Registered tensors: NCCL may run collectives in their memory without copies of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar, final

from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.nccl.api import CommHandle, Nccl, dotted
from asynccomm.backends.nccl.communicator import Communicator
from asynccomm.core.tasks import detach, shielded
from asynccomm.errors import AsyncCommError

T = TypeVar("T")


class RunsCalls(Protocol):
    """Makes a call of NCCL in the order of the collectives."""

    def __call__(self, call: Callable[[CommHandle, int], T], /) -> Coroutine[Any, Any, T]: ...


@final
class Registrations:
    """The registered tensors of one rank, which are kept until they are deregistered. On the event loop."""

    def __init__(self, nccl: Nccl, run: RunsCalls) -> None:
        self._nccl = nccl
        self._run = run
        #: by address and size; with the calls that return NCCL's handles
        self._held: dict[tuple[int, int], tuple[Tensor, asyncio.Future[int]]] = {}

    async def add(self, tensor: Tensor) -> None:
        """Register a tensor. A cancelled call registers it all the same.

        Raises: ValueError, NotImplementedError, RuntimeError before NCCL is connected, BackendError.
        """
        nccl = self._nccl
        if "register" not in nccl.native:
            raise NotImplementedError(f"NCCL {dotted(nccl.version)} cannot register memory")
        if not arithmetic.is_plain(tensor) or not tensor.numel():
            raise ValueError(f"tensor must be contiguous and have elements, got {_described(tensor)}")
        key = address, nbytes = _place(tensor)
        if key in self._held:
            raise ValueError(f"tensor must not be registered yet, got {_described(tensor)}")
        call = detach(asyncio.ensure_future(self._run(lambda comm, _: nccl.register(comm, address, nbytes))))
        self._held[key] = (tensor, call)
        try:
            await asyncio.shield(call)
        except Exception:
            self._held.pop(key, None)
            raise

    async def remove(self, tensor: Tensor) -> None:
        """Deregister a tensor, which no operation in flight uses. Raises: ValueError, BackendError."""
        held = self._held.pop(_place(tensor), None)
        if held is None:
            raise ValueError(f"tensor must be registered with this comm, got {_described(tensor)}")

        async def deregister(memory: Tensor, call: asyncio.Future[int]) -> None:  # ``memory`` is kept until then
            await self._run(partial(self._deregister, await call))

        await shielded(deregister(*held))

    def _deregister(self, handle: int, comm: CommHandle, stream: int) -> None:
        self._nccl.deregister(comm, handle)

    def end(self, communicator: Communicator) -> None:
        """Deregister all tensors, before the communicator ends. No call may be in progress."""
        held, self._held = self._held, {}
        for _, call in held.values():
            if call.done() and not call.cancelled() and call.exception() is None:
                with contextlib.suppress(AsyncCommError):  # the communicator has failed
                    communicator.run(partial(self._deregister, call.result()))


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} at address {tensor.data_ptr():#x}"
