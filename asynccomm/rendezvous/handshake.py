"""The handshake of a new comm's ranks, over a store that may hold keys of earlier runs.

A store can outlive its users: the launcher's store survives restarts of the workers, and a comm's name may be used
again. A rank therefore trusts only keys that answer its own fresh nonce:

1. Rank 0 publishes a random epoch under the comm's name.
2. Each rank reads the epoch and posts a numbered hello with a random nonce under it.
3. Rank 0 checks all hellos and answers each nonce, with the list of members or with the mismatch; not where all ranks
   also come to one meeting over a control channel, as they meet there (``channel_meeting``). A long list stands
   once in the store, as a table, and the answers refer to it: rank 0 would else write it once for each rank. All ranks
   read it, so it must be short: of a usual member it has about one byte, for the number of the process.

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
import logging
import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias, cast, final

from msgspec import Meta
from msgspec.structs import replace

from asynccomm.backends.base import RankInfo
from asynccomm.control.transport.connection import Tokens
from asynccomm.control.transport.schema import (
    JsonObject,
    Message,
    MessageError,
    TaggedMessage,
    decode,
    dumps,
    loads,
    shown,
)
from asynccomm.control.transport.tables import Value, pack_table, unpack_table
from asynccomm.control.transport.topology import RankAddress, Text
from asynccomm.core.hosts import host_name
from asynccomm.errors import AsyncCommError, RendezvousError, StoreError, StoreTimeoutError
from asynccomm.rendezvous.channel_meeting import ChannelMeeting
from asynccomm.store.base import Store, within
from asynccomm.store.routes import is_reachable, network_id
from asynccomm.version import __version__

FIRST_LOOK = 0.05  # seconds until a rank without an answer checks for a newer epoch; doubles up to LAST_LOOK
LAST_LOOK = 1.0
GRACE = 1.0  # seconds that rank 0, after finding a mismatch, gives further ranks to arrive and receive the error
NOTICE = 0.5  # seconds before its deadline that rank 0 gives up, so that the other ranks learn the reason by theirs
FAREWELL = 2.0  # seconds that rank 0, which may host the store, gives the other ranks to read the rejection

WINDOW: Final = 256  # hello numbers read in one pass, at either end of the unread range
HELLO_BYTES: Final = 16 << 10
ANSWER_BYTES: Final = 64 << 10  # for the whole answer, plus ANSWER_BYTES_EACH for each rank
ANSWER_BYTES_EACH: Final = 4 << 10
MEMBERS_INLINE: Final = 32  # ranks up to which each answer has the list of members
REASON: Final = 40 << 10  # characters of the reason for a rejection, which may quote a hello
STALE_SECONDS: Final = 0.5  # for a meeting over a channel to begin once all ranks have said hello, unless one withdrew
PATIENCE: Final = 0.05  # seconds before the next read of hellos, if one exists beyond the counter
FIRST_READ: Final = 0.002  # seconds until the next read of hellos, if one is missing below the counter; doubles

Rank: TypeAlias = Annotated[int, Meta(ge=0)]
Epoch: TypeAlias = Annotated[str, Meta(pattern="^[ -.0-~]{1,64}$")]  # any printable characters but a slash

# of a table of members: rank, host, pid, network, address, number, whether there is a contact, and the contact's fields
_COLUMNS: Final = (int, str, int, str, str, int, int, str, int, str, str, int)

_log = logging.getLogger("asynccomm")


class _VersionedHello(Message, frozen=True):
    """The fields that every version has in a hello."""

    rank: Rank
    nonce: Annotated[str, Meta(pattern="^[0-9A-Za-z]{1,64}$")]
    version: Text


@final
class Member(Message, frozen=True):
    """A rank, as the other ranks know it."""

    rank: Rank
    host: Text
    pid: int
    network: Text  #: equal for ranks that reach each other by loopback; in a list of members a number
    address: Text = ""  #: of the interface that leads to the store; empty: other hosts could not reach it
    number: int = 0  #: of the process, see ``launchers.process_number``
    contact: RankAddress | None = None  #: of its control channel; None: the rank has none

    def __post_init__(self) -> None:
        if self.contact is not None and self.contact.rank != self.rank:
            raise ValueError(f"rank {self.rank} has the contact of rank {self.contact.rank}")


@final
class _Hello(_VersionedHello, frozen=True):
    size: int
    backend: Text
    ordering: Text
    host: Text
    pid: int
    network: Text
    address: Text = ""
    number: int = 0
    contact: RankAddress | None = None
    beside: Text = ""  #: key of the meeting over a control channel to which it has come, too; empty: there is none

    def __post_init__(self) -> None:
        if not self.rank < self.size:
            raise ValueError(f"rank must be below the size, {self.size}, got {self.rank}")
        _ = self.member  # checks the contact

    @property
    def member(self) -> Member:
        return Member(self.rank, self.host, self.pid, self.network, self.address, self.number, self.contact)


@final
class _Answer(TaggedMessage, frozen=True):
    members: list[Member] | None  #: in rank order; None: they stand under ``members``
    tokens: Tokens


@final
class _Rejection(TaggedMessage, frozen=True):
    reason: Annotated[str, Meta(max_length=REASON)]


class HandshakeResult(NamedTuple):
    """The result of a handshake: the comm's epoch and members, and the control channel that they open."""

    epoch: str
    members: list[RankInfo]  #: in rank order
    contacts: list[RankAddress]  #: of the members that open a control channel
    tokens: Tokens


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
    number: int | None = None,
    spent: float = 0.0,
    epoch: str | None = None,
    beside: ChannelMeeting | None = None,
) -> HandshakeResult:
    """Connect with the other ranks of comm ``name``. Cancelling is safe.

    Args:
        contact: the address of this rank's control channel, if the rank has one.
        number: of this process, see ``launchers.process_number``; None: the rank.
        timeout: seconds allowed for the whole set-up of the comm.
        spent: seconds of ``timeout`` already used.
        epoch: of rank 0: the result of ``publish_epoch``; None: published here.
        beside: goes on meanwhile; once it begins, the caller cancels the handshake.

    Raises: RendezvousError naming the missing ranks or the mismatch, on all ranks that have arrived so far.
    """
    host, pid, nonce = host_name(), os.getpid(), secrets.token_hex(8)
    address = store.local_address() or ""
    hello = _Hello(
        rank,
        nonce,
        __version__,
        size,
        backend,
        ordering,
        host,
        pid,
        network_id(),
        address if is_reachable(address) else "",
        rank if number is None else number,
        contact,
        "" if beside is None else beside.key,
    )
    deadline = time.monotonic() + timeout - spent
    if rank == 0:
        deadline -= min(NOTICE, timeout / 10)
    place = store.prefix(name)
    try:
        # a store that answers lets the ranks find out themselves, by the deadline
        async with within(max(0.0, deadline + NOTICE - time.monotonic())) as replies:
            if rank == 0:
                epoch = await publish_epoch(store, name) if epoch is None else epoch
                return await _welcome(place.prefix(epoch), epoch, name, hello, deadline, timeout, beside, replies)
            return await _ask(place, name, hello, deadline, timeout)
    except TimeoutError:
        raise RendezvousError(
            f"comm {name!r}: the store did not answer within {timeout:g} s (this is rank {rank})"
        ) from None


