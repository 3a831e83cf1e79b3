"""Train a network on handwritten digits, data-parallel over any number of ranks, with collectives that are awaited.

    asynccomm run -n 2 examples/train_digits.py
    asynccomm run -n 2 examples/train_digits.py --device cuda      # by NCCL

Three things happen at once in every step: backward computes gradients in a thread, those that are complete already
travel (``asynccomm.GradientReducer``), and another thread prepares the next batch (``prefetch``). The event loop only
coordinates, so it stays free for whatever else your program does.

N ranks train the same weights as one rank does: each takes an equal slice of every global batch, and the average of
the slices' mean gradients is the mean gradient of the whole. Only rounding differs. (BatchNorm and dropout would break
this: their result depends on how the batch is cut.)
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import asynccomm
from asynccomm import Comm, GradientReducer

TEST_SAMPLES = 360  # of 1797
BUCKET_MB = 1 / 16  # small, as the model is: so its 600 KiB of gradients leave in three parts


class Samples(NamedTuple):
    images: Tensor  #: float32 ``(n, 1, 8, 8)``, from -0.5 to 0.5
    labels: Tensor  #: int64 ``(n,)``


def load() -> tuple[Samples, Samples]:
    """The digits that come with scikit-learn, as training set and test set; the same ones in every run."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16 - 0.5
    labels = torch.from_numpy(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return Samples(images[train], labels[train]), Samples(images[test], labels[test])


def make_model() -> nn.Module:
    """A small convolutional network: 150,000 parameters."""
    convolutions = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU())
    head = nn.Sequential(nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(convolutions, nn.MaxPool2d(2), nn.Flatten(), head)


def batches(samples: Samples, epochs: int, batch_size: int, seed: int, rank: int, size: int) -> Iterator[Samples]:
    """This rank's slice of every global batch, shuffled and augmented anew in each epoch.

    All ranks draw the same random numbers, for the whole epoch, and then take their own part: what becomes of a sample
    must not depend on how many ranks there are. The last, incomplete batch of an epoch is dropped.
    """
    random = torch.Generator().manual_seed(seed)
    share = batch_size // size
    for _ in range(epochs):
        order = torch.randperm(len(samples.labels), generator=random)
        offsets = torch.randint(3, (len(order), 2), generator=random)
        for first in range(0, len(order) - batch_size + 1, batch_size):
            mine = slice(first + rank * share, first + (rank + 1) * share)
            yield Samples(shifted(samples.images[order[mine]], offsets[mine]), samples.labels[order[mine]])


def shifted(images: Tensor, offsets: Tensor) -> Tensor:
    """Each image moved by up to one pixel; ``offsets`` is ``(n, 2)``, and 1 leaves an image in place."""
    padded = F.pad(images[:, 0], (1, 1, 1, 1), value=-0.5)
    rows, columns = (offsets.T[:, :, None] + torch.arange(8)).unbind()  # (n, 8) each
    which = torch.arange(len(images))[:, None, None]
    return padded[which, rows[:, :, None], columns[:, None, :]][:, None]


async def prefetch(samples: Iterator[Samples]) -> AsyncIterator[Samples]:
    """The same items, each prepared in a thread while the one before is in use."""
    upcoming = asyncio.create_task(asyncio.to_thread(next, samples, None))
    while (batch := await upcoming) is not None:
        upcoming = asyncio.create_task(asyncio.to_thread(next, samples, None))
        yield batch


@dataclass
class Overlap:
    """How much of the communication was hidden behind backward.

    ``total`` is the time during which a gradient was on its way, from call to completion; that includes waiting for
    slower ranks and for a processor. ``exposed`` is what it cost: how long the coroutine waited for Works after
    backward had ended. The rest passed while there was something else to do.
    """

    total: float = 0.0  #: seconds
    exposed: float = 0.0  #: seconds

    async def finish(self, gradients: GradientReducer) -> None:
        """Wait for the gradients of one step, and take the times."""
        began, works = time.monotonic(), gradients.works  # in the order they were sent
        await gradients.finish()
        self.exposed += time.monotonic() - began
        covered = 0.0  # until when; two Works at a time count once
        for work in works:
            assert work.finished is not None
            self.total += max(0.0, work.finished - max(work.started, covered))
            covered = max(work.finished, covered)

    @property
    def hidden(self) -> float:
        """The share of ``total`` that was not exposed."""
        return 1 - self.exposed / self.total if self.total else 1.0


async def train(
    comm: Comm, model: nn.Module, optimizer: torch.optim.Optimizer, samples: Samples, options: argparse.Namespace
) -> Overlap:
    """Run all epochs. Rank 0 shows the progress."""
    overlap = Overlap()

    def forward_backward(batch: Samples) -> float:
        images, labels = (tensor.to(comm.device) for tensor in batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        torch.autograd.backward(loss)
        return loss.item()

    steps = options.epochs * (len(samples.labels) // options.batch_size)
    mine = batches(samples, options.epochs, options.batch_size, options.seed, comm.rank, comm.size)
    with tqdm(total=steps, desc="training", unit="step", disable=comm.rank != 0) as progress:
        # the ranks begin with the weights of rank 0
        async with GradientReducer(model, comm, bucket_mb=BUCKET_MB) as gradients:
            async for batch in prefetch(mine):
                loss = await asyncio.to_thread(forward_backward, batch)
                await overlap.finish(gradients)
                optimizer.step()
                progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
                progress.update()
    return overlap


async def accuracy(comm: Comm, model: nn.Module, samples: Samples) -> float:
    """Share of the samples that the model gets right; each rank looks at every ``size``-th of them."""
    images, labels = (tensor[comm.rank :: comm.size].to(comm.device) for tensor in samples)
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).sum()
    return (await comm.all_reduce(right)).item() / len(samples.labels)


async def main(options: argparse.Namespace) -> None:
    train_samples, test_samples = load()
    if options.device == "cuda":  # one GPU for each rank of this machine, as far as they go round
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if options.batch_size > len(train_samples.labels):
        raise SystemExit(f"--batch-size is {options.batch_size}, but there are {len(train_samples.labels)} samples")
    async with asynccomm.new_comm(options.backend, options.device) as comm:
        if options.batch_size % comm.size:
            await comm.aclose()  # an error would abort it, and the other ranks would report that instead
            raise SystemExit(f"--batch-size {options.batch_size} does not divide evenly among {comm.size} ranks")
        torch.manual_seed(options.seed)
        model = make_model().to(comm.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True)

        began = time.monotonic()
        overlap = await train(comm, model, optimizer, train_samples, options)
        seconds = time.monotonic() - began
        share = await accuracy(comm, model, test_samples)

        if comm.rank == 0:
            trained = options.epochs * (len(train_samples.labels) // options.batch_size) * options.batch_size
            print(f"test accuracy: {share:.4f}")
            print(f"speed: {trained / seconds:.0f} samples/s (ranks: {comm.size}, backend: {comm.backend})")
            print(f"communication: {overlap.total:.2f} s of {seconds:.2f} s, {overlap.hidden:.0%} of it hidden")
            if options.save:
                torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on handwritten digits, data-parallel.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=48, help="of all ranks together (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation")
    parser.add_argument("--backend", default="auto", help=f"auto, {', '.join(asynccomm.backend_names())}")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--save", type=Path, metavar="PATH", help="where rank 0 writes the trained weights")
    options = parser.parse_args()
    if min(options.epochs, options.batch_size) < 1:
        parser.error("arguments --epochs and --batch-size: must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no GPU here")
    asynccomm.run(main(options))
