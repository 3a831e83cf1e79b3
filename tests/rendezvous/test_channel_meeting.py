"""Meetings of ranks in one process over a channel on real sockets, beside another way to meet."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from asynccomm.control.transport.schema import JsonObject
from asynccomm.rendezvous.channel_meeting import ChannelMeeting
from asynccomm.rendezvous.shared_channels import ChannelLease, ChannelPlace
from tests.control.channel_pairs import job
from tests.control.unauthenticated import until

pytestmark = pytest.mark.usefixtures("quiet")

HERE = ChannelPlace("run", "host:1", "host", "network")


class Two:
    """Two ranks with a channel, and the errors that they tell each other."""

    def __init__(self, leases: list[ChannelLease]) -> None:
        self.leases = leases
        self.told: list[tuple[int, str, JsonObject]] = []

    def come(self, rank: int, name: str = "m", **terms: Any) -> ChannelMeeting:
        lease = ChannelLease.of_open(HERE, rank, 2)
        assert lease is not None
        return ChannelMeeting(lease, name, terms, partial(self._tell, rank), {"why": "dropped"})

    def _tell(self, rank: int, epoch: str, error: JsonObject) -> None:
        self.told.append((rank, epoch, error))

    @property
    def users(self) -> list[int]:
        """The number of leases of each channel."""
        return [lease._shared.leases for lease in self.leases]


@asynccontextmanager
async def two() -> AsyncIterator[Two]:
    async with job("aa") as found:
        leases = [ChannelLease.of_new(channel, HERE, []) for channel in found.channels]
        yield Two(leases)
        for lease in leases:
            await lease.aclose()


async def given_up(meeting: ChannelMeeting, error: JsonObject) -> None:
    meeting.give_up(error)
    await meeting.answer()


def over(meeting: ChannelMeeting) -> None:
    """The comm has come about, and is closed."""
    meeting.keep_lease()
    meeting.lease.end()


async def never() -> str:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("never")


async def at_once() -> str:
    return "otherwise"


async def test_both_ranks_meet() -> None:
    async with two() as found:
        other = found.come(1, "another meeting")
        ours = [found.come(rank) for rank in range(2)]
        assert ours[0].key == ours[1].key != other.key
        assert [await meeting.or_else(never, 60.0) for meeting in ours] == [None, None]
        assert ours[0].begin is not None
        assert ours[0].begin == ours[1].begin
        tokens = [meeting.tokens(ours[0].begin.epoch) for meeting in ours]
        assert tokens[0] == tokens[1]
        assert (
            len({tokens[0].ask, tokens[0].answer, ours[0].tokens("another").ask, found.leases[0].channel.tokens.ask})
            == 4
        )
        assert found.users == [2, 3]
        for meeting in ours:
            over(meeting)
        await given_up(other, {})
        assert found.users == [1, 1]
        assert found.told == []


async def test_the_other_way_is_tried_after_a_while() -> None:
    async with two() as found:
        waiting = found.come(0)
        begun = asyncio.get_running_loop().time()
        assert await waiting.or_else(at_once, 0.05) == "otherwise"
        assert asyncio.get_running_loop().time() - begun > 0.04
        await given_up(waiting, {"why": "met"})
        late = found.come(1)
        with pytest.raises(RuntimeError, match="no way"):
            await late.or_else(_fail, 0.0)
        await given_up(late, {})
        assert found.told == []
        assert found.users == [1, 1]


async def _fail() -> str:
    raise RuntimeError("no way")


async def test_the_other_way_is_cancelled_once_the_meeting_begins() -> None:
    async with two() as found:
        cancelled: list[bool] = []

        async def long() -> str:
            try:
                return await never()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        waiting = asyncio.create_task((early := found.come(0)).or_else(long, 0.0))
        for _ in range(10):
            await asyncio.sleep(0)
        late = found.come(1)
        assert await waiting is None
        assert cancelled == [True]
        assert await late.or_else(never) is None
        assert early.begin == late.begin
        for meeting in (early, late):
            over(meeting)


async def test_a_loss_leaves_the_other_way() -> None:
    async with two() as found:
        waiting = asyncio.create_task((meeting := found.come(1)).or_else(at_once, 60.0))
        failing = asyncio.create_task(meeting.failed(60.0))
        await asyncio.sleep(0)
        assert not failing.done()
        await found.leases[0].aclose()
        assert await waiting == "otherwise"
        assert await failing
        assert meeting.begin is None
        assert found.users == [0, 1]


async def test_failing_is_certain_or_late() -> None:
    async with two() as found:
        zero = found.come(0)
        assert not await zero.failed(0.01)
        one = found.come(1)
        await until(lambda: zero.begin and one.begin, "the meeting")
        assert not await zero.failed(0.01), "the meeting has begun"
        for meeting in (zero, one):
            over(meeting)


async def test_a_rank_that_gives_up_after_the_begin_tells_the_others() -> None:
    async with two() as found:
        ours = [found.come(rank) for rank in range(2)]
        for meeting in ours:
            await meeting.or_else(never)
        begin = ours[0].begin
        assert begin is not None
        await given_up(ours[1], {"why": "cancelled"})
        await until(lambda: found.told, "the error")
        assert found.told == [(1, begin.epoch, {"why": "cancelled"})]
        await until(lambda: found.users == [2, 1], "the end of the lease")
        over(ours[0])


async def test_a_rank_that_gives_up_before_it_hears_of_the_begin_tells_the_others() -> None:
    async with two() as found:
        one = found.come(1)
        channel = found.leases[1].channel
        held: list[Any] = []
        heard = channel.meetings.on_begin
        channel.meetings.on_begin = held.append  # type: ignore[method-assign]
        zero = found.come(0)
        assert await zero.or_else(never) is None
        await until(lambda: held, "the begin")
        giving_up = asyncio.create_task(given_up(one, {"why": "late"}))
        await asyncio.sleep(0.01)
        assert not giving_up.done()
        channel.call(lambda: heard(held[0]))
        await giving_up
        assert zero.begin is not None
        assert found.told == [(1, zero.begin.epoch, {"why": "late"})]
        assert found.users == [2, 1]
        over(zero)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_has_given_up_is_not_met(rank: int) -> None:
    async with two() as found:
        first = found.come(rank)
        await given_up(first, {"why": "first"})
        other = found.come(1 - rank)
        assert await other.or_else(at_once, 0.02) == "otherwise"
        second = found.come(rank)
        assert await second.or_else(never) is None
        await until(lambda: other.begin, "the meeting")
        assert found.told == []
        for meeting in (second, other):
            over(meeting)


async def test_the_lease_is_held_until_the_root_answers() -> None:
    async with two() as found:
        meeting = found.come(1)
        meetings = found.leases[0].channel.meetings
        assert meetings.absent("m") >= {0}
        withdrawals: list[Any] = []
        answer = meetings.on_withdrawal
        meetings.on_withdrawal = lambda *args: withdrawals.append(args)  # type: ignore[method-assign]
        meeting.give_up({})
        await until(lambda: withdrawals, "the withdrawal")
        assert meetings.absent("m") == {0}
        assert found.users == [1, 2]
        found.leases[0].channel.call(lambda: answer(*withdrawals[0]))
        assert await meeting.answer() is None
        assert meetings.absent("m") == {0, 1}
        assert found.users == [1, 1]


@pytest.mark.parametrize("begins", [False, True])
async def test_an_attempt_that_is_dropped_with_its_loop_is_given_up(begins: bool) -> None:
    async with two() as found:
        zero = found.come(0) if begins else None
        loop = asyncio.new_event_loop()

        async def come() -> None:
            meeting = found.come(1)
            await never()
            over(meeting)

        task = loop.create_task(come())
        with ThreadPoolExecutor(1) as thread:
            thread.submit(loop.run_until_complete, asyncio.wait([task], timeout=0 if begins else 0.05)).result()
        loop.close()
        if zero is not None:
            await until(lambda: zero.begin, "the meeting")
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        del task
        gc.collect()
        await until(lambda: found.users[1] == 1, "the end of the lease")
        assert [error for _, _, error in found.told] == [{"why": "dropped"}] * begins
        if zero is not None:
            over(zero)


async def test_a_channel_that_has_ended_is_no_meeting() -> None:
    async with two() as found:
        lease = ChannelLease.of_open(HERE, 1, 2)
        assert lease is not None
        await found.leases[1].channel.aclose()
        meeting = ChannelMeeting(lease, "m", {}, lambda epoch, error: None, {})
        assert await meeting.or_else(at_once, 60.0) == "otherwise"
        await given_up(meeting, {})
        assert found.users == [1, 1]
