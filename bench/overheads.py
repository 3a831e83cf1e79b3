"""What observing costs: an awaited all_reduce with nothing on, and with events, hooks, metrics, a trace.

    python bench/overheads.py --ranks 2 --sizes 8,65536 --json out.json

Each setting has a comm of its own, and the settings take turns on the same ranks:

    small recorder   a flight recorder of one call: the least there is, as the recorder cannot be turned off
    off              as a comm is made: the flight recorder of 256 calls
    recorder         a flight recorder of 2000 calls, as torch's
    unread events    a stream of events that no task reads: all of its cost to the calls
    events           a stream of events that a task on the same loop reads: its work comes on top
    metrics          the hint "metrics"
    trace            a trace
    hook             a hook: calls take the ordinary path

A row is the median over rounds of rank 0's time for one operation, and the difference to "off".
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from report import Results, print_table
from rounds import Body, arguments, in_turns, start_ranks, timed

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.runner import run

HINTS = {"small recorder": {"recorder": "1"}, "recorder": {"recorder": "2000"}, "metrics": {"metrics": "on"}}
SETTINGS = ["small recorder", "off", "recorder", "unread events", "events", "metrics", "trace", "hook"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadRow:
    """One setting at one size."""

    setting: str
    bytes: int
    ranks: int
    backend: str
    us: float  #: microseconds of one operation
    more_us: float  #: than with nothing on


@asynccontextmanager
async def observed(comm: Comm, setting: str) -> AsyncIterator[None]:
    """Observe ``comm`` as ``setting`` says, beyond its hints."""
    if setting == "events":
        stream = comm.events()

        async def read() -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(read())
        try:
            yield
        finally:
            stream.close()
            await task
    elif setting == "unread events":
        with contextlib.closing(comm.events()):
            yield
    elif setting == "trace":
        with tempfile.TemporaryDirectory() as directory:
            async with comm.trace(Path(directory) / "out.json"):
                yield
    elif setting == "hook":
        with contextlib.closing(_Hooked(comm)):
            yield
    else:
        yield


class _Hooked:
    def __init__(self, comm: Comm) -> None:
        self._hook = comm.add_hook(post=lambda event: None)

    def close(self) -> None:
        self._hook.remove()


async def measure(comm: Comm, comms: dict[str, Comm], nbytes: int, rounds: int) -> list[OverheadRow]:
    tensor = torch.ones(max(1, nbytes // 4))

    def body(setting: str) -> Body:
        async def calls(count: int) -> None:
            for _ in range(count):
                await comms[setting].all_reduce(tensor)

        run_timed = timed(calls)

        async def turn(count: int) -> float:
            async with observed(comms[setting], setting):
                await calls(count // 5 + 1)  # the start of a trace measures the offsets of the clocks
                return await run_timed(count)

        return turn

    us = await in_turns(comm, {setting: body(setting) for setting in comms}, rounds)
    return [
        OverheadRow(
            setting=setting,
            bytes=tensor.nbytes,
            ranks=comm.size,
            backend=comm.backend,
            us=value,
            more_us=value - us["off"],
        )
        for setting, value in us.items()
    ]


async def measure_all(args: argparse.Namespace) -> None:
    """On every rank; rank 0 reports."""
    async with AsyncExitStack() as stack:
        comm = await stack.enter_async_context(new_comm(args.backend, name="bench"))
        comms = {
            setting: await stack.enter_async_context(new_comm(args.backend, name=setting, hints=HINTS.get(setting)))
            for setting in SETTINGS
        }
        with Results[OverheadRow](report, args.json) as rows:
            for nbytes in args.sizes:
                rows.add(*await measure(comm, comms, nbytes, args.rounds))


def report(rows: list[OverheadRow]) -> None:
    print_table(
        ["setting", "bytes", "us", "more us"],
        [(row.setting, row.bytes, f"{row.us:.2f}", f"{row.more_us:+.2f}") for row in rows],
        f"awaited all_reduce: {rows[0].backend}, {rows[0].ranks} ranks",
        left={"setting"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser, [8, 65536])
    args = parser.parse_args()
    start_ranks(args.ranks)
    run(measure_all(args))


if __name__ == "__main__":
    main()
