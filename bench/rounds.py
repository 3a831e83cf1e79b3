"""Contenders that take turns: each round measures every one of them once, in alternating order.

So all see the same machine. Before each turn the ranks meet; a turn begins with operations that do not count, which
wake caches and spinning strategies after the others' turns. Rank 0's times are what counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import torch
from report import median

from asynccomm.comm.comm import Comm

__all__ = ["ROUNDS", "Body", "arguments", "in_turns", "start_ranks", "timed"]

BUDGET = 0.06  # seconds that one contender may take per round, as far as a first estimate can tell
LEAST, MOST = 3, 1000  # operations per round
ROUNDS = 9  # unless a bench is told otherwise

Body = Callable[[int], Awaitable[float]]
"""Runs an operation that many times, each awaited before the next, and returns the seconds that they took."""


def arguments(parser: argparse.ArgumentParser, sizes: Sequence[int] | None = None) -> None:
    """Add what every bench of rounds takes; None: each case has sizes of its own."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--sizes", type=lambda text: [int(s) for s in text.split(",")], default=sizes, help="in bytes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", help="file to write the rows to")


def start_ranks(ranks: int) -> None:
    """Become the launcher of the running file as ``ranks`` processes; in one of those, do nothing.

    The launcher takes this process's place: a signal that should end the bench ends the ranks.
    """
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", str(ranks), "--no-prefix", *sys.argv]
        os.execv(sys.executable, command)


def timed(run: Callable[[int], Awaitable[object]]) -> Body:
    """``run`` with this rank's clock around it."""

    async def body(count: int) -> float:
        start = time.perf_counter()
        await run(count)
        return time.perf_counter() - start

    return body


async def in_turns(comm: Comm, bodies: Mapping[str, Body], rounds: int) -> dict[str, float]:
    """Microseconds of one operation of each contender, medians over rounds, meaningful on rank 0.

    ``comm`` is where the ranks meet between turns.
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
    return {name: median(values) for name, values in times.items()}


async def _operations_per_round(comm: Comm, bodies: Mapping[str, Body]) -> dict[str, int]:
    """As many as each contender can do in the budget, by rank 0's clock; the same on all ranks."""
    counts = []
    for body in bodies.values():
        await comm.barrier()
        await body(2)  # connections, caches
        await comm.barrier()
        each = await body(LEAST) / LEAST
        counts.append(max(LEAST, min(MOST, int(BUDGET / max(each, 1e-9)))))
    agreed = torch.tensor(counts)
    await comm.broadcast(agreed, 0)
    return dict(zip(bodies, agreed.tolist(), strict=True))
