"""dispatch and combine of a mixture of experts, against torch.distributed.all_to_all_single by hand on gloo.

    python bench/experts.py --ranks 2 --json out.json

Each rank has as many tokens, and each token has two of eight experts, drawn at random. The experts do nothing: one
operation is a dispatch with weights and a combine. The peer uses torch's calls: counts by one all_to_all_single,
tokens, ids and weights by three, results by one; one row per token and rank, sums by index_add, as here. The third
contender sends all tokens to all ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import torch
from report import Results, print_table
from rounds import arguments, in_turns, start_ranks, timed
from torch import Tensor
from torch import distributed as dist

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.ops.routing import Routing
from asynccomm.runner import run

EXPERTS, CHOSEN = 8, 2
SIZES = [1 << 10, 64 << 10, 1 << 20, 16 << 20]  # bytes of each rank's tokens
WIDTH = 256  # float32 elements of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTimes:
    """One dispatch and combine."""

    bytes: int  #: of each rank's tokens
    tokens: int
    ranks: int
    backend: str
    asynccomm_us: float
    to_all_us: float  #: all tokens to all ranks, without choosing rows there
    gloo_us: float  #: by hand
    ratio: float = field(init=False)  #: how many times as fast asynccomm is

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", self.gloo_us / self.asynccomm_us)


def by_hand(size: int, rank: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sums, by blocking calls of torch."""
    holders = ids // (EXPERTS // size)
    there = torch.zeros(len(hidden), size, dtype=torch.bool).scatter_(1, holders, True)
    _, tokens = there.t().nonzero(as_tuple=True)
    sends = there.sum(0)
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends)
    splits, parts = receives.tolist(), sends.tolist()
    received = []
    for tensor in (hidden, ids, weights):
        output = torch.empty(sum(splits), tensor.shape[1], dtype=tensor.dtype)
        dist.all_to_all_single(output, tensor[tokens], splits, parts)
        received.append(output)
    rows, their_ids, their_weights = received
    mine = their_ids // (EXPERTS // size) == rank
    numbers, slots = mine.nonzero(as_tuple=True)
    order = their_ids[numbers, slots].argsort(stable=True)
    numbers, slots = numbers[order], slots[order]
    results = rows[numbers] * their_weights[numbers, slots, None]
    partial = torch.zeros_like(rows).index_add_(0, numbers, results)
    back = torch.empty(len(tokens), hidden.shape[1])
    dist.all_to_all_single(back, partial, parts, splits)
    return torch.zeros_like(hidden).index_add_(0, tokens, back)


async def measure(comm: Comm, nbytes: int, rounds: int) -> ExpertTimes:
    tokens = max(1, nbytes // (4 * WIDTH))
    make = torch.Generator().manual_seed(comm.rank)
    hidden = torch.randn(tokens, WIDTH, generator=make)
    ids = torch.rand(tokens, EXPERTS, generator=make).argsort(1)[:, :CHOSEN]
    weights = torch.rand(tokens, CHOSEN, generator=make)
    routing = Routing(ids, EXPERTS, weights)

    async def routed() -> Tensor:
        sent = await comm.dispatch(hidden, routing)
        return await comm.combine(sent.hidden, sent)

    async def to_all() -> Tensor:
        sent = await comm.dispatch(hidden, None, [ids, weights])
        return await comm.combine(sent.hidden, sent)

    async def gloo() -> Tensor:
        return by_hand(comm.size, comm.rank, hidden, ids, weights)

    torch.testing.assert_close(await routed(), await gloo())
    torch.testing.assert_close(await routed(), hidden * weights.sum(1, keepdim=True))
    bodies = {name: timed(_times(once)) for name, once in (("asynccomm", routed), ("to_all", to_all), ("gloo", gloo))}
    us = await in_turns(comm, bodies, rounds)
    times = {f"{name}_us": value for name, value in us.items()}
    return ExpertTimes(bytes=nbytes, tokens=tokens, ranks=comm.size, backend=comm.backend, **times)


def _times(once: Callable[[], Awaitable[object]]) -> Callable[[int], Awaitable[None]]:
    async def repeated(count: int) -> None:
        for _ in range(count):
            await once()

    return repeated


async def measure_all(args: argparse.Namespace) -> None:
    async with new_comm(args.backend, name="bench") as comm:
        with Results[ExpertTimes](print_times, args.json) as rows:
            for nbytes in args.sizes:
                rows.add(await measure(comm, nbytes, args.rounds))


def print_times(rows: Sequence[ExpertTimes]) -> None:
    print_table(
        ["bytes", "tokens", "ranks", "backend", "asynccomm us", "to all us", "gloo us", "ratio"],
        [
            (
                row.bytes,
                row.tokens,
                row.ranks,
                row.backend,
                *(f"{us:.1f}" for us in (row.asynccomm_us, row.to_all_us, row.gloo_us)),
                f"{row.ratio:.2f}x",
            )
            for row in rows
        ],
        f"dispatch and combine, {CHOSEN} of {EXPERTS} experts, tokens of {WIDTH} float32",
        left={"backend"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser, SIZES)
    args = parser.parse_args()
    if EXPERTS % args.ranks:
        parser.error(f"argument --ranks: must divide the {EXPERTS} experts, got {args.ranks}")
    start_ranks(args.ranks)
    torch.set_num_threads(1)  # as many as there are cores for each rank
    dist.init_process_group("gloo")
    run(measure_all(args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
