"""One rank of MPI: reads operations from a socket, runs them, answers with the seconds that it took, until it ends.

    mpiexec -n 2 python -m asynccomm.benchmarks.mpi_rank SOCKET

``mpi_peer`` starts this, and reads the names of the operations first. The read blocks without spinning. Only rank 0
answers with a time: it is the one that counts.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from asynccomm.benchmarks.parts import uneven

Call = Callable[[], object]


def ones(count: int) -> NDArray[np.float32]:
    return np.ones(count, np.float32)  # written: pages that were never written would all be the same one


def all_reduce(comm: Any, n: int) -> Call:
    data = ones(n)
    return lambda: comm.Allreduce(MPI.IN_PLACE, data)


def broadcast(comm: Any, n: int) -> Call:
    data = ones(n)
    return lambda: comm.Bcast(data, 0)


def reduce(comm: Any, n: int) -> Call:
    data = ones(n)
    return lambda: comm.Reduce(MPI.IN_PLACE, data, root=0) if comm.rank == 0 else comm.Reduce(data, None, root=0)


def all_gather(comm: Any, n: int) -> Call:
    output, data = ones(n * comm.size), ones(n)
    return lambda: comm.Allgather(data, output)


def reduce_scatter(comm: Any, n: int) -> Call:
    share = max(1, n // comm.size)
    output, data = ones(share), ones(share * comm.size)
    return lambda: comm.Reduce_scatter_block(data, output)


def all_to_all(comm: Any, n: int) -> Call:
    share = max(1, n // comm.size)
    output, data = ones(share * comm.size), ones(share * comm.size)
    return lambda: comm.Alltoall(data, output)


def all_to_all_v(comm: Any, n: int) -> Call:
    """Each rank sends the same uneven parts, so each rank gets ``size`` times its own."""
    parts = uneven(n, comm.size)
    mine = [parts[comm.rank]] * comm.size
    output, data = ones(sum(mine)), ones(sum(parts))
    return lambda: comm.Alltoallv((data, parts), (output, mine))


def all_gather_object(comm: Any, n: int) -> Call:
    data = bytes(4 * n)
    return lambda: comm.allgather(data)


def broadcast_object(comm: Any, n: int) -> Call:
    data = bytes(4 * n) if comm.rank == 0 else None
    return lambda: comm.bcast(data, 0)


def gather(comm: Any, n: int) -> Call:
    output, data = ones(n * comm.size) if comm.rank == 0 else None, ones(n)
    return lambda: comm.Gather(data, output, 0)


def scatter(comm: Any, n: int) -> Call:
    output, data = ones(n), ones(n * comm.size) if comm.rank == 0 else None
    return lambda: comm.Scatter(data, output, 0)


def barrier(comm: Any, n: int) -> Call:
    return lambda: comm.Barrier()


def send_recv(comm: Any, n: int) -> Call:
    out, mine = ones(n), ones(n)

    def ping_pong() -> None:
        if comm.rank == 0:
            comm.Send(mine, 1)
            comm.Recv(out, 1)
        elif comm.rank == 1:
            comm.Recv(out, 0)
            comm.Send(mine, 0)

    return ping_pong


def ring(comm: Any, n: int) -> Call:
    out, mine = ones(n), ones(n)
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return lambda: comm.Sendrecv(mine, following, 0, out, previous, 0)


OPS: dict[str, Callable[[Any, int], Call]] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "all_gather": all_gather,  # MPI has no other than into one buffer
    "all_gather_single": all_gather,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter,
    "all_to_all_single": all_to_all,
    "all_to_all_v_single": all_to_all_v,
    "all_gather_object": all_gather_object,
    "broadcast_object": broadcast_object,
    "gather": gather,
    "scatter": scatter,
    "barrier": barrier,
    "send_recv": send_recv,
    "ring": ring,
}


def put_flush(comm: Any, n: int) -> Call:
    """Rank 0 writes into rank 1, which takes no part. The window stays to the end, as freeing one is collective."""
    data = ones(n)
    window = MPI.Win.Allocate(data.nbytes, data.itemsize, comm=comm)
    memory: Any = window.tomemory()
    np.frombuffer(memory, np.float32)[:] = 0
    window.Lock_all()
    windows.append(window)

    def put() -> None:
        if comm.rank == 0:
            window.Put(data, 1)
            window.Flush(1)

    return put


windows: list[Any] = []
ONE_SIDED: dict[str, Callable[[Any, int], Call]] = {"put_flush": put_flush}


def timed(comm: Any, call: Call, count: int) -> float:
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start if comm.rank == 0 else 0.0


def main() -> None:
    comm = MPI.COMM_WORLD
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        connection.sendall(json.dumps([*OPS, *ONE_SIDED]).encode() + b"\n")
        prepared: tuple[str, int] | None = None
        call: Call | None = None
        for line in connection.makefile():
            turn = json.loads(line)
            if prepared != (turn["op"], turn["floats"]):
                prepared = turn["op"], turn["floats"]
                call = None  # the memory of the last one goes before the next is made
                call = (OPS | ONE_SIDED)[turn["op"]](comm, turn["floats"])
            assert call is not None
            connection.sendall(f"{timed(comm, call, turn['count'])!r}\n".encode())


if __name__ == "__main__":
    main()
