"""All ranks of a world in one process and one event loop, for tests of programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import SupportsIndex

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.errors import describe_exception
from asynccomm.ops.validation import as_index
from asynccomm.options import DEFAULT_TIMEOUT, MAX_BYTES, MAX_OPS, seconds
from asynccomm.store.memory import MemoryStore

__all__ = ["loopback_world"]


@asynccontextmanager
async def loopback_world(
    size: SupportsIndex,
    *,
    name: str = "test",
    timeout: float | timedelta | None = None,
    hints: Mapping[str, str] | None = None,
    abort_process_on_timeout_or_error: bool = False,
    ordering: str = "program",
    max_ops: int = MAX_OPS,
    max_bytes: int = MAX_BYTES,
) -> AsyncIterator[list[Comm]]:
    """Comms of all ranks, in rank order, in an async context that closes them at its end, also on an exception.

    Args:
        timeout: of operations, as of ``new_comm``; connecting, which is within this process, does not count.

    Raises: ValueError, TypeError naming the argument, before any comm connects.

    Run one task per rank, or call the comms in turn: an operation runs when its last rank arrives.
    ``comm.unsafe_get_backend().hub`` controls the transport: see ``asynccomm.backends.loopback.Hub``.
    """
    number = as_index(size)
    if number is None:
        raise TypeError(f"size must be an integer, got {size!r}")
    if number < 1:
        raise ValueError(f"size must be at least 1, got {number}")
    limit = seconds("timeout", timeout, DEFAULT_TIMEOUT)
    store = MemoryStore()
    comms = await asyncio.gather(
        *(
            new_comm(
                "loopback",
                name=name,
                store=store,
                rank=rank,
                size=number,
                hints=hints,
                abort_process_on_timeout_or_error=abort_process_on_timeout_or_error,
                ordering=ordering,
                max_ops=max_ops,
                max_bytes=max_bytes,
            )
            for rank in range(number)
        )
    )
    try:
        for comm in comms:
            comm.set_timeout(limit)
        yield list(comms)
    except BaseException as exc:
        for comm in comms:
            comm.abort(describe_exception(exc))
        raise
    finally:
        await asyncio.gather(*(comm.aclose() for comm in comms))
