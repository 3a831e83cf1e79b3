"""Worlds of torch.distributed in the rank processes of the plugin."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch import distributed as dist

import asynccomm.interop.torch_backend  # noqa: F401  # registers the backend


def store(label: str) -> dist.Store:
    """Keys of this test alone."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(host, port, is_master=False)
    return dist.PrefixStore(f"{os.environ['TORCHELASTIC_RUN_ID']}/{label}", server)


@contextlib.contextmanager
def world(backend: str = "asynccomm", label: str | None = None, seconds: float = 60, **options: Any) -> Iterator[Any]:
    """The default group, made and destroyed."""
    try:
        dist.init_process_group(
            backend,
            store=store(backend if label is None else label),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=seconds),
            **options,
        )
    except BaseException:
        # torch counts groups that could not be made too, on the ranks that tried, and names the next ones by it:
        # ranks that tried and ranks that did not would never meet again.
        dist.distributed_c10d._world.group_count = 0
        raise
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
