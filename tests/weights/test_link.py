"""A server's side of one trainer: attempts, a fan that cannot be made, an end in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from asynccomm import AbortedError, MemoryStore
from asynccomm.weights import meeting as meeting_module
from asynccomm.weights.buckets import cut
from asynccomm.weights.conversation import (
    SERVER,
    STOP,
    TRAINER,
    Abandon,
    CommitVersion,
    Conversation,
    Done,
    Fan,
    Go,
    Ready,
    Route,
)
from asynccomm.weights.link import TrainerLink
from asynccomm.weights.meeting import Meeting
from asynccomm.weights.plan import plan
from asynccomm.weights.transmission import send

from .test_plan import part

LAYOUT = {"a": part((4, 2))}
PLAN = plan([LAYOUT], LAYOUT)[0]
WEIGHTS = {"a": torch.arange(8.0).reshape(4, 2)}


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Conversation, TrainerLink]]:
    """A trainer's conversation, and the link at its other end."""
    meeting = (await Meeting.open(MemoryStore(), "w", "loopback", torch.device("cpu"), 10, None)).of(1)
    comms = await asyncio.gather(meeting.pair(0, 1, TRAINER), meeting.pair(0, 1, SERVER))
    async with asyncio.timeout(20):
        talk = Conversation(comms[0], SERVER, "the server")
        yield talk, TrainerLink(meeting, 0, Conversation(comms[1], TRAINER, "the trainer"), PLAN, 16)


async def test_an_attempt_over_the_pair_and_the_end_of_the_job() -> None:
    async with linked() as (trainer, link):
        found = {"a": torch.zeros(4, 2)}
        receiving = asyncio.ensure_future(link.receive(3, found, LAYOUT))
        link.get_ready()
        link.get_ready()
        assert await trainer.hear(Ready) == Ready()
        trainer.say(Go(3, 0))
        await send(Route(trainer.comm, fan=False), cut(PLAN, 16), WEIGHTS, LAYOUT)
        assert await trainer.hear(Done) == Done(3, 0)
        link.get_ready()
        assert await trainer.hear(Ready) == Ready()
        trainer.say(CommitVersion(3))
        assert await receiving == CommitVersion(3)
        assert torch.equal(found["a"], WEIGHTS["a"])
        await asyncio.gather(trainer.aclose(), link.aclose(""))


async def test_a_trainer_that_stops() -> None:
    async with linked() as (trainer, link):
        receiving = asyncio.ensure_future(link.receive(1, {"a": torch.zeros(4, 2)}, LAYOUT))
        trainer.say(Go(1, 0))
        route = Route(trainer.comm, fan=False)
        for bucket in cut(PLAN, 16):
            route.send(route.header(STOP))
            route.send(torch.zeros(bucket.nbytes, dtype=torch.uint8))
        assert (await trainer.hear(Done)).error == "the trainer has stopped"
        trainer.say(Abandon(1, "no"))
        assert await receiving == Abandon(1, "no")
        await asyncio.gather(trainer.aclose(), link.aclose(""))


async def test_a_fan_that_cannot_be_made_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "CONNECT_SECONDS", 0.05)
    async with linked() as (trainer, link):
        receiving = asyncio.ensure_future(link.receive(1, {"a": torch.zeros(4, 2)}, LAYOUT))
        trainer.say(Go(1, 0, Fan(1, 1, 3)))
        done = await trainer.hear(Done)
        assert done.error.startswith("RendezvousError")
        trainer.say(CommitVersion(1))
        await receiving
        await asyncio.gather(trainer.aclose(), link.aclose(""))


async def test_leaving_while_a_receive_is_posted() -> None:
    async with linked() as (trainer, link):
        receiving = asyncio.ensure_future(link.receive(1, {"a": torch.zeros(4, 2)}, LAYOUT))
        trainer.say(Go(1, 0))
        while not link._receiving:
            await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait([receiving])
        await link.aclose("")
        with pytest.raises(AbortedError, match="the server has stopped receiving"):
            await trainer.hear(Done)
        await trainer.aclose()
