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
import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import torch
from mpi_peer import MpiRanks, mpi_ranks, why_not
from operations import NO_FUTURE, OPS, SIZES, Op, floats, one_way
from report import Results, Row, print_rows
from rounds import Body, arguments, in_turns, start_ranks, timed
from torch import distributed as dist

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.runner import run

PEERS = ["gloo", "gloo-future", "mpi"]


def contender(name: str, op: Op, comm: Comm, tensors: tuple[Any, Any]) -> Body:
    """asynccomm or a peer that runs in this process."""
    output, source = tensors
    loop = asyncio.get_running_loop()

    async def ours(count: int) -> None:
        for _ in range(count):
            await op.ours(comm, output, source)

    async def gloo(count: int) -> None:
        for _ in range(count):
            op.torch(output, source, False)

    async def gloo_future(count: int) -> None:
        for _ in range(count):
            done = loop.create_future()
            future = op.torch(output, source, True).get_future()
            future.add_done_callback(lambda _, done=done: loop.call_soon_threadsafe(done.set_result, None))
            await done

    return timed({"asynccomm": ours, "gloo": gloo, "gloo-future": gloo_future}[name])


async def elsewhere(count: int) -> float:
    """A turn of processes that rank 0 alone speaks to, as the other ranks see it: they go on to the next barrier."""
    return 0.0


async def measure(
    comm: Comm, op: Op, nbytes: int, peers: Sequence[str], mpi: MpiRanks | None, rounds: int
) -> list[Row]:
    """One operation at one size: a row per peer, meaningful on rank 0."""
    n = floats(nbytes)
    tensors = op.tensors(n, comm.rank, comm.size)
    bodies: dict[str, Body] = {}
    for name in ["asynccomm", *(p for p in peers if not (p == "gloo-future" and op.name in NO_FUTURE))]:
        if name == "mpi":
            bodies[name] = elsewhere if mpi is None else mpi.body(op.name, n)
        else:
            bodies[name] = contender(name, op, comm, tensors)
    us = {name: one_way(op.name, value) for name, value in (await in_turns(comm, bodies, rounds)).items()}
    return [
        Row(
            op=op.name,
            bytes=0 if op.name == "barrier" else nbytes,
            ranks=comm.size,
            backend=comm.backend,
            asynccomm_us=us["asynccomm"],
            peer=peer,
            peer_us=us[peer],
        )
        for peer in list(bodies)[1:]
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
                found = await measure(comm, OPS[name], nbytes, args.peers, mpi, args.rounds)
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
