"""Requests between ranks over the control channel, and the report to a diagnosing process outside the job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Sequence
from typing import Final, NamedTuple, final

from asynccomm.control.router import Router, Transport
from asynccomm.control.subscribers import EVERY, Subscribers
from asynccomm.control.timing import PING_SECONDS
from asynccomm.control.transport.framing import MESSAGE_BYTES, ControlMessage

ANSWER_SECONDS: Final = 1.0  # for ranks to answer with an issued operation, or with their state
ANSWER_BYTES: Final = MESSAGE_BYTES - 4096  # the rest is for the enclosing message


class _PendingRequest(NamedTuple):
    """A request that some ranks have not answered yet."""

    due: set[int]
    answers: dict[int, ControlMessage]
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
        self, key: str, ranks: Sequence[int], question: ControlMessage, timeout: float
    ) -> dict[int, ControlMessage]:
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
                self._router.send(rank, "ask", comm=key, question=question, number=number)
            if due:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if timeout == math.inf else timeout):
                        await asked.enough
            return asked.answers
        finally:
            del self._pending[number]

    def hear_question(self, message: ControlMessage) -> None:
        """Reply to the request of another rank. Raises: ValueError: the message is no request."""
        key, question = message.get("comm"), message.get("question")
        if not isinstance(key, str) or not isinstance(question, dict):
            raise ValueError("a question of no comm")
        self._router.send(message["from"], "reply", number=message.get("number"), answer=self._fitting(key, question))

    def _fitting(self, key: str, question: ControlMessage) -> ControlMessage:
        """The answer; without stacks if it would exceed a message with them, as with ten thousand tasks."""
        answer = self._members.answer(key, question)
        if question.get("stacks") and len(json.dumps(answer)) > ANSWER_BYTES:
            return self._members.answer(key, {**question, "stacks": False})
        return answer

    def hear_reply(self, message: ControlMessage) -> None:
        """Record the answer of a rank. Raises: ValueError: the message is no reply."""
        number, answer = message.get("number"), message.get("answer")
        if type(number) is not int or not isinstance(answer, dict):
            raise ValueError("no reply")
        asked, rank = self._pending.get(number), message["from"]
        if asked is not None and rank in asked.due:
            asked.due.discard(rank)
            asked.answers[rank] = answer
            asked.end_if_all_have_answered()

    def gone(self, rank: int) -> None:
        """Stop waiting for ``rank``."""
        for asked in self._pending.values():
            asked.due.discard(rank)
            asked.end_if_all_have_answered()

    def close(self) -> None:
        """Stop waiting for all ranks."""
        self._closed = True
        for asked in self._pending.values():
            asked.end()

    async def show(self, onlooker: Transport, ranks: Sequence[int], stacks: bool) -> None:
        """Send the states of ``ranks`` to a diagnosing process, one per message: all in one could be too long."""
        router = self._router
        said: dict[int, ControlMessage] = {}
        if ranks:
            await self.gather(EVERY, ranks, {"what": "ping"}, ANSWER_SECONDS)
            await asyncio.sleep(PING_SECONDS)
            said = await self.gather(EVERY, ranks, {"what": "state", "stacks": stacks}, ANSWER_SECONDS)
        for rank, answer in said.items():
            onlooker.send({"said": {rank: answer}})
        silent = {rank: router.silence(rank) for rank in ranks if rank not in said and rank not in router.gone}
        doors = {rank: contact.local for rank, contact in router.topology.contacts.items()}
        onlooker.send({"silent": silent, "gone": router.gone, "doors": doors})
