"""Channels of several ranks in one process, on real sockets; hosts are made up, and TCP goes over 127.0.0.1."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from asynccomm.control import channel as module
from asynccomm.control import thread as thread_module
from asynccomm.control.channel import Channel, Doors
from asynccomm.control.frames import Decoder, Message, encode
from asynccomm.control.ledger import Print
from asynccomm.control.links import Tokens
from asynccomm.control.roster import Contact
from asynccomm.control.thread import ControlThread

from .strangers import descriptors, names, until


class Member:
    """A comm, on one rank."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Message]] = []
        self.lost: list[tuple[int, str]] = []
        self.threads: set[str] = set()
        self.issued: list[Print] = []
        self.size = 2

    def hear(self, rank: int, item: Message) -> None:
        self.threads.add(threading.current_thread().name)
        if "bad" in item:
            raise ZeroDivisionError(item["bad"])
        self.heard.append((rank, item))

    def lose(self, rank: int, how: str) -> None:
        self.lost.append((rank, how))

    def answer(self, question: Message) -> Message:
        if "bad" in question:
            raise ZeroDivisionError(question["bad"])
        return {"asked": question, "on": threading.current_thread().name}

    def prints(self) -> tuple[int, Sequence[Print]]:
        found, self.issued = self.issued, []
        return self.size, found


class Job:
    """Its channels, by rank, and a member of comm "main" on each."""

    def __init__(self, channels: list[Channel]) -> None:
        self.channels = channels
        self.members = [Member() for _ in channels]
        for channel, member in zip(channels, self.members, strict=True):
            channel.enroll("main", member)

    async def kill(self, rank: int) -> None:
        """Its connections end, without a word."""
        channel = self.channels[rank]
        channel._thread.call(channel._begin_closing)
        await until(lambda: channel._closed, "its end")

    async def lost(self, rank: int, of: Sequence[int]) -> None:
        for one in of:
            await until(lambda one=one: rank in dict(self.members[one].lost), f"rank {one} to miss rank {rank}")


def doors_of(hosts: str) -> list[Doors]:
    found = []
    for rank, host in enumerate(hosts):
        doors = Doors(rank, "a run")
        if len(set(hosts)) > 1:
            doors.open_tcp("127.0.0.1")
        doors.contact = replace(doors.contact, host=host)
        found.append(doors)
    return found


@pytest.fixture(autouse=True)
async def quiet() -> None:
    """What a test before this one has used is closed."""
    await until(lambda: not any(t.name == "asynccomm control" for t in threading.enumerate()), "the thread's end")


@asynccontextmanager
async def job(hosts: str) -> AsyncIterator[Job]:
    held = descriptors()
    doors = doors_of(hosts)
    contacts = [one.contact for one in doors]
    tokens = Tokens()
    opened = await asyncio.gather(*(Channel.open(rank, contacts, tokens, one) for rank, one in enumerate(doors)))
    found = Job([channel for channel in opened if channel is not None])
    assert len(found.channels) == len(hosts)
    try:
        yield found
    finally:
        await asyncio.gather(*(channel.aclose() for channel in found.channels))
    await until(lambda: thread_module._thread is None, "the thread to be forgotten")
    await until(lambda: not any(t.name == "asynccomm control" for t in threading.enumerate()), "the thread's end")
    await until(lambda: descriptors() == held, "all descriptors closed")
    assert names() == set()


HOSTS = pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abab"])


# -- news -------------------------------------------------------------------------------------------------------------


@HOSTS
async def test_all_others_hear_news(hosts: str) -> None:
    async with job(hosts) as found:
        for rank, channel in enumerate(found.channels):
            channel.tell("main", {"by": rank})
        for rank, member in enumerate(found.members):
            await until(lambda member=member: len(member.heard) == 3, "the news")
            assert sorted((source, item["by"]) for source, item in member.heard) == [
                (other, other) for other in range(4) if other != rank
            ]
            assert member.threads == {"asynccomm control"}


async def test_telling_says_when_it_is_on_its_way() -> None:
    async with job("aa") as found:
        told = threading.Event()
        found.channels[1].tell("main", {"a": 1}, told.set)
        assert await asyncio.to_thread(told.wait, 10)
        await until(lambda: found.members[0].heard, "the news")
    told.clear()
    found.channels[1].tell("main", {"a": 1}, told.set)
    assert await asyncio.to_thread(told.wait, 10), "also when there is no channel any more"


