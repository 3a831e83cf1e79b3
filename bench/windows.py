"""Windows between two ranks: a put with its signal, against messages, against MPI, and against a plain copy.

    python bench/windows.py --sizes 8,1024,65536,1048576,16777216,67108864 --mpi --json out.json

- "put, signal, wait_signal": half of a ping-pong; peer: half of a ping-pong of our send and recv.
- "put, fence": rank 0 alone, with --mpi; peer: MPI's Put and Flush.
- "put": rank 0 alone; peer: torch's copy of as much memory within the process.
"""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack

import torch
from report import Results, Row, print_rows
from rounds import Body, arguments, in_turns, start_ranks, timed

from asynccomm.benchmarks.mpi_launcher import why_not
from asynccomm.benchmarks.mpi_peer import MpiRanks, mpi_ranks
from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.ops import SignalCmpOp
from asynccomm.runner import run
from asynccomm.windows.window import Window

SIZES = [8, 1 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
RANKS = 2


def signalled(comm: Comm, window: Window, tensor: torch.Tensor) -> Body:
    """A ping-pong: each rank waits for the other's signal, and answers by a put and a signal."""
    turn = 0

    async def play(count: int) -> None:
        nonlocal turn
        for _ in range(count):
            turn += 1
            for player in range(RANKS):
                if comm.rank == player:
                    window.put(tensor, 1 - player)
                    await window.signal(1 - player, 0, turn)
                else:
                    await window.wait_signal(0, turn, SignalCmpOp.GE)

    return timed(play)


def messages(comm: Comm, tensor: torch.Tensor) -> Body:
    out = torch.empty_like(tensor)

    async def play(count: int) -> None:
        for _ in range(count):
            for player in range(RANKS):
                await (comm.send(tensor, 1 - player) if comm.rank == player else comm.recv(out, player))

    return timed(play)


def alone(comm: Comm, window: Window, tensor: torch.Tensor, *, fenced: bool) -> Body:
    """Rank 0 puts; the other rank does nothing."""

    async def put(count: int) -> None:
        for _ in range(count if comm.rank == 0 else 0):
            work = window.put(tensor, 1)
            await (window.fence(1) if fenced else work)

    return timed(put)


def copied(comm: Comm, tensor: torch.Tensor) -> Body:
    out = torch.ones_like(tensor)

    async def copy(count: int) -> None:
        for _ in range(count if comm.rank == 0 else 0):
            out.copy_(tensor)

    return timed(copy)


def of_mpi(comm: Comm, ranks: MpiRanks | None, n: int) -> Body:
    """MPI's ranks, which rank 0 directs; the other ranks of asynccomm wait in the next barrier."""
    if ranks is None:
        return timed(_nothing)
    return ranks.body("put_flush", n)


async def _nothing(count: int) -> None:
    """The part of a rank that does not direct MPI."""


async def measure_all(args: argparse.Namespace) -> None:
    """On both ranks; rank 0 reports."""
    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:
        comm = await stack.enter_async_context(new_comm(args.backend, name="bench"))
        ranks = await stack.enter_async_context(mpi_ranks(RANKS)) if args.mpi and comm.rank == 0 else None
        results = stack.enter_context(Results[Row](print_rows, args.json))
        for nbytes in args.sizes:
            tensor = torch.ones(max(1, nbytes // 4))
            async with await comm.window(like=tensor) as window:
                window.tensor().fill_(1)  # pages that were never written would have to be made
                bodies = {
                    "signalled": signalled(comm, window, tensor),
                    "messages": messages(comm, tensor),
                    "put": alone(comm, window, tensor, fenced=False),
                    "memcpy": copied(comm, tensor),
                }
                if args.mpi:
                    bodies["fenced"] = alone(comm, window, tensor, fenced=True)
                    bodies["mpi"] = of_mpi(comm, ranks, tensor.numel())
                us = await in_turns(comm, bodies, args.rounds)
            compared = [("put, signal, wait_signal", us["signalled"] / 2, "send and recv", us["messages"] / 2)]
            if args.mpi:
                compared.append(("put, fence", us["fenced"], "MPI's Put and flush", us["mpi"]))
            compared.append(("put", us["put"], "memcpy", us["memcpy"]))
            for op, ours, peer, theirs in compared:
                row = Row(
                    op=op, bytes=nbytes, ranks=RANKS, backend=comm.backend, asynccomm_us=ours, peer=peer, peer_us=theirs
                )
                results.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser, SIZES)
    parser.add_argument("--mpi", action="store_true", help="compare with MPI, too")
    args = parser.parse_args()
    if args.ranks != RANKS:
        parser.error(f"--ranks must be {RANKS}: a put has two ends")
    if args.mpi and (missing := why_not()):
        parser.error(missing)
    start_ranks(args.ranks)
    run(measure_all(args))


if __name__ == "__main__":
    main()
