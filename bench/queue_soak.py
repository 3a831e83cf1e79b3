"""Queues whose ends come, go and are killed: every acknowledged item is seen once, and in order.

    python bench/queue_soak.py --minutes 10 --visitors 4

This process writes one queue to many readers, and reads another one of many writers. Visitors are processes that attach
to one of the queues, read or write for a while, and leave, or kill themselves at a random point. A reader that stays
checks every item of the first queue; visitors check theirs. Of each writer, the items must come in order and without a
gap, up to the last one that was acknowledged. The end of an item that was not acknowledged may be lost.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import struct
import time
from collections import Counter
from typing import Any, Final

from asynccomm.queues.attaching import attach_queue
from asynccomm.queues.errors import EndOfQueueError
from asynccomm.queues.meeting import QueueHost
from asynccomm.queues.options import QueueOptions
from asynccomm.queues.queue import MessageQueue
from asynccomm.runner import run

CAPACITY: Final = 1 << 16
MOST_BYTES: Final = 1 << 17  # of an item, more than the ring
WRONG: Final = 3  # exit code of a visitor that saw a wrong item
spawn: Final = multiprocessing.get_context("forkserver")
names: Final = struct.Struct("=QQ")  # of the writer and of the item


def item_of(number: int, writer: int = 0) -> bytes | tuple[int, int, bytes]:
    """Item ``number``: most are short, and most are bytes."""
    nbytes = number * 7919 % 2000 if number % 50 else number * 104_729 % MOST_BYTES
    data = bytes([number % 251]) * nbytes
    return names.pack(writer, number) + data if number % 3 else (writer, number, data)


def names_of(item: Any) -> tuple[int, int]:
    """The writer and the number of an item."""
    return names.unpack_from(item) if isinstance(item, bytes) else item[:2]


async def read(handle: str, count: int, die: bool) -> None:
    """A visitor that reads ``count`` items."""
    async with await attach_queue(handle) as queue:
        first: int | None = None
        left = count
        async for item in queue:
            _, number = names_of(item)
            first = number if first is None else first
            if item != item_of(number) or number != first + count - left:
                os._exit(WRONG)
            left -= 1
            if not left:
                break
        if die:
            os.kill(os.getpid(), signal.SIGKILL)


async def write(handle: str, me: int, count: int, die: bool, acknowledged: Any) -> None:
    """A visitor that writes ``count`` items, and may die at any point of a further one."""
    async with await attach_queue(handle) as queue:
        if die:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process at any instruction
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.1))
        for number in range(1 << 40 if die else count):
            await queue.put(item_of(number, me))
            acknowledged.value = number + 1


def visit(part: str, handle: str, seed: int, acknowledged: Any) -> None:
    """The main function of a visitor."""
    random.seed(seed)
    count, die = random.randrange(1, 2000), random.random() < 0.4
    if part == "read":
        asyncio.run(read(handle, count, die))
    else:
        asyncio.run(write(handle, seed, count, die, acknowledged))


async def ended(sentinel: int) -> None:
    """Wait for a process, on the loop: multiprocessing loses exit codes when several threads look for them."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sentinel, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(sentinel)


class WrongItemError(Exception):
    """An item was lost, seen twice, or is another one."""


class Soak:
    """The two queues, and the counts."""

    def __init__(self, outgoing: MessageQueue, incoming: MessageQueue, end: float) -> None:
        self.outgoing, self.incoming, self.end = outgoing, incoming, end
        self.over = False  #: the last visitor has left
        self.counts: Counter[str] = Counter()
        self.came: Counter[int] = Counter()  # items by writer

    async def write(self) -> None:
        number = 0
        while not self.over:
            await self.outgoing.put(item_of(number))
            number += 1
        self.counts["items written"] = number
        await self.outgoing.aclose()

    async def check(self, staying: MessageQueue) -> None:
        number = 0
        async for item in staying:
            if item != item_of(number):
                raise WrongItemError(f"item {names_of(item)[1]} in place of {number}")
            number += 1
        self.counts["items checked"] = number

    async def read(self) -> None:
        while True:
            try:
                item = await self.incoming.get()
            except EndOfQueueError:  # until the next writer attaches
                await asyncio.sleep(0.005)
                continue
            writer, number = names_of(item)
            if number != self.came[writer] or item != item_of(number, writer):
                raise WrongItemError(f"item {number} of writer {writer} in place of {self.came[writer]}")
            self.came[writer] += 1
            self.counts["items read"] += 1

    async def send_visitors(self, seeds: random.Random) -> None:
        """One visitor after the other."""
        while time.monotonic() < self.end:
            part = seeds.choice(["read", "write"])
            seed, acknowledged = seeds.randrange(1 << 40), spawn.RawValue("q", 0)
            handle = (self.outgoing if part == "read" else self.incoming).handle
            process = spawn.Process(target=visit, args=(part, handle, seed, acknowledged), daemon=True)
            process.start()
            await ended(process.sentinel)
            process.join()
            if process.exitcode not in (0, -signal.SIGKILL, -signal.SIGALRM):
                raise WrongItemError(f"visitor {seed} ended with {process.exitcode}")
            self.counts["killed" if process.exitcode else "left"] += 1
            for _ in range(1000):
                if self.came[seed] >= acknowledged.value:
                    break
                await asyncio.sleep(0.005)
            else:
                raise WrongItemError(f"writer {seed}: {acknowledged.value} acknowledged, {self.came[seed]} seen")


async def soak(options: argparse.Namespace) -> None:
    choices = QueueOptions(capacity=CAPACITY, on_lost="continue")
    hosts = [QueueHost(writes, choices, -1, "", ()) for writes in (True, False)]
    queues = [host.queue(await host.open()) for host in hosts]
    async with queues[0] as outgoing, queues[1] as incoming, await attach_queue(outgoing.handle) as staying:
        this = Soak(outgoing, incoming, time.monotonic() + options.minutes * 60)
        seeds = random.Random(options.seed)
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(each) for each in (this.write(), this.check(staying))]
            reading = group.create_task(this.read())
            visitors = [this.send_visitors(random.Random(seeds.random())) for _ in range(options.visitors)]
            await asyncio.gather(*map(group.create_task, visitors))
            this.over = True
            await asyncio.gather(*beside)
            reading.cancel()
    print(", ".join(f"{count} {name}" for name, count in sorted(this.counts.items())))
    if this.counts["items checked"] != this.counts["items written"]:
        raise WrongItemError("the reader that stayed has not seen all items")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--visitors", type=int, default=4, help="at the same time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    spawn.set_forkserver_preload(["asynccomm.queues.meeting", "asynccomm.queues.attaching"])
    run(soak(options))


if __name__ == "__main__":
    main()
