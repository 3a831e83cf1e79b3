"""Queues from one writer to several readers on one host, against other ways to do so.

    python bench/queues.py --readers 2,4 --bytes 1024,1048576 --json out.json

Items are bytes. Throughput: the writer puts items as fast as it can, until the last reader has the last one. Latency:
the writer puts an item every 2 ms (1 KiB) or 5 ms, and each reader compares its clock with the time in the item. The
contenders take turns in each round, with new processes; figures are medians over the rounds.

    asynccomm        a queue, ``await put`` and ``async for``
    busy poll        the same, and readers that poll for 10 ms before they sleep
    multiprocessing  a multiprocessing.Queue for each reader
    pyzmq            PUB and SUB sockets over ipc, blocking calls, without a limit that would drop items
    asyncio streams  a unix socket for each reader
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

from report import Results, median, print_table

from asynccomm.queues.attaching import attach_queue
from asynccomm.queues.meeting import QueueHost
from asynccomm.queues.options import QueueOptions
from asynccomm.runner import run

COUNTS: Final = {1024: 50_000, 1 << 20: 1_000}  # items of a throughput run
PAUSES: Final = {1024: 0.002, 1 << 20: 0.005}  # seconds between items of a latency run
PROBE: Final = b"?"  # of a contender that has to find out whether its readers are there
fork: Final = multiprocessing.get_context("fork")
stamp: Final = struct.Struct("=q")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """One contender in one setting."""

    contender: str
    readers: int
    bytes: int
    items_per_s: float
    latency_us: float  #: median
    p99_us: float
    items_ratio: float  #: items per second of asynccomm over this contender's
    latency_ratio: float  #: this contender's median over asynccomm's


@dataclass(frozen=True, slots=True)
class Plan:
    """The items of one run."""

    nbytes: int
    count: int
    pause: float  #: seconds between items; 0: none

    def items(self) -> Iterator[bytes]:
        rest = bytes(self.nbytes - stamp.size)
        for _ in range(self.count):
            yield stamp.pack(time.monotonic_ns()) + rest


class Tally:
    """The items that a reader has got."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.latencies, self.left = plan, list[int](), plan.count

    def got(self, item: bytes | memoryview) -> bool:
        """Whether this was the last item."""
        if len(item) == self.plan.nbytes:
            if self.plan.pause:
                self.latencies.append(time.monotonic_ns() - stamp.unpack_from(item)[0])
            self.left -= 1
        return self.left == 0


Reader = Callable[[Plan, Any, Connection], None]
Writer = Callable[[Plan, Any, list[Connection]], None]


# -- asynccomm ---------------------------------------------------------------------------------------------------------


def queue_writer(plan: Plan, place: Any, readers: list[Connection]) -> None:
    async def write() -> None:
        host = QueueHost(True, QueueOptions(), 0, "bench", ())
        handle = await host.open()
        async with host.queue(handle) as queue:
            for reader in readers:
                reader.send(handle.text())
            await asyncio.to_thread(wait_for, readers)
            start(readers)
            for item in plan.items():
                await queue.put(item)
                if plan.pause:
                    await asyncio.sleep(plan.pause)

    run(write())


def queue_reader(plan: Plan, place: Any, writer: Connection, busy_poll: float | None = None) -> None:
    async def read() -> None:
        tally = Tally(plan)
        async with await attach_queue(writer.recv(), busy_poll=busy_poll) as queue:
            writer.send("ready")
            async for item in queue:
                if tally.got(item):
                    break
        report(writer, tally)

    run(read())


# -- multiprocessing.Queue ---------------------------------------------------------------------------------------------


def mp_writer(plan: Plan, place: Any, readers: list[Connection]) -> None:
    wait_for(readers)
    start(readers)
    for item in plan.items():
        for queue in place:
            queue.put(item)
        time.sleep(plan.pause)


def mp_reader(plan: Plan, place: Any, writer: Connection) -> None:
    number = int(writer.recv())
    tally = Tally(plan)
    writer.send("ready")
    while not tally.got(place[number].get()):
        pass
    report(writer, tally)


# -- pyzmq -------------------------------------------------------------------------------------------------------------


def zmq_writer(plan: Plan, place: Any, readers: list[Connection]) -> None:
    import zmq  # noqa: PLC0415 (an extra)

    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(f"ipc://{place}")
        while not all(reader.poll() for reader in readers):
            socket.send(PROBE)
            time.sleep(0.01)
        wait_for(readers)
        start(readers)
        for item in plan.items():
            socket.send(item)
            if plan.pause:
                time.sleep(plan.pause)
        for reader in readers:
            reader.poll(None)


def zmq_reader(plan: Plan, place: Any, writer: Connection) -> None:
    import zmq  # noqa: PLC0415 (an extra)

    tally = Tally(plan)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.subscribe(b"")
        socket.connect(f"ipc://{place}")
        socket.recv()
        writer.send("ready")
        while not tally.got(socket.recv()):
            pass
    report(writer, tally)


# -- asyncio streams ---------------------------------------------------------------------------------------------------


