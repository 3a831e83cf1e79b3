"""Tensors from a TorchComm's allocator."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from asynccomm import Comm
from asynccomm.compat import torchcomms
from asynccomm.compat.torchcomms import ReduceOp


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_tensors_are_in_memory_that_other_ranks_read(comm: Comm) -> None:
    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "allocator")
        allocator = main.get_mem_allocator()
        with allocator.use_mem_pool():
            shared = torch.full((1 << 18,), main.get_rank() + 1.0)
        plain = torch.full((1 << 18,), main.get_rank() + 1.0)
        assert main.mem_allocator.use_mem_pool() is not None
        for tensor in (shared, plain):
            main.all_reduce(tensor, ReduceOp.SUM, False)
            assert tensor.eq(3).all()
        assert is_mapped_shared(shared) == (comm.backend == "shm")
        assert not is_mapped_shared(plain)
        main.finalize()
        assert shared.eq(3).all()  # it outlives the comm
        with pytest.raises(RuntimeError, match="finalized"):
            main.get_mem_allocator()

    await asyncio.to_thread(program)


def is_mapped_shared(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is in a mapping that processes share."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= tensor.data_ptr() < high:
            return permissions[3] == "s"
    return False
