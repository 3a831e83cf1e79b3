"""A rank on one of the hosts of a test: it prints events as lines of JSON, and takes steps from the command line.

RANK=... python program.py STEP...
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

import torch

import asynccomm
from asynccomm import AsyncCommError, Comm


def tell(event: str, **details: Any) -> None:
    print(json.dumps({"event": event, **details}), flush=True)


async def make(options: dict[str, Any]) -> Comm:
    started = time.monotonic()
    try:
        if os.environ.get("JOIN"):
            return await asynccomm.join_comm(**options)
        return await asynccomm.new_comm(**options)
    except (AsyncCommError, ValueError) as exc:
        tell("failed", error=type(exc).__name__, text=str(exc), seconds=time.monotonic() - started)
        raise SystemExit(3) from None


async def use(comm: Comm) -> None:
    """Collectives of a small and of a large tensor, and their proof."""
    for length in (1, 300_000):
        tensor = torch.full((length,), float(comm.rank))
        await comm.all_reduce(tensor)
        assert tensor.unique().tolist() == [comm.size * (comm.size - 1) / 2]
    members = comm._session.identity.members
    addresses = [member.address for member in members]
    tell(
        "works",
        rank=comm.rank,
        size=comm.size,
        backend=comm.backend,
        addresses=addresses,
        hosts=[each.host for each in members],
    )


async def until_loss(comm: Comm) -> None:
    """Collectives until a rank is lost."""
    tell("steps")
    while True:
        started = time.monotonic()
        try:
            await comm.all_reduce(torch.ones(8))
            await asyncio.sleep(0.01)
        except AsyncCommError as exc:
            tell("lost", error=type(exc).__name__, rank=getattr(exc, "rank", None), text=str(exc), at=time.monotonic())
            tell("waited", seconds=time.monotonic() - started)
            return


async def main() -> None:
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    comm = await make(options)
    comms = [comm]
    for step in sys.argv[1:]:
        name, _, argument = step.partition("=")
        match name:
            case "use":
                await use(comms[-1])
            case "until_loss":
                await until_loss(comms[-1])
            case "shrink":
                comms.append(await going_on(comms[-1], argument == "quorum"))
            case "admit":
                comms.append(await admitting(comms[-1]))
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
    for each in reversed(comms):
        await each.aclose()
    tell("done")


async def going_on(comm: Comm, quorum: bool) -> Comm:
    """The comm of the ranks that are left."""
    started = time.monotonic()
    try:
        left = await comm.shrink(quorum=quorum, timeout=60)
    except AsyncCommError as exc:
        tell("left out", error=type(exc).__name__, text=str(exc), seconds=time.monotonic() - started)
        raise SystemExit(4) from None
    tell("shrunk", ranks=list(left.parent_ranks), seconds=time.monotonic() - started)
    return left


async def admitting(comm: Comm) -> Comm:
    """The comm with one newcomer."""
    tell("waits")
    names: list[str] = []
    while comm.rank == 0 and not (names := await comm.newcomers()):  # others would not see one that is invited already
        await asyncio.sleep(0.02)
    names = await comm.broadcast_object(names, root=0, expect=list)
    return await comm.reconfigure([*range(comm.size), *names])


asynccomm.run(main())
