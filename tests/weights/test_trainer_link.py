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
    TRAINER,
    Abandon,
    Complete,
    Conversation,
    Done,
    Fan,
    Go,
    Ready,
)
from asynccomm.weights.meeting import Meeting
from asynccomm.weights.plan import plan
from asynccomm.weights.trainer_link import TrainerLink
from asynccomm.weights.transmission import send

from .test_plan import part

LAYOUT = {"a": part((4, 2))}
PLAN = plan([LAYOUT], LAYOUT)[0]
WEIGHTS = {"a": torch.arange(8.0).reshape(4, 2)}


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Conversation, TrainerLink, Meeting]]:
    """A trainer's conversation, and the link at its other end."""
    meeting = (await Meeting.open(MemoryStore(), "w", "loopback", torch.device("cpu"), 10, None)).of(1)
    comms = await asyncio.gather(meeting.pair(0, 1, TRAINER), meeting.pair(0, 1, SERVER))
    async with asyncio.timeout(20):
        talk = Conversation(comms[0], SERVER, "the server")
        yield talk, TrainerLink(meeting, 0, Conversation(comms[1], TRAINER, "the trainer"), PLAN, 16), meeting


async def test_attempts_and_the_end_of_the_job() -> None:
    async with linked() as (trainer, link, meeting):
        found = {"a": torch.zeros(4, 2)}
        receiving = asyncio.ensure_future(link.receive(3, found, LAYOUT))
        link.get_ready()
        link.get_ready()
        assert await trainer.hear(Ready) == Ready()
        trainer.say(Go(3, 0, Fan(1, 1, 2)))
        fan = await meeting.fan(0, 1, 0, 2, [], "")
        fan.abort("a first attempt that fails")
        done = await trainer.hear(Done)
        assert (done.attempt, done.error) == (0, "AbortedError: aborted by rank 0: a first attempt that fails")
        trainer.say(Go(3, 1, Fan(2, 1, 2)))
        second = await meeting.fan(0, 2, 0, 2, [], "")
        await send(second, cut(PLAN, 16), WEIGHTS, LAYOUT)
        assert await trainer.hear(Done) == Done(3, 1)
        trainer.say(Go(3, 2, Fan(2, 1, 2)))  # over the same fan
        await send(second, cut(PLAN, 16), WEIGHTS, LAYOUT)
        assert await trainer.hear(Done) == Done(3, 2)
        link.get_ready()
        assert await trainer.hear(Ready) == Ready()
        trainer.say(Complete(3))
        assert await receiving == Complete(3)
        assert torch.equal(found["a"], WEIGHTS["a"])
        await asyncio.gather(trainer.aclose(), link.aclose(""), fan.aclose(), second.aclose())


async def test_a_fan_that_cannot_be_made_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "CONNECT_SECONDS", 0.05)
    async with linked() as (trainer, link, _):
        receiving = asyncio.ensure_future(link.receive(1, {"a": torch.zeros(4, 2)}, LAYOUT))
        trainer.say(Go(1, 0, Fan(1, 1, 3)))
        assert (await trainer.hear(Done)).error.startswith("RendezvousError")
        trainer.say(Complete(1))
        await receiving
        await asyncio.gather(trainer.aclose(), link.aclose(""))


async def test_a_fan_is_given_up_when_the_trainer_goes_on() -> None:
    async with linked() as (trainer, link, _):
        receiving = asyncio.ensure_future(link.receive(1, {"a": torch.zeros(4, 2)}, LAYOUT))
        trainer.say(Go(1, 0, Fan(1, 1, 3)))
        trainer.say(Abandon(1, "cancelled"))
        assert (await trainer.hear(Done)).error == "BrokenError: the trainer did not wait for the fan"
        assert await receiving == Abandon(1, "cancelled")
        await asyncio.gather(trainer.aclose(), link.aclose(""))


async def test_leaving_while_a_version_arrives() -> None:
    async with linked() as (trainer, link, meeting):
        receiving = asyncio.ensure_future(link.receive(1, {"a": torch.zeros(4, 2)}, LAYOUT))
        trainer.say(Go(1, 0, Fan(1, 1, 2)))
        fan = await meeting.fan(0, 1, 0, 2, [], "")
        await fan.broadcast(torch.zeros(16, dtype=torch.uint8), 0)
        receiving.cancel()
        await asyncio.wait([receiving])
        await asyncio.gather(link.aclose(""), trainer.aclose())
        with pytest.raises(AbortedError, match="the server has left"):
            await fan.barrier()
        await fan.aclose()
