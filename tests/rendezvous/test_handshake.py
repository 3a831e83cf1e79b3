"""How ranks accept each other, on stores that are new, old, and full of lies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from asynccomm.control.transport.tables import pack_table
from asynccomm.control.transport.topology import RankAddress
from asynccomm.errors import RendezvousError, StoreError
from asynccomm.rendezvous import handshake as module
from asynccomm.rendezvous.handshake import MEMBERS_INLINE, HandshakeResult, handshake
from asynccomm.store.base import Store
from asynccomm.store.client import StoreClient
from asynccomm.store.memory import MemoryStore
from asynccomm.store.server import listen, serve

LIMIT = 20.0  # seconds; far more than any of these needs


@pytest.fixture(params=["memory", "tcp"])
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[list[Store]]:
    """One store as eight ranks see it."""
    if request.param == "memory":
        yield [MemoryStore()] * 8
        return
    hosted = serve("127.0.0.1", listen("127.0.0.1", 0))
    clients = [await StoreClient.connect("127.0.0.1", hosted.port) for _ in range(8)]
    yield list(clients)
    for client in clients:
        await client.aclose()
    hosted.release()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def start(store: Store, rank: int, size: int = 2, **changes: Any) -> asyncio.Task[HandshakeResult]:
    options = {"name": "world", "backend": "gloo", "timeout": LIMIT} | changes
    return asyncio.create_task(handshake(store, rank=rank, size=size, **options))


async def outcomes(*tasks: asyncio.Task[Any]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def check_same(results: list[HandshakeResult]) -> None:
    """All know the same."""
    tokens = [(joined.tokens.ask, joined.tokens.answer) for joined in results]
    assert all(joined._replace(tokens=results[0].tokens) == results[0] for joined in results)
    assert all(pair == tokens[0] for pair in tokens)


async def hello_of(store: Store, epoch: str, number: int) -> dict[str, Any]:
    hello: dict[str, Any] = json.loads(await store.get(f"world/{epoch}/hello/{number}"))
    return hello


async def test_eight_ranks_join_at_once(stores: list[Store]) -> None:
    results = await asyncio.gather(*(start(store, rank, 8) for rank, store in enumerate(stores)))
    check_same(results)
    assert results[0].epoch
    assert [member.rank for member in results[0].members] == list(range(8))


async def test_in_any_order_of_arrival(stores: list[Store]) -> None:
    tasks = []
    for rank in (5, 0, 7, 3, 1, 6, 2, 4):
        tasks.append(start(stores[rank], rank, 8))
        await stores[rank].check([])
    results = await asyncio.gather(*tasks)
    check_same(results)


async def test_a_world_of_one(store: MemoryStore) -> None:
    joined = await handshake(store, "world", 0, 1, "gloo", LIMIT)
    assert [member.rank for member in joined.members] == [0]


async def test_contacts_of_those_who_have_a_control_channel_are_shared(stores: list[Store]) -> None:
    contacts = [RankAddress(rank, "host", rank, f"name {rank}") if rank != 1 else None for rank in range(3)]
    results = await asyncio.gather(*(start(stores[rank], rank, 3, contact=contacts[rank]) for rank in range(3)))
    check_same(results)
    assert results[2].contacts == [contacts[0], contacts[2]]
    assert len({results[0].tokens.ask, results[0].tokens.answer}) == 2


async def test_a_long_list_of_ranks_is_stored_once(store: MemoryStore) -> None:
    size = MEMBERS_INLINE + 1
    results = await asyncio.gather(*(start(store, rank, size) for rank in range(size)))
    check_same(results)
    assert [member.rank for member in results[0].members] == list(range(size))
    values = {key.partition(f"{results[0].epoch}/")[2]: value for key, value in store._values.items()}
    assert all(len(value) < 200 for key, value in values.items() if key.startswith("answer/"))
    assert len(values["members"]) < 500


async def test_a_long_list_of_ranks_has_all_their_facts(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    size = MEMBERS_INLINE + 3
    monkeypatch.setattr(module, "host_name", lambda: "box-07")
    contacts = [RankAddress(rank, "box-07", 9 * rank, f"a/{rank}", f"fe80::{rank}", rank) for rank in range(size)]
    given: list[RankAddress | None] = [None if contact.rank % 5 == 1 else contact for contact in contacts]
    results = await asyncio.gather(
        *(start(store, rank, size, contact=given[rank], number=9 - rank) for rank in range(size))
    )
    check_same(results)
    assert [member.number for member in results[1].members] == [9 - rank for rank in range(size)]
    assert results[1].contacts == [contact for contact in given if contact is not None]
    assert {(member.host, member.network) for member in results[1].members} == {("box-07", "0")}


async def test_processes_that_share_a_number_have_the_numbers_of_their_ranks(store: MemoryStore) -> None:
    results = await asyncio.gather(*(start(store, rank, 3, number=7 - rank // 2) for rank in range(3)))
    check_same(results)
    assert [member.number for member in results[1].members] == [0, 1, 2]


def table(size: int, host: str = "h", network: str = "0", first: int = 0) -> bytes:
    return pack_table([[first + rank, host, 1, network, "", 0, 0, "", 0, "", "", 0] for rank in range(size)])


@pytest.mark.parametrize(
    ("members", "text"),
    [
        (b"[]", "a table must be compressed"),
        (zlib.compress(b"[]"), "Expected `object`, got `array`"),
        (pack_table([[0]]), "a table must have the columns int, str, "),
        (table(1), "the columns of a table must fit each other: they must be of 2 ranks, got 1"),
        (table(2, first=1), "members must be ranks 0 to 1"),
        (table(2, "h" * 2000), "the columns of a table must fit each other"),
        (table(2, network="a"), "members must have numbers for networks"),
        (table(2), "members must have this rank's"),
        (zlib.compress(b"[]")[:-1], "a table must have at most"),
        (zlib.compress(b" " * (1 << 20)), "a table must have at most"),
    ],
)
async def test_a_list_of_ranks_that_cannot_be_is_an_error(store: MemoryStore, members: bytes, text: str) -> None:
    task = start(store, 1)
    await store.set("world/epoch", "e")
    await store.wait(["world/e/hello/1"])
    nonce = (await hello_of(store, "e", 1))["nonce"]
    await store.set("world/e/members", members)
    answer = {"kind": "_Answer", "members": None, "tokens": {"ask": "a", "answer": "b"}}
    await store.set(f"world/e/answer/{nonce}", json.dumps(answer))
    with pytest.raises(RendezvousError, match=f"the answer of rank 0 cannot be read: {text}"):
        await task


async def test_names_are_worlds_of_their_own(store: MemoryStore) -> None:
    tasks = [start(store, rank, name=name) for name in ("a", "b") for rank in range(2)]
    a0, a1, b0, b1 = await asyncio.gather(*tasks)
    check_same([a0, a1])
    check_same([b0, b1])
    assert a0.epoch != b0.epoch
    assert a0.tokens.ask != b0.tokens.ask


async def test_a_name_can_be_used_again_and_again(stores: list[Store]) -> None:
    epochs = set()
    for _ in range(5):
        tasks = [start(stores[rank], rank, 3) for rank in (2, 1)]
        for _ in range(5):  # they read the epoch of the life before, and claim to be there
            await stores[0].check([])
        results = await asyncio.gather(start(stores[0], 0, 3), *tasks)
        assert len({joined.epoch for joined in results}) == 1
        epochs.add(results[0].epoch)
    assert len(epochs) == 5


async def test_a_stale_rejection_is_not_believed(stores: list[Store]) -> None:
    old = await outcomes(start(stores[0], 0), start(stores[1], 1, size=3))
    assert all(isinstance(result, RendezvousError) for result in old)
    again = start(stores[1], 1)
    for _ in range(5):
        await stores[0].check([])
    zero, one = await asyncio.gather(start(stores[0], 0), again)
    check_same([zero, one])


async def test_a_stale_world_that_waits_is_left(store: MemoryStore) -> None:
    abandoned = start(store, 0, 3)
    one = start(store, 1, 3)
    await hello_of(store, (await store.get("world/epoch")).decode(), 1)
    abandoned.cancel()  # as if killed: it says nothing
    results = await asyncio.gather(start(store, 0, 3), one, start(store, 2, 3))
    check_same(results)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"size": 4}, "size differs: rank 0 has 3, rank 2 has 4"),
        ({"backend": "nccl"}, "backend differs: rank 0 has 'gloo', rank 2 has 'nccl'"),
        ({"ordering": "agreed"}, "ordering differs: rank 0 has 'program', rank 2 has 'agreed'"),
    ],
)
async def test_what_differs_is_said_on_all_ranks(stores: list[Store], changes: dict[str, Any], text: str) -> None:
    one, two = start(stores[1], 1, 3), start(stores[2], 2, **{"size": 3, **changes})
    results = await outcomes(start(stores[0], 0, 3), one, two)
    for result in results:
        assert isinstance(result, RendezvousError)
        assert str(result) == f"comm 'world': {text}"


async def test_the_reason_outlives_the_store_of_rank_0(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, which may host the store, ends once the others have read the reason: the last round trip fails."""

    async def lost(keys: list[str]) -> bool:
        if keys:
            return all(key in store._values for key in keys)
        raise StoreError("the connection was lost")

    monkeypatch.setattr(store, "check", lost)
    results = await outcomes(start(store, 0, 3), start(store, 1, 3), start(store, 2, 3, backend="nccl"))
    for result in results:
        assert isinstance(result, RendezvousError), result
        assert "backend differs" in str(result)


