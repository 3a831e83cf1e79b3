"""How long it takes the ranks of one host to connect, and to close.

    python bench/connecting.py --ranks 2

In each round, every contender connects once and closes once, in alternating order; the ranks meet before each step.
Times are of the last rank, medians over rounds, in milliseconds. The default group of torch.distributed is ours, so
that a group can be made from it. It stays open, and a comm at the launcher's store, too: most comms are made beside
others of the same processes, with which they share a control channel. The first comm of a run opens one.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest import mock

import torch
from report import Results, median, print_table
from rounds import start_ranks
from torch import distributed as dist

import asynccomm.interop.torch_backend  # noqa: F401 (the backend "asynccomm")
from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.runner import run

ROUNDS: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectRow:
    """One way to connect."""

    what: str
    ranks: int
    connect_ms: float
    close_ms: float
    connect_over_gloo: float  #: the time as a multiple of gloo's
    close_over_gloo: float


async def new_group(backend: str) -> Any:
    return dist.new_group(backend=backend)


async def destroy(group: Any) -> None:
    dist.destroy_process_group(group)


def first_of_a_run(run_name: str) -> Awaitable[Comm]:
    """A comm whose ranks have no control channel yet: the open comms belong to another run."""
    with mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID=run_name):
        return new_comm(name="first")


async def aclose(comm: Comm) -> None:
    await comm.aclose()


async def measure(
    connect: Callable[[], Awaitable[Any]], close: Callable[[Any], Awaitable[None]]
) -> tuple[float, float]:
    """Seconds of this rank to connect, and to close."""
    dist.barrier()
    start = time.perf_counter()
    made = [await connect()]
    connected = time.perf_counter() - start
    dist.barrier()
    start = time.perf_counter()
    await close(made.pop())  # with the end of the object, which does the closing for gloo
    return connected, time.perf_counter() - start


def over_ranks(times: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times of the last rank."""
    tensor = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [(connect, close) for connect, close in tensor.tolist()]


async def bench(options: argparse.Namespace, rows: Results[ConnectRow]) -> None:
    store = dist.distributed_c10d._get_default_store()
    names = iter(range(1 << 30))
    async with new_comm(name="parent") as parent:
        contenders: dict[str, tuple[Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]]] = {
            "gloo, new_group": (partial(new_group, "gloo"), destroy),
            "new_group": (partial(new_group, "asynccomm"), destroy),
            "split": (lambda: _awaited(parent.split(range(parent.size), f"s{next(names)}")), aclose),
            "new_comm, launcher's store": (lambda: _awaited(new_comm(name=f"n{next(names)}")), aclose),
            "new_comm, torch's store": (lambda: _awaited(new_comm(name=f"n{next(names)}", store=store)), aclose),
            "new_comm, first of a run": (lambda: _awaited(first_of_a_run(f"r{next(names)}")), aclose),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        gc.disable()
        for number in range(options.rounds + 1):
            for name in list(contenders)[:: 1 - 2 * (number % 2)]:
                taken = await measure(*contenders[name])
                if number:
                    times[name].append(taken)
            gc.collect()
    gloo: tuple[float, float] | None = None
    for name, each in times.items():
        each = over_ranks(each)
        connect, close = (median(column) * 1e3 for column in zip(*each, strict=True))
        gloo = gloo or (connect, close)
        rows.add(
            ConnectRow(
                what=name,
                ranks=dist.get_world_size(),
                connect_ms=connect,
                close_ms=close,
                connect_over_gloo=connect / gloo[0],
                close_over_gloo=close / gloo[1],
            )
        )


async def _awaited(pending: Awaitable[Any]) -> Any:
    return await pending


def show(rows: list[ConnectRow]) -> None:
    columns = ["", "connect, ms", "over gloo's", "close, ms", "over gloo's"]
    lines = [
        (r.what, *(f"{v:.2f}" for v in (r.connect_ms, r.connect_over_gloo, r.close_ms, r.close_over_gloo)))
        for r in rows
    ]
    print_table(columns, lines, f"connecting {rows[0].ranks} ranks", left={""})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", help="file to write the rows to")
    options = parser.parse_args()
    start_ranks(options.ranks)
    dist.init_process_group("asynccomm")
    with Results[ConnectRow](show, options.json) as rows:
        run(bench(options, rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
