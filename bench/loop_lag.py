"""How long the event loop stalls while large all_reduces run, and what a rank costs that waits for a late peer.

    python bench/loop_lag.py --ranks 2 --bytes 268435456 --seconds 5 --json out.json

On every rank a task sleeps for 1 ms again and again; the lag is by how much rank 0's overslept, first without any
communication, then while all_reduces run one after the other. Three settings, the same on all ranks:

    idle loop  nothing else
    busy loop  another task, which computes for 50 to 200 us of every turn of the loop
    GIL-bound  a thread that computes in Python without end

The late peer: rank 0 awaits a barrier that the others enter --late seconds after it. Its CPU time, all threads of the
process included, as a share of that wait; without the probe, which would itself count.

A loop's timers have a grain of their own (uvloop's is 1 ms): compare with the lines without communication.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass

import torch
from report import Results, median, print_table
from rounds import start_ranks

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.runner import run

NAP = 0.001  # seconds that the probe means to sleep
TURNS = (50e-6, 200e-6)  # seconds of a turn of the busy task


@dataclass(frozen=True, slots=True, kw_only=True)
class LagRow:
    """The loop's lag in one setting, with or without communication."""

    case: str  #: the setting
    communicating: bool
    bytes: int  #: of one all_reduce
    ranks: int
    backend: str
    p50_us: float  #: lag: how much later than asked the probe woke
    p99_us: float
    max_us: float
    samples: int
    gb_per_s: float | None  #: payload reduced per second, in units of 1e9 bytes; None without communication


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRow:
    """What rank 0 spent while it waited for the others."""

    case: str
    ranks: int
    backend: str
    waited_s: float
    cpu_percent: float  #: CPU time of the process over the time waited


@contextmanager
def probe() -> Iterator[list[float]]:
    """Collect the loop's lags, in microseconds, while the block runs."""
    lags: list[float] = []

    async def sleep_again_and_again() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(NAP)
            lags.append((time.perf_counter() - start - NAP) * 1e6)

    task = asyncio.create_task(sleep_again_and_again())
    try:
        yield lags
    finally:
        task.cancel()


def compute() -> None:
    """A few microseconds of Python code, which holds the GIL."""
    total = 0
    for i in range(100):
        total += i


@asynccontextmanager
async def idle_loop() -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def busy_loop() -> AsyncIterator[None]:
    async def turns() -> None:
        while True:
            end = time.perf_counter() + random.uniform(*TURNS)
            while time.perf_counter() < end:
                compute()
            await asyncio.sleep(0)

    task = asyncio.create_task(turns())
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def gil_bound() -> AsyncIterator[None]:
    stop = threading.Event()

    def without_end() -> None:
        while not stop.is_set():
            compute()

    thread = threading.Thread(target=without_end, name="GIL-bound")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


SETTINGS: dict[str, Callable[[], AbstractAsyncContextManager[None]]] = {
    "idle loop": idle_loop,
    "busy loop": busy_loop,
    "GIL-bound": gil_bound,
}


async def measure(comm: Comm, case: str, tensor: torch.Tensor, seconds: float) -> list[LagRow]:
    """Without communication, then with as many all_reduces as take about so many seconds."""
    await comm.barrier()
    async with SETTINGS[case]():
        with probe() as alone:
            await asyncio.sleep(seconds)
        await comm.all_reduce(tensor)  # buffers
        await comm.barrier()
        start = time.perf_counter()
        await comm.all_reduce(tensor)
        count = torch.tensor([max(3, round(seconds / (time.perf_counter() - start)))])
        await comm.broadcast(count, 0)
        with probe() as beside:
            start = time.perf_counter()
            for _ in range(int(count)):
                await comm.all_reduce(tensor)
            took = time.perf_counter() - start
        await comm.barrier()
    return [
        lag_row(comm, case, tensor.nbytes, alone, None),
        lag_row(comm, case, tensor.nbytes, beside, tensor.nbytes * int(count) / took / 1e9),
    ]


def lag_row(comm: Comm, case: str, nbytes: int, lags: list[float], gb_per_s: float | None) -> LagRow:
    lags = sorted(lags) or [float("nan")]  # none: the loop stood still all the time
    return LagRow(
        case=case,
        communicating=gb_per_s is not None,
        bytes=nbytes,
        ranks=comm.size,
        backend=comm.backend,
        p50_us=median(lags),
        p99_us=lags[int(len(lags) * 0.99)],
        max_us=lags[-1],
        samples=len(lags),
        gb_per_s=gb_per_s,
    )


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def wait_for_late(comm: Comm, seconds: float) -> LateRow:
    await comm.barrier()
    if comm.rank:
        await asyncio.sleep(seconds)
    start, spent = time.perf_counter(), cpu_seconds()
    await comm.barrier()
    waited, spent = time.perf_counter() - start, cpu_seconds() - spent
    return LateRow(
        case="late peer", ranks=comm.size, backend=comm.backend, waited_s=waited, cpu_percent=spent / waited * 100
    )


async def measure_all(args: argparse.Namespace) -> None:
    """On every rank; rank 0 reports."""
    async with new_comm(args.backend, name="bench") as comm:
        tensor = torch.ones(max(1, args.bytes // 4))
        with Results[LagRow | LateRow](report, args.json) as rows:
            for case in SETTINGS:
                rows.add(*await measure(comm, case, tensor, args.seconds))
            if comm.size > 1:
                rows.add(await wait_for_late(comm, args.late))


def report(found: list[LagRow | LateRow]) -> None:
    rows = [row for row in found if isinstance(row, LagRow)]
    first = rows[0]
    loop = type(asyncio.get_running_loop()).__module__
    print_table(
        ["setting", "all_reduces", "p50 us", "p99 us", "max us", "samples", "GB/s"],
        [
            (
                row.case,
                "one after the other" if row.communicating else "none",
                f"{row.p50_us:.0f}",
                f"{row.p99_us:.0f}",
                f"{row.max_us:.0f}",
                row.samples,
                "" if row.gb_per_s is None else f"{row.gb_per_s:.2f}",
            )
            for row in rows
        ],
        f"lag of the loop ({loop}): {first.backend}, {first.bytes} B, {first.ranks} ranks, {os.cpu_count()} cores",
        left={"setting", "all_reduces"},
    )
    for late in found:
        if isinstance(late, LateRow):
            print(f"{late.case}: {late.cpu_percent:.2f} % CPU over {late.waited_s:.1f} s in a barrier")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--bytes", type=int, default=256 << 20, help="of one all_reduce")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each of the six lines")
    parser.add_argument("--late", type=float, default=10.0, metavar="SECONDS", help="how late the late peer is")
    parser.add_argument(
        "--loop", choices=["uvloop", "asyncio"], help="which event loop; as asynccomm.run() unless given"
    )
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    for name in ("ranks", "bytes", "seconds", "late"):
        if getattr(args, name) <= 0:
            parser.error(f"argument --{name}: must be positive, got {getattr(args, name)}")
    return args


def main() -> None:
    args = parse()
    start_ranks(args.ranks)
    run(measure_all(args), use_uvloop=None if args.loop is None else args.loop == "uvloop")


if __name__ == "__main__":
    main()
