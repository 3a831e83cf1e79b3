"""The cost of the bridge for programs without an event loop, against a hand-over between two threads.

    python bench/blocking.py --rounds 5 --json out.json

A hand-over: a thread gives a call to an event loop that runs in another thread, by ``call_soon_threadsafe``, and waits
for a lock that the call releases. The bridge: the blocking twin of a coroutine method does the same and awaits the
method. A small all_reduce takes no hand-over; its row compares ``work.wait()`` on a comm that blocks with the same on a
thread beside the loop of an ordinary comm, and with ``await``.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Callable

import torch
from report import Results, Row, median, print_rows

from asynccomm import blocking, new_comm, run


def per_call(call: Callable[[], object], count: int) -> float:
    """Microseconds of one call."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count * 1e6


def hand_over(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    lock = threading.Lock()
    lock.acquire()

    def there_and_back() -> None:
        loop.call_soon_threadsafe(lock.release)
        lock.acquire()

    return there_and_back


async def awaited(count: int) -> float:
    """Microseconds of one all_reduce that is awaited."""
    async with new_comm("shm", alone=True, name="awaited") as comm:
        tensor = torch.ones(1)
        start = time.perf_counter()
        for _ in range(count):
            await comm.all_reduce(tensor)
        return (time.perf_counter() - start) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000, help="of each kind in a round")
    parser.add_argument("--json", help="file for the rows")
    args = parser.parse_args()
    found: dict[str, list[float]] = {"twin": [], "hand-over": [], "wait": [], "await": []}
    with blocking.new_comm("shm", alone=True) as comm, Results[Row](print_rows, args.json) as results:
        tensor = torch.ones(1)
        turn = hand_over(comm.loop)
        for _ in range(args.rounds):
            found["hand-over"].append(per_call(turn, args.calls))
            found["twin"].append(per_call(comm.ready, args.calls))
            found["wait"].append(per_call(lambda: comm.all_reduce(tensor).wait(), args.calls))
            found["await"].append(run(awaited(args.calls)))
        for op, peer, nbytes in (("twin", "hand-over", 0), ("wait", "await", 4)):
            ours, theirs = median(found[op]), median(found[peer])
            row = Row(op=op, bytes=nbytes, ranks=1, backend="shm", asynccomm_us=ours, peer=peer, peer_us=theirs)
            results.add(row)


if __name__ == "__main__":
    main()
