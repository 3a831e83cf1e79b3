"""Weights to servers that answer requests meanwhile: the speed of a push, and the time that requests take.

    python bench/weights.py --servers 2 --sizes 100000000,1000000000 --json out.json

Rank 0 trains, the others serve. On every server a task answers requests without end, each a small matrix product on the
event loop after a pause; its time counts from the moment when the request came. The contenders take turns:

    one broadcast    asynccomm.weights; servers that want the same get one broadcast
    one send each    the same, with broadcast=False
    broadcast_state  a plain collective of one comm: no versions, no late servers, and a loss ends it for all

A version arrives in the weights themselves on all of them, so each process holds them once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from report import Results, median, print_table
from rounds import start_ranks
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.runner import run
from asynccomm.weights import Publisher, Server

LARGE, SMALL = 24, 48  # tensors of one size, and biases
WIDTH = 256  # of the layer that answers a request
PAUSE = 0.001  # seconds between two requests
TRAINER = 0

Turn = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRow:
    """One contender at one size."""

    contender: str
    bytes: int  #: of the weights
    servers: int
    backend: str
    rounds: int
    push_ms: float  #: median over rounds
    gb_per_s: float  #: bytes of the weights over that time, in units of 1e9; every server gets all of them
    idle_p99_ms: float  #: requests while no weights arrive, of all rounds and servers
    busy_p99_ms: float  #: requests while weights arrive
    busy_requests: int


def weights_of(nbytes: int) -> dict[str, Tensor]:
    numel = nbytes // 4 // LARGE
    state = {f"layer{number}.weight": torch.ones(max(1, numel)) for number in range(LARGE)}
    return state | {f"layer{number}.bias": torch.ones(WIDTH) for number in range(SMALL)}


class Requests:
    """Answers requests in a task, and notes the seconds that they took."""

    def __init__(self) -> None:
        self._layer = torch.ones(WIDTH, WIDTH)
        self._seconds: list[float] | None = None

    async def answer(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            came = time.perf_counter()
            answered: asyncio.Future[None] = loop.create_future()
            loop.call_soon(self._compute, answered)
            await answered
            if self._seconds is not None:
                self._seconds.append(time.perf_counter() - came)
            await asyncio.sleep(PAUSE)

    def _compute(self, answered: asyncio.Future[None]) -> None:
        if not answered.done():
            torch.mm(self._layer, self._layer)
            answered.set_result(None)

    @contextmanager
    def noted(self) -> Iterator[list[float]]:
        found: list[float] = []
        self._seconds = found
        try:
            yield found
        finally:
            self._seconds = None


async def contenders(comm: Comm, state: dict[str, Tensor], stack: AsyncExitStack) -> dict[str, Turn]:
    """A push of each, on this rank; on a server, that is to wait for the version."""
    turns: dict[str, Turn] = {}
    trainers = await stack.enter_async_context(comm.subgroups(1, "trainer"))
    for name, broadcast in (("one broadcast", True), ("one send each", False)):
        if comm.rank == TRAINER:
            publisher = Publisher(
                trainers,
                state,
                name=name,
                servers=comm.size - 1,
                retain=False,
                broadcast=broadcast,
                backend=comm.backend,
            )
            turns[name] = (await stack.enter_async_context(publisher)).push
        else:
            updates = Server(state, store=comm, name=name, in_place=True).updates(automatic=True)
            turns[name] = (await stack.enter_async_context(updates)).__anext__
    turns["broadcast_state"] = lambda: comm.broadcast_state(state, TRAINER)
    return turns


async def measure(comm: Comm, nbytes: int, rounds: int) -> list[WeightsRow]:
    state, requests = weights_of(nbytes), Requests()
    size = sum(tensor.nbytes for tensor in state.values())
    answering = asyncio.create_task(requests.answer()) if comm.rank != TRAINER else None
    seconds: dict[str, list[float]] = {}
    noted: dict[tuple[str, bool], list[float]] = {}
    async with AsyncExitStack() as stack:
        turns = await contenders(comm, state, stack)
        names = list(turns)
        for number in range(-1, rounds):  # the first does not count: connections, memory
            for name in names if number % 2 else names[::-1]:
                await comm.barrier(timeout=math.inf)
                with requests.noted() as busy:
                    start = time.perf_counter()
                    await turns[name]()
                    took = time.perf_counter() - start
                    await comm.barrier(timeout=math.inf)
                with requests.noted() as idle:
                    took_there: Any = await comm.broadcast_object(took, TRAINER)
                    await asyncio.sleep(min(1.0, took_there))
                if number >= 0:
                    seconds.setdefault(name, []).append(took)
                    noted.setdefault((name, True), []).extend(busy)
                    noted.setdefault((name, False), []).extend(idle)
        await comm.barrier()
    if answering is not None:
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering
    rows = []
    for name in names:
        found: Any = await comm.all_gather_object([noted[name, True], noted[name, False]])
        busy, idle = ([each for rank in found for each in rank[when]] for when in (0, 1))
        push = median(seconds[name])
        rows.append(
            WeightsRow(
                contender=name,
                bytes=size,
                servers=comm.size - 1,
                backend=comm.backend,
                rounds=rounds,
                push_ms=push * 1e3,
                gb_per_s=size / push / 1e9,
                idle_p99_ms=p99(idle) * 1e3,
                busy_p99_ms=p99(busy) * 1e3,
                busy_requests=len(busy),
            )
        )
    return rows


def p99(seconds: Sequence[float]) -> float:
    ordered = sorted(seconds) or [math.nan]  # a short push may be over before a request comes
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def report(rows: Sequence[WeightsRow]) -> None:
    first = rows[0]
    print_table(
        ["contender", "MB", "push ms", "GB/s", "p99 idle ms", "p99 meanwhile ms", "requests"],
        [
            (
                row.contender,
                f"{row.bytes / 1e6:.0f}",
                f"{row.push_ms:.1f}",
                f"{row.gb_per_s:.2f}",
                f"{row.idle_p99_ms:.2f}",
                f"{row.busy_p99_ms:.2f}",
                row.busy_requests,
            )
            for row in rows
        ],
        f"Weights to {first.servers} servers, {first.backend}, {os.cpu_count()} cores, {first.rounds} rounds",
        left={"contender"},
    )


async def measure_all(args: argparse.Namespace) -> None:
    async with new_comm(args.backend, name="bench") as comm:
        with Results[WeightsRow](report, args.json) as rows:
            for nbytes in args.sizes:
                rows.add(*await measure(comm, nbytes, args.rounds))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--sizes", type=lambda text: [int(s) for s in text.split(",")], default=[10**8, 10**9])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    if min(args.servers, args.rounds, *args.sizes) < 1:
        parser.error("arguments --servers, --sizes, --rounds: must be positive")
    return args


def main() -> None:
    args = parse()
    start_ranks(args.servers + 1)
    torch.set_num_threads(1)  # several processes share the cores
    run(measure_all(args))


if __name__ == "__main__":
    main()
