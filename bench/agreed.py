"""Agreed ordering: what it costs over program order, and how a round grows with the number of ranks.

    python bench/agreed.py --ranks 2 --backend shm --json out.json

Measured: on real ranks, 50 tasks all_reduce a tensor each, again and again. In agreed order each rank starts them in an
order of its own; in program order all start them in the same; in a scope their calls leave as one batch. Messages are
parcels of the agreement that a rank sends or receives.

Simulated (``--simulate 10,100,1000``; nothing is started then): all ranks in this process, each round every one issues
the same operations in an order of its own, announces them in one message, and hears one decision. No message travels,
so this is the work of rank 0 and of another rank, and the bytes; the first round, in which nothing is known, is told
apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import torch
from report import Results, median, print_table
from rounds import ROUNDS, in_turns, start_ranks, timed

from asynccomm.backends.base import Submission
from asynccomm.batching.ordering.protocol import Announcer, OrderCoordinator
from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.ops import RecvParcel, SendParcel
from asynccomm.runner import run

TASKS = 50
FLOATS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One number of ranks. Times are of one round."""

    ranks: int
    ops: int  #: per rank and round
    first_council_us: float  #: the council, while nothing is known
    council_us: float  #: the council: hears all ranks and decides
    council_us_per_op: float  #: the same by operations that it was told of
    rank_us: float  #: another rank: issues, announces and hears
    announcement_bytes: float  #: one rank's, on average
    decision_bytes: int
    messages_per_op: float  #: that a rank sends and receives


def simulate(ranks: int, ops: int, rounds: int) -> Simulated:
    """``rounds`` rounds in which all is known, after one in which nothing is."""
    coordinator = OrderCoordinator(ranks)
    announcers = [Announcer[str]() for _ in range(ranks)]
    tags = [f"layer{i}.weight" for i in range(ops)]
    shuffled = [random.Random(rank).sample(tags, ops) for rank in range(ranks)]
    council_times, rank_times = [], []
    for _ in range(rounds + 1):
        start = time.thread_time()
        announcements = []
        for announcer, order in zip(announcers, shuffled, strict=True):
            for tag in order:
                announcer.issue(tag, (1, 2), "all_reduce(float32[256], sum)", 1024, tag)
            announcements.append(announcer.message() or b"")
        announced = time.thread_time()
        for rank, message in enumerate(announcements):
            coordinator.hear(rank, message)
        decision = coordinator.message() or b""
        decided = time.thread_time()
        batches = [announcer.hear(decision) for announcer in announcers]
        heard = time.thread_time()
        if any(one != batches[0] for one in batches) or sum(map(len, batches[0])) != ops:
            raise RuntimeError("the ranks do not agree")
        council_times.append((decided - announced) * 1e6)
        rank_times.append((announced - start + heard - decided) * 1e6 / ranks)
    council_us = median(council_times[1:])
    return Simulated(
        ranks=ranks,
        ops=ops,
        first_council_us=council_times[0],
        council_us=council_us,
        council_us_per_op=council_us / (ranks * ops),
        rank_us=median(rank_times[1:]),
        announcement_bytes=sum(map(len, announcements)) / ranks,
        decision_bytes=len(decision),
        messages_per_op=2 / ops,
    )


