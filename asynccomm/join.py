"""How the ranks of a new comm accept each other, on a store that may hold anything from before.

A store can outlive its users: the launcher's survives restarts of the workers, and a comm's name may be used again. So
nothing found there is believed until it has answered something new:

1. Rank 0 publishes a random epoch under the comm's name.
2. Each rank reads the epoch and posts a hello with a random nonce there, numbered as they come.
3. Rank 0 checks all hellos and answers each nonce, with the list of members or with what does not fit.

A rank that read an old epoch is never answered, looks again, and finds the new one. All further keys of the comm lie
under its epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import time
from typing import Any, NamedTuple

from asynccomm.backends.base import Member
from asynccomm.control.links import Tokens
from asynccomm.control.roster import Contact
from asynccomm.errors import RendezvousError, StoreTimeoutError
from asynccomm.store.base import Store
from asynccomm.version import __version__

__all__ = ["Joined", "join"]

FIRST_LOOK = 0.05  # seconds until a rank that got no answer looks for a newer epoch; doubles up to LAST_LOOK
LAST_LOOK = 1.0
GRACE = 1.0  # seconds that rank 0, once it knows that the ranks do not fit, gives others to come and be told too
FAREWELL = 2.0  # seconds that rank 0, which may host the store, gives the others to read that they were rejected


class Joined(NamedTuple):
    """What a rank knows of the others, once they have met."""

    epoch: str
    members: list[Member]  #: in rank order
    contacts: list[Contact]  #: of those that have a control channel
    tokens: Tokens  #: of that


async def join(
    store: Store,
    name: str,
    rank: int,
    size: int,
    backend: str,
    timeout: float,
    *,
    ordering: str = "program",
    contact: Contact | None = None,
    spent: float = 0.0,
) -> Joined:
    """Meet the others of comm ``name``. Cancelling is safe.

    Args:
        contact: where this rank's control channel listens, if it has one.
        timeout: seconds allowed for becoming a comm.
        spent: how many of them are gone already.

    Raises: RendezvousError naming who is missing or what differs, on all ranks that have come so far.
    """
    hello = {
        "rank": rank,
        "size": size,
        "backend": backend,
        "ordering": ordering,
        "version": __version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "nonce": secrets.token_hex(8),
        "contact": None if contact is None else contact.as_json(),
    }
    deadline = time.monotonic() + timeout - spent
    place = store.prefix(name)
    if rank == 0:
        return await _welcome(place, name, hello, size, deadline, timeout)
    return await _ask(place, name, hello, deadline, timeout)


async def _welcome(place: Store, name: str, mine: dict[str, Any], size: int, deadline: float, timeout: float) -> Joined:
    epoch = secrets.token_hex(8)
    room = place.prefix(epoch)
    await place.set("epoch", epoch)
    tokens = Tokens()
    hellos: dict[int, dict[str, Any]] = {0: mine}
    others: list[dict[str, Any]] = []  # all who said hello, whether or not they fit
    seen: set[int] = set()
    problem = ""
    while len(others) < size - 1 and time.monotonic() < deadline:
        for theirs in await _arrivals(room, seen, deadline):
            others.append(theirs)
            if not problem and (problem := _misfit(mine, theirs, hellos)):
                deadline = min(deadline, time.monotonic() + GRACE)
            hellos.setdefault(theirs["rank"], theirs)
    if not problem and len(hellos) < size:
        missing = [rank for rank in range(size) if rank not in hellos]
        problem = f"ranks {missing} of {size} did not come within {timeout:g} s"
    if problem:
        raise await _reject(room, others, f"comm {name!r}: {problem}")
    keys = "rank", "host", "pid", "contact"
    answer = {
        "members": [{key: hellos[rank].get(key) for key in keys} for rank in range(size)],
        "tokens": [tokens.ask, tokens.answer],
    }
    text = json.dumps(answer)
    await room.multi_set({f"answer/{theirs['nonce']}": text for theirs in others})
    return _joined(epoch, answer)


def _joined(epoch: str, answer: dict[str, Any]) -> Joined:
    members = answer["members"]
    return Joined(
        epoch,
        [Member(m["rank"], m["host"], m["pid"]) for m in members],
        [Contact.of_json(m["contact"]) for m in members if m["contact"] is not None],
        Tokens(*answer["tokens"]),
    )


async def _arrivals(room: Store, seen: set[int], deadline: float) -> list[dict[str, Any]]:
    """The next hellos, some or none; ``seen`` has the numbers of all so far."""
    count = await room.add("arrivals", 0)
    # a rank that went away in the middle leaves a gap in the numbers
    fresh = [number for number in range(1, count + 1) if number not in seen]
    there = await asyncio.gather(*(room.check([f"hello/{number}"]) for number in fresh))
    new = [number for number, is_there in zip(fresh, there, strict=True) if is_there]
    if new:
        seen.update(new)
        return [json.loads(text) for text in await room.multi_get([f"hello/{number}" for number in new])]
    with contextlib.suppress(StoreTimeoutError):
        await room.wait([f"hello/{count + 1}"], max(0.0, min(LAST_LOOK, deadline - time.monotonic())))
    return []


def _misfit(mine: dict[str, Any], theirs: dict[str, Any], hellos: dict[int, dict[str, Any]]) -> str:
    """Why a rank cannot be taken in; empty if it can."""
    rank = theirs["rank"]
    for key in ("version", "size", "backend", "ordering"):
        if theirs.get(key) != mine[key]:  # another version may not say everything
            return f"{key} differs: rank 0 has {mine[key]!r}, rank {rank} has {theirs.get(key)!r}"
    if rank in hellos:
        first, second = (f"process {h['pid']} on {h['host']}" for h in (hellos[rank], theirs))
        return f"rank {rank} is taken twice, by {first} and {second}; each needs its own RANK"
    return ""


async def _reject(room: Store, others: list[dict[str, Any]], reason: str) -> RendezvousError:
    await room.multi_set({f"answer/{theirs['nonce']}": json.dumps({"error": reason}) for theirs in others})
    with contextlib.suppress(StoreTimeoutError):
        await room.wait([f"heard/{theirs['nonce']}" for theirs in others], FAREWELL)
    return RendezvousError(reason)


async def _ask(place: Store, name: str, mine: dict[str, Any], deadline: float, timeout: float) -> Joined:
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
            await room.set(f"hello/{await room.add('arrivals', 1)}", json.dumps(mine))
            greeted, look = epoch, FIRST_LOOK
        try:
            answer = json.loads(await room.get(f"answer/{mine['nonce']}", min(look, left())))
        except StoreTimeoutError:
            if left() <= 0:
                raise late("rank 0 did not answer: it or others are missing, or the world is full") from None
            look = min(2 * look, LAST_LOOK)
            continue
        if "error" in answer:
            await room.set(f"heard/{mine['nonce']}", b"")
            await room.check([])  # a reply: the server has it before the connection closes
            raise RendezvousError(answer["error"])
        return _joined(epoch, answer)
