"""A trainer pushes new weights into servers that go on answering requests meanwhile.

    asynccomm run -n 3 examples/weight_sync.py

Rank 0 trains. The other ranks serve: clients (tasks, here in the same process) ask for predictions all the time, and
each request is answered on the event loop. New weights arrive by ``comm.broadcast_state`` in a second copy of the
model, in the background; when they are complete the two copies change places, between two requests. So every answer
comes from one version of the weights, and all that a request can notice is that the machine is busier.

At the end each server prints how long requests took while weights were arriving and while none were: the difference is
the stall that the sync costs.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import asynccomm
from asynccomm import Comm

TRAINER = 0
FEATURES = 16


def make_model(width: int) -> nn.Sequential:
    """A network that is to learn the sum of its inputs, with a buffer that says which version it is."""
    layers = [nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)]
    model = nn.Sequential(*layers)
    model.register_buffer("version", torch.zeros((), dtype=torch.int64))
    return model


class Trainer:
    """Improves its model a little, and publishes it; again and again."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model = model
        self._optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self._random = torch.Generator().manual_seed(seed)

    def step(self) -> float:
        """One step on random data; returns the loss."""
        inputs = torch.randn(64, FEATURES, generator=self._random)
        loss = nn.functional.mse_loss(self.model(inputs), inputs.sum(1, keepdim=True))
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()


async def train(comm: Comm, trainer: Trainer, versions: int, steps: int) -> None:
    version = trainer.model.get_buffer("version")
    for number in range(1, versions + 1):
        losses = [await asyncio.to_thread(trainer.step) for _ in range(steps)]
        version.fill_(number)
        start = time.perf_counter()
        await comm.broadcast_object({"loss": losses[-1]}, TRAINER)
        await comm.broadcast_state(trainer.model, TRAINER)
        print(f"version {number}: loss {losses[-1]:.3f}, pushed in {1e3 * (time.perf_counter() - start):.0f} ms")


@dataclass
class Server:
    """Answers requests with the newest complete weights."""

    serving: nn.Module
    arriving: nn.Module  #: where the next version is being written
    syncing: bool = False
    losses: list[float] = field(default_factory=list)  #: of the trainer, for each version
    versions: list[int] = field(default_factory=list)  #: that were served
    idle: list[float] = field(default_factory=list)  #: seconds of requests while no weights arrived
    busy: list[float] = field(default_factory=list)  #: the same while some did

    async def receive_weights(self, comm: Comm, versions: int) -> None:
        for _ in range(versions):
            # the trainer may take as long as it likes
            coming: Any = await comm.broadcast_object(None, TRAINER, timeout=math.inf)
            self.losses.append(coming["loss"])
            self.syncing = True
            await comm.broadcast_state(self.arriving, TRAINER)
            self.syncing = False
            self.serving, self.arriving = self.arriving, self.serving

    def predict(self, inputs: Tensor) -> Tensor:
        model = self.serving
        version = int(model.get_buffer("version"))
        if not self.versions or self.versions[-1] != version:
            self.versions.append(version)
        with torch.no_grad():
            outputs: Tensor = model(inputs)
        return outputs

    def _respond(self, inputs: Tensor, answer: asyncio.Future[Tensor]) -> None:
        if not answer.cancelled():
            answer.set_result(self.predict(inputs))

    async def client(self, seed: int, pause: float) -> None:
        """Asks, waits for the answer, thinks a little, asks again; until it is cancelled."""
        random = torch.Generator().manual_seed(seed)
        loop = asyncio.get_running_loop()
        while True:
            inputs = torch.randn(1, FEATURES, generator=random)
            asked, syncing = time.perf_counter(), self.syncing
            answer: asyncio.Future[Tensor] = loop.create_future()
            loop.call_soon(self._respond, inputs, answer)  # as a server would that has just read the request
            await answer
            (self.busy if syncing or self.syncing else self.idle).append(time.perf_counter() - asked)
            await asyncio.sleep(pause)


async def serve(comm: Comm, width: int, versions: int, clients: int, pause: float) -> Server:
    server = Server(make_model(width), make_model(width))
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(server.client(100 * comm.rank + i, pause)) for i in range(clients)]
        await server.receive_weights(comm, versions)
        server.predict(torch.zeros(1, FEATURES))  # the last version is asked, whatever the clients do
        for task in asking:
            task.cancel()
    return server


def milliseconds(seconds: Sequence[float]) -> str:
    if not seconds:
        return "no requests"
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{len(ordered)} requests, median {1e3 * ordered[len(ordered) // 2]:.2f} ms, 99 % below {1e3 * p99:.2f} ms"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=20, help="how often new weights are pushed")
    parser.add_argument("--steps", type=int, default=5, help="of training between them")
    parser.add_argument("--width", type=int, default=2048, help="of the network; 2048: 17 MB of weights")
    parser.add_argument("--clients", type=int, default=4, help="of each server")
    parser.add_argument("--pause", type=float, default=0.002, help="seconds between two requests of a client")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    async with asynccomm.new_comm(name="weights") as comm:
        if comm.size < 2:
            raise SystemExit("one rank trains, the others serve: start at least two, asynccomm run -n 3 ...")
        if comm.rank == TRAINER:
            await train(comm, Trainer(make_model(args.width), seed=0), args.versions, args.steps)
        else:
            server = await serve(comm, args.width, args.versions, args.clients, args.pause)
            print(f"served versions {server.versions[0]} to {server.versions[-1]} (loss {server.losses[-1]:.3f})")
            print(f"while weights were arriving: {milliseconds(server.busy)}")
            print(f"else: {milliseconds(server.idle)}")


asynccomm.run(main())
