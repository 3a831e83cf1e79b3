"""Collectives on tensors of comm.empty(), which the ranks read directly, against the same on tensors of torch.empty().

    python bench/shared_tensors.py --sizes 4096,65536,1048576,4194304,16777216,67108864 --json out.json

A size is that of a rank's input; the peer is the same collective on ordinary tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from report import Results, Row, print_rows
from rounds import Body, arguments, in_turns, start_ranks, timed
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.core.work import Work
from asynccomm.runner import run

SIZES = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def calls(comm: Comm, tensor: Tensor) -> dict[str, Callable[[], Work[Tensor]]]:
    """Each collective, with ``tensor`` as the input of this rank; a result beside it is in ordinary memory."""
    n, size = tensor.numel(), comm.size
    gathered, part, swapped = torch.zeros(n * size), torch.zeros(n // size), torch.zeros(n)
    return {
        "all_reduce": lambda: comm.all_reduce(tensor),
        "all_gather_single": lambda: comm.all_gather_single(gathered, tensor),
        "broadcast": lambda: comm.broadcast(tensor, 0),
        "reduce_scatter_single": lambda: comm.reduce_scatter_single(part, tensor),
        "all_to_all_single": lambda: comm.all_to_all_single(swapped, tensor),
    }


def repeated(call: Callable[[], Work[Tensor]]) -> Body:
    async def play(count: int) -> None:
        for _ in range(count):
            await call()

    return timed(play)


async def measure_all(args: argparse.Namespace) -> None:
    """On all ranks; rank 0 reports."""
    torch.set_num_threads(1)
    async with new_comm(args.backend, name="bench") as comm:
        with Results[Row](print_rows, args.json) as results:
            for nbytes in args.sizes:
                n = max(1, nbytes // 4 // comm.size) * comm.size
                shared, plain = calls(comm, comm.empty(n).zero_()), calls(comm, torch.zeros(n))
                for op in shared:
                    bodies = {"shared": repeated(shared[op]), "plain": repeated(plain[op])}
                    us = await in_turns(comm, bodies, args.rounds)
                    row = Row(
                        op=op,
                        bytes=4 * n,
                        ranks=comm.size,
                        backend=comm.backend,
                        asynccomm_us=us["shared"],
                        peer="ordinary tensors",
                        peer_us=us["plain"],
                    )
                    results.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser, SIZES)
    args = parser.parse_args()
    start_ranks(args.ranks)
    run(measure_all(args))


if __name__ == "__main__":
    main()
