"""What may lie in a store where ranks look for each other: nobody is brought down by it, and nobody waits longer."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from typing import Any

import pytest

from asynccomm.control.transport.topology import RankAddress
from asynccomm.errors import RendezvousError
from asynccomm.rendezvous import handshake as module
from asynccomm.rendezvous.handshake import HandshakeResult, handshake
from asynccomm.store.memory import MemoryStore

from .mutations import little_memory, mutated

LIMIT = 20.0  # seconds; far more than any of these needs


def start(store: MemoryStore, rank: int, size: int = 2, timeout: float = LIMIT) -> asyncio.Task[HandshakeResult]:
    contact = RankAddress(rank, "host", 7, local="name")
    return asyncio.create_task(handshake(store, "world", rank, size, "gloo", timeout, contact=contact))


async def room_of(store: MemoryStore) -> str:
    return f"world/{(await store.get('world/epoch')).decode()}"


HELLO: dict[str, Any] = {
    "rank": 1,
    "size": 2,
    "backend": "gloo",
    "ordering": "program",
    "version": module.__version__,
    "host": "h",
    "pid": 1,
    "network": "a",
    "nonce": "0123456789abcdef",
    "contact": None,
}
NO_HELLOS = [
    b"",
    b"nonsense",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"9" * 10_000,
    b"null",
    b"[1]",
    b"{}",
    json.dumps({**HELLO, "padding": "x" * 20_000}).encode(),
    *(
        json.dumps({key: value for key, value in HELLO.items() if key != gone}).encode()
        for gone in HELLO
        if gone != "contact"
    ),
    *(
        json.dumps({**HELLO, **change}).encode()
        for change in (
            {"rank": True},
            {"rank": -1},
            {"rank": 2},
            {"rank": 1.0},
            {"rank": "1"},
            {"rank": None},
            {"rank": [1]},
            {"size": True},
            {"size": "2"},
            {"size": 0},
            {"backend": 3},
            {"backend": "g" * 2000},
            {"ordering": None},
            {"version": 3},
            {"host": 5},
            {"pid": "7"},
            {"pid": False},
            {"network": 1},
            {"address": None},
            {"nonce": 5},
            {"nonce": ""},
            {"nonce": "a/../b"},
            {"nonce": "a" * 65},
            {"contact": 5},
            {"contact": {}},
            {"contact": {"rank": 0, "host": "h", "pid": 1}},
            {"contact": {"rank": 1, "host": "h", "pid": 1, "port": 1 << 16}},
            {"contact": {"rank": 1, "host": "h", "pid": 1, "more": 1}},
        )
    ),
]


@pytest.mark.parametrize("text", NO_HELLOS, ids=lambda text: repr(text[:60]))
async def test_what_is_no_hello_is_passed_over(
    store: MemoryStore, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    caplog.set_level(logging.WARNING, "asynccomm")
    zero = start(store, 0)
    room = await room_of(store)
    for _ in range(2):
        await store.set(f"{room}/hello/{await store.add(f'{room}/arrivals', 1)}", text)
    results = await asyncio.gather(zero, start(store, 1))
    assert results[0].members == results[1].members
    assert [contact.rank for contact in results[0].contacts] == [0, 1]
    assert len(caplog.records) == 1
    assert "comm 'world' ignores a hello that is not of its ranks" in caplog.text
    assert len(caplog.text) < 1000


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.mark.parametrize("seed", range(5))
async def test_hellos_that_are_almost_right(store: MemoryStore, seed: int) -> None:
    """Rank 0 goes on or says what does not fit; nothing else is raised."""
    choose = random.Random(seed)
    right = json.dumps({**HELLO, "rank": 1}).encode()
    for _ in range(200):
        text = mutated(right, choose)
        try:
            found = module._hello(text, module.__version__)
        except module.MessageError:
            continue
        module._mismatch(module.decode(module._Hello, {**HELLO, "rank": 0}), found, {})


async def test_a_hello_that_is_said_again_is_nobodys(store: MemoryStore) -> None:
    zero = start(store, 0, 3)
    room = await room_of(store)
    one = start(store, 1, 3)
    text = await store.get(f"{room}/hello/1")
    await store.set(f"{room}/hello/{await store.add(f'{room}/arrivals', 1)}", text)
    results = await asyncio.gather(zero, one, start(store, 2, 3))
    assert results[0].members == results[2].members


@pytest.mark.parametrize("jump", [1000, 1 << 40])
@pytest.mark.parametrize("before", [True, False])
async def test_a_counter_that_jumps(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, jump: int, before: bool
) -> None:
    monkeypatch.setattr(module, "LAST_LOOK", 0.02)
    with little_memory(64 << 20):
        zero = start(store, 0, 3)
        room = await room_of(store)
        first = start(store, 1, 3)
        if not before:
            await store.get(f"{room}/hello/1")
        await store.add(f"{room}/arrivals", jump)
        async with asyncio.timeout(LIMIT):
            results = await asyncio.gather(zero, first, start(store, 2, 3))
    assert results[0].members == results[1].members == results[2].members


@pytest.mark.parametrize("count", [1 << 40, -5])
async def test_nobody_comes_but_the_counter_moves(store: MemoryStore, count: int) -> None:
    zero = start(store, 0, timeout=0.2)
    await store.add(f"{await room_of(store)}/arrivals", count)
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=r"ranks \[1\] of 2 did not come"):
        await zero
    assert time.monotonic() - began < LIMIT / 2


async def test_a_hello_of_a_number_that_nobody_was_given(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    add = store.add

    async def counted(key: str, amount: int) -> int:
        nonlocal looks
        looks += 1
        return await add(key, amount)

    monkeypatch.setattr(store, "add", counted)
    zero = start(store, 0, timeout=0.3)
    await store.set(f"{await room_of(store)}/hello/1", "nonsense")
    with pytest.raises(RendezvousError, match="did not come"):
        await zero
    assert looks < 20  # it does not look all the time


async def test_many_that_are_no_hellos(store: MemoryStore) -> None:
    zero = start(store, 0)
    room = await room_of(store)
    for number in range(1, 3001):
        await store.set(f"{room}/hello/{number}", b"{}")
    await store.add(f"{room}/arrivals", 3000)
    results = await asyncio.gather(zero, start(store, 1))
    assert results[0].members == results[1].members


async def test_a_hello_that_is_gone_again(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    zero = start(store, 0, timeout=0.3)
    room = await room_of(store)
    await store.add(f"{room}/arrivals", 1)
    monkeypatch.setattr(module, "LAST_LOOK", 0.02)

    async def there(keys: object) -> bool:
        return True

    monkeypatch.setattr(store, "check", there)
    async with asyncio.timeout(LIMIT):
        with pytest.raises(RendezvousError, match="did not come"):
            await zero


# -- a rank that asks -------------------------------------------------------------------------------------------------


async def answered(store: MemoryStore, change: Any) -> BaseException | HandshakeResult:
    """What rank 1 makes of an answer; ``change`` makes it of the right one."""
    await store.set("world/epoch", "abc")
    one = start(store, 1)
    hello = json.loads(await store.get("world/abc/hello/1"))
    mine = {key: hello[key] for key in ("rank", "host", "pid", "network", "address", "number", "contact")}
    mine["network"] = "0"
    members = [{**mine, "rank": 0, "number": 0, "contact": None}, mine]
    right = {"kind": "_Answer", "members": members, "tokens": {"ask": "a", "answer": "b"}}
    text = change(right)
    await store.set(f"world/abc/answer/{hello['nonce']}", text if isinstance(text, bytes) else json.dumps(text))
    async with asyncio.timeout(LIMIT):
        return (await asyncio.gather(one, return_exceptions=True))[0]


def members(change: Any) -> Any:
    return lambda right: {**right, "members": change(right["members"])}


def other(of: int, **changes: Any) -> Any:
    return members(lambda them: [{**m, **changes} if m["rank"] == of else m for m in them])


ANSWERS = [
    lambda right: b"nonsense",
    lambda right: b"[" * 50_000,
    lambda right: b"\xff",
    lambda right: b"{}" + b" " * (1 << 20),
    lambda right: [],
    lambda right: {},
    lambda right: {"kind": "_Rejection", "reason": 5},
    lambda right: {"kind": "_Rejection", "reason": "x" * (1 << 16)},
    lambda right: {"kind": "_Answer", "members": right["members"]},
    lambda right: {**right, "tokens": []},
    lambda right: {**right, "tokens": {"ask": "a"}},
    lambda right: {**right, "tokens": {"ask": "a", "answer": ""}},
    lambda right: {**right, "tokens": {"ask": "a", "answer": 5}},
    lambda right: {**right, "tokens": "ab"},
    members(lambda them: []),
    members(lambda them: them[:1]),
    members(lambda them: [*them, them[1]]),
    members(lambda them: them[::-1]),
    members(lambda them: "ab"),
    members(lambda them: [1, 2]),
    members(lambda them: {"0": 1, "1": 2}),
    other(0, rank=False),
    other(0, rank=5),
    other(0, host=None),
    other(0, pid="1"),
    other(0, contact=7),
    other(0, contact={"rank": 1, "host": "h", "pid": 1}),
    other(1, pid=-1),
    other(1, host="another"),
    other(1, network="another"),
    other(1, address="10.0.0.1"),
    other(1, contact=None),
]


@pytest.mark.parametrize("change", ANSWERS)
async def test_what_is_no_answer_is_named(store: MemoryStore, change: Any) -> None:
    found = await answered(store, change)
    assert type(found) is RendezvousError
    assert "comm 'world': the answer of rank 0 cannot be read: " in str(found)
    assert len(str(found)) < 1000


async def test_the_right_answer(store: MemoryStore) -> None:
    found = await answered(store, lambda right: right)
    assert isinstance(found, HandshakeResult)
    assert (found.tokens.ask, found.tokens.answer) == ("a", "b")


@pytest.mark.parametrize("epoch", [b"\xff\xfe", b"a/b", b"x" * 65, b"x" * 100_000, b"a\nb", b"\0"])
async def test_what_is_no_epoch_is_named_at_the_deadline(store: MemoryStore, epoch: bytes) -> None:
    await store.set("world/epoch", epoch)
    with pytest.raises(RendezvousError, match=r"within 0\.2 s: in the place of its epoch is b['\"]") as caught:
        await start(store, 1, timeout=0.2)
    assert len(str(caught.value)) < 1000


async def test_rank_0_writes_over_what_is_no_epoch(store: MemoryStore) -> None:
    await store.set("world/epoch", b"\xff")
    one = start(store, 1)
    await asyncio.sleep(0)
    results = await asyncio.gather(start(store, 0), one)
    assert results[0].members == results[1].members


async def test_what_was_seen_is_not_looked_at_again(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    first = asyncio.ensure_future(handshake(store, "main", 0, 3, "loopback", 10))
    second = asyncio.ensure_future(handshake(store, "main", 1, 3, "loopback", 10))
    async with asyncio.timeout(10):
        while not second.done() and not any("answer" in key for key in store._values):
            await asyncio.sleep(0.001)
            if len([key for key in store._values if "/hello/" in key]) == 1:
                break
    for _ in range(50):  # rank 0 has taken that hello by now, and waits for the next one
        await asyncio.sleep(0)
    await asyncio.gather(first, second, handshake(store, "main", 2, 3, "loopback", 10))
    assert not caplog.records
