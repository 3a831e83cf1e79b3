"""Pushing weights to servers that answer requests meanwhile: throughput, and the time of the requests.

    python bench/weights.py --ranks 3 --json out.json

Rank 0 is the trainer, all other ranks are servers. A version is pushed by ``asynccomm.weights``, and for comparison
sent by ``Comm.broadcast_state`` into the weights in use, in turns. On each server a client asks for an answer of a
small network about once per millisecond. The time of a request is from the question to the answer on the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from report import Results, median, print_table
from rounds import start_ranks
from torch import Tensor, nn

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.runner import run
from asynccomm.weights.publisher import Publisher
from asynccomm.weights.server import Server

SIZES = [100 << 20, 1 << 30]
ROUNDS = 5
TENSOR_BYTES = 16 << 20  # of the largest tensors
PAUSE = 0.001  # seconds between two requests
IDLE_SECONDS = 1.0  # of requests without a push


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTimes:
    """Versions of one size, pushed to all servers. Throughput counts the bytes of the weights once."""

    bytes: int
    servers: int
    push_ms: float
    broadcast_ms: float
    idle_p99_ms: float  #: of requests while no version arrives
    push_p99_ms: float
    broadcast_p99_ms: float
    push_gbps: float = field(init=False)
    broadcast_gbps: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "push_gbps", self.bytes / self.push_ms / 1e6)
        object.__setattr__(self, "broadcast_gbps", self.bytes / self.broadcast_ms / 1e6)


def make_state(nbytes: int) -> dict[str, Tensor]:
    """Tensors of ``nbytes`` in all."""
    sizes = [TENSOR_BYTES] * (nbytes // TENSOR_BYTES)
    if rest := nbytes % TENSOR_BYTES:
        sizes.append(rest)
    return {f"layer{number}": torch.ones(size // 4) for number, size in enumerate(sizes)}


class Clients:
    """Requests on the event loop of a server, and their times by phase."""

    def __init__(self) -> None:
        self.phase = "idle"
        self.seconds: dict[str, list[float]] = {}
        self._model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
        self._input = torch.randn(1, 64)

    def _answer(self, asked: asyncio.Future[Tensor]) -> None:
        if not asked.cancelled():
            with torch.no_grad():
                asked.set_result(self._model(self._input))

    async def ask(self) -> None:
        """Ask until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            phase, start = self.phase, time.perf_counter()
            asked: asyncio.Future[Tensor] = loop.create_future()
            loop.call_soon(self._answer, asked)
            await asked
            self.seconds.setdefault(phase, []).append(time.perf_counter() - start)
            await asyncio.sleep(PAUSE)

    def p99(self, phase: str) -> float:
        """Milliseconds below which 99 % of the requests took; NaN: there were none."""
        ordered = sorted(self.seconds.get(phase, []))
        return 1e3 * ordered[int(0.99 * len(ordered))] if ordered else float("nan")


async def measure(comm: Comm, nbytes: int, rounds: int) -> PushTimes:
    """One size; each rank returns the same."""
    state, clients = make_state(nbytes), Clients()
    pushed: list[float] = []
    sent: list[float] = []
    async with AsyncExitStack() as stack:
        if comm.rank == 0:
            trainers = await stack.enter_async_context(comm.split([0], f"trainers{nbytes}"))
            publisher = Publisher(trainers, state, servers=comm.size - 1, retain=False, name=f"w{nbytes}")
            await stack.enter_async_context(publisher)
        else:
            updates = await stack.enter_async_context(Server(state, store=comm, name=f"w{nbytes}").updates())
            asking = asyncio.create_task(clients.ask())
            stack.callback(asking.cancel)
            await asyncio.sleep(IDLE_SECONDS)
        for _ in range(rounds + 1):  # the first round wakes caches, and takes the memory for the second copy
            await _phase(comm, clients, "push")
            start = time.perf_counter()
            if comm.rank == 0:
                await publisher.push()
            else:
                (await anext(updates)).apply()
            pushed.append(time.perf_counter() - start)
            await _phase(comm, clients, "broadcast")
            start = time.perf_counter()
            await comm.broadcast_state(state, root=0)
            sent.append(time.perf_counter() - start)
            await _phase(comm, clients, "between")
        await comm.barrier()
    times: list[Any] = await comm.all_gather_object([clients.p99(phase) for phase in ("idle", "push", "broadcast")])
    idle, push, broadcast = (max(column) for column in zip(*times[1:], strict=True))
    mine = [1e3 * median(pushed[1:]), 1e3 * median(sent[1:])]
    push_ms, broadcast_ms = (await comm.broadcast_object(mine, root=0, expect=list))[:2]
    return PushTimes(
        bytes=nbytes,
        servers=comm.size - 1,
        push_ms=push_ms,
        broadcast_ms=broadcast_ms,
        idle_p99_ms=idle,
        push_p99_ms=push,
        broadcast_p99_ms=broadcast,
    )


async def _phase(comm: Comm, clients: Clients, phase: str) -> None:
    await comm.barrier()
    clients.phase = phase


async def measure_all(args: argparse.Namespace) -> None:
    async with new_comm(name="bench") as comm:
        with Results[PushTimes](print_times, args.json) as rows:
            for nbytes in args.sizes:
                rows.add(await measure(comm, nbytes, args.rounds))


def print_times(rows: Sequence[PushTimes]) -> None:
    print_table(
        ["weights", "servers", "push ms", "GB/s", "broadcast ms", "GB/s", "p99 idle ms", "push", "broadcast"],
        [
            (
                f"{row.bytes / 2**20:.0f} MiB",
                row.servers,
                f"{row.push_ms:.0f}",
                f"{row.push_gbps:.2f}",
                f"{row.broadcast_ms:.0f}",
                f"{row.broadcast_gbps:.2f}",
                *(f"{ms:.1f}" for ms in (row.idle_p99_ms, row.push_p99_ms, row.broadcast_p99_ms)),
            )
            for row in rows
        ],
        f"Versions of weights, and requests meanwhile, {os.cpu_count()} cores, torch {torch.__version__}",
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--sizes", type=lambda text: [int(s) for s in text.split(",")], default=SIZES, help="in bytes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"argument --ranks: must be at least 2, got {args.ranks}")
    if any(size < 4 for size in args.sizes):
        parser.error(f"argument --sizes: must be at least 4 bytes, got {args.sizes}")
    return args


def main() -> None:
    args = parse()
    start_ranks(args.ranks)
    torch.set_num_threads(1)
    run(measure_all(args))


if __name__ == "__main__":
    main()
