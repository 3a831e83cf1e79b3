"""Waiting for what other threads and processes do."""

from __future__ import annotations

import asyncio
import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEADLINE = 30.0  # seconds until a condition counts as never met


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        await asyncio.sleep(0.002)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def names() -> set[str]:
    """Of this process's local sockets that listen."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    found = {line[line.index("@") :] for line in lines if "@asynccomm/" in line}
    return {name for name in found if f"/{os.getpid()}/" in name}


@contextmanager
def nothing_unclosed() -> Iterator[None]:
    """Neither descriptors nor warnings of what was forgotten are left behind, in whatever thread."""
    held = descriptors()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(warning.message) for warning in found] == []
    assert descriptors() <= held
