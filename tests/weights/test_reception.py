"""Servers that are lost while they join, and servers of only some trainers."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch

from asynccomm import MemoryStore
from asynccomm.testing import loopback_world
from asynccomm.weights import Publisher, Server, Shard
from asynccomm.weights import meeting as module
from asynccomm.weights.conversation import SERVER, TRAINER, Connected, Conversation, LayoutOffer, TrainerLayouts
from asynccomm.weights.meeting import Meeting
from asynccomm.weights.orders import Admit
from asynccomm.weights.reception import Reception
from tests.waiting import until

from .scenes import Served, state
from .test_plan import part

LAYOUT = {"a": part((4,))}


async def place() -> Meeting:
    meeting = await Meeting.open(MemoryStore(), "w", "loopback", torch.device("cpu"), 10, None)
    return meeting.of(1)


async def join(meeting: Meeting) -> Conversation:
    """A server that has its welcome."""
    talk = Conversation(await meeting.pair(0, await meeting.enter(), SERVER), TRAINER, "trainer 0")
    await talk.hear(TrainerLayouts)
    return talk


async def test_a_server_that_is_lost_while_it_joins_holds_no_other_up(caplog: pytest.LogCaptureFixture) -> None:
    meeting = await place()
    reception = Reception(meeting, 0, [LAYOUT], 64, 10)
    orders: list[Admit] = []
    news: list[object] = []
    greeting = asyncio.ensure_future(reception.greet(orders.append, news.append))
    lost = await join(meeting)
    await lost.abort("out of memory")
    late = await join(meeting)
    late.say(LayoutOffer("late", LAYOUT, True))
    await until(lambda: orders)
    await late.abort("it was stopped")
    await until(lambda: "late could not join the trainers" in caplog.text)
    assert reception.gone() == []  # as long as the order is not carried out
    reception.admit(orders[0])
    assert reception.gone() == [2]  # the other trainers connect with it
    other = await join(meeting)
    other.say(LayoutOffer("other", LAYOUT, True))
    await until(lambda: len(orders) == 2)
    assert reception.present() == ()
    other.say(Connected())
    await until(lambda: news)
    assert (news, reception.present()) == ([3], ("other",))
    assert orders == [Admit(2, "late", LAYOUT, True), Admit(3, "other", LAYOUT, True)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "server 1 could not join the trainers: AbortedError: aborted by rank 1: out of memory" in caplog.text
    assert (await reception.members([1, 3]))[1] == {1: "it was not admitted"}
    assert reception.admitted() == []
    reception.admit(orders[1])
    assert reception.admitted() == [3]
    await asyncio.gather(other.aclose())
    await until(lambda: reception.gone() == [3])
    greeting.cancel()
    await asyncio.wait([greeting])
    await reception.aclose()


@pytest.mark.parametrize("others", [0, 1])
async def test_a_server_that_is_slow_after_it_took_its_number_joins(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    meeting = await place()
    reception = Reception(meeting, 0, [LAYOUT], 64, 10)
    greeting = asyncio.ensure_future(reception.greet(lambda order: None, lambda news: None))
    slow = await meeting.session.store.add("asynccomm/run/weights/w/1/servers", 1)  # and writes no key meanwhile
    talks = [await join(meeting) for _ in range(others)]  # not held up
    talks.append(Conversation(await meeting.pair(0, slow, SERVER), TRAINER, "trainer 0"))
    async with asyncio.timeout(5):
        await talks[-1].hear(TrainerLayouts)
    greeting.cancel()
    await asyncio.wait([greeting])
    await reception.aclose()
    await asyncio.gather(*(talk.aclose() for talk in talks))


async def test_a_server_is_connected_with_the_trainers_that_it_needs() -> None:
    async with loopback_world(3) as comms:
        halves = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
        states = [{"a": halves[0]}, {"a": halves[1]}, {}]
        shards = [{"a": Shard(0, 0, 2)}, {"a": Shard(0, 1, 2)}, {}]
        second = Served(comms[0], {"a": torch.zeros(2)}, shards={"a": Shard(0, 1, 2)})
        all_of_them = [
            Publisher(comm, each, shards=own, servers=1) for comm, each, own in zip(comms, states, shards, strict=True)
        ]
        await asyncio.gather(*(publisher.__aenter__() for publisher in all_of_them))
        assert len(second.updates._links) == 2  # the first, which gives orders, and the one with its half
        await asyncio.gather(*(publisher.push() for publisher in all_of_them))
        await second.reached(1)
        assert torch.equal(second.tensors["a"], halves[1])
        await asyncio.gather(*(publisher.__aexit__(None, None, None) for publisher in all_of_them))
        await second.end()


async def test_a_server_gives_up_after_its_time_limit() -> None:
    server = Server(state(), store=MemoryStore(), timeout=0.01)
    with pytest.raises(TimeoutError):
        await server.updates().__aenter__()
    with pytest.raises(TimeoutError):  # and is free for another attempt
        await server.updates().__aenter__()
