"""How the ranks of a new comm accept each other, on a store that may hold anything from before.

A store can outlive its users: the launcher's survives restarts of the workers, and a comm's name may be used again. So
nothing found there is believed until it has answered something new:

1. Rank 0 publishes a random epoch under the comm's name.
2. Each rank reads the epoch, claims its rank within it, and posts a hello with a random nonce.
3. Rank 0 checks all hellos and answers each nonce, with the list of members or with what does not fit.

A rank that read an old epoch is never answered, looks again, and finds the new one. All further keys of the comm lie
under its epoch.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
from typing import Any

from asynccomm.backends.base import Member
from asynccomm.errors import RendezvousError, StoreTimeoutError
from asynccomm.store.base import Store
from asynccomm.version import __version__

__all__ = ["join"]

FIRST_LOOK = 0.05  # seconds until a rank that got no answer looks for a newer epoch; doubles up to LAST_LOOK
LAST_LOOK = 1.0


async def join(store: Store, name: str, rank: int, size: int, backend: str, timeout: float) -> tuple[str, list[Member]]:
    """Meet the others of comm ``name``; returns its epoch and its members in rank order. Cancelling is safe.

    Raises: RendezvousError naming who is missing or what differs, on all ranks that have come so far.
    """
    hello = {
        "rank": rank,
        "size": size,
        "backend": backend,
        "version": __version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "nonce": secrets.token_hex(8),
    }
    deadline = time.monotonic() + timeout
    place = store.prefix(name)
    if rank == 0:
        return await _welcome(place, name, hello, size, deadline, timeout)
    return await _ask(place, name, hello, deadline, timeout)


async def _welcome(
    place: Store, name: str, mine: dict[str, Any], size: int, deadline: float, timeout: float
) -> tuple[str, list[Member]]:
    epoch = secrets.token_hex(8)
    room = place.prefix(epoch)
    await place.set("epoch", epoch)
    hellos = [mine]
    for rank in range(1, size):
        try:
            hellos.append(json.loads(await room.get(f"hello/{rank}", max(0.0, deadline - time.monotonic()))))
        except StoreTimeoutError:
            present = [await room.check([f"hello/{r}"]) for r in range(1, size)]
            missing = [r for r in range(1, size) if not present[r - 1]]
            raise await _reject(
                room, hellos, f"comm {name!r}: ranks {missing} of {size} did not come within {timeout:g} s"
            ) from None
    for theirs in hellos[1:]:
        for key in ("size", "backend", "version"):
            if theirs[key] != mine[key]:
                raise await _reject(
                    room,
                    hellos,
                    f"comm {name!r}: {key} differs: rank 0 has {mine[key]!r}, rank {theirs['rank']} has {theirs[key]!r}",
                )
    members = [{"rank": h["rank"], "host": h["host"], "pid": h["pid"]} for h in hellos]
    answer = json.dumps({"members": members})
    await room.multi_set({f"answer/{h['nonce']}": answer for h in hellos[1:]})
    return epoch, [Member(**m) for m in members]


async def _reject(room: Store, hellos: list[dict[str, Any]], reason: str) -> RendezvousError:
    answer = json.dumps({"error": reason})
    await room.set("rejected", answer)  # for those who are still to come
    for hello in hellos[1:]:
        await room.set(f"answer/{hello['nonce']}", answer)
    await room.check(["rejected"])  # a reply: the server has it all before anybody closes the connection
    return RendezvousError(reason)


async def _ask(
    place: Store, name: str, mine: dict[str, Any], deadline: float, timeout: float
) -> tuple[str, list[Member]]:
    def left() -> float:
        return max(0.0, deadline - time.monotonic())

    def late(what: str) -> RendezvousError:
        return RendezvousError(f"comm {name!r}: {what} within {timeout:g} s (this is rank {mine['rank']})")

    greeted = ""
    look = FIRST_LOOK
    while True:
        try:
            epoch = (await place.get("epoch", left())).decode()
        except StoreTimeoutError:
            raise late("rank 0 did not come") from None
        room = place.prefix(epoch)
        if epoch != greeted:
            if await room.add(f"claim/{mine['rank']}", 1) > 1 and left() > 0:
                raise RendezvousError(
                    f"comm {name!r}: rank {mine['rank']} is taken by another process; each needs its own RANK"
                )
            await room.set(f"hello/{mine['rank']}", json.dumps(mine))
            greeted = epoch
        if await room.check(["rejected"]):
            raise RendezvousError(json.loads(await room.get("rejected"))["error"])
        try:
            answer = json.loads(await room.get(f"answer/{mine['nonce']}", min(look, left())))
        except StoreTimeoutError:
            if left() <= 0:
                raise late("rank 0 did not answer; others may be missing") from None
            look = min(2 * look, LAST_LOOK)
            await asyncio.sleep(0)
            continue
        if "error" in answer:
            raise RendezvousError(answer["error"])
        return epoch, [Member(**m) for m in answer["members"]]
