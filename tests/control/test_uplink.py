"""Getting connected to the rank above, and who is missed on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asynccomm.control import channel, uplink
from asynccomm.control.router import FENCED, Router
from asynccomm.control.transport.connection import Connection, Tokens, end_connections
from asynccomm.control.transport.listener import Listener
from asynccomm.control.transport.sockets import local_socket
from asynccomm.control.transport.topology import RankAddress, Topology
from asynccomm.control.uplink import NOT_THERE, Uplink

from .channel_pairs import job
from .unauthenticated import until

pytestmark = pytest.mark.usefixtures("quiet")


async def test_several_lost_at_once_are_all_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that nobody is connected to any more."""
    monkeypatch.setattr(uplink, "REFUSED_SECONDS", 0.05)
    monkeypatch.setattr(channel, "HEARTBEAT_SECONDS", 0.05)
    async with job("aabbb") as found:
        await asyncio.gather(*(found.kill(rank) for rank in (0, 1, 2, 3)))
        for rank in (0, 1, 2, 3):
            await found.lost(rank, [4])
        assert all(how for how in found.channels[4].gone.values())
        found.channels[4].broadcast("main", {"a": 1})


# -- alone ------------------------------------------------------------------------------------------------------------


class Slope:
    """One rank of three on one host, and the sockets of the others."""

    def __init__(self, rank: int) -> None:
        self.tokens = Tokens.random()
        names = [f"asynccomm/test/{os.getpid()}/{secrets.token_hex(8)}" for _ in range(3)]
        self.contacts = [RankAddress(one, "here", os.getpid(), name) for one, name in enumerate(names)]
        self.router = Router(rank, Topology(self.contacts), lambda _: None, lambda ranks, how: None)
        self.attached = 0
        self.welcomed: list[tuple[Any, Connection]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.listeners: list[Listener] = []
        self.asks = False
        self.uplink = Uplink(
            self.router,
            self.tokens,
            self._begin,
            lambda *_: None,
            lambda link, how: None,
            self._attached,
            lambda: self.asks,
        )

    def _begin(self, coroutine: Any) -> asyncio.Task[None]:
        self.tasks.append(asyncio.ensure_future(coroutine))
        return self.tasks[-1]

    def _attached(self) -> None:
        self.attached += 1

    def listen(self, rank: int, refuses: str = "") -> None:
        """Let ``rank`` listen."""
        one = Listener(self.tokens, lambda who: refuses, lambda *who: self.welcomed.append(who), lambda *_: None)
        sock = local_socket(self.contacts[rank].local)
        assert sock is not None
        one.listen(sock)
        self.listeners.append(one)


@contextlib.asynccontextmanager
async def slope(rank: int) -> AsyncIterator[Slope]:
    one = Slope(rank)
    try:
        yield one
    finally:
        one.uplink.close()
        for task in one.tasks:
            task.cancel()
        await asyncio.gather(*one.tasks, return_exceptions=True)
        for listener in one.listeners:
            listener.close()
        await end_connections()


async def test_it_connects_to_the_rank_above_once() -> None:
    async with slope(2) as here:
        here.listen(0)
        here.uplink.connect()
        assert await here.uplink.wait_connected(10)
        here.uplink.connect()
        assert here.attached == len(here.tasks) == 1
        assert [who for who, _ in here.welcomed] == [2]
        assert here.router.up is not None


async def test_the_root_has_nowhere_to_go() -> None:
    async with slope(0) as here:
        assert await here.uplink.wait_connected(10)
        assert here.tasks == []


async def test_who_does_not_listen_for_a_while_is_lost_and_the_next_one_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uplink, "REFUSED_SECONDS", 0.03)
    async with slope(2) as here:
        here.listen(1)
        assert await here.uplink.wait_connected(10)
        assert here.router.gone == {0: NOT_THERE}
        assert [who for who, _ in here.welcomed] == [2]


async def test_who_begins_to_listen_is_waited_for() -> None:
    async with slope(1) as here:
        assert not await here.uplink.wait_connected(0.05)
        here.listen(0)
        assert await here.uplink.wait_connected(10)
        assert here.router.gone == {}
        assert here.attached == 1


async def test_who_is_given_up_itself_gives_up_nobody() -> None:
    async with slope(2) as here:
        here.listen(0, refuses=FENCED)
        here.listen(1)
        assert await here.uplink.wait_connected(10)
        assert here.router.gone == {0: FENCED}
        assert not here.router.fenced
        assert [who for who, _ in here.welcomed] == [2]


@contextlib.asynccontextmanager
async def stopped(here: Slope, rank: int) -> AsyncIterator[socket.socket]:
    """The socket of a process that is stopped: the system accepts connections, and no answer comes."""
    sock = local_socket(here.contacts[rank].local)
    assert sock is not None
    with sock:
        sock.listen()
        yield sock


