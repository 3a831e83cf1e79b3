"""The lobby: who waits there, who is still there, and how they are invited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from asynccomm import MemoryStore, StoreError
from asynccomm.control.transport.connection import Tokens
from asynccomm.control.transport.schema import dumps, loads
from asynccomm.control.transport.topology import RankAddress
from asynccomm.rendezvous import lobby as newcomers_module
from asynccomm.rendezvous.lobby import Invitation, Lobby

CONTACTS = [RankAddress(0, "here", 10, "name"), RankAddress(1, "there", 11, "", "1.2.3.4", 5)]
INVITATION = Invitation("key", [1, 0], CONTACTS, Tokens("ask", "answer"), "gloo", ["gloo"], "agreed")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomers_module, "ANSWER_SECONDS", 0.05)


@asynccontextmanager
async def newcomer(lobby: Lobby) -> AsyncIterator[tuple[str, asyncio.Task[Invitation]]]:
    async with lobby.enter() as here:
        task = asyncio.ensure_future(here.invited())
        try:
            yield here.name, task
        finally:
            task.cancel()
            await asyncio.wait([task])


def test_an_invitation_travels() -> None:
    found = loads(Invitation, dumps(INVITATION))
    assert found == INVITATION


async def test_nobody_waits() -> None:
    assert await Lobby(MemoryStore(), "c").waiting() == []


async def test_those_who_wait_are_seen_in_their_order_and_only_in_their_lobby() -> None:
    store = MemoryStore()
    lobby = Lobby(store, "c")
    async with newcomer(lobby) as (a, _), newcomer(Lobby(store, "other")), newcomer(lobby) as (b, _):
        for _ in range(3):
            assert await lobby.waiting() == [a, b]
        assert a != b
    assert await lobby.waiting() == []  # they have gone


async def test_several_may_ask_at_once() -> None:
    lobby = Lobby(MemoryStore(), "c")
    async with newcomer(lobby) as (a, _):
        assert await asyncio.gather(*(lobby.waiting() for _ in range(5))) == [[a]] * 5


async def test_asking_leaves_nothing_in_the_store() -> None:
    store = MemoryStore()
    lobby = Lobby(store, "c")
    async with newcomer(lobby):
        await lobby.waiting()
        before = await store.num_keys()
        for _ in range(5):
            await lobby.waiting()
        assert await store.num_keys() == before


async def test_one_that_does_not_answer_is_not_there() -> None:
    lobby = Lobby(MemoryStore(), "c")
    async with lobby.enter() as dead, newcomer(lobby) as (a, _):
        assert dead._answering is not None
        dead._answering.cancel()
        assert await lobby.waiting() == [a]


async def test_an_invitation_reaches_whom_it_is_for() -> None:
    lobby = Lobby(MemoryStore(), "c")
    async with newcomer(lobby) as (a, first), newcomer(lobby) as (b, second):
        await lobby.invite([b], INVITATION)
        await lobby.invite([b], INVITATION)
        assert (await second).key == "key"
        assert await lobby.waiting() == [a, b]  # the call that invited it may be rejected
        assert not first.done()


async def test_a_newcomer_that_has_left_is_not_seen() -> None:
    lobby = Lobby(MemoryStore(), "c")
    async with lobby.enter() as here:
        assert await lobby.waiting() == [here.name]
        for _ in range(2):
            await here.leave()
            assert await lobby.waiting() == []


async def test_a_store_that_fails_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    lobby = Lobby(store, "c")

    async def fail(keys: Sequence[str], timeout: float | None = None) -> None:
        raise StoreError("it has gone")

    monkeypatch.setattr(store, "wait", fail)
    async with newcomer(lobby) as (_, task):
        with pytest.raises(StoreError, match="it has gone"):
            await task
