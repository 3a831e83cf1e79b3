"""How the tests on real GPUs open comms."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from datetime import timedelta

import pytest
import torch

from asynccomm import Comm, new_comm

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def choose_gpu() -> torch.device:
    """Make one GPU this rank's own if there are as many, else share the one. Skips the test if they cannot share."""
    rank, size, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.cuda.device_count()
    if size > count and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        pytest.skip(f"needs {size} GPUs, or NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1; there are {count}")
    torch.cuda.set_device(rank % count)
    return torch.device("cuda", rank % count)


def open_comm(
    name: str = "main", *, timeout: float | timedelta | None = 60.0, hints: Mapping[str, str] | None = None
) -> AbstractAsyncContextManager[Comm]:
    """A comm of all ranks."""
    choose_gpu()
    return new_comm("nccl", "cuda", name=name, timeout=timeout, hints=hints)
