"""One rank of ``asynccomm bench``: ``python -m asynccomm.benchmarks.session OPTIONS``, with the options as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import torch
from torch import distributed as dist

from asynccomm.benchmarks.contenders import measure
from asynccomm.benchmarks.mpi_peer import mpi_ranks
from asynccomm.benchmarks.operations import OPS
from asynccomm.benchmarks.rows import HEAD, Measurement, floats_of, size_of, write_rows
from asynccomm.benchmarks.session_options import SessionOptions
from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.runner import run


async def _measure_all(options: SessionOptions, device: torch.device) -> None:
    peers = [("nccl" if device.type == "cuda" else "gloo") if peer == "torch" else peer for peer in options.peers]
    async with AsyncExitStack() as stack:
        comm = await stack.enter_async_context(new_comm(options.backend, device, name="bench"))
        mpi = await stack.enter_async_context(mpi_ranks(comm.size)) if "mpi" in peers and comm.rank == 0 else None
        if comm.rank == 0:
            print(HEAD, flush=True)
        rows: list[Measurement] = []
        for op in options.ops:
            counts = [floats_of(op, nbytes, comm.size) for nbytes in options.sizes]
            for floats in [1] if op == "barrier" else dict.fromkeys(counts):
                us = await measure(comm, OPS[op], floats, peers, mpi, options.rounds)
                if comm.rank == 0:
                    rows += _report(comm, op, floats, us)
                    write_rows(options.out, rows)


def _report(comm: Comm, op: str, floats: int, us: dict[str, float]) -> list[Measurement]:
    size = size_of(op, floats, comm.size)
    found = [
        Measurement(op=op, contender=name, backend=comm.backend, ranks=comm.size, bytes=size, us=value)
        for name, value in us.items()
    ]
    print(*found, sep="\n", flush=True)
    return found


def _device(options: SessionOptions) -> torch.device:
    """The GPU of this rank if each rank has one and the backend takes it, else the CPU. Exits without one for nccl."""
    ranks, local, gpus = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if options.backend == "nccl" and gpus < ranks:
        sys.exit(f"backend 'nccl' needs a GPU for each of {ranks} ranks, and torch finds {gpus}")
    if options.backend in ("nccl", "auto") and gpus >= ranks:
        return torch.device("cuda", local)
    return torch.device("cpu")


def main(arguments: Sequence[str]) -> None:
    """Measure on this rank. Rank 0 prints each row, and writes all of them after each operation and size."""
    options = SessionOptions.from_json(arguments[0])
    device = _device(options)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "torch" in options.peers:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    run(_measure_all(options, device))
    if "torch" in options.peers:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
