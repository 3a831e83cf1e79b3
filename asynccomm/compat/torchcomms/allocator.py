"""The memory allocator of a TorchComm: tensors that the other ranks of the host read without a copy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import final

from asynccomm.comm.comm import Comm
from asynccomm.core.handles import Handle


@final
class MemAllocator(Handle):
    """Allocator of CPU tensors for the operations of a comm; made by ``TorchComm.get_mem_allocator()``.

    ::

        with comm.get_mem_allocator().use_mem_pool():
            tensor = torch.ones(1 << 20)

    torchcomms' allocators are for ``torch.cuda.MemPool``, which has no counterpart for the CPU.
    """

    _instead = "get one there, by comm.get_mem_allocator()"

    def __init__(self, comm: Comm) -> None:
        """Not for users: see ``TorchComm.get_mem_allocator``."""
        self._comm = comm

    def use_mem_pool(self) -> AbstractContextManager[object]:
        """Within it, this task's new tensors are in memory that the other ranks of the host read.

        See ``asynccomm.Comm.memory``. Tensors may outlive the comm. On backends without such memory, nothing changes.
        """
        return self._comm.memory()