async def publish_epoch(store: Store, name: str) -> str:
    """Publish a new epoch of comm ``name``, as rank 0, and return it."""
    epoch = secrets.token_hex(8)
    await store.set(f"{name}/epoch", epoch)
    store.flush()
    return epoch


async def _welcome(
    room: Store,
    epoch: str,
    name: str,
    mine: _Hello,
    deadline: float,
    timeout: float,
    beside: ChannelMeeting | None,
    replies: asyncio.Timeout,
) -> HandshakeResult:
    size = mine.size
    hellos: dict[int, _Hello] = {0: mine}
    nonces: set[str] = set()  # of all hellos, matching or not
    reader = _HelloReader(room, name, mine.version)
    problem = ""
    while time.monotonic() < deadline:
        if len(nonces) == size - 1:
            pending = None if problem else _pending(beside, hellos)
            if pending is None or await pending.failed(min(STALE_SECONDS, deadline - time.monotonic())):
                break
            for rank in pending.absent() & hellos.keys() - {0}:  # it has withdrawn, and may say hello again
                nonces.discard(hellos.pop(rank).nonce)
            continue
        for theirs in await reader.arrivals(deadline):
            earlier = hellos.get(theirs.rank)
            if earlier is not None and await room.check([f"withdrawn/{earlier.nonce}"]):
                nonces.discard(hellos.pop(theirs.rank).nonce)  # it was cancelled, and tries again
            if theirs.nonce in nonces or len(nonces) == size - 1:
                reader.complain("it repeats another hello" if theirs.nonce in nonces else "all ranks have come")
                continue
            nonces.add(theirs.nonce)
            if not problem and (problem := _mismatch(mine, theirs, hellos)):
                deadline = min(deadline, time.monotonic() + GRACE)
            if isinstance(theirs, _Hello):
                hellos.setdefault(theirs.rank, theirs)
    if not problem and len(hellos) < size:
        missing = [rank for rank in range(size) if rank not in hellos]
        problem = f"ranks {missing} of {size} did not come within {timeout:g} s"
    if not problem and _pending(beside, hellos) is not None:
        problem = f"the ranks did not meet over their control channel within {timeout:g} s"
    if problem:
        replies.reschedule(None)  # the farewell has a limit of its own
        raise await _reject(room, nonces, f"comm {name!r}: {problem}")
    members, tokens = _as_listed([hellos[rank].member for rank in range(size)]), Tokens.random()
    if size > MEMBERS_INLINE:
        await room.set("members", pack_table([_row(member) for member in members]))
    text = dumps(_Answer(members if size <= MEMBERS_INLINE else None, tokens))
    await room.multi_set({f"answer/{nonce}": text for nonce in nonces})
    await room.check([])  # a round trip: the answers are stored; later losses of rank 0 are found by other means
    return _joined(epoch, members, tokens)


