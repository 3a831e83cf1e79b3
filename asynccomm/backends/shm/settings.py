"""The backend's settings, tuned by hints. Each default is the knee of a curve that ``bench/hints.py`` draws."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Final, final

from asynccomm.backends.shm.layout import LINE, Layout
from asynccomm.options import whole_number

BANKS: Final = 4  # steps in flight: one being filled, one combined, one read, and one for a late rank
MOST_BYTES: Final = 1 << 30  # upper limit of every size
# The kernel gives a busy thread time slices of milliseconds, and an event loop on the same core would wait for them.
# bench/loop_lag.py, 2 ranks on 2 cores: the 99th percentile of the loop's lag is below 1 ms, and 2 to 4 ms without.
YIELD_SECONDS: Final = 3e-4

# A peer that is awake answers within microseconds. The spin must outlast a wake-up and a call of a peer on a busy core;
# after a shorter one, ranks fall into antiphase: each goes to sleep just before the peer that it has rung is awake.
SPIN_SECONDS: Final = 2e-4

AWAKE: Final = 4  # spins of a call are one of the thread

HINTS: Final[Mapping[str, str]] = {
    "spin_us": "microseconds to look out for a late rank before going to sleep, 0 for not at all (default 200)",
    "thread_spin_us": "the same for the thread of a large transfer (default four times spin_us, and 0 with more ranks "
    "than cores)",
    "yield_us": "microseconds of a large transfer after which its thread offers its core to others, such as the event "
    "loop, 0 for never (default 300)",
    "chunk_bytes": "bytes that a rank shares in one step of a collective (default 524288)",
    "whole_bytes": "every rank does an all_reduce up to this at once, a root a reduce up to four times as much; larger "
    "ones are done in parts (default 16384)",
    "inline_bytes": "reductions and messages up to this run where they are called, and other collectives up to twice "
    "as much; larger ones on a thread (default 4194304)",
    "single_copy": "1 to read larger tensors from the memory of the other process where the kernel allows it, 0 to "
    "copy them to shared memory first (default 1)",
    "message_bytes": "bytes of the queue between two ranks that messages go through (default 1048576)",
}


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that all ranks of a comm must share; the fields are the hints of the same names."""

    chunk_bytes: int = 512 << 10
    whole_bytes: int = 16 << 10
    inline_bytes: int = 4 << 20
    single_copy: int = 1
    message_bytes: int = 1 << 20

    @staticmethod
    def of(hints: Mapping[str, str]) -> Settings:
        """The settings from the hints. Raises ``ValueError`` naming the hint."""
        return _settings(tuple((key, hints[key]) for key in Settings.__dataclass_fields__ if key in hints))

    def as_dict(self) -> dict[str, int]:
        """The values by the names of the hints."""
        return {key: getattr(self, key) for key in self.__dataclass_fields__}

    def layout(self, size: int) -> Layout:
        """The layout of a segment for ``size`` ranks; each rank gets at least one cache line of every slot."""
        return _layout(size, max(self.chunk_bytes, size * LINE), self.message_bytes)


# cached, because the comms of a process are often alike


@lru_cache(maxsize=64)
def _settings(given: tuple[tuple[str, str], ...]) -> Settings:
    values = {key: _number(key, text) for key, text in given}
    settings = Settings(**values)
    for key in ("chunk_bytes", "message_bytes"):
        value = getattr(settings, key)
        if value % LINE or value < 1024:
            raise ValueError(f"hint {key!r} must be a multiple of {LINE} and at least 1024, got {value}")
    if settings.whole_bytes > settings.chunk_bytes:
        if "whole_bytes" in values:
            raise ValueError(
                f"hint 'whole_bytes' must be at most chunk_bytes ({settings.chunk_bytes}), got {settings.whole_bytes}"
            )
        settings = replace(settings, whole_bytes=settings.chunk_bytes)
    return settings


@lru_cache(maxsize=64)
def _layout(size: int, chunk: int, ring: int) -> Layout:
    return Layout(size, chunk, BANKS, ring)


def spin_seconds(hints: Mapping[str, str], size: int) -> float:
    """The time that a rank of a comm of ``size`` ranks spins for a late peer before it sleeps, in seconds.

    Raises ``ValueError`` for a bad hint ``spin_us``.
    """
    seconds = _number("spin_us", hints["spin_us"]) * 1e-6 if "spin_us" in hints else SPIN_SECONDS
    return seconds if size > 1 else 0.0  # no other rank can be late


def thread_spin_seconds(hints: Mapping[str, str], size: int) -> float:
    """The same for the thread of large transfers. Raises ``ValueError``.

    With as long a spin as that of calls, 64 MiB take 8 % longer (bench/collectives.py, 2 ranks on 2 cores). With more
    ranks than cores, a spin takes a core from a rank that computes: communication costs a fifth to a third more in
    bench/ddp.py (4 ranks on 2 cores), and no transfer is faster.
    """
    spin = spin_seconds(hints, size)
    if "thread_spin_us" in hints and spin:
        return _number("thread_spin_us", hints["thread_spin_us"]) * 1e-6
    return AWAKE * spin if size <= cores() else 0.0


@cache
def cores() -> int:
    """The number of cores of this machine, asked once: the answer takes the system 30 us, as it reads a file."""
    return os.cpu_count() or 1


def yield_seconds(hints: Mapping[str, str]) -> float:
    """The hint ``yield_us`` in seconds; infinite if it is 0. Raises ``ValueError``."""
    return (_number("yield_us", hints["yield_us"]) * 1e-6 or math.inf) if "yield_us" in hints else YIELD_SECONDS


def _number(key: str, text: str) -> int:
    most = 1 if key == "single_copy" else MOST_BYTES
    number = whole_number(text)
    if number is None or number > most:
        raise ValueError(f"hint {key!r} must be an integer from 0 to {most}, got {text!r}")
    return number
