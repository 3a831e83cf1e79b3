"""Messages between a trainer and a server: order, ends in order and by failure, damaged messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from asynccomm import AbortedError, PayloadError
from asynccomm.testing import loopback_world
from asynccomm.weights import conversation as module
from asynccomm.weights.conversation import (
    SERVER,
    TRAINER,
    Abandon,
    Begin,
    Complete,
    Conversation,
    Done,
    Ending,
    Fan,
    FinishedError,
    Go,
    Ready,
    TrainerMessage,
)

FAN = Fan(4, 1, 3)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Conversation, Conversation]]:
    async with asyncio.timeout(20), loopback_world(2) as (first, second):
        yield Conversation(first, SERVER, "the server"), Conversation(second, TRAINER, "the trainer")


async def test_messages_come_by_kind_and_job() -> None:
    async with pair() as (trainer, server):
        trainer.say(Begin(1, 10, {"loss": 0.5}))
        trainer.say(Go(1, 0, FAN))
        trainer.say(Abandon(1, "no"))
        trainer.say(Go(2, 0, FAN))
        trainer.say(Complete(2))
        assert await server.hear(Begin) == Begin(1, 10, {"loss": 0.5})
        assert await server.wait_for(TrainerMessage, 1) == Go(1, 0, FAN)
        assert await server.hear(TrainerMessage, 1) == Go(1, 0, FAN)
        assert await server.hear(TrainerMessage, 2) == Go(2, 0, FAN)  # the end of job 1 is dropped
        assert await server.hear(Ending, 2) == Complete(2)
        waiting = asyncio.ensure_future(trainer.hear(Done, 2))
        server.say(Ready())
        server.say(Done(2, 0, "an error"))
        assert await waiting == Done(2, 0, "an error")
        assert await trainer.hear(Ready) == Ready()
        await asyncio.gather(trainer.aclose(), server.aclose())


async def test_the_other_side_hears_the_end() -> None:
    async with pair() as (trainer, server):
        trainer.say(Complete(1))
        await trainer.aclose()
        assert await server.hear(Complete) == Complete(1)
        with pytest.raises(FinishedError, match="the trainer has ended"):
            await server.hear(Complete)
        server.say(Ready())  # without effect
        await server.aclose()
        assert isinstance(trainer.ended, FinishedError)


async def test_an_abort_reaches_the_other_side() -> None:
    async with pair() as (trainer, server):
        hearing = asyncio.ensure_future(server.hear(Begin))
        await trainer.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            await hearing
        await server.aclose()
        assert isinstance(server.ended, AbortedError)


async def test_an_end_that_is_cancelled_still_closes_the_comm() -> None:
    async with pair() as (trainer, server):
        server._reading.cancel()  # answers nothing
        ending = asyncio.ensure_future(trainer.aclose())
        await asyncio.wait([ending], timeout=0.01)
        assert ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert trainer._reading.done()
        with pytest.raises(AbortedError, match="was cancelled"):
            await server.comm.barrier()


async def test_a_silent_side_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    async with loopback_world(2) as (first, second):
        await Conversation(first, SERVER, "the server").aclose()
        with pytest.raises(AbortedError, match="the server did not answer"):
            await second.recv(torch.ones(1), 0)


@pytest.mark.parametrize("item", ["{}", "no JSON", 3, (), '{"kind":"Begin","job":"x"}'])
async def test_a_damaged_message_ends_the_conversation(item: object) -> None:
    async with loopback_world(2) as (first, second):
        talk = Conversation(first, SERVER, "the server")
        second.sink(TRAINER).put(item)
        with pytest.raises(PayloadError, match="a message of the server cannot be read"):
            await talk.hear(Begin)
        await talk.abort("damaged")