def _pending(beside: ChannelMeeting | None, hellos: Mapping[int, _Hello]) -> ChannelMeeting | None:
    """The meeting that all ranks name, unless it was called off: they meet there, or not at all."""
    if beside is None or beside.called_off or any(hello.beside != beside.key for hello in hellos.values()):
        return None
    return beside


def _joined(epoch: str, members: Sequence[Member], tokens: Tokens) -> HandshakeResult:
    # processes may have inherited the variables of one rank, such as those that a batch script starts
    distinct = len({member.number for member in members}) == len(members)
    return HandshakeResult(
        epoch,
        [
            RankInfo(each.rank, each.host, each.pid, each.network, each.address, each.number if distinct else each.rank)
            for each in members
        ],
        [member.contact for member in members if member.contact is not None],
        tokens,
    )


def met(beside: ChannelMeeting, name: str) -> HandshakeResult:
    """The result of a meeting that has begun. Raises: RendezvousError: the terms differ."""
    begin = beside.begin
    assert begin is not None
    expected = begin.terms[0]
    for rank, terms in begin.terms.items():
        for key, value in expected.items():
            if terms.get(key) != value:
                raise RendezvousError(f"comm {name!r}: {_differing(key, value, rank, terms.get(key))}")
    return HandshakeResult(begin.epoch, list(beside.lease.members), [], beside.tokens(begin.epoch))


def _as_listed(members: Sequence[Member]) -> list[Member]:
    """The members, with numbers for their networks, and after the host's name if several hosts have that, as may be."""
    networks: dict[str, int] = {}
    hosts: dict[str, list[int]] = {}  # the networks of each
    listed = []
    for member in members:
        network = networks.setdefault(member.network, len(networks))
        alike = hosts.setdefault(member.host, [])
        if network not in alike:
            alike.append(network)
        number = alike.index(network)
        named = _on_host(member, f"{member.host}#{number + 1}") if number else member
        listed.append(replace(named, network=str(network)))
    return listed


