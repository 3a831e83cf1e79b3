"""How long to look out for a late rank before going to sleep.

Looking out pays while it is likely to end before a wake-up would: the peer that is awake comes within microseconds.
It must outlast a wake-up, though. With less, ranks fall into antiphase: each gives up just before the other, woken by
its ring, is back. Between two looks the core is offered to others (sched_yield), so it pays even where ranks share
cores: 4 ranks on 2 cores take 60 us for an all_reduce, 93 without looking out, and 130 with looks but no yielding.
"""

from __future__ import annotations

import functools
import os
import statistics
import threading
import time
from typing import Final

WAKE_UPS: Final = 5  # that a rank looks out for
LEAST: Final = 50e-6  # seconds
MOST: Final = 400e-6  # what a stall of the loop may cost
ROUNDS: Final = 40


def patience_for(size: int) -> float:
    """Seconds for ``size`` ranks on this machine. The first call takes some milliseconds."""
    if size == 1:
        return 0.0
    return min(MOST, max(LEAST, WAKE_UPS * wake_up_seconds()))


@functools.cache
def wake_up_seconds() -> float:
    """What it takes to wake a sleeping thread, measured: half of a round trip between two."""
    here, there = os.eventfd(0), os.eventfd(0)

    def answer() -> None:
        for _ in range(ROUNDS):
            os.eventfd_read(there)
            os.eventfd_write(here, 1)

    thread = threading.Thread(target=answer, name="asynccomm wake-up", daemon=True)
    thread.start()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        os.eventfd_write(there, 1)
        os.eventfd_read(here)
        times.append(time.perf_counter() - start)
    thread.join()
    os.close(here)
    os.close(there)
    return statistics.median(times) / 2
