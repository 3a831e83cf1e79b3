"""Leases of channels of several ranks in one process, on real sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import pytest

from asynccomm.backends.base import RankInfo
from asynccomm.control.channel import ControlChannel
from asynccomm.rendezvous import shared_channels
from asynccomm.rendezvous.shared_channels import ChannelLease, ChannelPlace
from tests.control.channel_pairs import job
from tests.control.unauthenticated import until
from tests.forking import fork

pytestmark = pytest.mark.usefixtures("quiet")

HERE = ChannelPlace("run", "host:1", "host", "network")


def members(size: int) -> Sequence[RankInfo]:
    return [RankInfo(rank, "host", os.getpid(), "0", "", rank) for rank in range(size)]


def lease(channel: ControlChannel, where: ChannelPlace = HERE) -> ChannelLease:
    return ChannelLease.of_new(channel, where, members(len(channel.topology.contacts)))


@pytest.mark.parametrize("end", ["end", "aclose"])
async def test_a_channel_ends_with_its_last_lease(end: str) -> None:
    async with job("aa") as found:
        channel = found.channels[1]
        first = lease(channel)
        second = ChannelLease.of_open(HERE, 1, 2)
        assert second is not None
        assert second.channel is channel
        assert second.members == members(2)
        for _ in range(2):  # the second time does nothing
            if end == "aclose":
                await first.aclose()
            first.end()
        assert not channel._closed
        third = ChannelLease.of_open(HERE, 1, 2)
        assert third is not None
        third.end()
        if end == "aclose":
            await asyncio.gather(second.aclose(), second.aclose())
            assert channel._closed
        else:
            second.end()
        assert ChannelLease.of_open(HERE, 1, 2) is None
        await until(lambda: channel._closed, "the end of the channel")
        assert shared_channels._open == []


async def test_only_the_same_ranks_at_the_same_place_share() -> None:
    async with job("aa") as found:
        mine = lease(found.channels[1])
        for where, rank, size in [
            (HERE._replace(run="another"), 1, 2),
            (HERE._replace(store="host:2"), 1, 2),
            (HERE._replace(host="another"), 1, 2),
            (HERE._replace(network="another"), 1, 2),
            (HERE, 0, 2),
            (HERE, 1, 3),
            (HERE, 2, 2),
        ]:
            assert ChannelLease.of_open(where, rank, size) is None
        again = ChannelLease.of_open(HERE, 1, 2)
        assert again is not None
        again.end()
        alone = ChannelLease.of_new(found.channels[0], None, members(2))
        assert ChannelLease.of_open(HERE, 0, 2) is None, "it is not for others"
        await alone.aclose()
        await until(lambda: 0 in found.channels[1].gone, "the leave of rank 0")
        assert ChannelLease.of_open(HERE, 1, 2) is None, "a rank is gone"
        await mine.aclose()


async def test_all_ranks_have_the_same_key() -> None:
    async with job("aa") as found, job("aa") as other:
        leases = [lease(channel) for each in (found, other) for channel in each.channels]
        keys = [each.key for each in leases]
        assert keys[0] == keys[1] != keys[2] == keys[3]
        assert all(len(key) == 16 and key not in str(found.channels[0].tokens.ask) for key in keys)
        for each in leases:
            each.end()


async def test_a_forked_child_has_no_channels() -> None:
    async with job("aa") as found:
        mine = lease(found.channels[0])
        child = fork()
        if not child:
            os._exit(0 if ChannelLease.of_open(HERE, 0, 2) is None else 1)
        assert os.waitpid(child, 0) == (child, 0)
        second = ChannelLease.of_open(HERE, 0, 2)
        assert second is not None
        second.end()
        mine.end()
