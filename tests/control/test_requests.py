"""Asking and answering, and who looks on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from asynccomm.control import channel as module
from asynccomm.control import requests as questions_module
from asynccomm.control.messages import Body, Reply, Request
from asynccomm.control.requests import Requests
from asynccomm.control.router import Router
from asynccomm.control.subscribers import EVERY, Subscribers
from asynccomm.control.transport.connection import Look
from asynccomm.control.transport.framing import Decoder, encode
from asynccomm.control.transport.schema import JsonObject
from asynccomm.control.transport.topology import RankAddress, Topology

from .channel_pairs import HOSTS, Member, job, two_threads
from .unauthenticated import until

pytestmark = pytest.mark.usefixtures("quiet")


@HOSTS
async def test_questions_are_answered(hosts: str) -> None:
    async with job(hosts) as found:
        said = await asyncio.wrap_future(found.channels[3].request("main", range(4), {"what": "now"}, 10))
        assert said == {rank: {"asked": {"what": "now"}, "on": "asynccomm control"} for rank in range(4)}
        assert await asyncio.wrap_future(found.channels[0].request("other", [1], {"what": "now"}, 10)) == {1: {}}
        assert await asyncio.wrap_future(found.channels[0].request("main", [], {}, 10)) == {}
        assert await asyncio.wrap_future(found.channels[0].request("main", [77], {}, 10)) == {}


async def test_a_question_that_cannot_be_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with job("aa") as found:
        said = await asyncio.wrap_future(found.channels[0].request("main", [1], {"bad": "luck"}, 10))
        assert said == {1: {"problem": "ZeroDivisionError: luck"}}


async def test_who_is_lost_meanwhile_is_not_waited_for() -> None:
    async with job("aaa") as found:
        found.channels[2]._router.send = lambda *args, **kwargs: None  # type: ignore[method-assign]  # it says nothing
        asking = found.channels[0].request("main", [1, 2], {"what": 1}, 60)
        await found.kill(2)
        said = await asyncio.wait_for(asyncio.wrap_future(asking), 20)
        assert sorted(said) == [1]
        assert await asyncio.wrap_future(found.channels[0].request("main", [2], {"what": 1}, 60)) == {}


async def test_asking_ends_when_the_channel_does() -> None:
    async with job("aa") as found:
        found.channels[1]._router.send = lambda *args, **kwargs: None  # type: ignore[method-assign]
        asking = found.channels[0].request("main", [1], {"what": 1}, 60)
        await found.kill(0)
        assert await asyncio.wait_for(asyncio.wrap_future(asking), 20) == {}


async def test_a_rank_whose_control_thread_is_stuck_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.02)
    zero, one, own = await two_threads(monkeypatch)
    one.subscribe("main", Member())
    assert 1 in await asyncio.wrap_future(zero.request("main", [1], {}, 10))
    assert zero.silence(0) is None
    release = threading.Event()
    own.call(release.wait)
    await until(lambda: (zero.silence(1) or 0) > 0.2, "silence")
    assert await asyncio.wrap_future(zero.request("main", [1], {}, 0.05)) == {}
    assert zero.gone == {}, "it may still come back"
    release.set()
    await until(lambda: (zero.silence(1) or 0) < 0.2, "it to be heard again")
    await asyncio.gather(zero.aclose(), one.aclose())
    own.join()
    assert not own._thread.is_alive()


async def test_who_looks_on_is_told_about_all_ranks() -> None:
    async with job("aaa") as found:
        await found.kill(2)
        await found.lost(2, [0, 1])
        reader, writer = await asyncio.open_unix_connection("\0" + found.channels[1].topology.contacts[1].local)
        writer.write(encode(Look()))
        decoder = Decoder(1 << 20)
        decoder.feed(await reader.read())
        shown = []
        while (message := decoder.next()) is not None:
            shown.append(message)
        said = {message["rank"]: message["comms"] for message in shown[:-1]}
        assert sorted(said) == [0, 1]
        assert said[0]["main"]["asked"]["what"] == "state"
        assert "ended" in shown[-1]["gone"]["2"]
        writer.close()


# -- alone ------------------------------------------------------------------------------------------------------------


class Line:
    """To another rank, or to somebody who looks on: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass

    def take(self, kind: type[Body]) -> list[Any]:
        found = [message.body for message in self.sent if isinstance(message.body, kind)]
        self.sent.clear()
        return found


