"""From the end of an operation on a GPU to the coroutine that awaited it: our poller against what else one could do.

    python bench/completion.py --json out.json

No GPU is needed. A process of its own stands in for it: at a set time it notes the time and sets a word in shared
memory, which is what an event's query reads here, without the GIL. Figures are microseconds from the time noted, or
from the launch where that came later, to the next line of the coroutine. The contenders:

    poller       Poller, Mailbox and Work, as in the NCCL backend
    thread only  the same without the looks on the loop's own thread (Poller.before_await)
    executor     a thread of a pool in a blocking read, which the other process ends: like a blocking-sync CUDA event
    sleep        a coroutine that looks and sleeps for 50 us, again and again

They take turns, in alternating order. Then: how often 100 Works that end at once wake the loop; and the CPU time of
this process, all threads included, while nothing is in flight and while one operation takes --late seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import math
import multiprocessing
import os
import resource
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import c_int64
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

import torch
from report import Results, median, print_table

from asynccomm.backends.nccl.poller import Poller
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.ops import AllReduce
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.runner import run

if TYPE_CHECKING:
    from collections.abc import Iterator

DELAYS = (20, 200, 2000, 20_000)  # microseconds that an operation takes
LEAD = 2_000_000  # ns from an order to the operation: the other process is ready by then
SPIN = 100_000  # ns that the other process does not sleep for: more than a wake-up
SLEEP = 50e-6  # seconds
SAMPLES = 25  # of one contender in one round
BATCH = 100  # Works that end at once
PR_SET_TIMERSLACK = 29

OP = AllReduce(torch.float32, 4, ReduceOp.SUM)
STREAM = "the stream"

libc = ctypes.CDLL(None)
libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
NOTHING = c_int64(0)


class Words(Protocol):
    """Shared memory."""

    over: int  #: whether the operation is
    when: int  #: ns


class Shared(ctypes.Structure):
    _fields_ = [("over", c_int64), ("when", c_int64)]


def gpu(shared: Words, orders: Connection, interrupt: Connection) -> None:
    """End operations when told to. In a process of its own."""
    gc.disable()
    libc.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    while (order := orders.recv()) is not None:
        due, interrupts = order
        while (left := due - time.perf_counter_ns()) > 0:
            if left > 2 * SPIN:
                time.sleep((left - SPIN) / 1e9)
        shared.when = time.perf_counter_ns()
        shared.over = 1
        if interrupts:
            os.write(interrupt.fileno(), b"!")


@final
class Gpu:
    """The other process, and what it shares with this one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.shared: Words = context.RawValue(Shared)
        self._address = ctypes.addressof(self.shared)
        self._nothing = ctypes.addressof(NOTHING)
        theirs, self._orders = context.Pipe(duplex=False)
        self._interrupt, interrupting = context.Pipe(duplex=False)
        self._process = context.Process(target=gpu, args=(self.shared, theirs, interrupting), daemon=True)
        self._process.start()

    def order(self, after: float, interrupts: bool) -> int:
        """Start an operation of so many seconds some time from now; returns when that is, in ns."""
        self.shared.over = self.shared.when = 0
        start = time.perf_counter_ns() + LEAD
        self._orders.send((start + round(after * 1e9), interrupts))
        return start

    def query(self, event: object) -> bool:
        return bool(libc.memcmp(self._address, self._nothing, 8))  # without the GIL, as cuEventQuery by cuda-python

    def enter(self) -> None:
        pass

    def wait(self) -> None:
        """Block until the operation is over, if it was ordered with an interrupt."""
        os.read(self._interrupt.fileno(), 1)

    def stop(self) -> None:
        self._orders.send(None)
        self._process.join()