def _on_host(member: Member, host: str) -> Member:
    """``member`` with the name that the ranks of the comm use for its host."""
    contact = member.contact and replace(member.contact, host=host)
    return replace(member, host=host, contact=contact)


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
        self._early: tuple[int, bytes] = (0, b"")  # the last number and hello read before the counter had the number
        self._pause = FIRST_READ
        self._complained = False

    async def arrivals(self, deadline: float) -> list[_VersionedHello]:
        """The next hellos; the list may be empty."""
        room = self._room
        count = await room.add("arrivals", 0)
        fresh = self._fresh(count)
        said = await asyncio.gather(*map(self._said, fresh))
        new = {number: text for number, text in zip(fresh, said, strict=True) if text is not None}
        if not new:
            early = await self._wait(count + 1, deadline, missing=bool(fresh))
            return [] if early is None or (hello := self._read(early)) is None else [hello]
        self._pause = FIRST_READ
        self._seen.update(new)
        while self._low in self._seen:
            self._seen.remove(self._low)
            self._low += 1
        return [hello for item in new.items() if item != self._early and (hello := self._read(item[1])) is not None]

    def _fresh(self, count: int) -> list[int]:
        """The numbers of 1 to ``count`` to read next."""
        unseen = (number for number in range(self._low, count + 1) if number not in self._seen)
        fresh = list(itertools.islice(unseen, WINDOW))
        last = range(max(fresh[-1] + 1 if fresh else self._low, count + 1 - WINDOW), count + 1)
        return fresh + [number for number in last if number not in self._seen]

    async def _wait(self, number: int, deadline: float, *, missing: bool) -> bytes | None:
        """Wait for the next hello, of ``number``. None: for now there is none that has not been read.

        A hello beyond the counter is from a rank that got its number after the count was read, or from a foreign
        process without a number: in its place another may follow.

        Args:
            missing: whether a rank with a lower number is about to post its hello, or has gone.
        """
        limit = LAST_LOOK
        if missing:
            limit, self._pause = self._pause, min(2 * self._pause, LAST_LOOK)
        try:
            text = await self._room.get(f"hello/{number}", max(0.0, min(limit, deadline - time.monotonic())))
        except StoreTimeoutError:
            return None
        if (number, text) == self._early:
            await asyncio.sleep(max(0.0, min(PATIENCE, deadline - time.monotonic())))
            return None
        self._early = number, text
        return text

    async def _said(self, number: int) -> bytes | None:
        """The hello with this number; None if it is missing."""
        try:
            return await self._room.get(f"hello/{number}", 0.0)
        except StoreTimeoutError:
            return None

    def _read(self, text: bytes) -> _VersionedHello | None:
        try:
            return _hello(text, self._version)
        except MessageError as exc:
            self.complain(str(exc))
            return None

    def complain(self, what: str) -> None:
        """Log the first skipped hello as a warning."""
        if not self._complained:
            self._complained = True
            _log.warning("comm %r ignores a hello that is not of its ranks: %s", self._name, what)


def _hello(text: bytes, version: str) -> _VersionedHello:
    """A hello, with all fields if it is of this ``version``. Raises: MessageError."""
    data: JsonObject = loads(JsonObject, _limited(text, HELLO_BYTES))
    if data.get("version") == version:
        return cast(_Hello, decode(_Hello, data))
    common = {key: data.get(key) for key in _VersionedHello.__struct_fields__}
    return cast(_VersionedHello, decode(_VersionedHello, common))


def _limited(text: bytes, most: int) -> bytes:
    if len(text) > most:
        raise MessageError(f"a message has at most {most} bytes, got {len(text)}")
    return text


def _mismatch(mine: _Hello, theirs: _VersionedHello, hellos: Mapping[int, _Hello]) -> str:
    """The reason for rejecting a rank; empty for none."""
    rank = theirs.rank
    for key in ("version", "size", "backend", "ordering"):
        if getattr(theirs, key, None) != getattr(mine, key):
            return _differing(key, getattr(mine, key), rank, getattr(theirs, key, None))
    if rank in hellos and isinstance(theirs, _Hello):
        first, second = (f"process {h.pid} on {h.host}" for h in (hellos[rank], theirs))
        return f"rank {rank} is taken twice, by {first} and {second}; each needs its own RANK"
    return ""


def _differing(key: str, mine: object, rank: int, theirs: object) -> str:
    return f"{key} differs: rank 0 has {mine!r}, rank {rank} has {theirs!r}"


async def _reject(room: Store, nonces: Collection[str], reason: str) -> RendezvousError:
    await room.multi_set({f"answer/{nonce}": dumps(_Rejection(reason)) for nonce in nonces})
    with contextlib.suppress(StoreTimeoutError):
        await room.wait([f"heard/{nonce}" for nonce in nonces], FAREWELL)
    return RendezvousError(reason)


