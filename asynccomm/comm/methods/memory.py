"""Tensors in memory that the other ranks of the host can read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import SupportsIndex

import torch
from torch import Tensor

from asynccomm.backends.base import Backend
from asynccomm.comm.memory_mode import SharedMemoryMode
from asynccomm.comm.methods.base import CommBase
from asynccomm.ops.validation import as_index, check_tensor
from asynccomm.ops.windows import check_shape


class SharedTensors(CommBase):
    """Tensors that collectives need not copy to the ranks of the same host."""

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], *, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor with any content, in memory that the other ranks of the host can read. Not collective.

        ::

            gradient = comm.empty((1024, 1024), dtype=torch.bfloat16)
            await comm.all_reduce(gradient)

        It is a tensor like any other. On the backends ``shm`` and ``hierarchical`` other ranks of the host read it
        directly, where collectives of other tensors often copy them into shared memory first: in ``all_reduce``,
        ``reduce``, ``all_gather``, ``broadcast``, ``gather``, ``reduce_scatter_single`` and ``all_to_all_single``, of
        contiguous tensors and their contiguous views, of 128 KiB or more (``all_reduce`` and ``reduce``: 2 MiB or
        more). The results have the same bits. Each rank decides for itself; ranks with and without such tensors may
        take part in one collective. In exchange, a rank's operation ends only when the other ranks have read its
        tensor: a program that cancels an await must not write the tensor before the Work is done. All comms of the
        process may use the tensor, and its memory cannot be resized. Elsewhere, and on other backends, the tensor is in
        ordinary memory of the comm's device.

        The memory is freed with the last tensor in it; a tensor may outlive the comm. Only this process writes it. A
        tensor takes at least 64 bytes, and one of 256 KiB or more whole pages; the first access to new memory costs as
        much as elsewhere, so a program that calls collectives in a loop keeps its tensors. A forked child shares the
        memory with its parent, instead of a copy of it, and collectives of the child treat it as ordinary memory.

        Args:
            shape: the sizes, or one size.
            dtype: None: torch's default dtype.

        Raises: TypeError, ValueError for the arguments; MemoryError; ClosedError, BrokenError. From any thread.
        """
        one = as_index(shape)
        sizes = check_shape([one] if one is not None else shape)
        if sizes and max(sizes) >= 1 << 63:
            raise ValueError(f"shape must have sizes below 2**63, got {shape!r}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        kind = torch.get_default_dtype() if dtype is None else dtype
        backend = self.unsafe_get_backend()
        strides = [math.prod([max(size, 1) for size in sizes[dim + 1 :]]) for dim in range(len(sizes))]
        if type(backend).shared_tensor is Backend.shared_tensor:
            return torch.empty(sizes, dtype=kind, device=self.device)
        return backend.shared_tensor(sizes, strides, kind)

    def memory(self) -> AbstractContextManager[object]:
        """Make the tensors that this task creates in the context as :meth:`empty` does. ``with``, without any await.

        ::

            with comm.memory():
                model = Model()

        This concerns CPU tensors from torch's functions that create tensors (``empty``, ``zeros``, ``ones``, ``full``,
        ``tensor``, ``arange``, ``eye``, ``rand`` and their like, with ``_like`` and ``new_``), from ``clone``, and from
        ``to`` with another dtype: parameters and buffers of modules that are made, loaded or converted here. Results of
        other functions are in ordinary memory. Values, strides and random numbers are those without the context. Does
        nothing on a backend that shares no memory.

        The first operation on a tensor in the context imports ``torch._dynamo`` and ``sympy``, the default of torch's
        dispatch modes: several seconds on the calling thread, unless the program has imported ``torch._dynamo`` before.

        Raises: MemoryError from functions in the context; ClosedError, BrokenError.
        """
        backend = self.unsafe_get_backend()
        if type(backend).shared_tensor is Backend.shared_tensor:
            return nullcontext()
        return SharedMemoryMode(backend.shared_tensor)

    async def register(self, tensor: Tensor) -> None:
        """Register the memory of a tensor with NCCL, which may then run collectives there without copies of its own.

        ::

            await comm.register(gradient)
            for step in range(steps):
                await comm.all_reduce(gradient)
            await comm.deregister(gradient)

        Not collective; NCCL gains from it where all ranks register the tensors of a collective. The results are those
        of any other tensors. The comm keeps the tensor until :meth:`deregister`, or until the comm is closed.
        Cancelling registers the tensor all the same.

        Only on ``nccl``. A process of the CPU cannot give other processes its own memory: there, :meth:`empty` and
        :meth:`memory` make tensors in memory that they can read.

        Raises: ValueError for a tensor that is not contiguous, has no elements, or is registered; NotImplementedError
            on other backends; RuntimeError before NCCL is connected; BackendError if NCCL refuses; TypeError,
            ClosedError, BrokenError.
        """
        check_tensor(self._group, "tensor", tensor)
        await self.unsafe_get_backend().register(tensor.detach())

    async def deregister(self, tensor: Tensor) -> None:
        """End the registration of a tensor, once the collectives of this rank that were called before are over.

        Raises: ValueError for a tensor that is not registered with this comm; as :meth:`register`.
        """
        check_tensor(self._group, "tensor", tensor)
        await self.unsafe_get_backend().deregister(tensor.detach())
