"""NCCL collectives on GPUs: what a call costs the host, and how soon a coroutine hears of the end.

    python bench/gpu.py --json out.json                   # one rank: the cost of the host alone
    asynccomm run -n 2 --no-prefix bench/gpu.py           # needs two GPUs, or NCCL_MULTI_RANK_GPU_ENABLE=1

Beside torch's ProcessGroupNCCL on the same GPU, in turns, medians over rounds, of rank 0:

    submit          the call of an all_reduce of 4 KiB, which returns before anything has run
    submit, grouped the same per tensor for 100 tensors in one group: all_reduce_coalesced, and torch's coalescing
    awaited         from the call to the coroutine that goes on, at several sizes; torch's Work is made awaitable by a
                    thread of a pool that waits for an event on torch's stream
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from report import Results, Row, median, print_rows
from torch import Tensor
from torch import distributed as dist

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.runner import run

TENSORS = 100  # of one group
CALLS = 50  # of one turn
SIZES = [4 << 10, 1 << 20, 64 << 20]  # bytes

Turn = Callable[[], Awaitable[float]]
"""Measures once; returns the seconds of one operation."""


async def alternate(turns: dict[str, Turn], rounds: int) -> dict[str, float]:
    """Microseconds of each, medians."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name in list(turns) if number % 2 == 0 else list(turns)[::-1]:
            found = await turns[name]()
            if number:  # the first warms up
                times[name].append(found * 1e6)
    return {name: median(values) for name, values in times.items()}


def submitting(submit: Callable[[], object], per_call: int) -> Turn:
    async def turn() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        kept = [submit() for _ in range(CALLS)]
        took = time.perf_counter() - start
        torch.cuda.synchronize()
        del kept
        await asyncio.sleep(0)
        return took / CALLS / per_call

    return turn


def awaiting(once: Callable[[], Awaitable[object]]) -> Turn:
    async def turn() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            await once()
        return (time.perf_counter() - start) / CALLS

    return turn


async def measure(comm: Comm, rounds: int, pool: ThreadPoolExecutor, rows: Results[Row]) -> None:
    loop = asyncio.get_running_loop()
    small = torch.ones(1024, device=comm.device)
    many = [torch.ones(1024, device=comm.device) for _ in range(TENSORS)]

    def torch_group() -> object:
        with dist._coalescing_manager(device=comm.device, async_ops=True) as manager:
            for tensor in many:
                dist.all_reduce(tensor)
        return manager

    def torch_awaited(tensor: Tensor) -> Awaitable[object]:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()  # orders the current stream
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return loop.run_in_executor(pool, event.synchronize)

    cases: list[tuple[str, int, dict[str, Turn]]] = [
        (
            "submit",
            small.nbytes,
            {
                "asynccomm": submitting(lambda: comm.all_reduce(small), 1),
                "torch": submitting(lambda: dist.all_reduce(small, async_op=True), 1),
            },
        ),
        (
            "submit, grouped",
            small.nbytes,
            {
                "asynccomm": submitting(lambda: comm.all_reduce_coalesced(many), TENSORS),
                "torch": submitting(torch_group, TENSORS),
            },
        ),
    ]
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4, device=comm.device)
        ours, theirs = awaiting(partial(comm.all_reduce, tensor)), awaiting(partial(torch_awaited, tensor))
        cases.append(("awaited", nbytes, {"asynccomm": ours, "torch": theirs}))
    for name, nbytes, turns in cases:
        await comm.barrier()
        us = await alternate(turns, rounds)
        rows.add(
            Row(
                op=f"all_reduce, {name}",
                bytes=nbytes,
                ranks=comm.size,
                backend=comm.backend,
                asynccomm_us=us["asynccomm"],
                peer="ProcessGroupNCCL",
                peer_us=us["torch"],
            )
        )


async def main(args: argparse.Namespace) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    store = dist.distributed_c10d._get_default_store()  # one port, whoever started this
    title = f"{dist.get_world_size()} ranks, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    async with new_comm("nccl", "cuda", name="bench", store=store) as comm:
        with ThreadPoolExecutor(1) as pool, Results[Row](partial(print_rows, title=title), args.json) as rows:
            await measure(comm, args.rounds, pool, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="file to write the rows to")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
        os.environ.update(alone)
    run(main(options))
