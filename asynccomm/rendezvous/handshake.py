"""The handshake of a new comm's ranks, over a store that may hold keys of earlier runs.

A store can outlive its users: the launcher's store survives restarts of the workers, and a comm's name may be used
again. A rank therefore trusts only keys that answer its own fresh nonce:

1. Rank 0 publishes a random epoch under the comm's name.
2. Each rank reads the epoch and posts a numbered hello with a random nonce under it.
3. Rank 0 checks all hellos and answers each nonce, with the list of members or with the mismatch.

A rank that read an old epoch gets no answer, reads the epoch again, and finds the new one. All further keys of the comm
lie under its epoch.

Every value is validated before use. Rank 0 skips malformed hellos, with one warning, and a rank that gets a malformed
answer raises an error that quotes the answer. A well-formed hello of a foreign process counts as a rank's: every
process that can reach the store must be trusted.
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

FIRST_LOOK = 0.05  # seconds until a rank without an answer checks for a newer epoch; doubles up to LAST_LOOK
LAST_LOOK = 1.0
GRACE = 1.0  # seconds that rank 0, after finding a mismatch, gives further ranks to arrive and receive the error
FAREWELL = 2.0  # seconds that rank 0, which may host the store, gives the other ranks to read the rejection

WINDOW: Final = 256  # hello numbers read in one pass, at either end of the unread range
HELLO_BYTES: Final = 16 << 10
ANSWER_BYTES: Final = 64 << 10  # for the whole answer, plus ANSWER_BYTES_EACH for each rank
ANSWER_BYTES_EACH: Final = 4 << 10
TEXT: Final = 1024  # characters of one text in a hello or an answer
REASON: Final = 40 << 10  # characters of the reason for a rejection, which may quote a hello
SHOWN: Final = 200  # characters of malformed text that an error shows
PATIENCE: Final = 0.05  # seconds before the next read of hellos, if one exists beyond the counter

_NAME: Final = re.compile(r"[0-9A-Za-z]{1,64}")  # of a nonce
_EPOCH: Final = re.compile(r"[ -.0-~]{1,64}")  # any printable character but a slash

_log = logging.getLogger("asynccomm")


class HandshakeResult(NamedTuple):
    """The result of a handshake: the comm's epoch and members, and their control channel."""

    epoch: str
    members: list[RankInfo]  #: in rank order
    contacts: list[RankAddress]  #: of the members that have a control channel
    tokens: Tokens  #: of the control channel


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
    """Connect with the other ranks of comm ``name``. Cancelling is safe.

    Args:
        contact: the address of this rank's control channel, if the rank has one.
        timeout: seconds allowed for the whole set-up of the comm.
        spent: seconds of ``timeout`` already used.

    Raises: RendezvousError naming the missing ranks or the mismatch, on all ranks that have arrived so far.
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
    others: dict[str, dict[str, Any]] = {}  # all hellos by nonce, matching or not
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
    await room.check([])  # a round trip: the answers are stored; later losses of rank 0 are found by other means
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
    """Rank 0's reader of hellos.

    The reader tries only the numbers at the two ends of the counter's range: ranks that left early leave gaps, and a
    foreign process may have moved the counter.
    """

    def __init__(self, room: Store, name: str, version: str) -> None:
        self._room = room
        self._name = name
        self._version = version
        self._low = 1  # all lower numbers were read
        self._seen: set[int] = set()  # numbers read above _low
        self._complained = False

    async def arrivals(self, deadline: float) -> list[dict[str, Any]]:
        """The next hellos; the list may be empty."""
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
        """The numbers of 1 to ``count`` to read next."""
        unseen = (number for number in range(self._low, count + 1) if number not in self._seen)
        fresh = list(itertools.islice(unseen, WINDOW))
        last = range(max(fresh[-1] + 1 if fresh else self._low, count + 1 - WINDOW), count + 1)
        return fresh + [number for number in last if number not in self._seen]

    async def _wait(self, key: str, deadline: float) -> None:
        with contextlib.suppress(StoreTimeoutError):
            if await self._room.check([key]):
                # from a rank that got its number after the count was read, or from a foreign process without a number
                await asyncio.sleep(max(0.0, min(PATIENCE, deadline - time.monotonic())))
            else:
                await self._room.wait([key], max(0.0, min(LAST_LOOK, deadline - time.monotonic())))

    async def _said(self, number: int, deadline: float) -> bytes | None:
        """The hello with this number; None if it was deleted or the deadline has passed."""
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
        """Log the first skipped hello as a warning."""
        if not self._complained:
            self._complained = True
            _log.warning("comm %r: somebody said hello who is no rank of it, and is not answered: %s", self._name, what)


class _NonsenseError(ValueError):
    """A value in the store that no rank has written."""


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
    """A parsed hello, fully checked if it is of this ``version``. Raises: _NonsenseError."""
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
    """Whether ``said`` describes ``rank``, in a hello or in rank 0's answer."""
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
    """The reason for rejecting a rank; empty for none."""
    rank = theirs["rank"]
    for key in ("version", "size", "backend", "ordering"):
        if theirs.get(key) != mine[key]:  # another version may lack some keys
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
        if _EPOCH.fullmatch(epoch) is None:  # rank 0 may still overwrite it with its own epoch
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
            await room.check([])  # a round trip: the store has the key before the connection closes
            raise RendezvousError(answer["error"])
        return _joined(epoch, answer)


def _answer(text: bytes, mine: dict[str, Any]) -> dict[str, Any]:
    """The answer of rank 0, checked. Raises: _NonsenseError."""
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
