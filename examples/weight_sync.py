"""A trainer pushes new weights into servers that go on answering requests meanwhile.

    asynccomm run -n 3 examples/weight_sync.py

Rank 0 trains. The other ranks serve: clients (tasks, here in the same process) ask for predictions all the time, and
each request is answered on the event loop. New weights arrive in a second copy of the model, in the background; when
they are complete the two copies change places, between two requests. So every answer comes from one version of the
weights, and all that a request can notice is that the machine is busier.

At the end each server prints how long requests took while weights were arriving and while none were: the difference is
the stall that the sync costs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import asynccomm
from asynccomm import Comm, weights

TRAINER = 0
FEATURES = 16


def make_model(width: int) -> nn.Sequential:
    """A network that is to learn the sum of its inputs."""
    layers = [nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)]
    return nn.Sequential(*layers)


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
    async with (
        comm.subgroups(1, "trainers") as trainers,
        weights.Publisher(trainers, trainer.model, servers=comm.size - 1) as publisher,
    ):
        for _ in range(versions):
            losses = [await asyncio.to_thread(trainer.step) for _ in range(steps)]
            pushed = await publisher.push(info={"loss": losses[-1]})
            print(f"version {pushed.version}: loss {losses[-1]:.3f}, pushed in {1e3 * pushed.seconds:.0f} ms")


class Predictor:
    """Answers requests with the newest complete weights."""

    def __init__(self, comm: Comm, model: nn.Module) -> None:
        self._model = model
        self._server = weights.Server(model, store=comm)
        self._updates = self._server.updates(automatic=True)
        self.losses: list[float] = []  #: of the trainer, for each version
        self.versions: list[int] = []  #: that were served
        self.idle: list[float] = []  #: seconds of requests while no weights arrived
        self.busy: list[float] = []  #: the same while some did

    async def receive_weights(self) -> None:
        async with self._updates:
            async for update in self._updates:
                self.losses.append(update.info["loss"])

    def predict(self, inputs: Tensor) -> Tensor:
        if not self.versions or self.versions[-1] != self._server.version:
            self.versions.append(self._server.version)
        with torch.no_grad():
            outputs: Tensor = self._model(inputs)
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
            asked, syncing = time.perf_counter(), self._updates.receiving
            answer: asyncio.Future[Tensor] = loop.create_future()
            loop.call_soon(self._respond, inputs, answer)  # as a server would that has just read the request
            await answer
            (self.busy if syncing or self._updates.receiving else self.idle).append(time.perf_counter() - asked)
            await asyncio.sleep(pause)


async def serve(comm: Comm, model: nn.Module, clients: int, pause: float) -> Predictor:
    predictor = Predictor(comm, model)
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(predictor.client(100 * comm.rank + i, pause)) for i in range(clients)]
        await predictor.receive_weights()  # until the trainer ends
        predictor.predict(torch.zeros(1, FEATURES))  # the last version is asked, whatever the clients do
        for task in asking:
            task.cancel()
    return predictor


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
    if min(args.versions, args.steps, args.width) < 1:
        parser.error("arguments --versions, --steps and --width: must be at least 1")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    async with asynccomm.new_comm(name="weights") as comm:
        if comm.size < 2:
            raise SystemExit("one rank trains, the others serve: start at least two, asynccomm run -n 3 ...")
        if comm.rank == TRAINER:
            await train(comm, Trainer(make_model(args.width), seed=0), args.versions, args.steps)
        else:
            server = await serve(comm, make_model(args.width), args.clients, args.pause)
            print(f"served versions {server.versions[0]} to {server.versions[-1]} (loss {server.losses[-1]:.3f})")
            print(f"while weights were arriving: {milliseconds(server.busy)}")
            print(f"else: {milliseconds(server.idle)}")


asynccomm.run(main())
