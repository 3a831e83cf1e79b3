"""Waiting for what other threads and processes do."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
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