async def test_news_are_kept_for_comms_that_are_enrolled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_NEWS", 3)
    monkeypatch.setattr(module, "KEPT_COMMS", 2)
    async with job("aa") as found:
        for number in range(5):
            found.channels[0].tell("later", {"n": number})
        found.channels[0].tell("main", {"the": "last"})
        await until(lambda: found.members[1].heard, "the news")
        late = Member()
        found.channels[1].enroll("later", late)
        await until(lambda: late.heard, "what was kept")
        assert [item["n"] for _, item in late.heard] == [0, 1, 2]
        for name in "xyz":
            found.channels[0].tell(name, {"n": name})
        found.channels[0].tell("main", {"the": "end"})
        await until(lambda: len(found.members[1].heard) == 2, "the news")
        others = [Member() for _ in "xyz"]
        for name, member in zip("xyz", others, strict=True):
            found.channels[1].enroll(name, member)
        await until(lambda: others[2].heard, "what was kept")
        assert [len(member.heard) for member in others] == [0, 1, 1], "of the latest comms only"


async def test_who_has_withdrawn_hears_nothing_and_has_said_so() -> None:
    async with job("aa") as found:
        found.channels[0].withdraw("main", {"kind": "closed"})
        await until(lambda: found.members[1].heard, "the news")
        assert found.members[1].heard == [(0, {"kind": "closed"})]
        found.channels[1].tell("main", {"a": 1})
        assert await asyncio.wrap_future(found.channels[1].ask("main", [0], {"what": 1}, 10)) == {0: {}}
        assert found.members[0].heard == []


async def test_a_comm_that_cannot_take_news_does_not_end_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    async with job("aa") as found:
        found.channels[0].tell("main", {"bad": "luck"})
        found.channels[0].tell("main", {"good": "luck"})
        await until(lambda: found.members[1].heard, "the news")
        assert found.members[1].heard == [(0, {"good": "luck"})]
        assert "comm main could not take a message of the control channel" in caplog.text


# -- questions --------------------------------------------------------------------------------------------------------


@HOSTS
async def test_questions_are_answered(hosts: str) -> None:
    async with job(hosts) as found:
        said = await asyncio.wrap_future(found.channels[3].ask("main", range(4), {"what": "now"}, 10))
        assert said == {rank: {"asked": {"what": "now"}, "on": "asynccomm control"} for rank in range(4)}
        assert await asyncio.wrap_future(found.channels[0].ask("other", [1], {"what": "now"}, 10)) == {1: {}}
        assert await asyncio.wrap_future(found.channels[0].ask("main", [], {}, 10)) == {}
        assert await asyncio.wrap_future(found.channels[0].ask("main", [77], {}, 10)) == {}


async def test_a_question_that_cannot_be_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with job("aa") as found:
        said = await asyncio.wrap_future(found.channels[0].ask("main", [1], {"bad": "luck"}, 10))
        assert said == {1: {"problem": "ZeroDivisionError: luck"}}


async def test_who_is_lost_meanwhile_is_not_waited_for() -> None:
    async with job("aaa") as found:
        found.channels[2]._node.send = lambda *args, **kwargs: None  # type: ignore[method-assign]  # it says nothing
        asking = found.channels[0].ask("main", [1, 2], {"what": 1}, 60)
        await found.kill(2)
        said = await asyncio.wait_for(asyncio.wrap_future(asking), 20)
        assert sorted(said) == [1]
        assert await asyncio.wrap_future(found.channels[0].ask("main", [2], {"what": 1}, 60)) == {}


async def test_asking_ends_when_the_channel_does() -> None:
    async with job("aa") as found:
        found.channels[1]._node.send = lambda *args, **kwargs: None  # type: ignore[method-assign]
        asking = found.channels[0].ask("main", [1], {"what": 1}, 60)
        await found.kill(0)
        assert await asyncio.wait_for(asyncio.wrap_future(asking), 20) == {}


async def test_a_rank_whose_control_thread_is_stuck_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PULSE_SECONDS", 0.02)
    own = ControlThread()

    def thread_of_its_own() -> ControlThread:
        own.acquire()
        return own

    doors = doors_of("aa")
    contacts, tokens = [one.contact for one in doors], Tokens()
    zero = await Channel.open(0, contacts, tokens, doors[0])
    with monkeypatch.context() as patch:
        patch.setattr(module, "control_thread", thread_of_its_own)
        one = await Channel.open(1, contacts, tokens, doors[1])
    assert zero is not None
    assert one is not None
    one.enroll("main", Member())
    assert 1 in await asyncio.wrap_future(zero.ask("main", [1], {}, 10))
    assert zero.silence(0) is None
    release = threading.Event()
    own.call(release.wait)
    await until(lambda: (zero.silence(1) or 0) > 0.2, "silence")
    assert await asyncio.wrap_future(zero.ask("main", [1], {}, 0.05)) == {}
    assert zero.gone == {}, "it may still come back"
    release.set()
    await until(lambda: (zero.silence(1) or 0) < 0.2, "it to be heard again")
    await asyncio.gather(zero.aclose(), one.aclose())
    own.join()
    assert not own._thread.is_alive()


