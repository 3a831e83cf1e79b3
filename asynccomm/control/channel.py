"""The control channel of a job's rank: one connection up the tree, shared by the comms of the same processes.

Each comm subscribes with the key that its ranks share and a member (``subscribers``), which handles news and the ends
of ranks, and answers requests. All of these calls run on the control thread, independently of the comm's own loop.

The channel joins the parts and dispatches messages: ``router`` holds the routes and the ranks that are gone,
``listener`` accepts connections, ``uplink`` connects to the rank above, ``subscribers`` are the comms, ``requests`` and
``mismatch`` query and compare ranks, ``service`` runs the agreement on new members, and in ``meetings`` the ranks meet
for new comms.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar, final

from asynccomm.control.meetings import Meetings
from asynccomm.control.membership.service import MembershipService
from asynccomm.control.messages import (
    ALL,
    Body,
    Heartbeat,
    IssuedCollectives,
    MeetingArrival,
    MeetingBegin,
    MeetingWithdrawal,
    News,
    OrderMessage,
    ParticipantReport,
    Presence,
    Reply,
    ReportRequest,
    Request,
    WithdrawalAck,
)
from asynccomm.control.mismatch import MismatchDetector
from asynccomm.control.patient import PATIENT_SECONDS
from asynccomm.control.requests import Requests
from asynccomm.control.router import Router
from asynccomm.control.runs import RankRuns, distinct_ranks
from asynccomm.control.subscribers import Subscriber, Subscribers
from asynccomm.control.timing import HEARTBEAT_SECONDS, LINGER_SECONDS
from asynccomm.control.transport.connection import Connection, Look, Tokens
from asynccomm.control.transport.listener import Listener
from asynccomm.control.transport.schema import JsonObject, decode
from asynccomm.control.transport.sockets import ListeningSockets
from asynccomm.control.transport.thread import ControlThread, control_thread
from asynccomm.control.transport.topology import RankAddress, Topology
from asynccomm.control.uplink import Uplink

ATTACH_SECONDS: Final = 10.0  # for the first connection; without it, there is no control channel
FIRST_CHECK_SECONDS: Final = 0.1  # until the root checks the ranks that are not connected: most are about to connect
LEAVE_ACK_SECONDS: Final = 0.5  # for the connected ranks to acknowledge this rank's leave

NOT_THE_ROOT: Final = "newcomers talk to the root"

T = TypeVar("T")
_log = logging.getLogger("asynccomm")


@final
class ControlChannel:
    """One rank's end of the control channel.

    Args:
        rank: in the job.
        contacts: the addresses of all ranks that have a channel, this rank included.
        tokens: of the job.
    """

    def __init__(self, rank: int, contacts: Sequence[RankAddress], tokens: Tokens) -> None:
        self.rank = rank
        self.topology: Topology = Topology(contacts)
        self.tokens = tokens
        self._thread: ControlThread = control_thread()
        self._router = router = Router(rank, self.topology, self._deliver, self._on_gone, self._after_pause)
        #: the reason for each rank of the job that is gone; readable from any thread
        self.gone: dict[int, str] = router.gone
        self._listener = Listener(tokens, self._refusal, self._accept, self._on_look, len(contacts))
        self._members = Subscribers(router.gone)
        self._requests = Requests(router, self._members)
        self._fingerprints = MismatchDetector(self._thread, router, self._members, self._requests, self._begin)
        self._joiners: dict[str, Connection] = {}
        self.service: MembershipService = MembershipService(router, self._thread.loop, self)  #: on the control thread
        self.meetings: Meetings = Meetings(router)  #: on the control thread
        self._uplink = Uplink(
            router,
            tokens,
            self._begin,
            self._received,
            self._ended,
            self.service.on_attached,
            lambda: self.service.asking,
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pulse: asyncio.TimerHandle | None = None
        self._leaving: asyncio.Future[None] | None = None  # done once the leave is acknowledged
        self._closed = False

    # -- from any thread ----------------------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls,
        rank: int,
        contacts: Sequence[RankAddress],
        tokens: Tokens,
        doors: ListeningSockets,
        timeout: float = ATTACH_SECONDS,
    ) -> ControlChannel | None:
        """Listen, and connect to the rank above; None, with a warning, if connecting takes over ``timeout`` seconds."""
        channel = cls(rank, contacts, tokens)
        socks = doors.take()
        try:
            started = channel._thread.run(channel._start(socks, min(timeout, ATTACH_SECONDS)))
            problem = await asyncio.wrap_future(started)
        except BaseException:
            channel._thread.call(lambda: channel._abort_start(socks))
            raise
        if problem:
            _log.warning("rank %d has no control channel: %s", rank, problem)
            await channel.aclose()
            return None
        return channel

    def subscribe(self, key: str, member: Subscriber) -> None:
        """Deliver the news of comm ``key`` to ``member`` from now on. Thread-safe."""
        self._thread.call(lambda: self._members.subscribe(key, member))

    def unsubscribe(self, key: str, item: JsonObject | None = None) -> None:
        """End the subscription of comm ``key``, after sending ``item`` to all ranks. Thread-safe."""

        def leave() -> None:
            if item is not None and not self._closed:
                self._router.send(ALL, News(key, item), patient=True)
            self._members.unsubscribe(key)

        self._thread.call(leave)

    def broadcast(self, key: str, item: JsonObject, then: Callable[[], object] | None = None) -> None:
        """Send ``item`` to all ranks of comm ``key``, then call ``then`` on the control thread. Thread-safe."""

        def send() -> None:
            try:
                if not self._closed:
                    self._router.send(ALL, News(key, item))
            finally:
                if then is not None:
                    then()

        if not self._thread.call(send) and then is not None:
            then()

    def request(
        self, key: str, ranks: Sequence[int], question: JsonObject, timeout: float
    ) -> Future[dict[int, JsonObject]]:
        """The answers of ``ranks`` of the job within ``timeout`` seconds, by rank. From any other thread."""
        return self._thread.run(self._requests.gather(key, ranks, question, timeout))

    def fingerprints_ready(self) -> None:
        """Signal that a collective was issued and has a fingerprint. Thread-safe; costs the check of a flag."""
        self._fingerprints.start_polling()

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Make ``call`` on the control thread after ``seconds``, or when the channel ends. Thread-safe."""

        def begin() -> None:
            self._begin(asyncio.sleep(seconds)).add_done_callback(lambda _: call())

        if not self._thread.call(begin):
            call()

    def spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run ``coroutine`` on the control thread. Thread-safe."""
        self._thread.call(lambda: self._begin(coroutine))

    def call(self, call: Callable[[], object]) -> bool:
        """Make ``call`` on the control thread. Thread-safe. Returns False once the thread has ended."""
        return self._thread.call(call)

    def connects_all(self, rank: int, size: int) -> bool:
        """Whether this is the channel of ``rank`` among ``size`` ranks, none of which is gone or without a channel."""
        known = self.rank == rank and len(self.topology.contacts) == size and rank < size
        return known and not (self.gone or self._leaving or self._closed)

    def silence(self, rank: int) -> float | None:
        """Seconds since the last message of ``rank`` of the job, as far as this rank can tell. Thread-safe."""
        return self._router.silence(rank)

    async def aclose(self) -> None:
        """Leave in good order, and close the channel. Works on any loop."""
        if self._closed:
            return
        with contextlib.suppress(RuntimeError):  # closing continues after a cancellation: no listener may stay open
            await asyncio.shield(asyncio.wrap_future(self._thread.run(self._close())))

    def end(self) -> None:
        """Leave and close the channel without waiting. Thread-safe."""
        self._thread.call(lambda: self._begin(self._close()))

    # -- on the control thread: starting and ending -------------------------------------------------------------------

    async def _start(self, socks: Sequence[socket.socket], timeout: float) -> str:
        """Listen and connect. Returns why there is no channel; empty: there is one."""
        if self._closed:
            return ""
        for sock in socks:
            self._listener.listen(sock)
        self._pulse = self._thread.loop.call_later(FIRST_CHECK_SECONDS, self._send_heartbeats)
        return "" if await self._uplink.wait_connected(timeout) else f"rank {self._router.above} cannot be reached"

    async def _close(self) -> None:
        if self._closed:
            return
        if self.service.must_stay:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self.service.wait_settled()
        if self._leaving is None:
            self._leaving = self._thread.loop.create_future()
            self._router.leave()
            self._check_departed()
        await asyncio.wait([self._leaving], timeout=LEAVE_ACK_SECONDS)
        self._begin_closing()

    def _check_departed(self) -> None:
        if self._leaving is not None and not self._leaving.done() and self._router.leave_acknowledged:
            self._leaving.set_result(None)

    def _abort_start(self, socks: Sequence[socket.socket]) -> None:
        """Close the channel at any stage of its start."""
        self._begin_closing()
        for sock in socks:  # the listener may not own the sockets yet
            sock.close()

    def _begin_closing(self) -> None:
        if self._closed:
            return
        self._closed = True
        for part in (self._listener, self._uplink, self._requests, self._fingerprints, self.service, self.meetings):
            part.close()
        for joiner in self._joiners.values():
            joiner.close()
        if self._pulse is not None:
            self._pulse.cancel()
        for task in self._tasks:
            task.cancel()
        for link in self._router.links:
            link.close()
        self._thread.release()

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._thread.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _after_pause(self, call: Callable[[], object]) -> None:
        self._thread.loop.call_later(PATIENT_SECONDS, lambda: None if self._closed else call())

    def _send_heartbeats(self) -> None:
        self._router.send_heartbeats()
        for joiner in self._joiners.values():
            joiner.send(Heartbeat())
        self._uplink.check_absent()
        self.service.tick()
        self._pulse = self._thread.loop.call_later(HEARTBEAT_SECONDS, self._send_heartbeats)

    # -- on the control thread: connections and messages --------------------------------------------------------------

    def _refusal(self, who: int | str) -> str:
        if isinstance(who, int):
            return self._router.refusal(who)
        if not self._router.is_root or self._router.fenced:
            return NOT_THE_ROOT
        return f"there is a newcomer {who!r} already" if who in self._joiners else ""

    def _accept(self, who: int | str, connection: Connection) -> None:
        if isinstance(who, str):
            self._joiners[who] = connection
            connection.received, connection.ended = partial(self._on_report, who), partial(self._on_joiner_end, who)
            return
        connection.received, connection.ended = self._received, self._ended
        self._router.accept(who, connection)

    def _received(self, connection: Connection, message: JsonObject) -> None:
        self._router.received(connection, message)
        self._check_departed()

    def _ended(self, connection: Connection, how: str) -> None:
        if not self._closed:
            self._router.ended(connection, how)
            self._uplink.connect()
            self._check_departed()

    def _deliver(self, source: int, body: Body) -> None:
        match body:
            case News():
                self._on_news(source, body.comm, body.item)
            case Request():
                self._requests.on_request(source, body)
            case Reply():
                self._requests.on_reply(source, body)
            case IssuedCollectives():
                self._fingerprints.on_issued(source, body)
            case ParticipantReport():
                self.service.on_report(source, body)
            case OrderMessage():
                self.service.on_order(source, body)
            case ReportRequest(key):
                self.service.on_report_request(key, self._members.__contains__)
            case Presence():
                self.service.on_presence(source)
            case MeetingArrival():
                self.meetings.on_arrival(source, body)
            case MeetingWithdrawal():
                self.meetings.on_withdrawal(source, body)
            case MeetingBegin():
                self.meetings.on_begin(body)
            case WithdrawalAck():
                self.meetings.on_withdrawal_ack(body)

    def _on_gone(self, ranks: Sequence[int], how: str) -> None:
        self.meetings.on_departure()
        for rank in ranks:
            self._members.on_departure(rank, how)
            self._requests.on_departure(rank)
            self.service.on_departure(rank, how)
        if self._router.fenced:
            for joiner in list(self._joiners.values()):
                joiner.drop("the others go on without its rank")
        if not self._closed:
            self._thread.loop.call_soon(self._uplink.connect)
            self._uplink.check_absent()
            self._thread.loop.call_soon(self._check_departed)
            if self._router.is_root:  # this rank may be the new root
                self._thread.loop.call_soon(self.service.on_attached)

    def _on_news(self, rank: int, key: str, item: JsonObject) -> None:
        if item.get("kind") == "closed":
            self.service.on_left(key, rank)
            self._fingerprints.forget(key)
        if item.get("kind") == "followed":
            self.service.on_followed(key, distinct_ranks(decode(RankRuns, item.get("members"))))
        if rank != self.rank:
            self._members.on_news(key, rank, item)

    def _on_look(self, observer: Connection, look: Look) -> None:
        ranks = [rank for rank in self.topology.contacts if look.ranks is None or rank in look.ranks]
        showing = self._begin(self._requests.send_overview(observer, ranks, look))
        showing.add_done_callback(lambda _: observer.close())  # also if the channel ends before the task starts

    # -- newcomers ----------------------------------------------------------------------------------------------------

    def send(self, name: str, message: OrderMessage) -> None:
        """Send ``message`` to the newcomer ``name``, if it is connected."""
        joiner = self._joiners.get(name)
        if joiner is not None:
            joiner.send(message)

    def _on_report(self, name: str, connection: Connection, data: JsonObject) -> None:
        self.service.on_report(name, decode(ParticipantReport, data))

    def _on_joiner_end(self, name: str, connection: Connection, how: str) -> None:
        if self._joiners.get(name) is connection:
            del self._joiners[name]
            self.service.on_departure(name, how)
