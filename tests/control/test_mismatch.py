"""Fingerprints, on their way to the root."""

from __future__ import annotations

from typing import Any

import pytest

from asynccomm.control import mismatch as module
from asynccomm.control.fingerprints import Fingerprint
from asynccomm.control.messages import IssuedCollectives
from asynccomm.control.mismatch import MismatchDetector
from asynccomm.control.requests import Requests
from asynccomm.control.router import Router
from asynccomm.control.subscribers import Subscribers
from asynccomm.control.transport.topology import RankAddress, Topology

from .channel_pairs import HOSTS, Member, job
from .unauthenticated import until

pytestmark = pytest.mark.usefixtures("quiet")


def fingerprints(*numbers: int, word: int = 5) -> list[Fingerprint]:
    return [(number, word, word, 1) for number in numbers]


@HOSTS
async def test_a_difference_is_told_to_all(hosts: str) -> None:
    async with job(hosts) as found:
        for rank, (channel, member) in enumerate(zip(found.channels, found.members, strict=True)):
            member.size = 4
            member.issued = fingerprints(0, 1) + fingerprints(2, word=9 if rank == 2 else 5)
            channel.fingerprints_ready()
        for member in found.members:
            await until(lambda member=member: member.heard, "the news")
            (item,) = [item for _, item in member.heard]
            assert item["kind"] == "differs"
            assert item["seq"] == 2
            assert 2 in item["jobs"]
            assert item["sides"] == [{"asked": {"what": "explain", "seq": 2}, "on": "asynccomm control"}] * 2


async def test_equal_programs_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(module, "BATCH_FINGERPRINTS", 7)
    async with job("aa") as found:
        for number in range(0, 40, 10):
            for channel, member in zip(found.channels, found.members, strict=True):
                member.issued = [*member.issued, *fingerprints(*range(number, number + 10))]
                channel.fingerprints_ready()
            await until(lambda: not any(member.issued for member in found.members), "them to be sent")
        await until(lambda: not any(channel._fingerprints._polling for channel in found.channels), "looking to end")
        found.members[0].issued = fingerprints(40, word=1)
        found.members[1].issued = fingerprints(40, word=2)
        for channel in found.channels:
            channel.fingerprints_ready()  # it begins again
        await until(lambda: all(member.heard for member in found.members), "the news")
        assert {item["seq"] for member in found.members for _, item in member.heard} == {40}


# -- alone ------------------------------------------------------------------------------------------------------------


class Clock:
    """The control thread: its timers fire when the test says so."""

    def __init__(self) -> None:
        self.loop = self
        self.timers: list[Any] = []

    def call(self, function: Any) -> bool:
        function()
        return True

    def call_later(self, seconds: float, function: Any) -> None:
        self.timers.append(function)

    def turn(self) -> None:
        timers, self.timers = self.timers, []
        for timer in timers:
            timer()


class Rank:
    """Rank 0 of two, with one comm."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.began: list[Any] = []
        topology = Topology(RankAddress(rank, "h", rank, "x") for rank in range(2))
        self.router = Router(0, topology, lambda _, body: self.heard.append(body), lambda *_: None)
        members = Subscribers(self.router.gone)
        self.member = Member()
        members.subscribe("main", self.member)
        self.clock: Any = Clock()
        self.requests = Requests(self.router, members)
        self.fingerprints = MismatchDetector(self.clock, self.router, members, self.requests, self.began.append)

    def hear(self, rank: int, *found: Fingerprint, key: str = "main") -> None:
        self.fingerprints.on_issued(rank, IssuedCollectives(key, 2, list(found)))


def test_it_looks_as_long_as_there_is_something_and_then_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_POLLS", 2)
    rank = Rank()
    rank.member.issued = fingerprints(0, 1)
    rank.fingerprints.start_polling()
    rank.fingerprints.start_polling()
    assert len(rank.clock.timers) == 1
    rank.member.issued = fingerprints(2)
    rank.clock.turn()
    assert [message.fingerprints for message in rank.heard] == [fingerprints(0, 1), fingerprints(2)]
    for _ in range(2):
        assert len(rank.clock.timers) == 1
        rank.clock.turn()
    assert rank.clock.timers == []
    rank.fingerprints.start_polling()
    assert len(rank.clock.timers) == 1, "it begins again"


def test_what_comes_as_the_looking_ends_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_POLLS", 1)
    rank = Rank()
    looks = iter([[], fingerprints(0)])
    monkeypatch.setattr(rank.member, "take_fingerprints", lambda: (2, next(looks, [])))
    rank.fingerprints.start_polling()
    assert [message.fingerprints for message in rank.heard] == [fingerprints(0)]
    assert not rank.fingerprints._polling


def test_many_go_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_FINGERPRINTS", 3)
    rank = Rank()
    rank.member.issued = fingerprints(*range(7))
    rank.fingerprints.start_polling()
    assert [len(message.fingerprints) for message in rank.heard] == [3, 3, 1]
    assert all(message.comm == "main" and message.size == 2 for message in rank.heard)


def test_nothing_is_sent_once_it_is_closed() -> None:
    rank = Rank()
    rank.fingerprints.close()
    rank.member.issued = fingerprints(0)
    rank.fingerprints.start_polling()
    assert rank.heard == []
    assert rank.clock.timers == []


async def test_the_first_difference_is_reported_with_what_both_say() -> None:
    rank = Rank()
    rank.hear(0, *fingerprints(0, 1))
    assert rank.began == []
    rank.hear(1, *fingerprints(0), *fingerprints(1, word=7))
    rank.hear(1, *fingerprints(2, word=9))
    (report,) = rank.began
    rank.requests.close()  # nobody answers
    await report
    item = {"kind": "differs", "seq": 1, "jobs": [0, 1], "sides": [{}, {}]}
    assert [message.item for message in rank.heard] == [item]
    assert rank.member.heard == [(0, item)], "the root has no news of itself"


def test_a_comm_that_has_ended_is_forgotten() -> None:
    rank = Rank()
    rank.hear(0, *fingerprints(0))
    rank.fingerprints.forget("main")
    rank.hear(1, *fingerprints(0, word=7))
    assert rank.began == []
