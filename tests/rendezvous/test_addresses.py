"""The addresses of ranks on several hosts: one table for all, and one error for all."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest

from asynccomm.backends.base import RankInfo
from asynccomm.control.transport.connection import Tokens
from asynccomm.control.transport.sockets import ListeningSockets
from asynccomm.control.transport.tables import pack_table
from asynccomm.control.transport.topology import RankAddress
from asynccomm.errors import BackendError, StoreError
from asynccomm.rendezvous import addresses as module
from asynccomm.rendezvous.addresses import abandon_exchange, exchange_addresses
from asynccomm.rendezvous.handshake import HandshakeResult
from asynccomm.store.memory import MemoryStore

LIMIT = 20.0  # seconds; far more than any of these needs


def joined(size: int) -> HandshakeResult:
    """Ranks on two hosts, of which rank 1 has no control channel."""
    members = [RankInfo(rank, f"host{rank % 2}", rank, "0", "127.0.0.1") for rank in range(size)]
    contacts = [RankAddress(rank, f"host{rank % 2}", rank, f"name {rank}") for rank in range(size) if rank != 1]
    return HandshakeResult("epoch", members, contacts, Tokens("a", "b"))


class Ranks:
    """The ranks of a job that exchange their addresses."""

    def __init__(self, size: int) -> None:
        self.store = MemoryStore()
        self.size = size
        self.sockets = [None if rank == 1 else ListeningSockets(rank, "run") for rank in range(size)]

    def start(self, rank: int, hints: dict[str, str] | None = None, limit: float = LIMIT) -> asyncio.Task[Any]:
        deadline = time.monotonic() + limit
        exchange = exchange_addresses(
            self.store, joined(self.size), self.sockets[rank], rank, hints or {"hostname": "127.0.0.1"}, deadline
        )
        return asyncio.create_task(exchange)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for sockets in self.sockets:
            if sockets is not None:
                sockets.close()


@pytest.fixture
def brief_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 stays for ranks that never read why it failed; the store of a test outlives it."""
    monkeypatch.setattr(module, "FAREWELL", 0.1)


async def outcomes(tasks: Sequence[Awaitable[Any]]) -> list[Any]:
    async with asyncio.timeout(LIMIT):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def test_all_ranks_learn_all_addresses() -> None:
    with Ranks(5) as ranks:
        found = await outcomes([ranks.start(rank) for rank in range(5)])
        assert found == [found[0]] * 5
        ports = {each.contact.rank: each.contact.port for each in ranks.sockets if each is not None}
        assert {contact.rank: contact.port for contact in found[0].contacts} == ports
        assert {contact.address for contact in found[0].contacts} == {"127.0.0.1"}
        assert [member.address for member in found[0].members] == ["127.0.0.1"] * 5


async def test_each_rank_but_the_first_makes_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    gets: Counter[str] = Counter()
    get = MemoryStore.get

    async def counted(store: MemoryStore, key: str, timeout: float | None = None) -> bytes:
        gets[key] += 1
        return await get(store, key, timeout)

    monkeypatch.setattr(MemoryStore, "get", counted)
    with Ranks(6) as ranks:
        await outcomes([ranks.start(rank) for rank in range(6)])
    assert gets == {"addresses": 5, **{f"address/{rank}": 1 for rank in range(6)}}


async def test_ranks_of_one_host_exchange_nothing() -> None:
    alone = joined(2)._replace(members=[RankInfo(rank, "host", rank, "0") for rank in range(2)])
    assert await exchange_addresses(MemoryStore(), alone, None, 0, {}, 0.0) is alone


@pytest.mark.parametrize("at", [0, 2])
async def test_a_rank_without_a_way_fails_all_ranks(at: int) -> None:
    with Ranks(3) as ranks:
        found = await outcomes([ranks.start(rank, {"interface": "no0"} if rank == at else None) for rank in range(3)])
    assert {type(error) for error in found} == {BackendError}
    assert len({str(error) for error in found}) == 1
    assert str(found[0]).startswith(f"rank {at} of 3: hint 'interface'='no0' names no interface")


@pytest.mark.usefixtures("brief_farewell")
async def test_missing_ranks_are_named_by_all_others() -> None:
    with Ranks(4) as ranks:
        two = ranks.start(2)
        async with asyncio.timeout(LIMIT):
            await ranks.store.wait(["address/2"])
        found = await outcomes([two, ranks.start(0, limit=0.2)])
    assert [str(error) for error in found] == [
        "ranks [1, 3] have met the others, and then not given their addresses"
    ] * 2


