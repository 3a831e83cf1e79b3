"""Train a network that is cut into stages, one per rank; activations travel as dicts of tensors.

    asynccomm run -n 2 examples/pipeline.py

Each batch is cut into microbatches. A stage receives a microbatch's activations from the one before it, computes, and
sends on; gradients go the other way. What a stage receives next is already on its way while it computes (in a thread,
so that the loop can attend to the messages): that is all the schedule there is. Gradients add up over the microbatches,
so the network learns just as if it were in one piece; only rounding differs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import asynccomm
from asynccomm import Comm

TEST_SAMPLES = 360  # of 1797
WIDTH = 256
DEPTH = 6  # hidden layers
GRADIENTS = 1  # tag of what goes back; activations have 0


class Samples(NamedTuple):
    images: Tensor  #: float32 ``(n, 64)``
    labels: Tensor  #: int64 ``(n,)``


def load() -> tuple[Samples, Samples]:
    """The digits that come with scikit-learn, as training set and test set."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(pixels).float() / 16 - 0.5, torch.from_numpy(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return Samples(images[train], labels[train]), Samples(images[test], labels[test])


def make_layers() -> list[nn.Module]:
    """The whole network; every rank makes the same one and keeps its part."""
    torch.manual_seed(0)
    widths = [64, *[WIDTH] * DEPTH]
    hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return [*hidden, nn.Linear(WIDTH, 10)]


def part_of(layers: list[nn.Module], rank: int, size: int) -> nn.Sequential:
    """The layers of stage ``rank``: as equal a share as can be."""
    return nn.Sequential(*layers[rank * len(layers) // size : (rank + 1) * len(layers) // size])


class Stage:
    """One rank's part of the network, between its two neighbours."""

    def __init__(self, comm: Comm, module: nn.Module) -> None:
        self.module = module
        self._comm = comm
        self._before = comm.rank - 1 if comm.rank > 0 else None
        self._after = comm.rank + 1 if comm.rank < comm.size - 1 else None
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # inputs and outputs of microbatches on their way
        self._sends: list[asynccomm.Work[Any]] = []

    async def train(self, batch: Samples, microbatches: int) -> float:
        """Add the gradients of one batch to the parameters; returns the loss on the last stage, 0 elsewhere."""
        images, labels = batch.images.chunk(microbatches), batch.labels.chunk(microbatches)
        loss = 0.0
        for i, item in enumerate(self._coming(self._before, 0, microbatches)):
            inputs = images[i] if item is None else (await item)["activations"]
            outputs = await asyncio.to_thread(self._forward, i, inputs)
            if self._after is not None:
                self._send({"activations": outputs.detach()}, self._after, 0)
            else:
                loss += await asyncio.to_thread(self._loss, i, labels[i], microbatches)
        for i, item in enumerate(self._coming(self._after, GRADIENTS, microbatches)):
            gradient = None if item is None else (await item)["gradient"]
            back = await asyncio.to_thread(self._backward, i, gradient)
            if self._before is not None:
                self._send({"gradient": back}, self._before, GRADIENTS)
        await asyncio.gather(*self._sends)
        self._sends.clear()
        return loss

    async def predict(self, images: Tensor) -> Tensor:
        """The network's output on the last stage; elsewhere this stage's."""
        with torch.no_grad():
            for item in self._coming(self._before, 0, 1):
                outputs: Tensor = self.module(images if item is None else (await item)["activations"])
        if self._after is not None:
            await self._comm.send_tensor_dict({"activations": outputs}, self._after)
        return outputs

    def _coming(self, source: int | None, tag: int, count: int) -> Iterator[Any]:
        """What comes from a neighbour, each received one ahead; None for each where there is no neighbour."""
        if source is None:
            yield from [None] * count
            return
        upcoming = self._comm.recv_tensor_dict(source, tag)
        for i in range(count):
            current = upcoming
            if i + 1 < count:
                upcoming = self._comm.recv_tensor_dict(source, tag)
            yield current

    def _send(self, item: dict[str, object], rank: int, tag: int) -> None:
        self._sends.append(self._comm.send_tensor_dict(item, rank, tag))

    # in threads

    def _forward(self, i: int, inputs: Tensor) -> Tensor:
        inputs = inputs.detach().requires_grad_(self._before is not None)
        outputs: Tensor = self.module(inputs)
        self._kept[i] = inputs, outputs
        return outputs

    def _loss(self, i: int, labels: Tensor, microbatches: int) -> float:
        inputs, outputs = self._kept[i]
        loss = F.cross_entropy(outputs, labels) / microbatches
        self._kept[i] = inputs, loss
        return loss.item()

    def _backward(self, i: int, gradient: Tensor | None) -> Tensor | None:
        inputs, outputs = self._kept.pop(i)
        torch.autograd.backward(outputs, gradient)
        return inputs.grad


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4)
    args = parser.parse_args()
    if min(args.epochs, args.batch_size, args.microbatches) < 1:
        parser.error("arguments --epochs, --batch-size and --microbatches: must be at least 1")
    if args.batch_size % args.microbatches:
        parser.error("argument --microbatches: must divide --batch-size")

    torch.set_num_threads(1)
    training, test = load()
    if args.batch_size > len(training.labels):
        parser.error(f"argument --batch-size: there are {len(training.labels)} samples")
    async with asynccomm.new_comm(name="pipeline") as comm:
        layers = make_layers()
        if comm.size > len(layers):
            raise SystemExit(f"there are {len(layers)} layers, so at most as many ranks")
        stage = Stage(comm, part_of(layers, comm.rank, comm.size))
        optimizer = torch.optim.Adam(stage.module.parameters())
        random = torch.Generator().manual_seed(0)
        last = comm.rank == comm.size - 1
        for epoch in range(1, args.epochs + 1):
            order = torch.randperm(len(training.labels), generator=random)
            losses = []
            for chosen in torch.split(order, args.batch_size):
                if len(chosen) < args.batch_size:
                    break  # the last one
                optimizer.zero_grad()
                batch = Samples(training.images[chosen], training.labels[chosen])
                losses.append(await stage.train(batch, args.microbatches))
                optimizer.step()
            if last:
                print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")
        guesses = await stage.predict(test.images)
        if last:
            accuracy = (guesses.argmax(1) == test.labels).float().mean().item()
            print(f"test accuracy: {accuracy:.3f} ({comm.size} stages of {len(layers)} layers in all, {comm.backend})")


asynccomm.run(main())
