"""An async front end feeds worker ranks by a queue, and the answers come back by another.

    asynccomm run -n 3 examples/inference_engine.py

Rank 0 is the front end: many tasks ask for answers at the same time, and a scheduler puts the requests that wait into
the queue, as one batch that every worker gets. Each worker holds some columns of a network, as in tensor
parallelism, and puts its part of the answers into a queue that only the front end reads. The front end prints
latencies under load. A worker blocks no loop, and the front end needs no thread.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field

import torch

import asynccomm
from asynccomm import Comm, MessageQueue

WIDTH = 256


@dataclass
class FrontEnd:
    """The requests that wait for the scheduler, and those that wait for the workers."""

    workers: int
    waiting: list[tuple[torch.Tensor, asyncio.Future[torch.Tensor]]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, prompt: torch.Tensor) -> torch.Tensor:
        answer: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt, answer))
        self.asked.set()
        return await answer

    async def schedule(self, batches: MessageQueue, answers: MessageQueue) -> None:
        """One step after the other: the requests that came during a step are the batch of the next."""
        while True:
            await self.asked.wait()
            self.asked.clear()
            step, self.waiting = self.waiting, []
            await batches.put(torch.stack([prompt for prompt, _ in step]))
            parts = dict([await answers.get() for _ in range(self.workers)])
            rows = torch.cat([parts[worker] for worker in sorted(parts)], dim=1)
            for (_, answer), row in zip(step, rows, strict=True):
                answer.set_result(row)


async def user(front: FrontEnd, requests: int, chance: random.Random, latencies: list[float]) -> None:
    for _ in range(requests):
        await asyncio.sleep(chance.uniform(0, 0.01))
        prompt = torch.rand(WIDTH)
        start = time.perf_counter()
        answer = await front.ask(prompt)
        latencies.append(time.perf_counter() - start)
        assert torch.allclose(answer, prompt @ weights(), atol=1e-3)


def weights() -> torch.Tensor:
    return torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)


async def serve(comm: Comm, users: int, requests: int) -> None:
    """Rank 0."""
    front, latencies = FrontEnd(comm.size - 1), list[float]()
    async with comm.queue(writer=0) as batches, comm.queue(reader=0) as answers:
        scheduler = asyncio.create_task(front.schedule(batches, answers))
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(users):
                group.create_task(user(front, requests, random.Random(number), latencies))
        seconds = time.perf_counter() - start
        scheduler.cancel()
        await batches.aclose()  # the workers end with the queue
    latencies.sort()
    p50, p90, p99 = (latencies[int(len(latencies) * share)] * 1e3 for share in (0.5, 0.9, 0.99))
    print(
        f"{len(latencies)} requests of {users} users, {len(latencies) / seconds:.0f} per second: "
        f"latency {p50:.1f} ms (median), {p90:.1f} ms (90 %), {p99:.1f} ms (99 %)"
    )


async def work(comm: Comm) -> None:
    """Any other rank: its columns of the network."""
    mine = weights().chunk(comm.size - 1, dim=1)[comm.rank - 1]
    async with comm.queue(writer=0) as batches, comm.queue(reader=0) as answers:
        async for prompts in batches:
            await answers.put((comm.rank, prompts @ mine))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--requests", type=int, default=50, help="of each user")
    args = parser.parse_args()
    if min(args.users, args.requests) < 1:
        parser.error("arguments --users and --requests: must be at least 1")

    torch.set_num_threads(1)
    async with asynccomm.new_comm(name="engine") as comm:
        if comm.size < 2:
            raise SystemExit("the engine needs a front end and at least one worker: asynccomm run -n 3 ...")
        await (serve(comm, args.users, args.requests) if comm.rank == 0 else work(comm))


asynccomm.run(main())
