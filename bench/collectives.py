"""Awaited collectives against their peers, measured in the same processes, interleaved.

    python bench/collectives.py --ranks 2 --peers gloo,gloo-future --json out.json

Peers:
    gloo         torch.distributed's blocking call, as a script without an event loop would make it
    gloo-future  the same made awaitable: async_op=True, and the future's callback wakes the loop

Each round measures every contender once, in alternating order, with all ranks starting together. A row is the median
over rounds of rank 0's time for one operation; the ratio is the peer's time over ours, from medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from report import Row, median, print_rows, write_rows
from torch import Tensor
from torch import distributed as dist

from asynccomm.comm import Comm
from asynccomm.connect import new_comm
from asynccomm.runner import run

SIZES = [8, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]  # bytes each rank brings
BUDGET = 0.06  # seconds that one contender may take per round, as far as a first estimate can tell
MOST = 200  # operations per round at most
ROUNDS = 9
NO_FUTURE = {"send_recv", "reduce_scatter_single"}  # in gloo

Body = Callable[[int], Awaitable[None]]


@dataclass(frozen=True)
class Op:
    """One collective, by us and by torch.distributed; ``tensors`` makes its (output, input) for a size in floats."""

    name: str
    tensors: Callable[[int, int, int], tuple[Any, Any]]  # (floats, rank, size)
    ours: Callable[[Comm, Any, Any], Awaitable[object]]
    torch: Callable[[Any, Any, bool], Any]  # (output, input, async_op)


def _same(n: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    tensor = torch.ones(n)
    return tensor, tensor


def _gathered(n: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.empty(n * size), torch.ones(n)


def _scattered(n: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    share = max(1, n // size)
    return torch.empty(share), torch.ones(share * size)


def _swapped(n: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    share = max(1, n // size) * size
    return torch.empty(share), torch.ones(share)


def _list_out(n: int, rank: int, size: int) -> tuple[list[Tensor], Tensor]:
    return [torch.empty(n) for _ in range(size)], torch.ones(n)


def _list_at_root(n: int, rank: int, size: int) -> tuple[list[Tensor] | None, Tensor]:
    return ([torch.empty(n) for _ in range(size)] if rank == 0 else None), torch.ones(n)


async def _ping_pong(comm: Comm, out: Tensor, mine: Tensor) -> None:
    if comm.rank == 0:
        await comm.send(mine, 1)
        await comm.recv(out, 1)
    elif comm.rank == 1:
        await comm.recv(out, 0)
        await comm.send(mine, 0)


def _ping_pong_torch(out: Tensor, mine: Tensor, async_op: bool) -> None:
    if dist.get_rank() == 0:
        dist.send(mine, 1)
        dist.recv(out, 1)
    elif dist.get_rank() == 1:
        dist.recv(out, 0)
        dist.send(mine, 0)


OPS = {
    op.name: op
    for op in [
        Op("all_reduce", _same, lambda c, o, i: c.all_reduce(i), lambda o, i, a: dist.all_reduce(i, async_op=a)),
        Op("broadcast", _same, lambda c, o, i: c.broadcast(i, 0), lambda o, i, a: dist.broadcast(i, 0, async_op=a)),
        Op("reduce", _same, lambda c, o, i: c.reduce(i, 0), lambda o, i, a: dist.reduce(i, 0, async_op=a)),
        Op(
            "all_gather",
            _list_out,
            lambda c, o, i: c.all_gather(o, i),
            lambda o, i, a: dist.all_gather(o, i, async_op=a),
        ),
        Op(
            "all_gather_single",
            _gathered,
            lambda c, o, i: c.all_gather_single(o, i),
            lambda o, i, a: dist.all_gather_into_tensor(o, i, async_op=a),
        ),
        Op(
            "reduce_scatter_single",
            _scattered,
            lambda c, o, i: c.reduce_scatter_single(o, i),
            lambda o, i, a: dist.reduce_scatter_tensor(o, i, async_op=a),
        ),
        Op(
            "all_to_all_single",
            _swapped,
            lambda c, o, i: c.all_to_all_single(o, i),
            lambda o, i, a: dist.all_to_all_single(o, i, async_op=a),
        ),
        Op(
            "gather",
            _list_at_root,
            lambda c, o, i: c.gather(o, i, 0),
            lambda o, i, a: dist.gather(i, o, 0, async_op=a),
        ),
        Op(
            "scatter",
            lambda n, r, s: tuple(reversed(_list_at_root(n, r, s))),  # type: ignore[arg-type,return-value]
            lambda c, o, i: c.scatter(o, i, 0),
            lambda o, i, a: dist.scatter(o, i, 0, async_op=a),
        ),
        Op("barrier", _same, lambda c, o, i: c.barrier(), lambda o, i, a: dist.barrier(async_op=a)),
        Op("send_recv", lambda n, r, s: (torch.empty(n), torch.ones(n)), _ping_pong, _ping_pong_torch),
    ]
}


def contender(name: str, op: Op, comm: Comm, tensors: tuple[Any, Any]) -> Body:
    """A coroutine function that runs the operation ``count`` times, each awaited before the next."""
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

    return {"asynccomm": ours, "gloo": gloo, "gloo-future": gloo_future}[name]


async def measure(comm: Comm, op: Op, nbytes: int, peers: Sequence[str]) -> list[Row]:
    """One operation at one size: a row per peer, meaningful on rank 0."""
    tensors = op.tensors(max(1, nbytes // 4), comm.rank, comm.size)
    names = ["asynccomm", *(p for p in peers if not (p == "gloo-future" and op.name in NO_FUTURE))]
    bodies = {name: contender(name, op, comm, tensors) for name in names}
    count = await _operations_per_round(comm, bodies)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(ROUNDS):
        order = names if round_number % 2 == 0 else names[::-1]
        for name in order:
            await comm.barrier()
            start = time.perf_counter()
            await bodies[name](count)
            times[name].append((time.perf_counter() - start) / count * 1e6)
    share = 2 if op.name == "send_recv" else 1  # one way
    us = {name: median(values) / share for name, values in times.items()}
    shown = 0 if op.name == "barrier" else nbytes
    return [
        Row(
            op=op.name,
            bytes=shown,
            ranks=comm.size,
            backend=comm.backend,
            asynccomm_us=us["asynccomm"],
            peer=peer,
            peer_us=us[peer],
        )
        for peer in names[1:]
    ]


async def _operations_per_round(comm: Comm, bodies: dict[str, Body]) -> int:
    """As many as the slowest contender can do in the budget; the same on all ranks."""
    slowest = 0.0
    for body in bodies.values():
        await body(2)  # connections, caches
        start = time.perf_counter()
        await body(3)
        slowest = max(slowest, (time.perf_counter() - start) / 3)
    count = torch.tensor([max(3, min(MOST, int(BUDGET / slowest)))])
    await comm.broadcast(count, 0)
    return int(count)


async def measure_all(args: argparse.Namespace) -> None:
    """On every rank; rank 0 reports."""
    rows: list[Row] = []
    async with new_comm(args.backend, name="bench") as comm:
        for name in args.ops:
            for nbytes in [8] if name == "barrier" else args.sizes:
                found = await measure(comm, OPS[name], nbytes, args.peers)
                rows += found
                if comm.rank == 0:
                    for row in found:
                        print(f"{row.op} {row.bytes} B: {row.asynccomm_us:.1f} us, {row.peer} {row.peer_us:.1f} us")
        if comm.rank == 0:
            print_rows(rows, f"{comm.size} ranks, {os.cpu_count()} cores, torch {torch.__version__}")
            if args.json:
                write_rows(args.json, rows)


def parse() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--peers", type=words, default=["gloo", "gloo-future"])
    parser.add_argument("--ops", type=words, default=list(OPS), help=f"of {','.join(OPS)}")
    parser.add_argument("--sizes", type=lambda text: [int(s) for s in text.split(",")], default=SIZES, help="in bytes")
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    for name, known in (("ops", list(OPS)), ("peers", ["gloo", "gloo-future"])):
        for value in getattr(args, name):
            if value not in known:
                parser.error(f"argument --{name}: {value!r} is not one of {', '.join(known)}")
    return args


def main() -> None:
    args = parse()
    if "RANK" not in os.environ:  # start the ranks, which run this file again
        command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", str(args.ranks), "--no-prefix"]
        raise SystemExit(subprocess.run([*command, *sys.argv], check=False).returncode)
    dist.init_process_group("gloo")
    run(measure_all(args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
