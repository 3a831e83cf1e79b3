"""The mode of torch by itself; test_memory.py in methods has it on comms."""

import asyncio
import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor

from asynccomm.comm.memory_mode import SharedMemoryMode

made: list[tuple[int, ...]] = []


def allocate(shape: object, stride: object, dtype: torch.dtype) -> Tensor:
    made.append(tuple(shape))  # type: ignore[arg-type]
    return torch.empty_strided(shape, stride, dtype=dtype)  # type: ignore[arg-type]


async def test_only_the_task_that_made_the_mode_allocates() -> None:
    made.clear()
    mode = SharedMemoryMode(allocate)

    async def other() -> None:
        with mode:
            torch.zeros(3)

    await asyncio.create_task(other())
    assert made == []
    with mode:
        thread = threading.Thread(target=torch.zeros, args=(3,))
        thread.start()
        thread.join()
        assert made == []
        assert torch.zeros(2, 3).shape == (2, 3)
        assert torch.eye(2).tolist() == [[1, 0], [0, 1]]
    assert made == [(2, 3), (2, 2)]


def test_tensors_that_are_no_plain_memory_stay() -> None:
    made.clear()
    base = torch.ones(3, 3)
    with SharedMemoryMode(allocate):
        torch.empty(3, device="meta")
        torch.zeros(0)
        torch.eye(3).to_sparse()
        base.expand(2, 3, 3)
        base + 1
    assert made == [(3, 3)], "eye alone"


def test_a_mode_is_never_copied() -> None:
    mode = SharedMemoryMode(allocate)
    assert copy.copy(mode) is mode
    assert copy.deepcopy([mode]) == [mode]
    with pytest.raises(TypeError, match=r"belongs to this process: call comm\.memory\(\) there"):
        pickle.dumps(mode)
