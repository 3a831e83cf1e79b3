"""What a process holds of the system: descriptors, threads, shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Inventory", "sockets_named", "what_is_left"]

SECONDS: Final = 3.0  # for threads that were told to end to do so
KEPT_DESCRIPTORS: Final = ("/dev/null",)  # of uvloop, in reserve
KEPT_THREADS: Final = ("AnyIO worker thread", "asyncio_", "MainThread", "simulated ")  # of the loop, not of comms


class Inventory(NamedTuple):
    """At one moment."""

    descriptors: dict[int, str]
    threads: frozenset[str]
    mapped: int  #: segments of shared memory

    @classmethod
    def take(cls) -> Inventory:
        found = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the directory itself
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        threads = [thread.name for thread in threading.enumerate() if not thread.name.startswith(KEPT_THREADS)]
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped = sum("memfd:asynccomm" in line or _is_unlinked(line) for line in lines)
        return cls(found, frozenset(threads), mapped)

    def beyond(self, before: Inventory) -> list[str]:
        """What is here and was not ``before``."""
        new = {fd: what for fd, what in self.descriptors.items() if fd not in before.descriptors}
        left = [f"descriptor {fd}: {what}" for fd, what in new.items() if what not in KEPT_DESCRIPTORS]
        left += [f"thread {name!r}" for name in self.threads - before.threads]
        if self.mapped > before.mapped:
            left.append(f"{self.mapped - before.mapped} mapped segments")
        return sorted(left)


def _is_unlinked(line: str) -> bool:
    """Whether a mapping is of a file without a name, which holds segments where there are no memfds."""
    return " rw-s " in line and line.endswith("(deleted)")


async def what_is_left(before: Inventory) -> list[str]:
    """What the process holds beyond ``before``, and the loop's tasks, once what was on its way out has gone."""
    end = time.monotonic() + SECONDS
    while True:
        gc.collect()
        left = Inventory.take().beyond(before)
        left += [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.01)


def sockets_named(text: str) -> list[str]:
    """The system's local sockets with ``text`` in their names."""
    return [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if text in line]
