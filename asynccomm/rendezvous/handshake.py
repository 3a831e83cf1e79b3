"""How the ranks of a new comm accept each other, on a store that may hold anything from before.

A store can outlive its users: the launcher's survives restarts of the workers, and a comm's name may be used again. So
nothing found there is believed until it has answered something new:

1. Rank 0 publishes a random epoch under the comm's name.
2. Each rank reads the epoch and posts a hello with a random nonce there, numbered as they come.
3. Rank 0 checks all hellos and answers each nonce, with the list of members or with what does not fit.

A rank that read an old epoch is never answered, looks again, and finds the new one. All further keys of the comm lie
under its epoch.

What is found is checked before it is used. Rank 0 passes over what is no hello, with one warning, and a rank that gets
no proper answer says what it got instead. A stranger who writes a proper hello is a rank like any other: whoever can
reach the store must be trusted not to.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Collection
from typing import Any, Final, NamedTuple, final

from asynccomm.backends.base import RankInfo
from asynccomm.control.transport.connection import Tokens
from asynccomm.control.transport.topology import RankAddress
from asynccomm.errors import RendezvousError, StoreTimeoutError
from asynccomm.store.base import Store
from asynccomm.version import __version__

FIRST_LOOK = 0.05  # seconds until a rank that got no answer looks for a newer epoch; doubles up to LAST_LOOK
LAST_LOOK = 1.0
GRACE = 1.0  # seconds that rank 0, once it knows that the ranks do not fit, gives others to come and be told too
FAREWELL = 2.0  # seconds that rank 0, which may host the store, gives the others to read that they were rejected

WINDOW: Final = 256  # numbers of hellos that are looked at together, at either end of those that were given out
HELLO_BYTES: Final = 16 << 10
ANSWER_BYTES: Final = 64 << 10  # and ANSWER_BYTES_EACH for each rank
ANSWER_BYTES_EACH: Final = 4 << 10
TEXT: Final = 1024  # characters of one text in a hello or an answer
REASON: Final = 40 << 10  # characters of why ranks were rejected, which may quote a hello
SHOWN: Final = 200  # characters of nonsense that an error shows
PATIENCE: Final = 0.05  # seconds until another look for hellos, where there is one of a number that nobody was given

_NAME: Final = re.compile(r"[0-9A-Za-z]{1,64}")  # of a nonce
_EPOCH: Final = re.compile(r"[ -.0-~]{1,64}")  # anything but a slash

_log = logging.getLogger("asynccomm")


class HandshakeResult(NamedTuple):
    """What a rank knows of the others, once they have met."""

    epoch: str
    members: list[RankInfo]  #: in rank order
    contacts: list[RankAddress]  #: of those that have a control channel
    tokens: Tokens  #: of that


async def handshake(
    store: Store,
    name: str,
    rank: int,
    size: int,
    backend: str,
    timeout: float,
    *,
    ordering: str = "program",
    contact: RankAddress | None = None,
    spent: float = 0.0,
) -> HandshakeResult:
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


async def _welcome(
    place: Store, name: str, mine: dict[str, Any], size: int, deadline: float, timeout: float
) -> HandshakeResult:
    epoch = secrets.token_hex(8)
    room = place.prefix(epoch)
    await place.set("epoch", epoch)
    tokens = Tokens()
    hellos: dict[int, dict[str, Any]] = {0: mine}
    others: dict[str, dict[str, Any]] = {}  # by nonce, all who said hello, whether or not they fit
    door = _HelloReader(room, name, mine["version"])
    problem = ""
    while len(others) < size - 1 and time.monotonic() < deadline:
        for theirs in await door.arrivals(deadline):
            if theirs["nonce"] in others or len(others) == size - 1:
                door.complain("it says what another one has said" if theirs["nonce"] in others else "all have come")
                continue
            others[theirs["nonce"]] = theirs
            if not problem and (problem := _mismatch(mine, theirs, hellos)):
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
    await room.multi_set({f"answer/{nonce}": text for nonce in others})
    await room.check([])  # a reply: the server has it, so who has lost rank 0 from here on finds out by other ways
    return _joined(epoch, answer)


def _joined(epoch: str, answer: dict[str, Any]) -> HandshakeResult:
    members = answer["members"]
    return HandshakeResult(
        epoch,
        [RankInfo(m["rank"], m["host"], m["pid"]) for m in members],
        [RankAddress.of_json(m["contact"]) for m in members if m["contact"] is not None],
        Tokens(*answer["tokens"]),
    )


@final
class _HelloReader:
    """Where rank 0 looks for hellos.

    Whatever the counter says, only the numbers at its two ends are looked at: ranks that went away in the middle leave
    gaps in them, and a stranger may have moved it.
    """

    def __init__(self, room: Store, name: str, version: str) -> None:
        self._room = room
        self._name = name
        self._version = version
        self._low = 1  # all numbers below were seen
        self._seen: set[int] = set()  # from there on
        self._complained = False

    async def arrivals(self, deadline: float) -> list[dict[str, Any]]:
        """The next hellos, some or none."""
        room = self._room
        count = await room.add("arrivals", 0)
        fresh = self._fresh(count)
        there = await asyncio.gather(*(room.check([f"hello/{number}"]) for number in fresh))
        new = [number for number, is_there in zip(fresh, there, strict=True) if is_there]
        if not new:
            await self._wait(f"hello/{count + 1}", deadline)
            return []
        said = await asyncio.gather(*(self._said(number, deadline) for number in new))
        self._seen.update(number for number, text in zip(new, said, strict=True) if text is not None)
        while self._low in self._seen:
            self._seen.remove(self._low)
            self._low += 1
        return [hello for text in said if text is not None and (hello := self._read(text)) is not None]

    def _fresh(self, count: int) -> list[int]:
        """The numbers to look at, of 1 to ``count``."""
        unseen = (number for number in range(self._low, count + 1) if number not in self._seen)
        fresh = list(itertools.islice(unseen, WINDOW))
        last = range(max(fresh[-1] + 1 if fresh else self._low, count + 1 - WINDOW), count + 1)
        return fresh + [number for number in last if number not in self._seen]

    async def _wait(self, key: str, deadline: float) -> None:
        with contextlib.suppress(StoreTimeoutError):
            if await self._room.check([key]):
                # of a rank that got its number since, or of a stranger that got none
                await asyncio.sleep(max(0.0, min(PATIENCE, deadline - time.monotonic())))
            else:
                await self._room.wait([key], max(0.0, min(LAST_LOOK, deadline - time.monotonic())))

    async def _said(self, number: int, deadline: float) -> bytes | None:
        """None: somebody has taken it away, or the time is over."""
        try:
            return await self._room.get(f"hello/{number}", max(0.0, min(LAST_LOOK, deadline - time.monotonic())))
        except StoreTimeoutError:
            return None

    def _read(self, text: bytes) -> dict[str, Any] | None:
        try:
            return _hello(text, self._version)
        except _NonsenseError as exc:
            self.complain(str(exc))
            return None

    def complain(self, what: str) -> None:
        """Say that something was passed over, once."""
        if not self._complained:
            self._complained = True
            _log.warning("comm %r: somebody said hello who is no rank of it, and is not answered: %s", self._name, what)


class _NonsenseError(ValueError):
    """What no rank has written."""


def _parsed(text: bytes, most: int) -> dict[str, Any]:
    """A JSON object. Raises: _NonsenseError."""
    if len(text) > most:
        raise _NonsenseError(f"{len(text)} bytes, where {most} are the limit")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _NonsenseError(_shown(text)) from None
    if type(found) is not dict:
        raise _NonsenseError(_shown(text))
    return found


def _shown(text: bytes) -> str:
    return repr(text[:SHOWN]) + ("..." if len(text) > SHOWN else "")


def _hello(text: bytes, version: str) -> dict[str, Any]:
    """A hello; all of it was looked at if it is of this ``version``. Raises: _NonsenseError."""
    hello = _parsed(text, HELLO_BYTES)
    rank: Any = hello.get("rank")
    nonce = hello.get("nonce")
    fits = type(rank) is int and rank >= 0 and type(nonce) is str and _NAME.fullmatch(nonce) is not None
    if fits and hello.get("version") == version:
        size: Any = hello.get("size")
        fits = type(size) is int and rank < size and _is_member(hello, rank)
        fits = fits and all(_is_text(hello.get(key)) for key in ("backend", "ordering"))
    elif fits:
        fits = _is_text(hello.get("version"))
    if not fits:
        raise _NonsenseError(_shown(text))
    return hello


def _is_text(value: object) -> bool:
    return type(value) is str and len(value) <= TEXT


def _is_member(said: Any, rank: int) -> bool:
    """Whether that is what a rank says, or rank 0 says of it."""
    if type(said) is not dict or type(said.get("rank")) is not int or said["rank"] != rank:
        return False
    if not _is_text(said.get("host")) or type(said.get("pid")) is not int:
        return False
    if said.get("contact") is None:
        return True
    try:
        contact = RankAddress.of_json(said["contact"])
    except ValueError:
        return False
    texts = contact.host, contact.local, contact.address
    return contact.rank == rank and 0 <= contact.port < 1 << 16 and all(_is_text(text) for text in texts)


def _mismatch(mine: dict[str, Any], theirs: dict[str, Any], hellos: dict[int, dict[str, Any]]) -> str:
    """Why a rank cannot be taken in; empty if it can."""
    rank = theirs["rank"]
    for key in ("version", "size", "backend", "ordering"):
        if theirs.get(key) != mine[key]:  # another version may not say everything
            return f"{key} differs: rank 0 has {mine[key]!r}, rank {rank} has {theirs.get(key)!r}"
    if rank in hellos:
        first, second = (f"process {h['pid']} on {h['host']}" for h in (hellos[rank], theirs))
        return f"rank {rank} is taken twice, by {first} and {second}; each needs its own RANK"
    return ""


async def _reject(room: Store, nonces: Collection[str], reason: str) -> RendezvousError:
    await room.multi_set({f"answer/{nonce}": json.dumps({"error": reason}) for nonce in nonces})
    with contextlib.suppress(StoreTimeoutError):
        await room.wait([f"heard/{nonce}" for nonce in nonces], FAREWELL)
    return RendezvousError(reason)


async def _ask(place: Store, name: str, mine: dict[str, Any], deadline: float, timeout: float) -> HandshakeResult:
    def left() -> float:
        return max(0.0, deadline - time.monotonic())

    def late(what: str) -> RendezvousError:
        return RendezvousError(f"comm {name!r}: {what} within {timeout:g} s (this is rank {mine['rank']})")

    greeted = ""
    look = FIRST_LOOK
    while True:
        try:
            found = await place.get("epoch", left())
        except StoreTimeoutError:
            raise late("rank 0 did not come") from None
        epoch = found.decode(errors="replace") if len(found) <= TEXT else ""
        if _EPOCH.fullmatch(epoch) is None:  # rank 0 may still come and write its own over it
            if left() <= 0:
                raise late(f"rank 0 did not come: in the place of its epoch is {_shown(found)}")
            await asyncio.sleep(min(look, left()))
            look = min(2 * look, LAST_LOOK)
            continue
        room = place.prefix(epoch)
        if epoch != greeted:
            await room.set(f"hello/{await room.add('arrivals', 1)}", json.dumps(mine))
            greeted, look = epoch, FIRST_LOOK
        try:
            text = await room.get(f"answer/{mine['nonce']}", min(look, left()))
        except StoreTimeoutError:
            if left() <= 0:
                raise late("rank 0 did not answer: it or others are missing, or the world is full") from None
            look = min(2 * look, LAST_LOOK)
            continue
        try:
            answer = _answer(text, mine)
        except _NonsenseError as exc:
            raise RendezvousError(f"comm {name!r}: what is there as the answer of rank 0 is none: {exc}") from None
        if "error" in answer:
            await room.set(f"heard/{mine['nonce']}", b"")
            await room.check([])  # a reply: the server has it before the connection closes
            raise RendezvousError(answer["error"])
        return _joined(epoch, answer)


def _answer(text: bytes, mine: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 has answered. Raises: _NonsenseError."""
    size = mine["size"]
    answer = _parsed(text, ANSWER_BYTES + ANSWER_BYTES_EACH * size)
    if "error" in answer:
        if type(answer["error"]) is not str or len(answer["error"]) > REASON:
            raise _NonsenseError(_shown(text))
        return answer
    members, tokens = answer.get("members"), answer.get("tokens")
    if type(members) is not list or len(members) != size:
        raise _NonsenseError(f"it does not name {size} members: {_shown(text)}")
    for rank, member in enumerate(members):
        if not _is_member(member, rank):
            raise _NonsenseError(f"rank {rank} is none in it: {_shown(json.dumps(member).encode())}")
    me = members[mine["rank"]]
    if any(me.get(key) != mine[key] for key in ("host", "pid", "contact")):
        raise _NonsenseError(f"it has another one as rank {mine['rank']}: {_shown(json.dumps(me).encode())}")
    if type(tokens) is not list or len(tokens) != 2 or not all(_is_text(token) and token for token in tokens):
        raise _NonsenseError(f"it has no tokens: {_shown(text)}")
    return answer
