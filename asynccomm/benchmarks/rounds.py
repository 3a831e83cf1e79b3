"""Contenders that take turns: each round measures each of them once, in alternating order.

So all see the same machine. Before each turn the ranks meet; a turn begins with operations that do not count, which
wake caches and spinning strategies after the others' turns. The times of rank 0 count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import torch

from asynccomm.comm.comm import Comm

BUDGET: Final = 0.06  # seconds that one contender may take per round, as far as a first estimate can tell
LEAST: Final = 3  # operations per round
MOST: Final = 1000
ROUNDS: Final = 9  # by default

Body = Callable[[int], Awaitable[float]]
"""Runs an operation that many times, each awaited before the next, and returns the seconds that they took."""


def timed(run: Callable[[int], Awaitable[object]]) -> Body:
    """``run`` with this rank's clock around it."""

    async def body(count: int) -> float:
        start = time.perf_counter()
        await run(count)
        return time.perf_counter() - start

    return body


async def in_turns(comm: Comm, bodies: Mapping[str, Body], rounds: int) -> dict[str, float]:
    """Microseconds of one operation of each contender, medians over rounds, meaningful on rank 0.

    Args:
        comm: where the ranks meet between turns; all of them call this.
        bodies: the contenders by name, the same names on all ranks.
    """
    names = list(bodies)
    counts = await _operations_per_round(comm, bodies)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(rounds):
        for name in names if round_number % 2 == 0 else names[::-1]:
            count = counts[name]
            await comm.barrier()
            await bodies[name](count // 5)
            await comm.barrier()
            times[name].append(await bodies[name](count) / count * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


async def _operations_per_round(comm: Comm, bodies: Mapping[str, Body]) -> dict[str, int]:
    """As many as each contender can do in the budget, by rank 0's clock; the same on all ranks."""
    counts = []
    for body in bodies.values():
        await comm.barrier()
        await body(2)  # connections, caches
        await comm.barrier()
        each = await body(LEAST) / LEAST
        counts.append(max(LEAST, min(MOST, int(BUDGET / max(each, 1e-9)))))
    agreed = torch.tensor(counts, device=comm.device)
    await comm.broadcast(agreed, 0)
    return dict(zip(bodies, agreed.tolist(), strict=True))
