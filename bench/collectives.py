"""Awaited collectives against their peers, interleaved on the same ranks of the same machine.

    python bench/collectives.py --ranks 2 --peers gloo,gloo-future,mpi --json out.json

Peers:
    gloo         torch.distributed's blocking call, as a script without an event loop would make it
    gloo-future  the same made awaitable: async_op=True, and the future's callback wakes the loop
    mpi          MPI by mpi4py on numpy arrays, in processes of its own; needs the extra "bench". It spins, so on a
                 machine with other work it loses whole time slices: measure it on a quiet one

Each round measures every contender once, in alternating order, with all ranks starting together. A row is the median
over rounds of rank 0's time for one operation; the ratio is the peer's time over ours, from medians.
"""

from __future__ import annotations

import argparse
import os
from contextlib import AsyncExitStack

import torch
from report import Results, Row, print_rows
from rounds import arguments, start_ranks
from torch import distributed as dist

from asynccomm.benchmarks.contenders import measure
from asynccomm.benchmarks.mpi_launcher import why_not
from asynccomm.benchmarks.mpi_peer import mpi_ranks
from asynccomm.benchmarks.operations import OPS, SIZES, floats
from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.runner import run

PEERS = ["gloo", "gloo-future", "mpi"]


def rows_of(comm: Comm, op: str, nbytes: int, us: dict[str, float]) -> list[Row]:
    """A row for each peer."""
    return [
        Row(
            op=op,
            bytes=0 if op == "barrier" else nbytes,
            ranks=comm.size,
            backend=comm.backend,
            asynccomm_us=us["asynccomm"],
            peer=peer,
            peer_us=us[peer],
        )
        for peer in list(us)[1:]
    ]


async def measure_all(args: argparse.Namespace) -> None:
    """On every rank; rank 0 reports."""

    def show(rows: list[Row]) -> None:
        print_rows(rows, f"{rows[0].ranks} ranks, {os.cpu_count()} cores, torch {torch.__version__}")

    async with AsyncExitStack() as stack:
        comm = await stack.enter_async_context(new_comm(args.backend, name="bench"))
        mpi = None
        if "mpi" in args.peers and comm.rank == 0:
            mpi = await stack.enter_async_context(mpi_ranks(comm.size))
            mpi.check_known(args.ops)
        rows: Results[Row] = stack.enter_context(Results(show, args.json))
        for name in args.ops:
            for nbytes in [8] if name == "barrier" else args.sizes:
                us = await measure(comm, OPS[name], floats(nbytes), args.peers, mpi, args.rounds)
                found = rows_of(comm, name, nbytes, us)
                rows.add(*found)
                if comm.rank == 0:
                    for row in found:
                        print(f"{row.op} {row.bytes} B: {row.asynccomm_us:.1f} us, {row.peer} {row.peer_us:.1f} us")


def parse() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser, SIZES)
    parser.add_argument("--peers", type=words, default=["gloo", "gloo-future"], help=f"of {','.join(PEERS)}")
    parser.add_argument("--ops", type=words, default=list(OPS), help=f"of {','.join(OPS)}")
    args = parser.parse_args()
    for name, known in (("ops", list(OPS)), ("peers", PEERS)):
        for value in getattr(args, name):
            if value not in known:
                parser.error(f"argument --{name}: {value!r} is not one of {', '.join(known)}")
    if "mpi" in args.peers and (reason := why_not()) is not None:
        parser.error(f"argument --peers: {reason}")
    return args


def main() -> None:
    args = parse()
    start_ranks(args.ranks)
    dist.init_process_group("gloo")
    run(measure_all(args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