async def test_other_versions_are_refused(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    zero = start(store, 0)
    await store.get("world/epoch")
    monkeypatch.setattr(module, "__version__", "0.0.0")
    zero_result, one_result = await outcomes(zero, start(store, 1))
    assert isinstance(zero_result, RendezvousError)
    assert "version differs: rank 0 has" in str(zero_result)
    assert str(one_result) == str(zero_result)


async def test_those_who_come_soon_after_the_misfit_are_told_too(store: MemoryStore) -> None:
    zero, one = start(store, 0, 3), start(store, 1, 3, backend="nccl")
    await hello_of(store, (await store.get("world/epoch")).decode(), 1)
    for _ in range(20):  # rank 0 knows by now
        await asyncio.sleep(0)
    results = await outcomes(zero, one, start(store, 2, 3))
    assert {str(result) for result in results} == {
        "comm 'world': backend differs: rank 0 has 'gloo', rank 1 has 'nccl'"
    }


async def test_nobody_waits_long_for_those_who_do_not_come_after_a_misfit(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE", 0.05)
    async with asyncio.timeout(LIMIT / 2):
        results = await outcomes(start(store, 0, 4), start(store, 1, 4, backend="nccl"))
    assert all("backend differs" in str(result) for result in results)


async def test_a_rank_beyond_the_world_is_told(stores: list[Store]) -> None:
    results = await outcomes(start(stores[0], 0, 2), start(stores[5], 5, 6))
    for result in results:
        assert isinstance(result, RendezvousError)
        assert "size differs: rank 0 has 2, rank 5 has 6" in str(result)


async def test_a_rank_that_was_cancelled_may_try_again(stores: list[Store]) -> None:
    zero = start(stores[0], 0, 3)
    epoch = (await stores[1].get("world/epoch", 10.0)).decode()
    first = start(stores[1], 1, 3)
    await stores[2].wait([f"world/{epoch}/hello/1"], 10.0)
    first.cancel()
    await asyncio.wait([first])
    results = await outcomes(zero, start(stores[1], 1, 3), start(stores[2], 2, 3))
    assert [len(result.members) for result in results] == [3, 3, 3]


async def test_a_rank_taken_twice_is_said_on_all_ranks(stores: list[Store]) -> None:
    results = await outcomes(start(stores[0], 0, 3), start(stores[1], 1, 3), start(stores[2], 1, 3))
    for result in results:
        assert isinstance(result, RendezvousError)
        assert "rank 1 is taken twice, by process" in str(result)


async def test_hosts_of_one_name_get_numbers(stores: list[Store], monkeypatch: pytest.MonkeyPatch) -> None:
    networks = iter(["a", "b", "a", "c", "b"])
    monkeypatch.setattr(module, "network_id", lambda: next(networks))
    monkeypatch.setattr(module, "host_name", lambda: "box")
    contacts = [RankAddress(rank, "box", 1, "name") for rank in range(5)]
    tasks = [start(stores[rank], rank, 5, contact=contacts[rank]) for rank in range(5)]
    results = await outcomes(*tasks)
    check_same(results)
    assert [member.host for member in results[0].members] == ["box", "box#2", "box", "box#3", "box#2"]
    assert [member.network for member in results[0].members] == ["0", "1", "0", "2", "1"]
    assert [contact.host for contact in results[0].contacts] == ["box", "box#2", "box", "box#3", "box#2"]


async def test_the_address_that_leads_to_the_store_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = iter(["127.0.0.1", "10.0.0.2", None])
    store = MemoryStore()
    monkeypatch.setattr(MemoryStore, "local_address", lambda self: next(ways))
    results = await outcomes(*(start(store, rank, 3) for rank in range(3)))
    assert [member.address for member in results[0].members] == ["", "10.0.0.2", ""]


async def test_two_ranks_zero(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FAREWELL", 0.05)  # the other never says that it heard
    other = {
        "rank": 0,
        "size": 2,
        "backend": "gloo",
        "ordering": "program",
        "version": module.__version__,
        "host": "h",
        "pid": 1,
        "network": "a",
        "nonce": "n",
    }
    zero = start(store, 0)
    epoch = (await store.get("world/epoch")).decode()
    await store.set(f"world/{epoch}/hello/{await store.add(f'world/{epoch}/arrivals', 1)}", json.dumps(other))
    with pytest.raises(RendezvousError, match="rank 0 is taken twice"):
        await zero


async def test_missing_ranks_are_named_at_the_deadline(stores: list[Store]) -> None:
    one = start(stores[1], 1, 4)
    await stores[1].check([])
    zero_result, one_result = await outcomes(start(stores[0], 0, 4, timeout=0.3), one)
    for result in (zero_result, one_result):
        assert isinstance(result, RendezvousError)
        assert str(result) == "comm 'world': ranks [2, 3] of 4 did not come within 0.3 s"


async def test_ranks_with_one_deadline_all_learn_of_the_missing(stores: list[Store]) -> None:
    results = await outcomes(start(stores[0], 0, 4, timeout=1), start(stores[1], 1, 4, timeout=1))
    assert [str(result) for result in results] == ["comm 'world': ranks [2, 3] of 4 did not come within 1 s"] * 2


async def test_without_rank_0(store: MemoryStore) -> None:
    with pytest.raises(RendezvousError, match=r"rank 0 did not come within 0\.05 s \(this is rank 1\)"):
        await handshake(store, "world", 1, 2, "gloo", 0.05)


async def test_a_rank_that_nobody_answers(store: MemoryStore) -> None:
    await store.set("world/epoch", "from an earlier life")
    with pytest.raises(RendezvousError, match=r"rank 0 did not answer within 0\.2 s: .* \(this is rank 1\)"):
        await handshake(store, "world", 1, 2, "gloo", 0.2)


async def test_a_rank_that_went_away_in_the_middle_of_its_hello(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_LOOK", 0.05)
    zero = start(store, 0)
    epoch = (await store.get("world/epoch")).decode()
    assert await store.add(f"world/{epoch}/arrivals", 1) == 1  # and no hello/1
    zero_result, one_result = await asyncio.gather(zero, start(store, 1))
    check_same([zero_result, one_result])


@pytest.mark.parametrize("size", [2, 3])
async def test_a_hello_that_comes_after_rank_0_has_read_its_number(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    numbered, waiting = asyncio.Event(), asyncio.Event()

    class SlowStore(MemoryStore):
        async def add(self, key: str, amount: int) -> int:
            if amount == 0:
                await numbered.wait()
            total = await super().add(key, amount)
            if total == size - 1:
                numbered.set()
            return total

        async def set(self, key: str, value: bytes | str) -> None:
            if key.endswith("/hello/1"):
                await waiting.wait()
            await super().set(key, value)

        async def wait(self, keys: Sequence[str], timeout: float | None = None) -> None:
            if keys[0].endswith(f"/hello/{size}"):
                waiting.set()
            await super().wait(keys, timeout)

    monkeypatch.setattr(module, "LAST_LOOK", 2 * LIMIT)
    store = SlowStore()
    check_same(await asyncio.gather(*(start(store, rank, size) for rank in range(size))))


async def test_rank_0_lets_the_others_read_why_before_it_leaves(store: MemoryStore) -> None:
    zero = start(store, 0)
    epoch = (await store.get("world/epoch")).decode()
    one = start(store, 1, 3)
    nonce = (await hello_of(store, epoch, 1))["nonce"]
    await store.get(f"world/{epoch}/answer/{nonce}")
    with pytest.raises(RendezvousError):
        await zero
    assert await store.check([f"world/{epoch}/heard/{nonce}"])
    await outcomes(one)


@pytest.mark.parametrize("rank", [0, 1])
async def test_joining_can_be_cancelled_anywhere(stores: list[Store], rank: int) -> None:
    for turns in range(0, 40, 3):
        name = f"world{turns}"
        leaver = start(stores[rank], rank, 2, name=name)
        for _ in range(turns):
            await asyncio.sleep(0)
        leaver.cancel()
        assert isinstance((await outcomes(leaver))[0], asyncio.CancelledError)
        await stores[rank].check([])
    zero, one = await asyncio.gather(start(stores[0], 0), start(stores[1], 1))
    check_same([zero, one])


async def test_joining_obeys_a_timeout_from_outside(store: MemoryStore) -> None:
    for rank in (0, 1):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await handshake(store, f"world{rank}", rank, 2, "gloo", LIMIT)


async def test_the_store_is_lost_meanwhile() -> None:
    hosted = serve("127.0.0.1", listen("127.0.0.1", 0))
    client = await StoreClient.connect("127.0.0.1", hosted.port)
    task = start(client, 1)
    await client.ping()
    hosted.release()
    with contextlib.suppress(RendezvousError):
        results = await outcomes(task)
        assert "lost" in str(results[0])
    await client.aclose()


@pytest.mark.parametrize(("rank", "method"), [(0, "add"), (0, "check"), (1, "get"), (1, "add")])
async def test_a_store_that_stops_ends_the_handshake_soon_after_its_limit(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, rank: int, method: str
) -> None:
    monkeypatch.setattr(module, "NOTICE", 0.05)
    others = []
    if rank == 1:
        await store.set("world/epoch", "e")
    elif method == "check":  # to learn that the answers are stored
        others.append(start(store, 1))
    monkeypatch.setattr(store, method, lambda *_: asyncio.get_running_loop().create_future())
    async with asyncio.timeout(LIMIT):
        results = await outcomes(start(store, rank, timeout=0.1), *others)
    assert type(results[0]) is RendezvousError
    assert str(results[0]) == f"comm 'world': the store did not answer within 0.1 s (this is rank {rank})"


async def test_rank_0_does_not_wait_for_a_rank_that_has_withdrawn(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAREWELL", 2 * LIMIT)
    zero = start(store, 0, 3, timeout=0.6)
    one = start(store, 1, 3)
    epoch = (await store.get("world/epoch")).decode()
    await store.wait([f"world/{epoch}/hello/1"], LIMIT)
    one.cancel()
    async with asyncio.timeout(LIMIT):
        results = await outcomes(zero, one)
    assert str(results[0]) == "comm 'world': ranks [2] of 3 did not come within 0.6 s"


class Beside:
    """Stands for a meeting over a control channel, which does not begin."""

    def __init__(self, key: str = "key", *, absent: set[int] | None = None) -> None:
        self.key = key
        self.called_off = False
        self.asked = 0
        self._absent = absent or set()

    def absent(self) -> set[int]:
        return self._absent

    async def failed(self, limit: float) -> bool:
        self.asked += 1
        await asyncio.sleep(0.0 if self.called_off else limit)
        return self.called_off


async def test_ranks_that_come_to_one_meeting_are_not_answered(store: MemoryStore) -> None:
    beside = Beside()
    results = await outcomes(*(start(store, rank, beside=beside, timeout=0.6) for rank in range(2)))
    for result in results:
        assert isinstance(result, RendezvousError)
        assert "the ranks did not meet over their control channel within 0.6 s" in str(result)
    assert beside.asked


async def test_ranks_are_answered_once_their_meeting_is_called_off(store: MemoryStore) -> None:
    beside = Beside()
    tasks = [start(store, rank, beside=beside) for rank in range(2)]
    while not beside.asked:
        await asyncio.sleep(0)
    beside.called_off = True
    check_same(await asyncio.gather(*tasks))


async def test_ranks_that_come_to_different_meetings_are_answered(store: MemoryStore) -> None:
    check_same(await asyncio.gather(*(start(store, rank, beside=Beside(f"key {rank}")) for rank in range(2))))


async def test_a_rank_that_has_withdrawn_from_the_meeting_is_missing(store: MemoryStore) -> None:
    beside = Beside(absent={0, 1})  # as rank 0 sees it once the meeting has begun
    results = await outcomes(*(start(store, rank, beside=beside, timeout=1.2) for rank in range(2)))
    assert isinstance(results[0], RendezvousError)
    assert "ranks [1] of 2 did not come within 1.2 s" in str(results[0])
