"""A newcomer's connection to the root of the job that it joins, and to the next root after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final, final

from asynccomm.control.membership.messages import (
    Commit,
    CoordinatorOrder,
    Excluded,
    ParticipantState,
    Rejected,
    Retry,
    StatusReport,
)
from asynccomm.control.membership.participant import Participant
from asynccomm.control.messages import Heartbeat, OrderMessage, ParticipantReport
from asynccomm.control.runs import ParticipantId, compact_ranks
from asynccomm.control.timing import LINGER_SECONDS, REACH_SECONDS, SILENT_SECONDS
from asynccomm.control.transport.connection import Connection, Tokens, connect
from asynccomm.control.transport.schema import JsonObject, decode
from asynccomm.control.transport.thread import ControlThread, control_thread
from asynccomm.control.transport.topology import RankAddress
from asynccomm.core.hosts import host_name

RETRY_SECONDS: Final = 0.05  # between rounds through the ranks while no root accepts the newcomer
PROBE_SECONDS: Final = 1.0  # for a rank to answer; the rank may be stopped


@final
class Joiner:
    """One newcomer, as a participant in the agreement of one comm. ``service.MembershipService`` has the same methods.

    Args:
        name: of the newcomer.
        key: of the comm.
        ranks: of the comm, in the job's numbering.
        contacts, tokens: of the job.
    """

    def __init__(
        self, name: str, key: str, ranks: Sequence[int], contacts: Sequence[RankAddress], tokens: Tokens
    ) -> None:
        self._name = name
        self._key = key
        self._ranks = compact_ranks(ranks)
        self._contacts = sorted((c for c in contacts if c.listens), key=lambda contact: contact.rank)
        self._tokens = tokens
        self._thread: ControlThread = control_thread()
        self._participant = Participant(name, ranks)
        self._on_order: Callable[[CoordinatorOrder], object] = _nothing
        self._wait = 0.0
        self._host = host_name()
        self._leaving = False  # withdrawn; the exit is to be reported
        self._closing = False  # to end once the participant may leave
        self._ended_here = False
        self._link: Connection | None = None
        self._last_message = 0.0  # time of the last message
        self._task: asyncio.Task[None] | None = None
        self._lost: asyncio.Event | None = None  # set at the end of the connection

    def ask(
        self, proposal: Sequence[ParticipantId] | None, wait: float, hear: Callable[[CoordinatorOrder], object]
    ) -> None:
        """Ask to join. Thread-safe."""

        def ask() -> None:
            self._on_order, self._wait = hear, wait
            self._participant.ask(proposal, wait)
            self._connect()
            self._report()

        self._thread.call(ask)

    def prepared(self, decision: str) -> None:
        """Message and report that the members of a decision are connected. Thread-safe."""

        def prepared() -> None:
            self._participant.prepared(decision)
            self._report()

        self._thread.call(prepared)

    def failed(self, decision: str, why: str) -> None:
        """Message and report that the members of a decision could not connect. Thread-safe."""

        def failed() -> None:
            self._participant.failed(decision, why)
            self._report()

        self._thread.call(failed)

    def withdraw(self) -> None:
        """Leave, and report the exit: the others may be waiting for this newcomer. Thread-safe."""

        def leave() -> None:
            if self._ended_here or self._leaving:
                return
            self._leaving = True
            if self._link is None:
                self._connect()
                self._thread.loop.call_later(REACH_SECONDS, self._end)
            else:
                self._send_exit(self._link)

        self._thread.call(leave)

    def close(self) -> None:
        """Leave once no member needs this newcomer any more. Thread-safe."""

        def close() -> None:
            if not (self._ended_here or self._leaving or self._closing):
                self._closing = True
                self._thread.loop.call_later(LINGER_SECONDS, self._end)
                self._end_if_over()

        self._thread.call(close)

    def _end_if_over(self) -> None:
        if self._closing and self._participant.can_leave:
            self._end()

    def _end(self) -> None:
        if self._ended_here:
            return
        self._ended_here = True
        if self._task is not None:
            self._task.cancel()
        if self._link is not None:
            self._link.close()
        self._thread.release()

    def _connect(self) -> None:
        if self._task is None:
            self._lost = asyncio.Event()
            self._task = self._thread.loop.create_task(self._stay_connected())

    async def _stay_connected(self) -> None:
        """Stay connected to the current root."""
        assert self._lost is not None
        seen = time.monotonic()  # time of the last contact with any rank
        while True:
            for contact in self._contacts:
                try:
                    async with asyncio.timeout(PROBE_SECONDS):
                        self._link = await connect(
                            contact, contact.host == self._host, self._tokens, self._name, self._received, self._ended
                        )
                except PermissionError:  # not the root, or it still has our last connection
                    seen = time.monotonic()
                    continue
                except OSError:
                    continue
                if self._leaving:
                    self._send_exit(self._link)
                    return
                await self._hold_connection(self._link)
                seen = time.monotonic()
                break
            if time.monotonic() - seen > REACH_SECONDS:
                self._exclude("none of its ranks can be reached any more")
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _hold_connection(self, link: Connection) -> None:
        """Report, and hold the connection until it ends, or no message has come for ``SILENT_SECONDS``."""
        assert self._lost is not None
        self._last_message = time.monotonic()
        self._report()
        while not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._lost.wait()
            if time.monotonic() - self._last_message > SILENT_SECONDS:
                link.drop("it is silent")
        self._lost.clear()

    def _exclude(self, why: str) -> None:
        order = self._participant.on_order(Excluded(why))
        if order is not None:
            self._on_order(order)
        self._end_if_over()

    def _report(self) -> None:
        report = self._participant.report()
        if self._link is not None and report is not None and not self._leaving:
            self._link.send(ParticipantReport(self._key, self._ranks, report))

    def _send_exit(self, link: Connection) -> None:
        link.send(ParticipantReport(self._key, self._ranks, StatusReport(ParticipantState.OUT, 0)))
        self._end()

    def _received(self, connection: Connection, data: JsonObject) -> None:
        self._last_message = time.monotonic()
        message: Heartbeat | OrderMessage = decode(Heartbeat | OrderMessage, data)
        if isinstance(message, Heartbeat):
            return
        order = self._participant.on_order(message.order)
        if isinstance(order, Rejected) and order.mistake:  # a mistake of the ranks, which may call again
            self._participant.ask(None, self._wait)
        elif order is not None:
            self._on_order(order)
        if isinstance(order, (Retry, Commit, Rejected, Excluded)):
            self._report()
        self._end_if_over()

    def _ended(self, connection: Connection, how: str) -> None:
        self._link = None
        if self._lost is not None:
            self._lost.set()


def _nothing(order: CoordinatorOrder) -> None:
    pass
