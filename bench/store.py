"""Our store client against torch's, on torch's own server in a process of its own.

    python bench/store.py --json out.json

Rounds are interleaved (ours, theirs, ours, ...), so that both see the same machine; medians over the rounds.
torch's client blocks, so from one thread a loop is the best it can do; "torch-threads" calls it from a thread pool, as
asyncio code would have to.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from report import Results, Row, median, print_rows
from torch import distributed as dist

from asynccomm.runner import run
from asynccomm.store.client import StoreClient
from asynccomm.store.server import listen, serve

VALUE = b"x" * 64
ALONE = 1000  # operations in a sequential round
BURST = 1000  # operations at once


@dataclass(frozen=True)
class Case:
    """One operation ``count`` times: by us, by torch in a loop, by torch in threads (None: would say nothing new)."""

    op: str
    bytes: int
    count: int
    ours: Callable[[StoreClient], Awaitable[object]]
    torch: Callable[[dist.TCPStore], object]
    threads: Callable[[dist.TCPStore], object] | None = None


async def one_by_one(call: Callable[[], Awaitable[object]]) -> None:
    for _ in range(ALONE):
        await call()


async def at_once(call: Callable[[int], Awaitable[object]]) -> None:
    await asyncio.gather(*(call(i) for i in range(BURST)))


async def set_all(client: StoreClient) -> None:
    for i in range(BURST):
        await client.set(f"s{i}", VALUE)
    await client.check(["s0"])  # a reply: the server has them all


def loop(count: int, call: Callable[[int], object]) -> None:
    for i in range(count):
        call(i)


def set_loop(store: dist.TCPStore) -> None:
    loop(BURST, lambda i: store.set(f"s{i}", VALUE.decode()))
    store.check(["s0"])


CASES = [
    Case("store.get", 64, ALONE, lambda c: one_by_one(lambda: c.get("k")), lambda s: loop(ALONE, lambda i: s.get("k"))),
    Case(
        "store.add",
        8,
        ALONE,
        lambda c: one_by_one(lambda: c.add("n", 1)),
        lambda s: loop(ALONE, lambda i: s.add("n", 1)),
    ),
    Case(
        "store.check",
        0,
        ALONE,
        lambda c: one_by_one(lambda: c.check(["k"])),
        lambda s: loop(ALONE, lambda i: s.check(["k"])),
    ),
    Case(
        f"store.get x{BURST}",
        64,
        BURST,
        lambda c: at_once(lambda i: c.get("k")),
        lambda s: loop(BURST, lambda i: s.get("k")),
        lambda s: s.get("k"),
    ),
    Case(
        f"store.add x{BURST}",
        8,
        BURST,
        lambda c: at_once(lambda i: c.add("n", 1)),
        lambda s: loop(BURST, lambda i: s.add("n", 1)),
        lambda s: s.add("n", 1),
    ),
    Case(f"store.set x{BURST}", 64, BURST, set_all, set_loop),
]


async def in_threads(pool: ThreadPoolExecutor, call: Callable[[dist.TCPStore], object], store: dist.TCPStore) -> None:
    running = asyncio.get_running_loop()
    await asyncio.gather(*(running.run_in_executor(pool, call, store) for _ in range(BURST)))


async def measure(client: StoreClient, store: dist.TCPStore, case: Case, rounds: int) -> list[Row]:
    ours: list[float] = []
    theirs: dict[str, list[float]] = {"torch": []}
    if case.threads is not None:
        theirs["torch-threads"] = []
    with ThreadPoolExecutor(8) as pool:
        for lap in range(rounds + 1):
            start = time.perf_counter()
            await case.ours(client)
            laps = {"asynccomm": time.perf_counter() - start}
            start = time.perf_counter()
            case.torch(store)
            laps["torch"] = time.perf_counter() - start
            if case.threads is not None:
                start = time.perf_counter()
                await in_threads(pool, case.threads, store)
                laps["torch-threads"] = time.perf_counter() - start
            if lap:  # the first warms up
                ours.append(laps["asynccomm"])
                for peer, times in theirs.items():
                    times.append(laps[peer])
    scale = 1e6 / case.count
    return [
        Row(
            op=case.op,
            bytes=case.bytes,
            ranks=1,
            backend="tcpstore",
            asynccomm_us=median(ours) * scale,
            peer=peer,
            peer_us=median(times) * scale,
        )
        for peer, times in theirs.items()
    ]


def serve_until_told(pipe: Connection) -> None:
    hosted = serve("127.0.0.1", listen("127.0.0.1", 0))
    pipe.send(hosted.port)
    pipe.recv()
    hosted.release()


async def bench(port: int, rounds: int, rows: Results[Row]) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    client = await StoreClient.connect("127.0.0.1", port)
    await client.set("k", VALUE)
    for case in CASES:
        rows.add(*await measure(client, store, case, rounds))
    await client.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="write the rows there")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    server = context.Process(target=serve_until_told, args=(theirs,), daemon=True)
    server.start()
    with Results[Row](partial(print_rows, title=f"store: {options.rounds} rounds, medians"), options.json) as rows:
        run(bench(pipe.recv(), options.rounds, rows))
    pipe.send("end")
    server.join()


if __name__ == "__main__":
    main()