# -- going ------------------------------------------------------------------------------------------------------------


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
            found.channels[other].tell("main", {"by": other})
        for other in others:
            await until(lambda other=other: len(found.members[other].heard) == 2, "the news of the others")
        assert len(await asyncio.wrap_future(found.channels[others[-1]].ask("main", others, {}, 10))) == 3


async def test_several_lost_at_once_are_all_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that nobody is connected to any more."""
    monkeypatch.setattr(module, "REFUSED_SECONDS", 0.05)
    monkeypatch.setattr(module, "PULSE_SECONDS", 0.05)
    async with job("aabbb") as found:
        await asyncio.gather(*(found.kill(rank) for rank in (0, 1, 2, 3)))
        for rank in (0, 1, 2, 3):
            await found.lost(rank, [4])
        assert all(how for how in found.channels[4].gone.values())
        found.channels[4].tell("main", {"a": 1})


async def test_comms_that_are_enrolled_later_hear_who_is_gone() -> None:
    async with job("aaa") as found:
        await found.kill(2)
        await found.lost(2, [0, 1])
        late = Member()
        found.channels[1].enroll("late", late)
        await until(lambda: late.lost, "the loss")
        assert late.lost[0][0] == 2


@HOSTS
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
async def test_whoever_leaves_in_good_order_is_not_lost(hosts: str, order: tuple[int, ...]) -> None:
    async with job(hosts) as found:
        start = time.monotonic()
        for number, rank in enumerate(order):
            await found.channels[rank].aclose()
            for other in order[number + 1 :]:
                await until(lambda other=other, rank=rank: rank in found.channels[other].gone, "the goodbye")
        assert time.monotonic() - start < 2 * module.GOODBYE_SECONDS, "nobody is waited for in vain"
        for channel, member in zip(found.channels, found.members, strict=True):
            assert set(channel.gone.values()) <= {""}
            assert all(how == "" for _, how in member.lost)


@pytest.mark.parametrize("turn", range(5))
async def test_all_leave_at_once(turn: int) -> None:
    async with job("aaaaa") as found:
        start = time.monotonic()
        await asyncio.gather(*(channel.aclose() for channel in found.channels))
        assert time.monotonic() - start < module.GOODBYE_SECONDS
        assert all(set(channel.gone.values()) <= {""} for channel in found.channels)


async def test_closing_twice_and_at_once() -> None:
    async with job("aa") as found:
        await asyncio.gather(*(found.channels[0].aclose() for _ in range(3)))
        await found.channels[0].aclose()


async def test_a_stopped_rank_does_not_hold_up_closing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GOODBYE_SECONDS", 0.1)
    async with job("aa") as found:
        found.channels[1]._received = lambda *args: None  # type: ignore[method-assign]
        for link in found.channels[1]._node.links:
            link.received = lambda *args: None  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            await found.channels[0].aclose()


async def test_who_cannot_reach_the_others_has_no_channel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ATTACH_SECONDS", 0.1)
    held = descriptors()
    doors = Doors(1, "run")
    nobody = Contact(0, doors.contact.host, 1, "asynccomm/nobody")
    assert await Channel.open(1, [nobody, doors.contact], Tokens(), doors) is None
    assert "rank 1 has no control channel: rank 0 cannot be reached" in caplog.text
    await until(lambda: descriptors() == held, "all descriptors closed")


async def test_opening_can_be_cancelled() -> None:
    held = descriptors()
    doors = Doors(1, "run")
    nobody = Contact(0, doors.contact.host, 1, "asynccomm/nobody")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await Channel.open(1, [nobody, doors.contact], Tokens(), doors)
    await until(lambda: descriptors() == held, "all descriptors closed")
    await until(lambda: thread_module._thread is None, "the thread's end")


async def test_ranks_without_a_channel_are_left_out() -> None:
    doors = doors_of("aa")
    contacts = [doors[0].contact, replace(doors[1].contact, local="")]
    channel = await Channel.open(0, contacts, Tokens(), doors[0])
    assert channel is not None
    assert await asyncio.wrap_future(channel.ask("main", [1], {}, 10)) == {}
    await channel.aclose()
    doors[1].close()


async def test_doors_that_nobody_takes_are_closed() -> None:
    held = descriptors()
    doors = Doors(3, "some/run with ünusual characters and a name that is much too long")
    doors.open_tcp("127.0.0.1")
    assert doors.contact.port > 0
    (name,) = names()
    assert name.startswith("@asynccomm/some-run")
    assert len(name) < 108
    doors.close()
    assert descriptors() == held


async def test_later_and_whatever_comes_first() -> None:
    async with job("a") as found:
        called = threading.Event()
        found.channels[0].later(0.01, called.set)
        assert await asyncio.to_thread(called.wait, 10)
        called.clear()
        found.channels[0].later(3600, called.set)
        await found.channels[0].aclose()
        assert await asyncio.to_thread(called.wait, 10), "at the latest when the channel ends"
    called.clear()
    found.channels[0].later(3600, called.set)
    assert called.is_set()


# -- fingerprints -----------------------------------------------------------------------------------------------------


def prints(*numbers: int, word: int = 5) -> list[Print]:
    return [(number, word, word, 1) for number in numbers]


@HOSTS
async def test_a_difference_is_told_to_all(hosts: str) -> None:
    async with job(hosts) as found:
        for rank, (channel, member) in enumerate(zip(found.channels, found.members, strict=True)):
            member.size = 4
            member.issued = prints(0, 1) + prints(2, word=9 if rank == 2 else 5)
            channel.issued()
        for member in found.members:
            await until(lambda member=member: member.heard, "the news")
            (item,) = [item for _, item in member.heard]
            assert item["kind"] == "differs"
            assert item["seq"] == 2
            assert 2 in item["jobs"]
            assert item["sides"] == [{"asked": {"what": "explain", "seq": 2}, "on": "asynccomm control"}] * 2


async def test_equal_programs_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRINT_SECONDS", 0.001)
    monkeypatch.setattr(module, "PRINTS", 7)
    async with job("aa") as found:
        for number in range(0, 40, 10):
            for channel, member in zip(found.channels, found.members, strict=True):
                member.issued = [*member.issued, *prints(*range(number, number + 10))]
                channel.issued()
            await until(lambda: not any(member.issued for member in found.members), "them to be sent")
        await until(lambda: not any(channel._looking for channel in found.channels), "looking to end")
        found.members[0].issued = prints(40, word=1)
        found.members[1].issued = prints(40, word=2)
        for channel in found.channels:
            channel.issued()  # it begins again
        await until(lambda: all(member.heard for member in found.members), "the news")
        assert {item["seq"] for member in found.members for _, item in member.heard} == {40}


# -- who sends nonsense, and who looks on -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "news"},
        {"kind": "news", "comm": "main", "item": 5},
        {"kind": "ask"},
        {"kind": "ask", "comm": "main", "question": []},
        {"kind": "prints", "comm": "main", "size": 2, "prints": [1]},
        {"kind": "reply", "number": []},
    ],
)
async def test_nonsense_ends_the_connection_of_who_sends_it_and_nothing_else(message: Message) -> None:
    async with job("aaa") as found:
        sender: Any = found.channels[1]
        text = {"to": 0, "from": 1, **message}
        sender._thread.call(lambda: sender._node.up.send(text))
        await found.lost(1, [0, 2])
        assert "nonsense" in found.channels[0].gone[1]
        found.channels[2].tell("main", {"still": "here"})
        await until(lambda: any("still" in item for _, item in found.members[0].heard), "the news")


async def test_who_looks_on_is_told_about_all_ranks() -> None:
    async with job("aaa") as found:
        await found.kill(2)
        await found.lost(2, [0, 1])
        reader, writer = await asyncio.open_unix_connection("\0" + found.channels[1].roster.contacts[1].local)
        writer.write(encode({"look": True, "stacks": False}))
        decoder = Decoder(1 << 20)
        decoder.feed(await reader.read())
        shown = []
        while (message := decoder.next()) is not None:
            shown.append(message)
        said = {rank: answer for message in shown for rank, answer in message.get("said", {}).items()}
        assert sorted(said) == ["0", "1"]
        assert said["0"]["comms"]["main"]["asked"]["what"] == "state"
        assert "ended" in shown[-1]["gone"]["2"]
        writer.close()


def test_nothing_is_logged_of_a_usual_life(caplog: pytest.LogCaptureFixture) -> None:
    async def live() -> None:
        async with job("aab") as found:
            found.channels[0].tell("main", {"a": 1})

    with caplog.at_level(logging.DEBUG):
        asyncio.run(live())
    assert [record.getMessage() for record in caplog.records if record.name == "asynccomm"] == []
