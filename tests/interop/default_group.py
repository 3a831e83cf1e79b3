"""A default group of torch.distributed in rank processes of the plugin."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch import distributed as dist

import asynccomm.interop.torch_backend  # noqa: F401  # registers the backend


def keys(label: str) -> dist.Store:
    """A store for this test alone."""
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore(f"{os.environ['TORCHELASTIC_RUN_ID']}/{label}", server)


@contextlib.contextmanager
def default_group(backend: str, seconds: float = 60.0) -> Iterator[Any]:
    """Made, and destroyed."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend, store=keys("world"), rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
