"""Many tasks share one comm, each at its own pace.

    asynccomm run -n 2 examples/many_tasks.py

Every task steers a small search for the minimum of a function of its own: each rank tries steps of random sizes, the
ranks average where they got to, and go on from there until all are close enough. How long a task takes between two
averages depends on the data, and differs from rank to rank: so the ranks' tasks come to the comm in different orders.
With ``ordering="agreed"`` that is fine, since each task has a tag of its own and the ranks agree on an order as they
go. In program order the tags do not fit, and every rank ends with an error that names its own:

    asynccomm run -n 2 examples/many_tasks.py --ordering program
"""

from __future__ import annotations

import argparse
import asyncio
import random

import torch
from torch import Tensor

import asynccomm
from asynccomm import Comm, ReduceOp

CLOSE = 1e-2  # distance from the minimum at which a task is content
WIDTH = 32


async def search(comm: Comm, task: int, chance: random.Random) -> int:
    """Find the point that ``task`` looks for; returns how many averages that took."""
    target = torch.linspace(-1, 1, WIDTH) * (task + 1)
    point = torch.zeros(WIDTH)
    averages = 0
    while True:
        for _ in range(chance.randrange(1, 6)):  # the data decide how long a rank needs
            point = improved(point, target, chance)
            await asyncio.sleep(0)  # here an async program would read, ask a model, wait for a user
        await comm.all_reduce(point, ReduceOp.AVG, tag=f"task {task}")
        averages += 1
        if (point - target).abs().max() < CLOSE:  # the same on all ranks: they have the same average
            return averages


def improved(point: Tensor, target: Tensor, chance: random.Random) -> Tensor:
    """A random part of the way."""
    return point + (target - point) * chance.uniform(0.2, 0.8)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--ordering", choices=["agreed", "program"], default="agreed")
    args = parser.parse_args()
    if args.tasks < 1:
        parser.error("argument --tasks: must be at least 1")

    try:
        async with asynccomm.new_comm(name="shared", ordering=args.ordering, timeout=60) as comm:
            chances = [random.Random(1000 * comm.rank + task) for task in range(args.tasks)]
            async with asyncio.TaskGroup() as group:
                searches = [group.create_task(search(comm, i, chance)) for i, chance in enumerate(chances)]
            averages = [task.result() for task in searches]
            batches = comm.statistics().batches
    except* asynccomm.CollectiveMismatchError as errors:  # every task has it: the comm is broken
        raise SystemExit(f"the tasks took turns in different orders: {errors.exceptions[0]}") from None
    if comm.rank == 0:
        print(
            f"{args.tasks} tasks on {comm.size} ranks found their minimum: {sum(averages)} averages, "
            f"{min(averages)} to {max(averages)} per task, {batches} batches of several"
        )


asynccomm.run(main())
