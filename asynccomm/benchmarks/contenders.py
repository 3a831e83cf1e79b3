"""asynccomm and its peers as contenders that take turns on the same ranks.

Peers:
    gloo         torch.distributed's blocking call, as a script without an event loop makes it
    gloo-future  the same made awaitable: async_op=True, and the future's callback wakes the loop
    nccl         torch.distributed's call on a GPU, and a wait for the current stream
    mpi          MPI by mpi4py on numpy arrays, in processes of its own; it spins while it waits
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from asynccomm.benchmarks.mpi_peer import MpiRanks
from asynccomm.benchmarks.operations import NO_FUTURE, MeasuredOp, one_way
from asynccomm.benchmarks.rounds import Body, in_turns, timed
from asynccomm.comm.comm import Comm


def contender(name: str, op: MeasuredOp, comm: Comm, tensors: tuple[Any, Any]) -> Body:
    """asynccomm or a peer that runs in this process."""
    output, source = tensors
    loop = asyncio.get_running_loop()
    call = op.ours

    async def ours(count: int) -> None:
        for _ in range(count):
            await call(comm, output, source)

    async def gloo(count: int) -> None:
        for _ in range(count):
            op.torch(output, source, False)

    async def gloo_future(count: int) -> None:
        for _ in range(count):
            done = loop.create_future()
            future = op.torch(output, source, True).get_future()
            future.add_done_callback(lambda _, done=done: loop.call_soon_threadsafe(done.set_result, None))
            await done

    async def nccl(count: int) -> None:
        for _ in range(count):
            op.torch(output, source, False)
            torch.cuda.current_stream().synchronize()

    return timed({"asynccomm": ours, "gloo": gloo, "gloo-future": gloo_future, "nccl": nccl}[name])


async def _elsewhere(count: int) -> float:
    """A turn of processes that rank 0 alone controls, on the other ranks: they go on to the next barrier."""
    return 0.0


async def measure(
    comm: Comm, op: MeasuredOp, floats: int, peers: Sequence[str], mpi: MpiRanks | None, rounds: int
) -> dict[str, float]:
    """Microseconds of one operation of asynccomm and of each peer that has it, meaningful on rank 0. Collective.

    Args:
        floats: the argument of ``op.tensors``.
        mpi: the ranks of MPI; on rank 0 only, and only with the peer "mpi".
    """
    with torch.device(comm.device):
        tensors = op.tensors(floats, comm.rank, comm.size)
    bodies: dict[str, Body] = {}
    for name in ["asynccomm", *(p for p in peers if not (p == "gloo-future" and op.name in NO_FUTURE))]:
        if name == "mpi":
            bodies[name] = _elsewhere if mpi is None else mpi.body(op.name, floats)
        else:
            bodies[name] = contender(name, op, comm, tensors)
    return {name: one_way(op.name, us) for name, us in (await in_turns(comm, bodies, rounds)).items()}
