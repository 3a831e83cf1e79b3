"""Meetings over channels of several ranks in one process, on real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynccomm.control.channel import ControlChannel
from asynccomm.control.messages import MeetingBegin

from .channel_pairs import HOSTS, job
from .unauthenticated import until

pytestmark = pytest.mark.usefixtures("quiet")


def come(channel: ControlChannel, meeting: str, **terms: Any) -> list[MeetingBegin | None]:
    """The outcomes of an arrival."""
    outcomes: list[MeetingBegin | None] = []
    channel.call(lambda: channel.meetings.come(meeting, terms, outcomes.append))
    return outcomes


def withdraw(channel: ControlChannel, meeting: str) -> None:
    channel.call(lambda: channel.meetings.withdraw(meeting))


def state(channel: ControlChannel) -> tuple[int, int]:
    """The numbers of arrivals that wait for an answer, and of meetings that wait for ranks."""
    return len(channel.meetings._waiting), len(channel.meetings._come)


@HOSTS
async def test_a_meeting_begins_with_the_last_rank(hosts: str) -> None:
    async with job(hosts) as found:
        outcomes = [come(channel, "m", backend="shm") for channel in found.channels[1:]]
        other = [come(channel, "another") for channel in found.channels]
        await until(lambda: all(other), "the other meeting")
        assert outcomes == [[], [], []]
        outcomes.append(come(found.channels[0], "m", backend="shm"))
        await until(lambda: all(outcomes), "the meeting")
        begun = outcomes[0][0]
        assert begun is not None
        assert begun.terms == {0: {"backend": "shm"}}
        assert outcomes == [[begun]] * 4
        assert other[0][0] is not None
        assert other[0][0].epoch != begun.epoch
        assert [state(channel) for channel in found.channels] == [(0, 0)] * 4


async def test_other_terms_are_told_of_the_first_rank_that_has_them() -> None:
    async with job("aaaa") as found:
        outcomes = [come(channel, "m", rank=max(1, rank)) for rank, channel in enumerate(found.channels)]
        await until(lambda: all(outcomes), "the meeting")
        assert [outcome[0].terms for outcome in outcomes if outcome[0]] == [{0: {"rank": 1}, 2: {"rank": 2}}] * 4


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_withdraws_in_time_is_not_counted(rank: int) -> None:
    async with job("aa") as found:
        one, other = found.channels[rank], found.channels[1 - rank]
        first = come(one, "m")
        withdraw(one, "m")
        await until(lambda: first, "the acknowledgement")
        assert first == [None]
        theirs = come(other, "m")
        assert await asyncio.wrap_future(other.request("main", [rank], {}, 10))  # the arrival has come before it
        assert theirs == []
        again = come(one, "m")
        await until(lambda: again, "the meeting")
        await until(lambda: theirs, "the meeting there")
        assert again == theirs
        assert again[0] is not None
        assert [state(channel) for channel in found.channels] == [(0, 0)] * 2


async def test_a_rank_that_withdraws_too_late_knows_that_it_is_counted() -> None:
    async with job("aa") as found:
        zero, one = found.channels
        first = come(zero, "m")

        outcomes: list[MeetingBegin | None] = []

        def come_and_go() -> None:
            one.meetings.come("m", {}, outcomes.append)
            one.meetings.withdraw("m")
            one.meetings.come("m", {}, outcomes.append)

        one.call(come_and_go)
        await until(lambda: first and outcomes, "the meeting")
        assert outcomes == first
        second = come(zero, "m")
        await until(lambda: second and len(outcomes) == 2, "the second meeting")
        assert outcomes == [*first, *second]
        assert None not in outcomes


async def test_no_rank_is_absent_once_a_rank_is_gone() -> None:
    """Departures end the record of the ranks that have come before their outcomes reach the loop."""
    async with job("aaa") as found:
        zero, one, two = found.channels
        outcomes = come(one, "m")
        await until(lambda: zero.meetings.absent("m") == {0, 2}, "the arrival")
        await two.aclose()
        await until(lambda: outcomes and not state(zero)[1], "the departure")
        assert outcomes == [None]
        assert zero.meetings.absent("m") == set()


async def test_a_second_arrival_of_a_rank_is_refused() -> None:
    async with job("aa") as found:
        zero, one = found.channels
        ours = [come(one, "m"), come(one, "m")]
        await until(lambda: ours[0], "the refusal")
        assert ours == [[None], []]
        theirs = come(zero, "m")
        await until(lambda: theirs and ours[1], "the meeting")
        assert ours[1] == theirs


@HOSTS
@pytest.mark.parametrize("rank", [0, 1, 3])
async def test_no_meeting_takes_place_without_a_lost_rank(hosts: str, rank: int) -> None:
    async with job(hosts) as found:
        others = [channel for channel in found.channels if channel.rank != rank]
        outcomes = [come(channel, "m") for channel in others]
        await found.kill(rank)
        await until(lambda: all(outcomes), "the end of the meeting")
        assert outcomes == [[None]] * 3
        late = come(others[1], "m")
        await until(lambda: late, "the refusal")
        assert late == [None]
        assert [state(channel) for channel in others] == [(0, 0)] * 3


@pytest.mark.parametrize("rank", [0, 1])
async def test_no_meeting_takes_place_without_a_rank_that_has_left(rank: int) -> None:
    async with job("aa") as found:
        waiting = come(found.channels[1 - rank], "m")
        await found.channels[rank].aclose()
        await until(lambda: waiting, "the end of the meeting")
        assert waiting == [None]


async def test_the_end_of_the_channel_is_the_end_of_its_meetings() -> None:
    async with job("aa") as found:
        waiting = come(found.channels[1], "m")
        await found.channels[1].aclose()
        assert waiting == [None]
        late: list[MeetingBegin | None] = []
        found.channels[1].meetings.come("m", {}, late.append)
        assert late == [None]