async def test_who_is_stopped_is_lost_once_this_rank_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(uplink, "SILENT_SECONDS", 0.03)
    async with slope(2) as here, stopped(here, 0) as door:
        here.listen(1)
        assert not await here.uplink.wait_connected(0.1)
        assert here.router.gone == {}
        here.asks = True
        assert await here.uplink.wait_connected(10)
        assert list(here.router.gone) == [0]
        assert here.router.gone[0].startswith("it was silent for 0.")
        with door.accept()[0] as link:
            assert b"it was silent for 0." in link.recv(1 << 16), "it does not learn of its loss when it goes on"
        assert [who for who, _ in here.welcomed] == [2]


async def test_another_rank_above_ends_the_wait_for_one_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "HEARTBEAT_SECONDS", 0.01)
    async with slope(2) as here, stopped(here, 0):
        here.listen(1)
        assert not await here.uplink.wait_connected(0.05)
        here.router.declare_lost(0, "it was lost")
        assert await here.uplink.wait_connected(10)
        assert [who for who, _ in here.welcomed] == [2]


async def test_who_cannot_be_reached_for_long_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "REACH_SECONDS", 0.03)

    async def connect(*args: object) -> Connection:
        raise OSError("no route")

    monkeypatch.setattr(uplink, "connect", connect)
    async with slope(1) as here:
        here.uplink.connect()
        await until(lambda: here.router.gone, "the loss")
        assert here.router.gone == {0: "it cannot be reached: no route"}
        await until(lambda: here.tasks[0].done(), "the end: it is the root now")


async def test_who_was_given_up_by_the_others_climbs_no_more() -> None:
    async with slope(1) as here:
        here.listen(0, refuses="rank 1 was given up: it was silent")
        assert await here.uplink.wait_connected(10)
        assert here.router.fenced == "rank 1 was given up: it was silent"
        assert here.router.up is None
        assert here.attached == 0


async def test_who_was_lost_meanwhile_is_not_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Connection] = []
    connect = uplink.connect

    async def slowly(contact: RankAddress, *args: Any) -> Connection:
        link = await connect(contact, *args)
        made.append(link)
        if contact.rank == 0:
            here.router.declare_lost(0, "it was silent")
        return link

    monkeypatch.setattr(uplink, "connect", slowly)
    async with slope(2) as here:
        here.listen(0)
        here.listen(1)
        assert await here.uplink.wait_connected(10)
        assert here.router.up is made[1]
        await until(lambda: made[0]._transport is None, "the end of the first")


async def test_the_root_misses_who_does_not_listen_and_waits_for_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "REFUSED_SECONDS", 0.03)
    async with slope(0) as here:
        here.listen(1)
        here.uplink.check_absent()
        here.uplink.check_absent()
        assert len(here.tasks) == 1, "one search at a time"
        await here.tasks[0]
        assert here.router.gone == {2: NOT_THERE}
        here.uplink.check_absent()
        assert len(here.tasks) == 2, "rank 1 may still go"


async def test_the_root_misses_a_rank_on_a_host_that_stays_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[int, list[bool | None]] = {1: [None, True, None, None], 2: [True, True, True, True]}

    async def listens(contact: RankAddress, local: bool) -> bool | None:
        return answers[contact.rank].pop(0)

    monkeypatch.setattr(uplink, "listens", listens)
    async with slope(0) as here:
        for seconds in (1e9, 1e9, 1e9):  # once in between it has answered
            monkeypatch.setattr(uplink, "REACH_SECONDS", seconds)
            here.uplink.check_absent()
            await here.tasks[-1]
            assert here.router.gone == {}
        monkeypatch.setattr(uplink, "REACH_SECONDS", 0.0)
        here.uplink.check_absent()
        await here.tasks[-1]
        assert here.router.gone == {1: uplink.UNREACHED}


async def test_nothing_begins_once_it_is_closed() -> None:
    for rank in (0, 1):
        async with slope(rank) as here:
            here.uplink.close()
            here.uplink.connect()
            here.uplink.check_absent()
            assert here.tasks == []


async def test_ranks_of_other_hosts_are_reached_by_tcp() -> None:
    async with slope(1) as here:
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        here.router.topology.contacts[0] = RankAddress(0, "there", 1, here.contacts[0].local, "127.0.0.1", port)
        one = Listener(here.tokens, lambda who: "", lambda *who: here.welcomed.append(who), lambda *_: None)
        one.listen(sock)
        here.listeners.append(one)
        here.listen(0)  # its name is a rank of this host's
        assert await here.uplink.wait_connected(10)
        assert here.welcomed[0][1].user is None
