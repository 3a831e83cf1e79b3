"""Random programs on real processes, with ranks that are late, blocked or stopped, against a reference."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import Comm, ReduceOp, Work, new_comm
from tests.sampling import amount, some
from tests.waiting import until

SIZES = [0, 1, 3, 100, 4096, 20_000, 100_000, 600_000]  # elements; from one cache line to many chunks
STOPPER = """
import os, random, signal, sys, time
pids, seed = [int(pid) for pid in sys.argv[2:]], int(sys.argv[1])
choose = random.Random(seed)
print("ready", flush=True)
while os.getppid() in pids:
    pid = choose.choice(pids)
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(choose.choice([0.0, 0.001, 0.01, 0.05]))
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        break
    time.sleep(choose.random() * 0.02)
"""


def data(seed: int, number: int, rank: int, n: int) -> Tensor:
    """What ``rank`` brings to operation ``number``: whole numbers, so that sums are exact."""
    return torch.randint(-8, 8, (n,), generator=torch.Generator().manual_seed(hash((seed, number, rank)))).float()


def operation(comm: Comm, seed: int, number: int, choose: random.Random) -> tuple[Work[Any], Callable[[], None]]:
    """Submit a random collective, the same on all ranks; returns it with the check of its outcome."""
    size, me = comm.size, comm.rank
    n, root = choose.choice(SIZES), choose.randrange(size)

    def of(rank: int, length: int = n) -> Tensor:
        return data(seed, number, rank, length)

    def same(mine: Tensor, want: Tensor) -> Callable[[], None]:
        def check() -> None:
            assert torch.equal(mine.view(-1), want.view(-1)), f"operation {number}: {kind} of {n}, root {root}"

        return check

    def total(length: int = n) -> Tensor:
        return torch.stack([of(rank, length) for rank in range(size)]).sum(0)

    kind = choose.choice(
        ["all_reduce", "max", "broadcast", "reduce", "gather", "scatter", "all", "part", "swap", "none"]
    )
    tensor = of(me)
    match kind:
        case "all_reduce":
            return comm.all_reduce(tensor), same(tensor, total())
        case "max":
            return comm.all_reduce(tensor, ReduceOp.MAX), same(
                tensor, torch.stack([of(rank) for rank in range(size)]).amax(0)
            )
        case "broadcast":
            return comm.broadcast(tensor, root), same(tensor, of(root))
        case "reduce":
            return comm.reduce(tensor, root), same(tensor, total() if me == root else of(me))
        case "gather":
            work = comm.gather(None, tensor, root)
            return work, lambda: [same(t, of(r))() for r, t in enumerate(work.result() or [])] and None
        case "scatter":
            parts = list(of(root, n * size).view(size, n).unbind()) if me == root else None
            return comm.scatter(tensor, parts, root), same(tensor, of(root, n * size).view(size, n)[me])
        case "all":
            output = torch.full((size * n,), -99.0)
            return comm.all_gather_single(output, tensor), same(output, torch.cat([of(rank) for rank in range(size)]))
        case "part":
            return comm.reduce_scatter_single(tensor, of(me, n * size)), same(tensor, total(n * size).view(size, n)[me])
        case "swap":
            output = torch.full((size * n,), -99.0)
            want = torch.stack([of(rank, n * size).view(size, n)[me] for rank in range(size)])
            return comm.all_to_all_single(output, of(me, n * size)), same(output, want)
        case _:
            return comm.barrier(), lambda: None


async def finish(work: Work[Any], check: Callable[[], None], how: float) -> None:
    if how < 0.2:
        await asyncio.to_thread(work.wait)
    else:
        await work
    check()


async def program(comm: Comm, seed: int, count: int) -> None:
    """``count`` collectives and some messages; each rank has delays, and ways to wait, of its own."""
    same, mine = random.Random(seed), random.Random(hash((seed, comm.rank)))
    open_ones: list[Awaitable[None]] = []
    for number in range(count):
        where = mine.random()
        submit: Callable[[], tuple[Work[Any], Callable[[], None]]]
        draw = random.Random(same.random())
        submit = lambda: operation(comm, seed, number, draw)  # noqa: B023, E731 - called before the next turn
        work, check = submit() if where < 0.8 else await asyncio.to_thread(submit)
        open_ones.append(asyncio.ensure_future(finish(work, check, mine.random())))
        if comm.size > 1 and same.random() < 0.3:
            a, b = same.sample(range(comm.size), 2)
            n, tag = same.choice(SIZES), same.choice([0, 1, 7])
            if comm.rank == a:
                open_ones.append(asyncio.ensure_future(finish(comm.send(data(seed, number, -1, n), b, tag), int, 1.0)))
            elif comm.rank == b:
                into = torch.full((n,), -99.0)
                want = data(seed, number, -1, n)

                def right(into: Tensor = into, want: Tensor = want) -> None:
                    assert torch.equal(into, want)

                open_ones.append(asyncio.ensure_future(finish(comm.recv(into, a, tag), right, mine.random())))
        delay = mine.random()
        if delay < 0.05:
            time.sleep(mine.random() * 0.01)  # the loop is blocked
        elif delay < 0.2:
            await asyncio.sleep(mine.random() * 0.005)
        if len(open_ones) > mine.choice([1, 4, 30]):
            await asyncio.gather(*open_ones)
            open_ones.clear()
    await asyncio.gather(*open_ones)


HINTS: list[dict[str, str]] = [
    {},
    {"spin_us": "200", "chunk_bytes": "4096", "whole_bytes": "1024", "inline_bytes": "8192", "message_bytes": "4096"},
    {"spin_us": "0", "inline_bytes": "0"},
    {"spin_us": "50", "inline_bytes": "1000000000"},
]


@pytest.mark.ranks(some([3, 1, 2, 5], 1), backend="shm")
@pytest.mark.parametrize("seed", some(range(len(HINTS)), 2))
async def test_random_programs(comm: Comm, seed: int) -> None:
    count = amount(60, 30)
    async with new_comm("shm", name="stress", timeout=60, hints=HINTS[seed]) as other:
        await asyncio.gather(program(comm, 2 * seed, count), program(other, 2 * seed + 1, count))


@contextmanager
def _stopping(pids: list[int], seed: int) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPER, str(seed), *map(str, pids)], stdout=subprocess.PIPE, text=True
    ) as stopper:
        assert stopper.stdout is not None
        assert stopper.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            stopper.kill()
            stopper.wait()
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


@pytest.mark.ranks(some([4, 2], 1), backend="shm")
@pytest.mark.parametrize("seed", some(range(2), 1))
async def test_random_programs_with_ranks_that_are_stopped(comm: Comm, seed: int) -> None:
    pids, count = await comm.all_gather_single(None, torch.tensor([os.getpid()])), amount(80, 40)
    if comm.rank == 0:
        with _stopping(pids.tolist(), seed):
            await program(comm, 100 + seed, count)
            await comm.barrier()
    else:
        await program(comm, 100 + seed, count)
        await comm.barrier()


@pytest.mark.ranks(2, backend="shm")
async def test_ten_thousand_operations_leave_nothing(comm: Comm) -> None:
    tensor, large = torch.ones(16), torch.ones(200_000)

    async def some(count: int) -> None:
        for i in range(count):
            await comm.all_reduce(tensor, ReduceOp.MAX)
            if i % 50 == 0:
                await comm.all_reduce(large, ReduceOp.MAX)
                works = [comm.send(tensor, 1 - comm.rank, i % 3), comm.recv(torch.empty(16), 1 - comm.rank, i % 3)]
                await asyncio.gather(*works)

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    await some(1000)
    before, memory = held(), resident()
    await some(10_000)
    assert comm.statistics().in_flight == 0
    assert resident() - memory < 4 << 20
    # some of an earlier test may just be ending, and somebody who looks at what goes on here may just be connected
    await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
