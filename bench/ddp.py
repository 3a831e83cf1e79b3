"""A training step under DistributedDataParallel: backend "asynccomm" against gloo, on the same ranks.

    python bench/ddp.py --ranks 2 --json out.json

A step is forward, backward and SGD on one batch per rank. ``bare`` is the same step where DDP sends nothing, and the
ranks only wait for each other; what a step takes longer is what communication costs, without the part of it that hides
behind the backward pass. The ratio is gloo's cost over asynccomm's, from medians over rounds; in each round all three
take turns.

The models: a transformer encoder (4 layers of width 256) and a convolutional net (7 layers), small enough for a CPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from report import Results, print_table
from rounds import ROUNDS, Body, in_turns, start_ranks, timed
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.interop.torch_backend import register
from asynccomm.runner import run

CLASSES = 10
TOKENS, WIDTH, LAYERS = 1000, 256, 4
PEERS = ("asynccomm", "gloo")


class Transformer(nn.Module):
    """Tells classes of sequences of tokens; 3.4 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.tell = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tell(self.encode(self.embed(tokens)).mean(1))  # type: ignore[no-any-return]

    @staticmethod
    def batch() -> Tensor:
        return torch.randint(TOKENS, (4, 32))


class Convolutions(nn.Sequential):
    """Tells classes of small pictures; 2.2 million parameters, and no buffers, which DDP would broadcast."""

    def __init__(self) -> None:
        widths = [3, 32, 64, 128, 256, 256, 512]
        parts: list[nn.Module] = []
        for before, after in pairwise(widths):
            stride = 1 if before == after else 2
            parts += [nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(8, after), nn.ReLU()]
        super().__init__(*parts, nn.Flatten(), nn.Linear(widths[-1], CLASSES))

    @staticmethod
    def batch() -> Tensor:
        return torch.randn(8, 3, 32, 32)


MODELS: dict[str, type[Transformer | Convolutions]] = {"transformer": Transformer, "convolutions": Convolutions}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One model's training step. Milliseconds."""

    model: str
    bytes: int  #: of gradients
    ranks: int
    bare_ms: float
    asynccomm_ms: float
    gloo_ms: float
    cost_ms: float = field(init=False)  #: of communication, with asynccomm
    gloo_cost_ms: float = field(init=False)
    ratio: float = field(init=False)  #: gloo's cost over asynccomm's

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost_ms", self.asynccomm_ms - self.bare_ms)
        object.__setattr__(self, "gloo_cost_ms", self.gloo_ms - self.bare_ms)
        object.__setattr__(self, "ratio", self.gloo_cost_ms / self.cost_ms)


def stepper(
    kind: type[Transformer | Convolutions],
    wrap: Callable[[nn.Module], nn.Module],
    meet: Callable[[], Awaitable[object]] | None = None,
) -> Body:
    """Trains a model of its own, the same for all contenders; then the ranks ``meet``, if they have not done so."""
    torch.manual_seed(1)
    model = wrap(kind())
    batch, target = kind.batch(), torch.randint(CLASSES, (len(kind.batch()),))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    async def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if meet is not None:
                await meet()

    return timed(steps)


def silent(group: Any, model: nn.Module) -> nn.Module:
    """DDP that sends nothing in a step."""
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(None, noop_hook)
    return wrapped


async def measure(comm: Comm, name: str, groups: dict[str, Any], rounds: int) -> Step:
    kind = MODELS[name]
    bodies = {"bare": stepper(kind, partial(silent, groups["gloo"]), comm.barrier)}
    for peer, group in groups.items():
        bodies[peer] = stepper(kind, partial(DistributedDataParallel, process_group=group))
    us = await in_turns(comm, bodies, rounds)
    nbytes = sum(parameter.nbytes for parameter in kind().parameters())
    return Step(model=name, bytes=nbytes, ranks=comm.size, **{f"{name}_ms": value / 1000 for name, value in us.items()})


async def measure_all(args: argparse.Namespace) -> None:
    groups = {peer: dist.new_group(backend=peer) for peer in PEERS}
    async with new_comm(name="bench") as comm:
        with Results[Step](print_steps, args.json) as rows:
            for name in args.models:
                rows.add(await measure(comm, name, groups, args.rounds))


def print_steps(rows: Sequence[Step]) -> None:
    print_table(
        ["model", "gradients", "ranks", "bare ms", "asynccomm ms", "gloo ms", "cost ms", "gloo's", "ratio"],
        [
            (
                row.model,
                f"{row.bytes / 2**20:.1f} MiB",
                row.ranks,
                *(f"{ms:.1f}" for ms in (row.bare_ms, row.asynccomm_ms, row.gloo_ms, row.cost_ms, row.gloo_cost_ms)),
                f"{row.ratio:.1f}x",
            )
            for row in rows
        ],
        f"A step under DDP, {os.cpu_count()} cores, torch {torch.__version__}",
        left={"model"},
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help="names, with commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    for name in args.models:
        if name not in MODELS:
            parser.error(f"argument --models: there is no model {name!r}; choose from {', '.join(MODELS)}")
    return args


def main() -> None:
    args = parse()
    start_ranks(args.ranks)
    register()
    torch.set_num_threads(1)  # as many as there are cores for each rank
    dist.init_process_group("gloo")
    run(measure_all(args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
