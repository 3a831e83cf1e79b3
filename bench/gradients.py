"""A training step with GradientReducer, against DistributedDataParallel with the backends "asynccomm" and gloo.

    python bench/gradients.py --ranks 2 --json out.json

The models, the step and ``bare`` are those of ``ddp.py``. The reducer takes part twice: with backward on the event
loop's thread, as DDP has it, and with backward in a thread, where the event loop stays free. Cost is the time of a step
beyond ``bare``; the ratios are DDP's cost over that of the reducer with backward on the loop's thread.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from ddp import CLASSES, MODELS, PEERS, Convolutions, Transformer, silent, stepper
from report import Results, print_table
from rounds import ROUNDS, Body, in_turns, start_ranks, timed
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.gradients.reducer import BUCKET_MB, GradientReducer
from asynccomm.interop.torch_backend import register
from asynccomm.runner import run


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStepTimes:
    """One model's training step. Milliseconds."""

    model: str
    bytes: int  #: of gradients
    ranks: int
    bucket_mb: float
    bare_ms: float
    reducer_ms: float
    thread_ms: float  #: the reducer, with backward in a thread
    asynccomm_ms: float  #: DDP
    gloo_ms: float  #: DDP
    cost_ms: float = field(init=False)  #: of communication, with the reducer
    over_asynccomm: float = field(init=False)
    over_gloo: float = field(init=False)

    def __post_init__(self) -> None:
        cost = self.reducer_ms - self.bare_ms
        object.__setattr__(self, "cost_ms", cost)
        object.__setattr__(self, "over_asynccomm", (self.asynccomm_ms - self.bare_ms) / cost)
        object.__setattr__(self, "over_gloo", (self.gloo_ms - self.bare_ms) / cost)


async def reducing(kind: type[Transformer | Convolutions], comm: Comm, bucket_mb: float, *, thread: bool) -> Body:
    """The step of ``ddp.stepper`` with a reducer."""
    torch.manual_seed(1)
    model = kind()
    batch, target = kind.batch(), torch.randint(CLASSES, (len(kind.batch()),))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    reducer = await GradientReducer(model, comm, bucket_mb=bucket_mb)

    async def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            backward = nn.functional.cross_entropy(model(batch), target).backward
            if thread:
                await asyncio.to_thread(backward)
            else:
                backward()  # type: ignore[no-untyped-call]
            await reducer.finish()
            optimizer.step()

    return timed(steps)


async def measure(comm: Comm, name: str, groups: dict[str, Any], rounds: int, bucket_mb: float) -> GradientStepTimes:
    kind = MODELS[name]
    bodies = {"bare": stepper(kind, partial(silent, groups["gloo"]), comm.barrier)}
    for label, thread in (("reducer", False), ("thread", True)):
        bodies[label] = await reducing(kind, comm, bucket_mb, thread=thread)
    for peer, group in groups.items():
        wrap = partial(DistributedDataParallel, process_group=group, bucket_cap_mb=bucket_mb)
        bodies[peer] = stepper(kind, wrap)
    us = await in_turns(comm, bodies, rounds)
    return GradientStepTimes(
        model=name,
        bytes=sum(parameter.nbytes for parameter in kind().parameters()),
        ranks=comm.size,
        bucket_mb=bucket_mb,
        **{f"{label}_ms": value / 1000 for label, value in us.items()},
    )


async def measure_all(args: argparse.Namespace) -> None:
    groups = {peer: dist.new_group(backend=peer) for peer in PEERS}
    async with new_comm(name="bench") as comm:
        with Results[GradientStepTimes](print_steps, args.json) as rows:
            for name in args.models:
                rows.add(await measure(comm, name, groups, args.rounds, args.bucket_mb))


def print_steps(rows: Sequence[GradientStepTimes]) -> None:
    columns = ["model", "gradients", "ranks", "bare", "reducer", "thread", "DDP", "DDP gloo", "cost"]
    print_table(
        [*columns, "over DDP", "over gloo"],
        [
            (
                row.model,
                f"{row.bytes / 2**20:.1f} MiB",
                row.ranks,
                *(f"{ms:.1f}" for ms in (row.bare_ms, row.reducer_ms, row.thread_ms, row.asynccomm_ms, row.gloo_ms)),
                f"{row.cost_ms:.1f}",
                f"{row.over_asynccomm:.1f}x",
                f"{row.over_gloo:.1f}x",
            )
            for row in rows
        ],
        f"A step with GradientReducer and under DDP, ms, {os.cpu_count()} cores, torch {torch.__version__}",
        left={"model"},
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help="names, with commas")
    parser.add_argument("--bucket-mb", type=float, default=BUCKET_MB, help="of all contenders (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    for name in args.models:
        if name not in MODELS:
            parser.error(f"argument --models: there is no model {name!r}; choose from {', '.join(MODELS)}")
    if not args.bucket_mb > 0:
        parser.error(f"argument --bucket-mb: must be positive, got {args.bucket_mb:g}")
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