class CountingMailbox(Mailbox):
    """Knows how often it woke the loop."""

    __slots__ = ("rings",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.rings = 0

    def _drain(self) -> None:
        self.rings += 1
        super()._drain()


@final
class Side:
    """What a running loop has of the contenders."""

    def __init__(self, gpu: Gpu, poller: Poller[None], pool: ThreadPoolExecutor) -> None:
        self.gpu, self.poller, self.pool = gpu, poller, pool
        self.mailbox = CountingMailbox(asyncio.get_running_loop())

    def work(self, *, hurried: bool) -> Work[None]:
        """One in flight."""
        work: Work[None] = Work(
            OP,
            0,
            self.mailbox,
            value=None,
            timeout=math.inf,
            on_settled=lambda work: None,
            driver=self if hurried else None,
        )
        self.poller.watch(STREAM, None, work.settle)
        return work

    def before_await(self, work: Work[Any]) -> None:
        self.poller.before_await(STREAM, until=work.done)

    def before_block(self, work: Work[Any]) -> None:
        pass

    async def by_poller(self) -> None:
        await self.work(hurried=True)

    async def by_thread_only(self) -> None:
        await self.work(hurried=False)

    async def by_executor(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self.pool, self.gpu.wait)

    async def by_sleep(self) -> None:
        while not self.gpu.query(None):  # noqa: ASYNC110
            await asyncio.sleep(SLEEP)


CONTENDERS: dict[str, Callable[[Side], Awaitable[None]]] = {
    "poller": Side.by_poller,
    "thread only": Side.by_thread_only,
    "executor": Side.by_executor,
    "sleep": Side.by_sleep,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyRow:
    """One contender with operations of one length."""

    loop: str
    contender: str
    delay_us: float  #: what an operation is to take
    took_us: float  #: what it took, median
    p50_us: float  #: from its end to the coroutine
    p90_us: float
    p99_us: float
    samples: int
    ratio: float  #: the executor's median over this one's


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeUpRow:
    """Works that end at once."""

    loop: str
    works: int
    p50: float  #: wake-ups of the loop
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuRow:
    """What waiting costs."""

    loop: str
    contender: str
    in_flight: bool
    seconds: float
    cpu_percent: float  #: CPU time of the process over the time waited


Found: TypeAlias = LatencyRow | WakeUpRow | CpuRow


async def latency(side: Side, contender: str, delay: float) -> tuple[float, float]:
    """Seconds that the operation took, and from its end to here."""
    start = side.gpu.order(delay, interrupts=contender == "executor")
    while time.perf_counter_ns() < start:  # as if busy until the launch
        pass
    await CONTENDERS[contender](side)
    now = time.perf_counter_ns()
    over = max(side.gpu.shared.when, start)
    return (over - start) / 1e9, (now - over) / 1e9


async def latencies(side: Side, loop: str, delay_us: int, rounds: int) -> list[LatencyRow]:
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    took: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    names = list(CONTENDERS)
    for number in range(rounds + 1):
        for name in names if number % 2 == 0 else names[::-1]:
            for _ in range(SAMPLES if number else 3):
                lasted, late = await latency(side, name, delay_us * 1e-6)
                if number:  # the first warms up
                    took[name].append(lasted * 1e6)
                    times[name].append(late * 1e6)
    return [
        LatencyRow(
            loop=loop,
            contender=name,
            delay_us=delay_us,
            took_us=median(took[name]),
            p50_us=median(found),
            p90_us=sorted(found)[int(len(found) * 0.9)],
            p99_us=sorted(found)[int(len(found) * 0.99)],
            samples=len(found),
            ratio=median(times["executor"]) / median(found),
        )
        for name, found in times.items()
    ]


async def wake_ups(side: Side, loop: str, rounds: int) -> WakeUpRow:
    counts = []
    for _ in range(rounds * 5):
        start = side.gpu.order(0.02, interrupts=False)
        while time.perf_counter_ns() < start:
            pass
        works = [side.work(hurried=True) for _ in range(BATCH)]
        before = side.mailbox.rings
        await asyncio.gather(*works)
        counts.append(side.mailbox.rings - before)
    return WakeUpRow(loop=loop, works=BATCH, p50=median(counts), most=max(counts))


@contextmanager
def cpu_percent() -> Iterator[list[float]]:
    """Collect the CPU time of the block, in percent, and its seconds."""
    found: list[float] = []
    start, spent = time.perf_counter(), _cpu_seconds()
    yield found
    took = time.perf_counter() - start
    found += [(_cpu_seconds() - spent) / took * 100, took]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def cpu(side: Side, loop: str, contender: str, late: float) -> list[CpuRow]:
    await latency(side, contender, 0.002)  # threads have started
    with cpu_percent() as idle:
        await asyncio.sleep(1.0)
    side.gpu.order(late, interrupts=contender == "executor")
    with cpu_percent() as waiting:
        await CONTENDERS[contender](side)
    return [
        CpuRow(loop=loop, contender=contender, in_flight=in_flight, seconds=seconds, cpu_percent=percent)
        for in_flight, (percent, seconds) in ((False, idle), (True, waiting))
    ]


async def measure_all(args: argparse.Namespace, gpu: Gpu, loop: str, rows: Results[Found]) -> None:
    poller: Poller[None] = Poller(gpu)
    with ThreadPoolExecutor(1) as pool:
        side = Side(gpu, poller, pool)
        for delay in args.delays:
            rows.add(*await latencies(side, loop, delay, args.rounds))
        rows.add(await wake_ups(side, loop, args.rounds))
        for contender in CONTENDERS:
            rows.add(*await cpu(side, loop, contender, args.late))
    poller.close()


def report(found: list[Found]) -> None:
    for loop in dict.fromkeys(row.loop for row in found):
        report_loop(loop, [row for row in found if row.loop == loop])


def report_loop(loop: str, found: list[Found]) -> None:
    print_table(
        ["an operation of", "took us", "contender", "p50 us", "p90 us", "p99 us", "samples", "executor / it"],
        [
            (
                f"{row.delay_us} us",
                f"{row.took_us:.0f}",
                row.contender,
                f"{row.p50_us:.0f}",
                f"{row.p90_us:.0f}",
                f"{row.p99_us:.0f}",
                row.samples,
                f"{row.ratio:.2f}x",
            )
            for row in found
            if isinstance(row, LatencyRow)
        ],
        f"end of an operation to coroutine: {loop}, {os.cpu_count()} cores",
        left={"contender"},
    )
    for row in found:
        if isinstance(row, WakeUpRow):
            print(f"{row.works} Works that end at once wake the loop {row.p50:g} times, at most {row.most}")
    print_table(
        ["contender", "in flight", "seconds", "CPU %"],
        [
            (row.contender, "one" if row.in_flight else "nothing", f"{row.seconds:.1f}", f"{row.cpu_percent:.2f}")
            for row in found
            if isinstance(row, CpuRow)
        ],
        f"CPU time of the process: {loop}",
        left={"contender", "in flight"},
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--delays", type=lambda text: [int(us) for us in text.split(",")], default=DELAYS, help="in microseconds"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--late", type=float, default=5.0, metavar="SECONDS", help="what one long operation takes")
    parser.add_argument(
        "--loop", choices=["uvloop", "asyncio"], help="which event loop; one after the other if not given"
    )
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    if min(args.rounds, args.late, *args.delays) <= 0:
        parser.error("arguments --delays, --rounds, --late: must be positive")
    return args


def main() -> None:
    args = parse()
    stand_in = Gpu()
    with Results[Found](report, args.json) as rows:
        for loop in [args.loop] if args.loop else ["asyncio", "uvloop"]:
            run(measure_all(args, stand_in, loop, rows), use_uvloop=loop == "uvloop")
    stand_in.stop()


if __name__ == "__main__":
    main()
