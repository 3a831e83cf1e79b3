"""What one scope saves: many all_reduces in `comm.coalesce()`, against one by one here and in gloo.

    python bench/coalesce.py --ranks 2 --backend shm --json out.json

The lists: 100 tensors of 1 KiB, the gradients of a ResNet-50, and 64 tensors of some sizes up to 4 MiB. Microseconds
are of the whole list, until all of it is done; ``one by one`` awaits each before the next is called, ``at once`` calls
all and then awaits, ``list`` is ``all_reduce_coalesced``. The first ratio is gloo's time one by one over ours in a
scope, the second ours one by one over ours in a scope.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from models import resnet50
from report import Results, print_table
from rounds import ROUNDS, in_turns, start_ranks, timed
from torch import Tensor
from torch import distributed as dist

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.runner import run

LISTS: dict[str, list[int]] = {  # numbers of floats
    "100 x 1 KiB": [256] * 100,
    "ResNet-50": [prod(shape) for shape in resnet50()],
    "64 x 64 B": [16] * 64,
    "64 x 16 KiB": [4096] * 64,
    "64 x 256 KiB": [64 << 10] * 64,
    "64 x 1 MiB": [256 << 10] * 64,
    "64 x 4 MiB": [1 << 20] * 64,
}

Run = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """One list of tensors."""

    tensors: str
    bytes: int
    ranks: int
    backend: str
    scope_us: float
    list_us: float
    at_once_us: float
    one_by_one_us: float
    gloo_us: float  #: torch's gloo, one by one, blocking
    over_gloo: float = field(init=False)
    over_one_by_one: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "over_gloo", self.gloo_us / self.scope_us)
        object.__setattr__(self, "over_one_by_one", self.one_by_one_us / self.scope_us)


def contenders(comm: Comm, tensors: list[Tensor]) -> dict[str, Run]:
    async def scope() -> None:
        async with comm.coalesce() as batch:
            for tensor in tensors:
                comm.all_reduce(tensor)
        await batch

    async def as_list() -> None:
        await comm.all_reduce_coalesced(tensors)

    async def at_once() -> None:
        for work in [comm.all_reduce(tensor) for tensor in tensors]:
            await work

    async def one_by_one() -> None:
        for tensor in tensors:
            await comm.all_reduce(tensor)

    async def gloo() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    return {"scope": scope, "list": as_list, "at_once": at_once, "one_by_one": one_by_one, "gloo": gloo}


async def measure(comm: Comm, name: str, rounds: int) -> Saving:
    tensors = [torch.zeros(n) for n in LISTS[name]]
    runs = contenders(comm, tensors)
    times = await in_turns(comm, {key: timed(_repeated(body)) for key, body in runs.items()}, rounds)
    return Saving(
        tensors=name,
        bytes=sum(tensor.nbytes for tensor in tensors),
        ranks=comm.size,
        backend=comm.backend,
        **{f"{key}_us": us for key, us in times.items()},
    )


def _repeated(body: Run) -> Callable[[int], Awaitable[object]]:
    async def many(count: int) -> None:
        for _ in range(count):
            await body()

    return many


async def measure_all(args: argparse.Namespace) -> None:
    async with new_comm(args.backend, name="bench") as comm:
        with Results[Saving](print_savings, args.json) as rows:
            for name in args.lists:
                rows.add(await measure(comm, name, args.rounds))


def print_savings(rows: Sequence[Saving]) -> None:
    lines = []
    for row in rows:
        times = (row.scope_us, row.list_us, row.at_once_us, row.one_by_one_us, row.gloo_us)
        ratios = f"{row.over_gloo:.1f}x", f"{row.over_one_by_one:.2f}x"
        lines.append((row.tensors, row.ranks, row.backend, *(f"{us:.0f}" for us in times), *ratios))
    print_table(
        ["tensors", "ranks", "backend", "scope us", "list", "at once", "one by one", "gloo", "/ gloo", "/ one by one"],
        lines,
        f"all_reduce of many tensors, {os.cpu_count()} cores, torch {torch.__version__}",
        left={"tensors", "backend"},
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--lists", type=lambda text: text.split(","), default=list(LISTS), help="names, with commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    for name in args.lists:
        if name not in LISTS:
            parser.error(f"argument --lists: there is no list {name!r}; choose from {', '.join(LISTS)}")
    return args


def main() -> None:
    args = parse()
    start_ranks(args.ranks)
    dist.init_process_group("gloo")
    run(measure_all(args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
