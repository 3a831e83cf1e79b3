"""How long it takes the others to hear of a failure, and to go on without the rank that failed.

    python bench/failures.py --backend shm --ranks 3 --rounds 20

For each failure, rounds of fresh processes: one rank fails while the others wait in an all_reduce. Times are from the
failure to the error in the last of the others, on one clock; medians and maxima over rounds, in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch
from report import Results, median, print_table

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.errors import AbortedError, BrokenError, CollectiveMismatchError, PeerLostError
from asynccomm.runner import run
from asynccomm.store.server import listen, serve

CASE_SECONDS = 30.0  # for one round; then it is a failure of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRow:
    """One kind of failure."""

    failure: str
    backend: str
    ranks: int
    rounds: int
    median_ms: float
    max_ms: float


Said = dict[str, Any]  # what a rank reports of a round


async def kill(comm: Comm) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def abort(comm: Comm) -> None:
    comm.abort("enough")


async def raise_in_task_group(comm: Comm) -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    async with comm, asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(60))
        group.create_task(fail())


async def mismatch(comm: Comm) -> None:
    await comm.broadcast(torch.ones(2), root=0)


FAILURES: dict[str, tuple[Callable[[Comm], Awaitable[None]], type[BrokenError], bool]] = {
    "kill -9": (kill, PeerLostError, False),
    "abort()": (abort, AbortedError, False),
    "exception in a task group": (raise_in_task_group, AbortedError, False),
    "another collective": (mismatch, CollectiveMismatchError, False),
    "kill -9, then shrink()": (kill, PeerLostError, True),
    "kill -9 of rank 0, then shrink()": (kill, PeerLostError, True),
}  # what the rank does, what the others get, and whether the time is that until they have a new comm


async def one_rank(args: argparse.Namespace, failure: str, rank: int, out: int) -> None:
    act, expected, shrinks = FAILURES[failure]
    culprit = 0 if "rank 0" in failure else args.ranks - 1
    comm = await new_comm(args.backend, timeout=CASE_SECONDS)
    await comm.all_reduce(torch.ones(2))
    await comm.barrier()
    said: Said = {"rank": rank}
    if rank == culprit:
        await asyncio.sleep(0.05)  # the others wait in the operation by now
        os.write(out, pickle.dumps({"rank": rank, "failed": time.monotonic()}))
        with contextlib.suppress(Exception):
            await act(comm)
    else:
        try:
            await comm.all_reduce(torch.ones(2))
        except expected:
            said["heard"] = time.monotonic()
        if shrinks:
            comm = await comm.shrink()
            said["heard"] = time.monotonic()
        os.write(out, pickle.dumps(said))
    await comm.aclose()


def play(args: argparse.Namespace, failure: str) -> float:
    """One round; seconds from the failure to when the last of the others has heard of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosting = os.fork()
    if hosting == 0:  # a process of its own: a rank that is killed must not take it along
        server = serve("127.0.0.1", listen("127.0.0.1", port))
        time.sleep(CASE_SECONDS)
        server.release()
        os._exit(0)
    pipes, pids = [], [hosting]
    for rank in range(args.ranks):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
                run(one_rank(args, failure, rank, theirs))
                code = 0
            finally:
                os._exit(code)
        os.close(theirs)
        pipes.append(ours)
        pids.append(pid)
    try:
        said = [read(pipe) for pipe in pipes]
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in pipes:
            os.close(pipe)
    failed = next(one["failed"] for one in said if "failed" in one)
    heard: float = max(one["heard"] for one in said if "failed" not in one)
    return heard - float(failed)


def read(pipe: int) -> Said:
    if not select.select([pipe], [], [], CASE_SECONDS)[0]:
        raise TimeoutError(f"a rank has not said anything for {CASE_SECONDS:g} s")
    said: Said = pickle.loads(os.read(pipe, 4096))
    return said


def measure(args: argparse.Namespace, failure: str) -> FailureRow:
    times = [play(args, failure) * 1e3 for _ in range(args.rounds)]
    return FailureRow(
        failure=failure,
        backend=args.backend,
        ranks=args.ranks,
        rounds=args.rounds,
        median_ms=median(times),
        max_ms=max(times),
    )


def report(rows: list[FailureRow]) -> None:
    first = rows[0]
    what = f"{first.backend}, {first.ranks} ranks, {os.cpu_count()} cores, {first.rounds} rounds"
    lines = [(row.failure, f"{row.median_ms:.1f}", f"{row.max_ms:.1f}") for row in rows]
    print_table(["failure", "median", "max"], lines, f"ms until the others know, {what}", left={"failure"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="shm", choices=["shm", "gloo"])
    parser.add_argument("--ranks", type=int, default=3, help="at least 2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="write the rows there")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"argument --ranks: must be at least 2, got {args.ranks}")
    if args.rounds < 1:
        parser.error(f"argument --rounds: must be at least 1, got {args.rounds}")
    with Results[FailureRow](report, args.json) as rows:
        for failure in FAILURES:
            rows.add(measure(args, failure))


if __name__ == "__main__":
    main()
