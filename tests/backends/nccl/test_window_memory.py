"""The memory of a window: its layout, and how long it lives."""

from __future__ import annotations

import gc

import pytest
import torch

from asynccomm.backends.nccl.window_memory import PIECE, WindowMemory
from asynccomm.errors import BackendError
from asynccomm.ops import WindowInfo
from asynccomm.ops.validation import CommInfo

from .simulation import SimulatedDevice, SimulatedNccl

INFO = WindowInfo(CommInfo("test", 1, 3, torch.device("cpu")), 0, (0, 100, 5000), 4)


class Noting(SimulatedDevice):
    """Notes in the calls of NCCL that the device was waited for."""

    def __init__(self, nccl: SimulatedNccl) -> None:
        super().__init__()
        self.nccl = nccl

    def synchronize(self) -> None:
        self.nccl.calls.append("synchronize")


def test_all_ranks_have_memory_for_the_largest() -> None:
    nccl, device = SimulatedNccl(), SimulatedDevice()
    memory = WindowMemory(nccl, device, INFO)
    assert memory.nbytes == 8192 + PIECE
    own, piece = memory.tensors(device)
    assert (own.numel(), piece.numel()) == (100, PIECE)
    assert (own.data_ptr(), piece.data_ptr()) == (memory.address, memory.address + 8192)


def test_memory_is_freed_with_its_last_view_when_the_device_is_idle() -> None:
    nccl = SimulatedNccl()
    device = Noting(nccl)
    own, piece = WindowMemory(nccl, device, INFO).tensors(device)
    view = own[5:7]
    del own, piece
    gc.collect()
    assert nccl.calls == ["mem_alloc"]
    view.fill_(1)
    del view
    gc.collect()
    assert nccl.calls == ["mem_alloc", "synchronize", "mem_free"]


def test_no_memory() -> None:
    nccl = SimulatedNccl()
    nccl.fail["mem_alloc"] = "out of memory"
    with pytest.raises(BackendError, match="out of memory"):
        WindowMemory(nccl, SimulatedDevice(), INFO)