def streams_writer(plan: Plan, place: Any, readers: list[Connection]) -> None:
    async def write() -> None:
        writers: list[asyncio.StreamWriter] = []
        server = await asyncio.start_unix_server(lambda _, writer: writers.append(writer), place)
        for reader in readers:
            reader.send("go")
        await asyncio.to_thread(wait_for, readers)
        while len(writers) < len(readers):  # noqa: ASYNC110 (before the time starts)
            await asyncio.sleep(0.001)
        start(readers)
        for item in plan.items():
            for writer in writers:
                writer.write(len(item).to_bytes(4, "big") + item)
            for writer in writers:
                await writer.drain()
            if plan.pause:
                await asyncio.sleep(plan.pause)
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        server.close()

    run(write())


def streams_reader(plan: Plan, place: Any, writer: Connection) -> None:
    async def read() -> None:
        tally = Tally(plan)
        writer.recv()
        stream, _ = await asyncio.open_unix_connection(place)
        writer.send("ready")
        while True:
            nbytes = int.from_bytes(await stream.readexactly(4), "big")
            if tally.got(await stream.readexactly(nbytes)):
                break
        report(writer, tally)

    run(read())


# -- running -----------------------------------------------------------------------------------------------------------

CONTENDERS: Final[dict[str, tuple[Writer, Reader]]] = {
    "asynccomm": (queue_writer, queue_reader),
    "busy poll": (queue_writer, partial(queue_reader, busy_poll=0.01)),
    "multiprocessing": (mp_writer, mp_reader),
    "pyzmq": (zmq_writer, zmq_reader),
    "asyncio streams": (streams_writer, streams_reader),
}


def wait_for(readers: list[Connection]) -> None:
    for reader in readers:
        reader.recv()


def start(readers: list[Connection]) -> None:
    """Time starts now; the readers are in the loop that receives."""
    global started
    started = time.monotonic_ns()


started = 0


def report(writer: Connection, tally: Tally) -> None:
    writer.send((time.monotonic_ns(), tally.latencies))


def measure(name: str, readers: int, plan: Plan) -> tuple[float, list[int]]:
    """Seconds until the last reader had the last item, and all latencies in nanoseconds."""
    write, read = CONTENDERS[name]
    with tempfile.TemporaryDirectory() as folder:
        place: Any = os.path.join(folder, "socket")
        if name == "multiprocessing":
            place = [fork.Queue() for _ in range(readers)]
        pipes = [fork.Pipe() for _ in range(readers)]
        processes = [fork.Process(target=read, args=(plan, place, pipe[1])) for pipe in pipes]
        for process in processes:
            process.start()
        mine = [pipe[0] for pipe in pipes]
        if name == "multiprocessing":
            for number, pipe in enumerate(mine):
                pipe.send(number)
        write(plan, place, mine)
        results = [pipe.recv() for pipe in mine]
        for process in processes:
            process.join()
    seconds = (max(at for at, _ in results) - started) / 1e9
    return seconds, [latency for _, latencies in results for latency in latencies]


def bench(options: argparse.Namespace, rows: Results[QueueRow]) -> None:
    names = [name for name in CONTENDERS if name in options.contenders.split(",")]
    for readers in map(int, options.readers.split(",")):
        for nbytes in map(int, options.bytes.split(",")):
            count = options.items or COUNTS.get(nbytes, 5_000)
            paced = Plan(nbytes, min(count, 500), PAUSES.get(nbytes, 0.001))
            rates: dict[str, list[float]] = {name: [] for name in names}
            latencies: dict[str, list[list[int]]] = {name: [] for name in names}
            for number in range(options.rounds):
                for name in names[:: 1 - 2 * (number % 2)]:
                    rates[name].append(count / measure(name, readers, Plan(nbytes, count, 0))[0])
                    latencies[name].append(measure(name, readers, paced)[1])
            middle = {name: median(map(statistics.median, latencies[name])) / 1e3 for name in names}
            rate = {name: median(rates[name]) for name in names}
            for name in names:
                rows.add(
                    QueueRow(
                        contender=name,
                        readers=readers,
                        bytes=nbytes,
                        items_per_s=rate[name],
                        latency_us=middle[name],
                        p99_us=median(sorted(each)[len(each) * 99 // 100] for each in latencies[name]) / 1e3,
                        items_ratio=rate[names[0]] / rate[name],
                        latency_ratio=middle[name] / middle[names[0]],
                    )
                )


def show(rows: list[QueueRow]) -> None:
    columns = ["", "readers", "bytes", "items/s", "over it", "median, us", "p99, us", "over it"]
    lines = [
        (
            *(r.contender, r.readers, r.bytes, f"{r.items_per_s:,.0f}", f"{r.items_ratio:.2f}x"),
            *(f"{r.latency_us:.0f}", f"{r.p99_us:.0f}", f"{r.latency_ratio:.2f}x"),
        )
        for r in rows
    ]
    print_table(columns, lines, "one writer, several readers", left={""})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--readers", default="2,4")
    parser.add_argument("--bytes", default="1024,1048576")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--items", type=int, help="items of a throughput run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file to write the rows to")
    options = parser.parse_args()
    with Results[QueueRow](show, options.json) as rows:
        bench(options, rows)


if __name__ == "__main__":
    main()
