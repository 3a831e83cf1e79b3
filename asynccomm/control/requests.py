"""Requests between ranks over the control channel, and the report to a diagnosing process outside the job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Sequence
from typing import Final, NamedTuple, final

from asynccomm.control.messages import JobOverview, RankAnswer, Reply, Request
from asynccomm.control.router import Router, Transport
from asynccomm.control.subscribers import EVERY, Subscribers
from asynccomm.control.timing import ANSWER_SECONDS, PING_SECONDS
from asynccomm.control.transport.connection import Look
from asynccomm.control.transport.framing import MESSAGE_BYTES
from asynccomm.control.transport.schema import JsonObject

ANSWER_BYTES: Final = MESSAGE_BYTES - 4096  # the rest is for the enclosing message
FLIGHT_BYTES: Final = ANSWER_BYTES // 64  # of one comm's flight recorder


class _PendingRequest(NamedTuple):
    """A request that some ranks have not answered yet."""

    due: set[int]
    answers: dict[int, JsonObject]
    enough: asyncio.Future[None]

    def end(self) -> None:
        if not self.enough.done():
            self.enough.set_result(None)

    def end_if_all_have_answered(self) -> None:
        if not self.due:
            self.end()


@final
class Requests:
    """The requests of one rank, and its replies to the requests of other ranks. Runs on the control thread.

    Args:
        router: carries requests and replies.
        members: the comms that answer the requests of other ranks.
    """

    def __init__(self, router: Router, members: Subscribers) -> None:
        self._router = router
        self._members = members
        self._pending: dict[int, _PendingRequest] = {}
        self._number = 0
        self._closed = False

    async def gather(
        self, key: str, ranks: Sequence[int], question: JsonObject, timeout: float
    ) -> dict[int, JsonObject]:
        """The answers of ``ranks`` that arrive within ``timeout`` seconds, by rank."""
        if self._closed:
            return {}
        due = {rank for rank in ranks if rank not in self._router.gone and rank in self._router.topology.contacts}
        asked = _PendingRequest(due, {}, asyncio.get_running_loop().create_future())
        number = self._number
        self._number += 1
        self._pending[number] = asked
        try:
            for rank in list(due):
                self._router.send(rank, Request(key, question, number))
            if due:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if timeout == math.inf else timeout):
                        await asked.enough
            return asked.answers
        finally:
            del self._pending[number]

    def on_request(self, source: int, request: Request) -> None:
        """Reply to the request of another rank."""
        self._router.send(source, Reply(request.number, self._fitting(request.comm, request.question)))

    def _fitting(self, key: str, question: JsonObject) -> JsonObject:
        """The answer; without stacks if it would exceed a message with them, as with ten thousand tasks."""
        answer = self._members.on_request(key, question)
        if question.get("stacks") and len(json.dumps(answer)) > ANSWER_BYTES:
            return self._members.on_request(key, {**question, "stacks": False})
        return answer

    def on_reply(self, rank: int, reply: Reply) -> None:
        """Message the answer of a rank."""
        asked = self._pending.get(reply.number)
        if asked is not None and rank in asked.due:
            asked.due.discard(rank)
            asked.answers[rank] = reply.answer
            asked.end_if_all_have_answered()

    def on_departure(self, rank: int) -> None:
        """Stop waiting for ``rank``."""
        for asked in self._pending.values():
            asked.due.discard(rank)
            asked.end_if_all_have_answered()

    def close(self) -> None:
        """Stop waiting for all ranks."""
        self._closed = True
        for asked in self._pending.values():
            asked.end()

    async def send_overview(self, observer: Transport, ranks: Sequence[int], look: Look) -> None:
        """Send the states of ``ranks``, or their flight recorders, to a diagnosing process.

        One message for each rank: all in one could be too long.
        """
        router = self._router
        said: dict[int, JsonObject] = {}
        if look.flight:
            question = {"what": "flight", "bytes": FLIGHT_BYTES}
            for rank in ranks:  # one after the other: each answer may be long
                said |= await self.gather(EVERY, [rank], question, ANSWER_SECONDS)
        elif ranks:
            await self.gather(EVERY, ranks, {"what": "ping"}, ANSWER_SECONDS)
            await asyncio.sleep(PING_SECONDS)
            said = await self.gather(EVERY, ranks, {"what": "state", "stacks": look.stacks}, ANSWER_SECONDS)
        for rank, answer in said.items():
            observer.send(RankAnswer(rank, answer.get("comms", {})))
        silent = {rank: router.silence(rank) for rank in ranks if rank not in said and rank not in router.gone}
        sockets = {rank: contact.local for rank, contact in router.topology.contacts.items()}
        observer.send(JobOverview(silent, router.gone, sockets))