class Side:
    """Rank 0 of three, with lines to the others."""

    def __init__(self) -> None:
        self.router = Router(
            0, Topology(RankAddress(rank, "h", rank, "x") for rank in range(3)), lambda *_: None, self._gone
        )
        self.members = Subscribers(self.router.gone)
        self.requests = Requests(self.router, self.members)
        self.lines = {rank: Line() for rank in (1, 2)}
        for rank, line in self.lines.items():
            self.router.accept(rank, line)

    def _gone(self, ranks: Sequence[int], how: str) -> None:
        for rank in ranks:
            self.requests.on_departure(rank)

    def reply(self, rank: int, answer: JsonObject, number: int = 0) -> None:
        self.requests.on_reply(rank, Reply(number, answer))


async def begun(
    side: Side, timeout: float = 60.0, question: JsonObject | None = None
) -> asyncio.Task[dict[int, JsonObject]]:
    sent = len(side.lines[2].sent)
    task = asyncio.ensure_future(side.requests.gather("main", [1, 2], question or {"what": 1}, timeout))
    await until(lambda: len(side.lines[2].sent) > sent, "the question")
    return task


async def test_answers_come_in_any_order_and_count_once() -> None:
    side = Side()
    task = await begun(side)
    (asked,) = side.lines[1].take(Request)
    assert (asked.comm, asked.question, asked.number) == ("main", {"what": 1}, 0)
    side.reply(2, {"b": 1})
    side.reply(2, {"b": 2})
    side.reply(0, {"nobody": "has asked it"})
    side.reply(1, {"another": "question"}, number=7)
    side.reply(1, {"a": 1})
    assert await task == {2: {"b": 1}, 1: {"a": 1}}
    side.reply(1, {"too": "late"})


async def test_each_question_has_its_own_answers() -> None:
    side = Side()
    first, second = await begun(side), await begun(side)
    for number in (1, 0):
        for rank in (1, 2):
            side.reply(rank, {"to": number}, number)
    assert (await first)[1] == {"to": 0}
    assert (await second)[1] == {"to": 1}


async def test_who_goes_is_not_waited_for_and_who_is_gone_not_asked() -> None:
    side = Side()
    task = await begun(side)
    side.router.declare_lost(2, "it was silent")
    side.reply(1, {"a": 1})
    assert await task == {1: {"a": 1}}
    assert await side.requests.gather("main", [2], {}, 60.0) == {}


async def test_what_came_in_time_counts() -> None:
    side = Side()
    task = await begun(side, timeout=0.01)
    side.reply(1, {"a": 1})
    assert await task == {1: {"a": 1}}


async def test_nobody_waits_any_longer_once_it_is_closed() -> None:
    side = Side()
    task = await begun(side)
    side.reply(1, {"a": 1})
    side.requests.close()
    assert await task == {1: {"a": 1}}
    assert await side.requests.gather("main", [1], {}, 60.0) == {}


def test_a_question_has_its_answer_sent() -> None:
    side = Side()
    side.members.subscribe("main", Member())
    side.requests.on_request(1, Request("main", {"what": 1}, 5))
    (reply,) = side.lines[1].take(Reply)
    assert reply.number == 5
    assert reply.answer["asked"] == {"what": 1}


def test_stacks_are_left_out_of_answers_that_would_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    class Talkative(Member):
        def on_request(self, question: JsonObject) -> JsonObject:
            return {"stacks": "x" * 1000 if question["stacks"] else ""}

    side = Side()
    side.members.subscribe("main", Talkative())
    question = Request(EVERY, {"stacks": True}, 0)
    side.requests.on_request(1, question)
    monkeypatch.setattr(questions_module, "ANSWER_BYTES", 500)
    side.requests.on_request(1, question)
    long, short = side.lines[1].take(Reply)
    assert long.answer["comms"]["main"]["stacks"]
    assert not short.answer["comms"]["main"]["stacks"]


async def test_an_onlooker_is_shown_each_rank_and_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions_module, "PING_SECONDS", 0.0)
    monkeypatch.setattr(questions_module, "ANSWER_SECONDS", 0.05)
    side, observer = Side(), Line()
    side.router.declare_lost(2, "it was silent")
    showing = asyncio.ensure_future(side.requests.send_overview(observer, [0, 1, 2], Look()))
    await showing
    last = observer.sent[-1]
    assert 1 in last.silent
    assert last.gone == {2: "it was silent"}
    assert last.sockets == dict.fromkeys(range(3), "x")
    assert {request.question["what"] for request in side.lines[1].take(Request)} == {"ping", "state"}
    nobody = Line()
    await side.requests.send_overview(nobody, [], Look())
    assert len(nobody.sent) == 1
    assert nobody.sent[0].silent == {}