def print_simulated(rows: Sequence[Simulated]) -> None:
    print_table(
        ["ranks", "ops", "first round us", "council us", "us/op told", "rank us", "bytes up", "bytes down", "msgs/op"],
        [
            (
                row.ranks,
                row.ops,
                f"{row.first_council_us:.0f}",
                f"{row.council_us:.0f}",
                f"{row.council_us_per_op:.2f}",
                f"{row.rank_us:.0f}",
                f"{row.announcement_bytes:.1f}",
                row.decision_bytes,
                f"{row.messages_per_op:.2f}",
            )
            for row in rows
        ],
        "agreed ordering, simulated",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Microseconds of one all_reduce, of all tasks together by their number."""

    ranks: int
    backend: str
    tasks: int
    bytes: int
    agreed_us: float
    program_us: float  #: the same tasks, in the same order on all ranks
    scope_us: float  #: program order, in one batch
    times: float  #: agreed as multiple of program
    messages_per_op: float  #: that a rank sends and receives, on average over the ranks


async def measure(backend: str, rounds: int) -> Measured:
    async with new_comm(backend, name="meet") as comm, new_comm(backend, name="agreed", ordering="agreed") as agreed:
        chance = random.Random(comm.rank)
        tensors = [torch.zeros(FLOATS) for _ in range(TASKS)]

        async def one(on: Comm, i: int) -> None:
            await on.all_reduce(tensors[i], tag=f"task {i}")

        async def shuffled() -> None:
            await asyncio.gather(*(one(agreed, i) for i in chance.sample(range(TASKS), TASKS)))

        async def in_order() -> None:
            await asyncio.gather(*(one(comm, i) for i in range(TASKS)))

        async def scope() -> None:
            async with comm.coalesce() as batch:
                for i, tensor in enumerate(tensors):
                    comm.all_reduce(tensor, tag=f"task {i}")
            await batch

        bodies = {"agreed": shuffled, "program": in_order, "scope": scope}
        times = await in_turns(comm, {name: timed(_repeated(body)) for name, body in bodies.items()}, rounds)
        messages = torch.tensor([await _messages(agreed, shuffled)])
        await comm.all_reduce(messages)
        each = {name: us / TASKS for name, us in times.items()}
        return Measured(
            ranks=comm.size,
            backend=comm.backend,
            tasks=TASKS,
            bytes=4 * FLOATS,
            agreed_us=each["agreed"],
            program_us=each["program"],
            scope_us=each["scope"],
            times=each["agreed"] / each["program"],
            messages_per_op=messages.item() / comm.size,
        )


def _repeated(body: Callable[[], Awaitable[object]]) -> Callable[[int], Awaitable[object]]:
    async def many(count: int) -> None:
        for _ in range(count):
            await body()

    return many


async def _messages(comm: Comm, body: Callable[[], Awaitable[object]], repeats: int = 20) -> float:
    """Messages that this rank sends and receives for one operation."""
    backend = comm.unsafe_get_backend()
    submit = backend.submit
    count = 0

    def counting(batch: Sequence[Submission]) -> None:
        nonlocal count
        count += sum(isinstance(submission.op, (SendParcel, RecvParcel)) for submission in batch)
        submit(batch)

    backend.submit = counting  # type: ignore[method-assign]
    try:
        await _repeated(body)(repeats)
    finally:
        backend.submit = submit  # type: ignore[method-assign]
    return count / (repeats * TASKS)


def print_measured(row: Measured) -> None:
    print_table(
        ["ranks", "backend", "tasks", "bytes", "agreed us/op", "program us/op", "scope us/op", "times", "msgs/op"],
        [
            (
                row.ranks,
                row.backend,
                row.tasks,
                row.bytes,
                f"{row.agreed_us:.1f}",
                f"{row.program_us:.1f}",
                f"{row.scope_us:.1f}",
                f"{row.times:.2f}x",
                f"{row.messages_per_op:.3f}",
            )
        ],
        f"agreed ordering, {os.cpu_count()} cores, torch {torch.__version__}",
        left={"backend"},
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--simulate", type=numbers, help="numbers of ranks, instead")
    parser.add_argument("--ops", type=int, default=100, help="simulated per rank and round")
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    if min(*(args.simulate or [1]), args.ops, args.rounds, args.ranks) < 1:
        parser.error("arguments --simulate, --ops, --rounds, --ranks: must be positive")
    return args


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


async def measure_all(args: argparse.Namespace) -> None:
    with Results[Measured](lambda rows: print_measured(*rows), args.json) as rows:
        rows.add(await measure(args.backend, args.rounds))


def main() -> None:
    args = parse()
    if args.simulate is None:
        start_ranks(args.ranks)
        run(measure_all(args))
        return
    with Results[Simulated](print_simulated, args.json) as rows:
        for ranks in args.simulate:
            rows.add(simulate(ranks, args.ops, args.rounds))


if __name__ == "__main__":
    main()