@pytest.mark.usefixtures("brief_farewell")
async def test_rank_0_is_missing() -> None:
    with Ranks(3) as ranks:
        found = await outcomes([ranks.start(rank, limit=0.2) for rank in (1, 2)])
    assert [str(error) for error in found] == ["ranks [0] have met the others, and then not given their addresses"] * 2


@pytest.mark.usefixtures("brief_farewell")
async def test_a_cancelled_rank_0_fails_the_others() -> None:
    with Ranks(3) as ranks:
        tasks = [ranks.start(rank) for rank in (0, 1)]
        async with asyncio.timeout(LIMIT):
            await ranks.store.wait(["address/0", "address/1"])
        tasks[0].cancel()
        found = await outcomes([*tasks, ranks.start(2)])
    assert isinstance(found[0], asyncio.CancelledError)
    assert [str(error) for error in found[1:]] == ["rank 0 of 3: it gave up connecting"] * 2


@pytest.mark.usefixtures("brief_farewell")
async def test_a_cancelled_rank_fails_the_others() -> None:
    with Ranks(3) as ranks:
        one = ranks.start(1)
        async with asyncio.timeout(LIMIT):
            await ranks.store.wait(["address/1"])
        one.cancel()
        assert isinstance((await outcomes([one]))[0], asyncio.CancelledError)
        found = await outcomes([ranks.start(rank) for rank in (0, 2)])
    assert [str(error) for error in found] == ["rank 1 of 3: it gave up connecting"] * 2


@pytest.mark.usefixtures("brief_farewell")
@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("address/1", b"nonsense", "rank 0 of 2: an address of a rank cannot be read: no JSON"),
        ("address/1", b'{"port": 70000}', "rank 0 of 2: an address of a rank cannot be read: "),
        ("addresses", b"nonsense", "the addresses that rank 0 has published cannot be read: a table must be"),
        ("addresses", pack_table([("", 0, "", 0)]), "cannot be read: .*must be of 2 ranks, got 1"),
        ("addresses", pack_table([("", 70000, "", 0)] * 2), "cannot be read: Expected `int` <= 65535"),
    ],
)
async def test_a_value_that_cannot_be_is_named(key: str, value: bytes, text: str) -> None:
    with Ranks(2) as ranks:
        await ranks.store.set(key, value)
        rank = int(key == "addresses")
        with pytest.raises(BackendError, match=text) as caught:
            async with asyncio.timeout(LIMIT):
                await ranks.start(rank)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(("rank", "method"), [(0, "wait"), (0, "check"), (1, "get")])
async def test_a_store_that_stops_ends_the_exchange_soon_after_its_limit(
    monkeypatch: pytest.MonkeyPatch, rank: int, method: str
) -> None:
    monkeypatch.setattr(module, "NOTICE", 0.05)
    with Ranks(2) as ranks:
        monkeypatch.setattr(ranks.store, method, lambda *_: asyncio.get_running_loop().create_future())
        found = await outcomes([ranks.start(rank, limit=0.1)])
    assert type(found[0]) is BackendError
    assert str(found[0]) == f"the store did not answer rank {rank} of 2, for the ranks' addresses"


async def test_the_error_of_a_rank_outlives_a_store_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FAREWELL", 0.05)
    with Ranks(2) as ranks:
        monkeypatch.setattr(ranks.store, "add", lambda *_: asyncio.get_running_loop().create_future())
        found = await outcomes([ranks.start(rank, {"interface": "no0"}) for rank in range(2)])
    assert all(str(error).startswith("rank 0 of 2: hint 'interface'='no0'") for error in found)


async def test_the_error_outlives_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object) -> int:
        raise StoreError("the connection was lost")

    with Ranks(2) as ranks:
        monkeypatch.setattr(ranks.store, "add", lost)
        found = await outcomes([ranks.start(rank, {"interface": "no0"}) for rank in range(2)])
    assert {type(error) for error in found} == {BackendError}


@pytest.mark.usefixtures("brief_farewell")
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_gives_up_before_the_exchange_ends_it(rank: int) -> None:
    with Ranks(3) as ranks:
        others = [ranks.start(other) for other in range(3) if other != rank]
        await abandon_exchange(ranks.store, joined(3).members, rank)
        for error in await outcomes(others):
            assert isinstance(error, BackendError)
            assert str(error) == f"rank {rank} of 3: it gave up connecting"


async def test_ranks_of_one_host_exchange_nothing_that_could_be_abandoned() -> None:
    store = MemoryStore()
    await abandon_exchange(store, [RankInfo(rank, "host", rank) for rank in range(2)], 0)
    assert await store.num_keys() == 0
