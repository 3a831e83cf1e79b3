"""Channels of several ranks in one process, on real sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from typing import Any

import pytest
from msgspec.structs import replace

from asynccomm.control import channel as module
from asynccomm.control.channel import ControlChannel
from asynccomm.control.transport import thread as thread_module
from asynccomm.control.transport.connection import Tokens
from asynccomm.control.transport.schema import JsonObject
from asynccomm.control.transport.sockets import ListeningSockets
from asynccomm.control.transport.topology import RankAddress
from tests.sampling import some

from .channel_pairs import HOSTS, doors_of, job, two_threads
from .unauthenticated import descriptors, nothing_unclosed, until

pytestmark = pytest.mark.usefixtures("quiet")


@HOSTS
async def test_all_others_hear_news(hosts: str) -> None:
    async with job(hosts) as found:
        for rank, channel in enumerate(found.channels):
            channel.broadcast("main", {"by": rank})
        for rank, member in enumerate(found.members):
            await until(lambda member=member: len(member.heard) == 3, "the news")
            assert sorted((source, item["by"]) for source, item in member.heard) == [
                (other, other) for other in range(4) if other != rank
            ]
            assert member.threads == {"asynccomm control"}


async def test_telling_says_when_it_is_on_its_way() -> None:
    async with job("aa") as found:
        told = threading.Event()
        found.channels[1].broadcast("main", {"a": 1}, told.set)
        assert await asyncio.to_thread(told.wait, 10)
        await until(lambda: found.members[0].heard, "the news")
    told.clear()
    found.channels[1].broadcast("main", {"a": 1}, told.set)
    assert await asyncio.to_thread(told.wait, 10), "also when there is no channel any more"


async def test_who_has_withdrawn_hears_nothing_and_has_said_so() -> None:
    async with job("aa") as found:
        found.channels[0].unsubscribe("main", {"kind": "closed"})
        await until(lambda: found.members[1].heard, "the news")
        assert found.members[1].heard == [(0, {"kind": "closed"})]
        found.channels[1].broadcast("main", {"a": 1})
        assert await asyncio.wrap_future(found.channels[1].request("main", [0], {"what": 1}, 10)) == {0: {}}
        assert found.members[0].heard == []


@HOSTS
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
async def test_a_lost_rank_is_missed_at_once_and_the_others_go_on(hosts: str, rank: int) -> None:
    async with job(hosts) as found:
        others = [other for other in range(4) if other != rank]
        start = time.monotonic()
        await found.kill(rank)
        await found.lost(rank, others)
        assert time.monotonic() - start < 5
        for other in others:
            assert found.members[other].lost == [(rank, found.channels[other].gone[rank])]
            assert "its control connection ended" in found.channels[other].gone[rank]
            found.channels[other].broadcast("main", {"by": other})
        for other in others:
            await until(lambda other=other: len(found.members[other].heard) == 2, "the news of the others")
        assert len(await asyncio.wrap_future(found.channels[others[-1]].request("main", others, {}, 10))) == 3


@HOSTS
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
async def test_whoever_leaves_in_good_order_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, hosts: str, order: tuple[int, ...]
) -> None:
    monkeypatch.setattr(module, "LEAVE_ACK_SECONDS", 3600.0)  # nobody is waited for in vain
    async with job(hosts) as found:
        for number, rank in enumerate(order):
            async with asyncio.timeout(20):
                await found.channels[rank].aclose()
            for other in order[number + 1 :]:
                await until(lambda other=other, rank=rank: rank in found.channels[other].gone, "the goodbye")
        for channel, member in zip(found.channels, found.members, strict=True):
            assert set(channel.gone.values()) <= {""}
            assert all(how == "" for _, how in member.lost)


@pytest.mark.parametrize("turn", some(range(5), 2))
async def test_all_leave_at_once(monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    monkeypatch.setattr(module, "LEAVE_ACK_SECONDS", 3600.0)  # nobody is waited for in vain
    async with job("aaaaa") as found:
        async with asyncio.timeout(20):
            await asyncio.gather(*(channel.aclose() for channel in found.channels))
        assert all(set(channel.gone.values()) <= {""} for channel in found.channels)


async def test_closing_twice_and_at_once() -> None:
    async with job("aa") as found:
        await asyncio.gather(*(found.channels[0].aclose() for _ in range(3)))
        await found.channels[0].aclose()


async def test_a_stopped_rank_does_not_hold_up_closing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAVE_ACK_SECONDS", 0.1)
    async with job("aa") as found:
        found.channels[1]._received = lambda *args: None  # type: ignore[method-assign]
        for link in found.channels[1]._router.links:
            link.received = lambda *args: None  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            await found.channels[0].aclose()


async def test_who_cannot_reach_the_others_has_no_channel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ATTACH_SECONDS", 0.1)
    held = descriptors()
    doors = ListeningSockets(1, "run")
    nobody = RankAddress(0, doors.contact.host, 1, "asynccomm/nobody")
    assert await ControlChannel.open(1, [nobody, doors.contact], Tokens.random(), doors) is None
    assert "rank 1 has no control channel: rank 0 cannot be reached" in caplog.text
    await until(lambda: descriptors() <= held, "all descriptors closed")


async def test_opening_can_be_cancelled() -> None:
    held = descriptors()
    doors = ListeningSockets(1, "run")
    nobody = RankAddress(0, doors.contact.host, 1, "asynccomm/nobody")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await ControlChannel.open(1, [nobody, doors.contact], Tokens.random(), doors)
    await until(lambda: descriptors() <= held, "all descriptors closed")
    await until(lambda: thread_module._thread is None, "the thread's end")


async def test_ranks_without_a_channel_are_left_out() -> None:
    doors = doors_of("aa")
    contacts = [doors[0].contact, replace(doors[1].contact, local="")]
    channel = await ControlChannel.open(0, contacts, Tokens.random(), doors[0])
    assert channel is not None
    assert await asyncio.wrap_future(channel.request("main", [1], {}, 10)) == {}
    await channel.aclose()
    doors[1].close()


async def test_the_root_does_not_look_for_ranks_that_are_about_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[RankAddress] = []

    async def listens(contact: RankAddress, local: bool) -> bool:
        looked.append(contact)
        return True

    monkeypatch.setattr("asynccomm.control.uplink.listens", listens)
    monkeypatch.setattr(module, "FIRST_CHECK_SECONDS", 3600.0)
    async with job("aaaa") as found:
        found.channels[3].broadcast("main", {"a": 1})
        await until(lambda: found.members[0].heard, "the news")
        assert not looked


async def test_the_root_soon_misses_a_rank_that_never_connects() -> None:
    doors = doors_of("aa")
    channel = await ControlChannel.open(0, [each.contact for each in doors], Tokens.random(), doors[0])
    assert channel is not None
    doors[1].close()
    await until(lambda: channel.gone, "the loss")
    assert channel.gone == {1: "it does not listen any more"}
    await channel.aclose()


async def test_later_and_whatever_comes_first() -> None:
    async with job("a") as found:
        called = threading.Event()
        found.channels[0].call_later(0.01, called.set)
        assert await asyncio.to_thread(called.wait, 10)
        called.clear()
        found.channels[0].call_later(3600, called.set)
        await found.channels[0].aclose()
        assert await asyncio.to_thread(called.wait, 10), "at the latest when the channel ends"
    called.clear()
    found.channels[0].call_later(3600, called.set)
    assert called.is_set()


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "News"},
        {"kind": "News", "comm": "main", "item": 5},
        {"kind": "Request", "comm": "main", "question": [], "number": 0},
        {"kind": "IssuedCollectives", "comm": "main", "size": 2, "fingerprints": [1]},
        {"kind": "Departure", "rank": 77, "reason": ""},
    ],
)
async def test_nonsense_ends_the_connection_of_who_sends_it_and_nothing_else(message: JsonObject) -> None:
    async with job("aaa") as found:
        sender: Any = found.channels[1]
        text = {"to": 0, "source": 1, "body": message}
        sender._thread.call(lambda: sender._router.up.send(text))
        await found.lost(1, [0, 2])
        assert "an invalid message" in found.channels[0].gone[1]
        found.channels[2].broadcast("main", {"still": "here"})
        await until(lambda: any("still" in item for _, item in found.members[0].heard), "the news")


def test_nothing_is_logged_of_a_usual_life(caplog: pytest.LogCaptureFixture) -> None:
    async def live() -> None:
        async with job("aab") as found:
            found.channels[0].broadcast("main", {"a": 1})

    with caplog.at_level(logging.DEBUG):
        asyncio.run(live())
    assert [record.getMessage() for record in caplog.records if record.name == "asynccomm"] == []


# -- what is left of a channel ----------------------------------------------------------------------------------------


async def alone() -> ControlChannel:
    doors = doors_of("a")
    channel = await ControlChannel.open(0, [doors[0].contact], Tokens.random(), doors[0])
    assert channel is not None
    return channel


async def ended(channel: ControlChannel) -> None:
    await asyncio.to_thread(channel._thread.join)
    assert not channel._thread._thread.is_alive()


@pytest.mark.parametrize("turns", some(range(8), 3))
async def test_who_comes_while_a_channel_ends_leaves_nothing_open(turns: int) -> None:
    """They come so many turns of the loop before it closes, and in that turn."""
    strangers: list[socket.socket] = []

    def come() -> None:
        for _ in range(100):
            strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            strangers[-1].connect("\0" + channel.topology.contacts[0].local)

    async def end() -> None:
        come()
        for _ in range(turns):
            await asyncio.sleep(0)
        come()
        channel._begin_closing()

    with nothing_unclosed():
        channel = await alone()
        await asyncio.wrap_future(channel._thread.run(end()))
        await ended(channel)
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("turn", some(range(3), 1))
async def test_a_channel_may_end_while_others_keep_coming(turn: int) -> None:
    over = threading.Event()

    def come(name: str) -> None:
        while not over.is_set():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                if stranger.connect_ex("\0" + name):
                    return  # nobody listens any more

    with nothing_unclosed():
        channel = await alone()
        name = channel.topology.contacts[0].local
        threads = [threading.Thread(target=come, args=(name,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        await until(lambda: channel._listener.admission.refused.total() > 100, "many strangers")
        await channel.aclose()
        await ended(channel)
        over.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)


async def test_opening_can_be_cut_short_in_any_turn() -> None:
    with nothing_unclosed():
        for turns in some(range(12), 6):
            doors = doors_of("aaa")
            contacts, tokens = [one.contact for one in doors], Tokens.random()
            opening = [
                asyncio.ensure_future(ControlChannel.open(rank, contacts, tokens, one))
                for rank, one in enumerate(doors)
            ]
            for _ in range(turns):
                await asyncio.sleep(0.0002)
            for task in opening:
                task.cancel()
            for done in await asyncio.gather(*opening, return_exceptions=True):
                if isinstance(done, ControlChannel):
                    await done.aclose()
            for one in doors:
                one.close()
            await until(lambda: not any(t.name == "asynccomm control" for t in threading.enumerate()), "the end")


async def test_what_a_stopped_rank_has_not_read_is_not_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAVE_ACK_SECONDS", 0.05)
    with nothing_unclosed():
        zero, one, own = await two_threads(monkeypatch)
        stopped = descriptors()
        release = threading.Event()
        own.call(release.wait)
        for _ in range(20):
            zero.broadcast("main", {"x": "x" * 100_000})
        await zero.aclose()
        await ended(zero)
        assert descriptors() < stopped - 1, "its listener, its loop and its end of the connection"
        release.set()
        await one.aclose()
        await asyncio.to_thread(own.join)
