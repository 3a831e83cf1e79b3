"""Windows: memory and signals of each rank that the other ranks reach, with torchcomms' names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, final

import torch
from torch import Tensor

from asynccomm.compat.either import EitherComm
from asynccomm.compat.torchcomms.errors import refusing
from asynccomm.compat.torchcomms.work import TorchWork
from asynccomm.core.handles import Handle
from asynccomm.core.work import Work
from asynccomm.ops.windows import SignalCmpOp
from asynccomm.windows.window import Window


@final
class TorchCommWindow(Handle):
    """Memory and signals of each rank, which all ranks reach; made by ``TorchComm.window_allocate``.

    Displacements and offsets are counted in elements of the tensor's dtype. Operations of one rank on one target take
    effect in the order of the calls; the target must see a signal, or a barrier after a wait for the signal, before it
    reads the memory: the TorchWork of a ``put`` only tells that ``tensor`` may be changed.

    ``async_op`` as for operations of the comm. Raises, before anything is sent: TypeError; RuntimeError for wrong
    values, and on a finalized comm or a closed window. Cancelling an await leaves the operation running.
    """

    _instead = "make one there, by comm.window_allocate()"

    def __init__(self, window: Window, comm: EitherComm, run: Callable[..., TorchWork]) -> None:
        """Not for users: see ``TorchComm.window_allocate``."""
        self._window, self._comm, self._run = window, comm, run

    def get_size(self) -> int:
        """Bytes of this rank's memory."""
        return self._window.get_size()

    def get_tensor(
        self, rank: SupportsIndex, sizes: Sequence[SupportsIndex], dtype: torch.dtype, offset: SupportsIndex
    ) -> Tensor:
        """The memory of ``rank`` from ``offset`` on, as a tensor of shape ``sizes`` without a copy.

        Raises: RuntimeError if the tensor would not fit, or the memory of ``rank`` cannot be mapped in this process:
            that of this rank always can, and on one host that of all ranks, over ``shm``.
        """
        with refusing({"shape": "sizes"}):
            return self._window.tensor(rank, sizes, dtype, offset)

    def put(self, tensor: Tensor, dst_rank: SupportsIndex, target_disp: SupportsIndex, async_op: bool) -> TorchWork:
        """Write ``tensor`` to the memory of ``dst_rank``, from element ``target_disp`` on."""
        return self._start("put", async_op, self._window.put, tensor, dst_rank, target_disp)

    def signal(
        self, signal_disp: SupportsIndex, signal_val: SupportsIndex, dst_rank: SupportsIndex, async_op: bool
    ) -> TorchWork:
        """Set signal ``signal_disp`` of ``dst_rank`` to ``signal_val``; ``dst_rank`` sees earlier puts with it."""
        return self._start("signal", async_op, self._window.signal, dst_rank, signal_disp, signal_val)

    def wait_signal(
        self, signal_disp: SupportsIndex, signal_val: SupportsIndex, cmp_op: SignalCmpOp, async_op: bool
    ) -> TorchWork:
        """Wait until signal ``signal_disp`` of this rank compares true with ``signal_val``."""
        return self._start("wait_signal", async_op, self._window.wait_signal, signal_disp, signal_val, cmp_op)

    def _start(self, name: str, async_op: object, method: Callable[..., Work[Any]], *args: Any) -> TorchWork:
        def start(*args: Any, timeout: Any, hints: object) -> Work[Any]:  # windows take no hints
            return method(*args, timeout=timeout)

        return self._run(name, async_op, None, None, start, *args)

    def close(self) -> Any:
        """Free the window, once all ranks have called it; in a coroutine, ``await`` the call. Idempotent.

        ``TorchComm.finalize`` frees the windows of the comm, too. Not in torchcomms.
        """
        return self._comm.awaited(self._window.aclose)

    def __repr__(self) -> str:
        return f"<TorchCommWindow of {self._window!r}>"
