"""Ranks on several hosts exchange the addresses at which the other hosts reach them, once they know each other.

Each rank posts its address, rank 0 reads all of them and publishes one table, and all ranks read that: the number of
requests is proportional to the number of ranks. Ports follow from the rank where they are free, so the table is short.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Final, final

import anyio.to_thread
from msgspec import Meta, structs

from asynccomm.backends.addresses import choose_address
from asynccomm.backends.base import RankInfo
from asynccomm.control.transport.schema import Message, MessageError, decode, dumps, loads
from asynccomm.control.transport.sockets import ListeningSockets, derived_port
from asynccomm.control.transport.tables import pack_table, unpack_table
from asynccomm.control.transport.topology import TEXT_CHARACTERS, Text
from asynccomm.core.tasks import shielded
from asynccomm.errors import BackendError, StoreError, StoreTimeoutError
from asynccomm.rendezvous.handshake import FAREWELL, NOTICE, HandshakeResult
from asynccomm.store.base import Store, within

LEAST_SECONDS: Final = 0.1  # the least time for a step, even past the deadline
TABLE_BYTES: Final = 64 << 10  # of a table at most, plus TABLE_BYTES_EACH for each rank
TABLE_BYTES_EACH: Final = 4 << 10


@final
class _Way(Message, frozen=True):
    """The way to one rank from other hosts."""

    address: Text = ""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0  #: of its control channel; 0: the rank has none
    problem: Text = ""  #: why there is no way
    missing: Annotated[int, Meta(ge=0, le=1)] = 0  #: whether the rank has posted nothing


_GAVE_UP: Final = _Way(problem="it gave up connecting")
_COLUMNS: Final = (str, int, str, int)  # of a table: the fields of ways


async def exchange_addresses(
    room: Store,
    joined: HandshakeResult,
    sockets: ListeningSockets | None,
    rank: int,
    hints: Mapping[str, str],
    deadline: float,
) -> HandshakeResult:
    """Tell the ranks on other hosts the address that leads here. Nothing happens where all ranks are on one host.

    Args:
        room: the comm's own store prefix.
        sockets: listen on TCP, too, from now on; None: this rank has no control channel.
        deadline: on the monotonic clock.

    Raises: BackendError, on all ranks, if one of them has no such address.
    """
    size = len(joined.members)
    if not _on_several_hosts(joined.members):
        return joined
    try:
        await room.set(f"address/{rank}", dumps(await _own_way(joined, sockets, rank, hints)))
        left = max(LEAST_SECONDS, deadline - time.monotonic())
        async with within(left + NOTICE):
            ways = await (_collect(room, size, left) if rank == 0 else _read(room, size, left))
    except TimeoutError:
        raise BackendError(f"the store did not answer rank {rank} of {size}, for the ranks' addresses") from None
    except asyncio.CancelledError:
        await shielded(_post_end(room, rank, size))
        raise
    await _check(room, ways)
    return _with_ways(joined, ways)


def _with_ways(joined: HandshakeResult, ways: Sequence[_Way]) -> HandshakeResult:
    contacts = []
    for contact in joined.contacts:
        way, host = ways[contact.rank], joined.members[contact.rank].host
        contacts.append(structs.replace(contact, host=host, address=way.address, port=way.port))
    members = [replace(member, address=way.address) for member, way in zip(joined.members, ways, strict=True)]
    return joined._replace(members=members, contacts=contacts)


async def _own_way(
    joined: HandshakeResult, sockets: ListeningSockets | None, rank: int, hints: Mapping[str, str]
) -> _Way:
    try:
        choice = await anyio.to_thread.run_sync(
            choose_address, hints, os.environ, rank, joined.members, abandon_on_cancel=True
        )
        if sockets is None:
            return _Way(choice.address)
        sockets.open_tcp(choice.address, joined.members[rank].host, derived_port(joined.epoch, rank))
        return _Way(choice.address, sockets.contact.port)
    except (BackendError, OSError) as exc:
        return _Way(problem=f"{exc}"[:TEXT_CHARACTERS])


async def abandon_exchange(room: Store, members: Sequence[RankInfo], rank: int) -> None:
    """End the exchange where this rank gives up after the ranks have met: the others may wait for its address."""
    if _on_several_hosts(members):
        await _post_end(room, rank, len(members))


def _on_several_hosts(members: Sequence[RankInfo]) -> bool:
    return len({member.host for member in members}) > 1


async def _post_end(room: Store, rank: int, size: int) -> None:
    """Post that this rank, which is cancelled, gave up; of rank 0 the other ranks wait for the table."""
    with contextlib.suppress(StoreError):
        await room.set(f"address/{rank}", dumps(_GAVE_UP))
        if rank == 0:
            await _publish(room, [_GAVE_UP, *[_Way()] * (size - 1)])


async def _publish(room: Store, ways: Sequence[_Way]) -> None:
    await room.set("addresses", pack_table([structs.astuple(way) for way in ways]))


async def _collect(room: Store, size: int, left: float) -> list[_Way]:
    """Read and publish the ways of all ranks, at rank 0."""
    keys = [f"address/{rank}" for rank in range(size)]
    try:
        # the other ranks learn by their deadlines which ranks are missing
        posted = await room.multi_get(keys, left - min(NOTICE, left / 10))
        ways: list[_Way] = [loads(_Way, text) for text in posted]
    except StoreTimeoutError:
        there = await asyncio.gather(*(room.check([key]) for key in keys))
        ways = [_Way(missing=int(not found)) for found in there]
    except MessageError as exc:
        ways = [_Way(problem=f"an address of a rank cannot be read: {exc}"), *[_Way()] * (size - 1)]
    await _publish(room, ways)
    return ways


async def _read(room: Store, size: int, left: float) -> list[_Way]:
    """The ways of all ranks, from rank 0."""
    try:
        text = await room.get("addresses", left)
    except StoreTimeoutError:
        return [_Way(missing=1), *[_Way()] * (size - 1)]
    try:
        return _unpacked(text, size)
    except MessageError as exc:
        raise BackendError(f"the addresses that rank 0 has published cannot be read: {exc}") from None


def _unpacked(table: bytes, size: int) -> list[_Way]:
    """The ways in a table. Raises: MessageError."""
    rows = unpack_table(table, _COLUMNS, size, TABLE_BYTES + TABLE_BYTES_EACH * size)
    ways: list[_Way] = decode(list[_Way], [dict(zip(_Way.__struct_fields__, row, strict=True)) for row in rows])
    return ways


async def _check(room: Store, ways: Sequence[_Way]) -> None:
    """Raise the error that the ways give on all ranks, once all have read it: the store may end with one of them."""
    missing = [rank for rank, way in enumerate(ways) if way.missing]
    problems = [f"rank {rank} of {len(ways)}: {way.problem}" for rank, way in enumerate(ways) if way.problem]
    if missing:
        problems.insert(0, f"ranks {missing} have met the others, and then not given their addresses")
    if problems:
        with contextlib.suppress(StoreError, TimeoutError):
            async with within(FAREWELL):
                if await room.add("addresses read", 1) == len(ways):
                    await room.set("all addresses read", b"1")
                await room.wait(["all addresses read"], FAREWELL)
        raise BackendError(problems[0])
