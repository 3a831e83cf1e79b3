"""News between ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asynccomm.bulletin import Bulletin
from asynccomm.errors import ClosedError
from asynccomm.store.base import Store
from asynccomm.store.client import StoreClient
from asynccomm.store.host import listen, serve
from asynccomm.store.memory import MemoryStore


class Reader:
    """A rank: what it heard, and a way to wait for it."""

    def __init__(self, store: Store, rank: int) -> None:
        self.heard: list[dict[str, Any]] = []
        self._more = asyncio.Event()
        self.bulletin = Bulletin(store.prefix("comm"), rank, self._on_news)

    def _on_news(self, item: dict[str, Any]) -> None:
        self.heard.append(item)
        self._more.set()

    async def until(self, count: int) -> list[dict[str, Any]]:
        while len(self.heard) < count:
            self._more.clear()
            await self._more.wait()
        return self.heard


@pytest.fixture(params=["memory", "tcp"])
async def readers(request: pytest.FixtureRequest) -> AsyncIterator[list[Reader]]:
    if request.param == "memory":
        stores: list[Store] = [MemoryStore()] * 3
    else:
        hosted = serve("127.0.0.1", listen("127.0.0.1", 0))
        stores = [await StoreClient.connect("127.0.0.1", hosted.port) for _ in range(3)]
    readers = [Reader(store, rank) for rank, store in enumerate(stores)]
    yield readers
    for reader, store in zip(readers, stores, strict=True):
        await reader.bulletin.aclose()
        await store.aclose()


async def test_all_others_hear_what_is_posted_in_order(readers: list[Reader]) -> None:
    zero, one, two = readers
    assert await zero.bulletin.post(kind="a", value=1) == 0
    assert await one.bulletin.post(kind="b") == 1
    assert await two.until(2) == [
        {"rank": 0, "number": 0, "kind": "a", "value": 1},
        {"rank": 1, "number": 1, "kind": "b"},
    ]
    assert await zero.until(1) == [{"rank": 1, "number": 1, "kind": "b"}]
    assert await one.until(1) == [{"rank": 0, "number": 0, "kind": "a", "value": 1}]


async def test_many_posts_at_once(readers: list[Reader]) -> None:
    numbers = await asyncio.gather(*(readers[i % 2].bulletin.post(i=i) for i in range(40)))
    assert sorted(numbers) == list(range(40))
    heard = await readers[2].until(40)
    assert [item["number"] for item in heard] == list(range(40))
    assert sorted(item["i"] for item in heard) == list(range(40))


async def test_look_sees_what_the_watch_has_not_yet_told(readers: list[Reader]) -> None:
    zero, one, _ = readers
    assert await one.bulletin.look() == []
    one.bulletin.cancel()
    await zero.bulletin.post(kind="a")
    await one.bulletin.post(kind="own")
    await zero.bulletin.post(kind="b")
    assert [item["kind"] for item in await one.bulletin.look()] == ["a", "b"]
    assert [item["kind"] for item in await one.bulletin.look()] == ["a", "b"]  # looking takes nothing away
    assert one.heard == []


async def test_what_was_heard_is_not_looked_at_again(readers: list[Reader]) -> None:
    zero, one, _ = readers
    await zero.bulletin.post(kind="a")
    await one.until(1)
    assert await one.bulletin.look() == []


async def test_a_roll_call(readers: list[Reader]) -> None:
    zero, one, two = readers
    number = await zero.bulletin.post(kind="who")
    await one.until(1)
    await one.bulletin.reply(number, seq=4)
    assert await zero.bulletin.replies(number, [1, 2], 0.02) == {1: {"seq": 4}}
    asking = asyncio.create_task(zero.bulletin.replies(number, [1, 2], 20))
    await two.until(1)
    await two.bulletin.reply(number, seq=5)
    assert await asking == {1: {"seq": 4}, 2: {"seq": 5}}
    assert await zero.bulletin.replies(number, [], 20) == {}


async def test_a_lost_store_is_no_news() -> None:
    hosted = serve("127.0.0.1", listen("127.0.0.1", 0))
    store = await StoreClient.connect("127.0.0.1", hosted.port)
    reader = Reader(store, 0)
    await store.ping()
    hosted.release()
    await reader.bulletin._task  # ends by itself, without an error
    assert reader.heard == []
    await reader.bulletin.aclose()
    await store.aclose()


async def test_a_closed_store_is_no_news() -> None:
    hosted = serve("127.0.0.1", listen("127.0.0.1", 0))
    store = await StoreClient.connect("127.0.0.1", hosted.port)
    reader = Reader(store, 0)
    await store.aclose()
    await reader.bulletin._task
    with pytest.raises(ClosedError):
        await reader.bulletin.post(kind="a")
    await reader.bulletin.aclose()
    hosted.release()


async def test_what_cannot_be_told_takes_no_number(readers: list[Reader]) -> None:
    zero, one, _ = readers
    with pytest.raises(TypeError, match="bytes"):
        await zero.bulletin.post(kind=b"a")
    assert await zero.bulletin.post(kind="b") == 0
    assert [item["kind"] for item in await one.until(1)] == ["b"]


async def test_closing_raises_what_the_watch_failed_with() -> None:
    store = MemoryStore()

    def misread(item: dict[str, Any]) -> None:
        raise ZeroDivisionError("cannot divide")

    bulletin = Bulletin(store, 0, misread)
    other = Reader(MemoryStore(), 1)
    other.bulletin._store = store.prefix("news")
    await other.bulletin.post(kind="a")
    await asyncio.wait([bulletin._task])
    with pytest.raises(ZeroDivisionError, match="cannot divide"):
        await bulletin.aclose()
    await other.bulletin.aclose()


async def test_closing_twice_is_fine() -> None:
    reader = Reader(MemoryStore(), 0)
    reader.bulletin.cancel()
    await reader.bulletin.aclose()
    await reader.bulletin.aclose()