async def _ask(place: Store, name: str, mine: _Hello, deadline: float, timeout: float) -> HandshakeResult:
    greeted: list[str] = []  # the epochs under which there is a hello of this rank
    try:
        return await _ask_rank_0(place, name, mine, deadline, timeout, greeted)
    except (asyncio.CancelledError, RendezvousError):
        for epoch in greeted:
            with contextlib.suppress(AsyncCommError):
                # for a next attempt of this rank; and rank 0 does not wait for it to hear a rejection
                keys = [f"{epoch}/{use}/{mine.nonce}" for use in ("withdrawn", "heard")]
                await place.multi_set(dict.fromkeys(keys, b""))
        raise


async def _ask_rank_0(
    place: Store, name: str, mine: _Hello, deadline: float, timeout: float, greeted: list[str]
) -> HandshakeResult:
    def left() -> float:
        return max(0.0, deadline - time.monotonic())

    def late(event: str, reason: str = "") -> RendezvousError:
        return RendezvousError(f"comm {name!r}: {event} within {timeout:g} s{reason} (this is rank {mine.rank})")

    look = FIRST_LOOK
    while True:
        try:
            found = await place.get("epoch", left())
        except StoreTimeoutError:
            raise late("rank 0 did not come") from None
        try:
            epoch: str = decode(Epoch, found.decode(errors="replace"))
        except MessageError:  # rank 0 may still overwrite it with its own epoch
            if left() <= 0:
                raise late("rank 0 did not come", f": in the place of its epoch is {shown(found)}") from None
            await asyncio.sleep(min(look, left()))
            look = min(2 * look, LAST_LOOK)
            continue
        room = place.prefix(epoch)
        if epoch not in greeted:
            greeted.append(epoch)
            await room.set(f"hello/{await room.add('arrivals', 1)}", dumps(mine))
            look = FIRST_LOOK
        try:
            text = await room.get(f"answer/{mine.nonce}", min(look, left()))
        except StoreTimeoutError:
            if left() <= 0:
                raise late("rank 0 did not answer", ": it or others are missing, or the comm is full") from None
            look = min(2 * look, LAST_LOOK)
            continue
        try:
            most = ANSWER_BYTES + ANSWER_BYTES_EACH * mine.size
            answer: _Answer | _Rejection = loads(_Answer | _Rejection, _limited(text, most))
            if isinstance(answer, _Answer):
                members = answer.members
                if members is None:
                    members = _unpacked(await room.get("members", left()), mine.size, most)
                return _joined(epoch, _checked(members, mine), answer.tokens)
        except MessageError as exc:
            raise RendezvousError(f"comm {name!r}: the answer of rank 0 cannot be read: {exc}") from None
        except StoreTimeoutError:
            raise late("the list of the ranks did not come") from None
        with contextlib.suppress(StoreError):  # rank 0, which may host the store, ends as soon as all have heard it
            await room.set(f"heard/{mine.nonce}", b"")
            await room.check([])  # a round trip: the store has the key before the connection closes
        raise RendezvousError(answer.reason)


def _row(member: Member) -> list[Value]:
    """``member`` in a table."""
    there = member.contact
    contact = there or RankAddress(0, "", 0)
    here: list[Value] = [member.rank, member.host, member.pid, member.network, member.address, member.number]
    return [*here, int(there is not None), contact.host, contact.pid, contact.local, contact.address, contact.port]


def _unpacked(table: bytes, size: int, most: int) -> list[Member]:
    """The members in a table. Raises: MessageError."""
    listed = []
    for row in unpack_table(table, _COLUMNS, size, most):
        rank, host, pid, network, address, number, there, *contact = row
        fields = {"rank": rank, **dict(zip(("host", "pid", "local", "address", "port"), contact, strict=True))}
        member = {"rank": rank, "host": host, "pid": pid, "network": network, "address": address, "number": number}
        listed.append({**member, "contact": fields if there else None})
    members: list[Member] = decode(list[Member], listed)
    return members


def _checked(members: list[Member], mine: _Hello) -> list[Member]:
    """``members``, if they can be. Raises: MessageError."""
    if [member.rank for member in members] != list(range(mine.size)):
        raise MessageError(f"members must be ranks 0 to {mine.size - 1}, got {shown(members)}")
    if wrong := [member for member in members if not member.network.isdecimal()]:
        raise MessageError(f"members must have numbers for networks, got {wrong[0]}")
    found = members[mine.rank]
    expected = _on_host(mine.member, found.host) if found.host.startswith(f"{mine.host}#") else mine.member
    if found != replace(expected, network=found.network):
        raise MessageError(f"members must have this rank's {mine.member}, got {found}")
    return members
