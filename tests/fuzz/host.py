"""A process that does programs for the driver: as one rank of a world, or as all ranks of one that lives in a process.

``python -m tests.fuzz.host FD`` with FD its end of a socket pair. Messages are JSON objects:

- ``{"epoch", "open": {...}}``: leave the world there is and join a new one; answered by ``{"epoch", "opened": true}``.
- ``{"epoch", "case", "program"}``: do a program; answered by ``{"epoch", "case", "findings", "digests", "broken"}``.

After a case that broke its world, cases of that epoch are skipped. The main thread runs the loop; another one reads, so
that what has become stale is known at once. The process ends with its driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import json
import os
import sys
import threading
import traceback
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed as dist

import asynccomm
from asynccomm.backends.shm import lowering
from asynccomm.core.hosts import PRETENDED

from .judging import Finding
from .oracle import expect
from .perform import Comms, Report, perform
from .program import Program, loads
from .torch_calls import torch_call
from .worlds import IN_PROCESS, perform_all, worlds

HOSTS = "FUZZ_HOSTS"  # the environment's layout: the host of each rank, with the hierarchical backend
LENT_BYTES = lowering.LENT_BYTES


class Host:
    """One process, from within."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._latest = 0  # epoch that the driver has come to
        self._broken = False
        self._comms: list[Comms] = []
        self._stack = AsyncExitStack()
        self._all = False  # the ranks of the world are all here
        self._rank = 0

    async def serve(self) -> None:
        """Answer messages for ever."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)  # what a broken world's Works say is in the findings
        threading.Thread(target=self._read, args=(loop,), name="fuzz messages", daemon=True).start()
        while True:
            message = await self._inbox.get()
            if message["epoch"] < self._latest or ("case" in message and self._broken):
                continue
            answer = await (self._open(**message["open"]) if "open" in message else self._case(message["program"]))
            self._channel.send_bytes(
                json.dumps({**answer, "epoch": message["epoch"], "case": message.get("case")}).encode()
            )

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                message = json.loads(self._channel.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            self._latest = max(self._latest, message["epoch"])
            loop.call_soon_threadsafe(self._inbox.put_nowait, message)

    async def _open(
        self, backend: str, size: int, rank: int, name: str, timeout: float, with_torch: bool
    ) -> dict[str, Any]:
        with contextlib.suppress(Exception):  # what a broken world says at its end has been told
            await self._stack.aclose()
        self._stack = AsyncExitStack()
        self._broken, self._all, self._rank = False, backend in IN_PROCESS, rank
        if self._all:
            self._comms = await self._stack.enter_async_context(worlds(backend, size, name=name, timeout=timeout))
            return {"opened": True}
        comms = Comms(None)
        if with_torch:
            face = "gloo" if backend == "torch" else "asynccomm"
            await asyncio.to_thread(_join_torch, face, size, rank, name, timeout)
            self._stack.callback(_leave_torch)
            comms.torch_calls = partial(torch_call)
        if backend != "torch":
            hints: dict[str, str] = {}
            lends = backend in ("shm", "hierarchical") and with_small_sizes(name)
            lowering.LENT_BYTES = 64 if lends else LENT_BYTES
            if lends:
                hints["whole_bytes"] = "64"
            if backend == "hierarchical":
                layout = os.environ.get(HOSTS, "abba")
                os.environ[PRETENDED] = f"host-{layout[rank % len(layout)]}"
                hints["hostname"] = "127.0.0.1"
            comms.world = await asynccomm.new_comm(
                backend, name=name, rank=rank, size=size, timeout=timeout, hints=hints
            )
        self._stack.push_async_callback(comms.aclose)
        self._comms = [comms]
        return {"opened": True}

    async def _case(self, text: str) -> dict[str, Any]:
        try:
            return dataclasses.asdict(await self._report(loads(text)))
        except Exception as exc:  # of the fuzzer's own
            self._broken = True
            message = "".join(traceback.format_exception(exc))
            return dataclasses.asdict(Report([Finding("fuzzer", -1, self._rank, message, repr(exc))], broken=True))

    async def _report(self, program: Program) -> Report:
        if self._all:
            findings, self._broken = await perform_all(program, self._comms)
            return Report(findings, broken=self._broken)
        report = await perform(program, expect(program), self._rank, self._comms[0])
        self._broken = report.broken
        return report


def with_small_sizes(name: str) -> bool:
    """Whether ranks lend each other tensors of any size in the world ``name``; the same on all ranks."""
    return sum(name.encode()) % 2 == 0


def _join_torch(backend: str, size: int, rank: int, name: str, timeout: float) -> None:
    limit = timedelta(seconds=timeout)
    server = dist.PrefixStore(f"torch-{name}", _store(limit))
    dist.init_process_group(backend, store=server, rank=rank, world_size=size, timeout=limit)


def _store(limit: timedelta) -> dist.Store:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)


def _leave_torch() -> None:
    dist.destroy_process_group()


def main() -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    channel = Connection(int(sys.argv[1]))
    asyncio.run(Host(channel).serve())


if __name__ == "__main__":
    main()
