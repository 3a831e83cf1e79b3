"""A newcomer's connection: to whoever is the root, and away from it in good order. The roots are the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from asynccomm.control.membership import joiner as guest_module
from asynccomm.control.membership.joiner import Joiner
from asynccomm.control.membership.messages import (
    Commit,
    CoordinatorOrder,
    Excluded,
    Finalized,
    Prepare,
    Rejected,
    Retry,
    View,
)
from asynccomm.control.messages import Heartbeat, OrderMessage
from asynccomm.control.transport.connection import Connection, Tokens
from asynccomm.control.transport.listener import Listener
from asynccomm.control.transport.schema import JsonObject
from asynccomm.control.transport.sockets import local_socket
from asynccomm.control.transport.topology import RankAddress
from tests.waiting import until

DECISION = View("k", 0, 0, (0, "me"))


class Root:
    """A rank that takes newcomers, or refuses them."""

    def __init__(self, rank: int, tokens: Tokens, refuses: str = "") -> None:
        name = f"asynccomm/test/{rank}/{os.getpid()}/{secrets.token_hex(4)}"
        sock = local_socket(name)
        assert sock is not None
        self.sock = sock
        self.contact = RankAddress(rank, socket.gethostname(), os.getpid(), name)
        self.refuses = refuses
        self.listener = Listener(tokens, lambda who: self.refuses, self.welcome, lambda *_: None)
        self.joiner: Connection | None = None
        self.names: list[Any] = []
        self.heard: list[JsonObject] = []
        self.ended = False

    def welcome(self, who: Any, connection: Connection) -> None:
        self.names.append(who)
        self.joiner, self.ended = connection, False
        connection.received = lambda _, message: self.heard.append(message)
        connection.ended = lambda *_: setattr(self, "ended", True)

    def say(self, order: CoordinatorOrder) -> None:
        assert self.joiner is not None
        self.joiner.send(OrderMessage("key", order))

    @property
    def states(self) -> list[str]:
        assert all(message["comm"] == "key" and message["ranks"] == [0, 1] for message in self.heard)
        return [message["report"]["state"] for message in self.heard]

    async def listen(self) -> None:
        self.listener.listen(self.sock)

    def close(self) -> None:
        self.listener.close()
        if self.joiner is not None:
            self.joiner.close()


class Place:
    def __init__(self, roots: list[Root], joiner: Joiner) -> None:
        self.roots, self.joiner = roots, joiner
        self.heard: list[CoordinatorOrder] = []

    def ask(self) -> None:
        self.joiner.ask(None, 5.0, self.heard.append)


@contextlib.asynccontextmanager
async def place(*refusals: str, mute: int = 0) -> AsyncIterator[Place]:
    """Ranks with these refusals; the first ``mute`` of them take connections, and nothing else."""
    tokens = Tokens.random()
    roots = [Root(rank, tokens, refuses) for rank, refuses in enumerate(refusals)]
    for root in roots[mute:]:
        await root.listen()
    joiner = Joiner("me", "key", [0, 1], [root.contact for root in reversed(roots)], tokens)
    try:
        yield Place(roots, joiner)
    finally:
        joiner.close()
        joiner.withdraw()
        for root in roots[mute:]:
            root.close()
        for root in roots[:mute]:
            root.sock.close()
    await until(lambda: not [t for t in threading.enumerate() if t.name == "asynccomm control"])


async def test_it_takes_part_and_stays_until_it_is_over() -> None:
    async with place("") as here:
        (root,) = here.roots
        here.ask()
        await until(lambda: bool(root.heard) and root.states == ["wants"])
        assert root.names == ["me"]
        root.say(Prepare(DECISION))
        await until(lambda: here.heard == [Prepare(DECISION)])
        here.joiner.failed("k", "no route")
        await until(lambda: root.states[-1] == "failed")
        root.say(Retry("k", 1, "no route"))
        await until(lambda: root.states[-1] == "wants")
        again = replace(DECISION, key="l", attempt=1)
        root.say(Prepare(again))
        await until(lambda: here.heard[-1] == Prepare(again))
        here.joiner.prepared("l")
        await until(lambda: root.states[-1] == "prepared")
        root.say(Commit("l"))
        await until(lambda: root.states[-1] == "committed")
        here.joiner.close()
        root.say(Retry("other", 1, "nothing"))  # it still hears
        await asyncio.sleep(0.05)
        assert not root.ended
        root.say(Finalized("l"))
        await until(lambda: root.ended)
        assert root.states == ["wants", "failed", "wants", "prepared", "committed"]
        assert [type(order) for order in here.heard[:4]] == [Prepare, Retry, Prepare, Commit]


async def test_who_is_not_the_root_is_passed_over() -> None:
    async with place("newcomers talk to the root", "newcomers talk to the root", "") as here:
        here.ask()
        await until(lambda: bool(here.roots[2].heard))
        assert here.roots[0].names == here.roots[1].names == []


async def test_it_finds_the_next_root_and_tells_it_all() -> None:
    async with place("", "not yet") as here:
        first, second = here.roots
        here.ask()
        await until(lambda: bool(first.heard))
        first.say(Prepare(DECISION))
        await until(lambda: here.heard == [Prepare(DECISION)])
        here.joiner.prepared("k")
        await until(lambda: first.states[-1] == "prepared")
        first.close()
        second.refuses = ""
        await until(lambda: bool(second.heard))
        assert second.states == ["prepared"]
        assert second.heard[0]["report"]["decision"]["key"] == "k"


async def test_a_root_that_was_stopped_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "PROBE_SECONDS", 0.05)
    async with place("", "", mute=1) as here:
        here.ask()
        await until(lambda: bool(here.roots[1].heard))


async def test_a_root_that_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(guest_module, "SILENT_SECONDS", 0.3)
    async with place("", "") as here:
        first, second = here.roots
        here.ask()
        await until(lambda: bool(first.heard))
        assert first.joiner is not None
        for _ in range(20):  # as long as it is heard, all is well
            first.joiner.send(Heartbeat())
            await asyncio.sleep(0.03)
        assert not first.ended
        first.refuses = "it is stopped"
        await until(lambda: first.ended)
        await until(lambda: bool(second.heard))


async def test_giving_up_is_said() -> None:
    async with place("") as here:
        here.ask()
        await until(lambda: bool(here.roots[0].heard))
        here.joiner.withdraw()
        await until(lambda: here.roots[0].ended)
        assert here.roots[0].states == ["wants", "out"]


async def test_giving_up_is_said_even_by_one_that_has_not_asked() -> None:
    async with place("newcomers talk to the root", "") as here:
        here.joiner.withdraw()
        await until(lambda: bool(here.roots[1].heard) and here.roots[1].ended)
        assert here.roots[1].states == ["out"]


async def test_giving_up_ends_when_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "REACH_SECONDS", 0.1)
    async with place("newcomers talk to the root") as here:
        here.joiner.withdraw()
        await until(lambda: not [t for t in threading.enumerate() if t.name == "asynccomm control"])


async def test_a_mistake_of_the_others_is_not_heard() -> None:
    async with place("") as here:
        (root,) = here.roots
        here.ask()
        await until(lambda: bool(root.heard))
        root.say(Rejected(0, "they differ", True))
        await until(lambda: root.states == ["wants", "wants"])
        assert root.heard[-1]["report"]["attempt"] == 1
        assert here.heard == []


async def test_a_refusal_ends_it() -> None:
    async with place("") as here:
        (root,) = here.roots
        here.ask()
        await until(lambda: bool(root.heard))
        root.say(Rejected(0, "no route", False))
        await until(lambda: here.heard == [Rejected(0, "no route", False)])
        here.joiner.close()
        await until(lambda: root.ended)


async def test_nobody_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "REACH_SECONDS", 0.1)
    async with place("") as here:
        here.roots[0].close()
        here.ask()
        await until(lambda: here.heard == [Excluded("none of its ranks can be reached any more")])


async def test_nonsense_ends_the_connection_and_no_more() -> None:
    async with place("") as here:
        (root,) = here.roots
        here.ask()
        await until(lambda: bool(root.heard))
        assert root.joiner is not None
        root.joiner.send({"kind": "OrderMessage", "comm": "key", "order": {"kind": "Boo"}})
        await until(lambda: len(root.names) == 2)
        await until(lambda: root.states == ["wants", "wants"])
