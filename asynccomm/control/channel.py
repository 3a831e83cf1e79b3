"""The control channel of a job's rank: one connection up the tree, shared by all comms that were split off one another.

Each comm enrols with the key that its ranks share and a member (``subscribers``), which hears its news, is asked what
it is at, and hears who is gone. All of that happens on the control thread, whatever the comm's own loop is doing.

The channel holds together what does the work, and passes on what comes: ``router`` knows the ways and who is gone,
``listener`` lets others in, ``uplink`` connects to the rank above, ``subscribers`` are the comms, ``requests`` and
``mismatch`` are what ranks ask and compare, ``service`` how they agree who goes on.
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

from asynccomm.control.membership.service import MembershipService
from asynccomm.control.mismatch import MismatchDetector
from asynccomm.control.requests import Requests
from asynccomm.control.router import ALL, HERE, Router
from asynccomm.control.subscribers import Subscriber, Subscribers
from asynccomm.control.transport.connection import Connection, Tokens
from asynccomm.control.transport.framing import ControlMessage
from asynccomm.control.transport.listener import Listener
from asynccomm.control.transport.sockets import ListeningSockets
from asynccomm.control.transport.thread import ControlThread, control_thread
from asynccomm.control.transport.topology import RankAddress, Topology
from asynccomm.control.uplink import Uplink

ATTACH_SECONDS: Final = 10.0  # for the first connection; without it, there is no control channel
GOODBYE_SECONDS: Final = 0.5  # for the others to hear that this rank leaves
PULSE_SECONDS: Final = 1.0  # between heartbeats
LINGER_SECONDS: Final = 30.0  # for the others to learn what was agreed on with this rank

NOT_THE_ROOT: Final = "newcomers talk to the root"

T = TypeVar("T")
_log = logging.getLogger("asynccomm")


@final
class ControlChannel:
    """One rank's end.

    Args:
        rank: in the job.
        contacts: of all ranks that have a channel, this one included.
        tokens: of the job.
    """

    def __init__(self, rank: int, contacts: Sequence[RankAddress], tokens: Tokens) -> None:
        self.rank = rank
        self.topology = Topology(contacts)
        self.tokens = tokens
        self._thread: ControlThread = control_thread()
        self._router = router = Router(rank, self.topology, self._deliver, self._lose)
        self.gone = router.gone  #: ranks of the job that are, and how; to be read from any thread
        self._listener = Listener(tokens, self._refusal, self._welcome, self._look)
        self._members = Subscribers(router.gone)
        self._requests = Requests(router, self._members)
        self._fingerprints = MismatchDetector(self._thread, router, self._members, self._requests, self._begin)
        self._joiners: dict[str, Connection] = {}
        self.service = MembershipService(router, self._thread.loop, self)  #: on the control thread
        self._uplink = Uplink(router, tokens, self._begin, self._received, self._ended, self.service.attached)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pulse: asyncio.TimerHandle | None = None
        self._leaving: asyncio.Future[None] | None = None  # done once the others know
        self._closed = False
        self._handlers: dict[str, Callable[[ControlMessage], object]] = {
            "news": self._hear_news,
            "ask": self._requests.hear_question,
            "reply": self._requests.hear_reply,
            "prints": self._fingerprints.hear,
            "report": self.service.hear_report,
            "order": self.service.hear_order,
            "poll": lambda message: self.service.hear_poll(message, self._members.__contains__),
            HERE: lambda message: self.service.here(message["from"]),
        }

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
        """Listen, and connect to the rank above; None, with a warning, if that cannot be reached in ``timeout`` s."""
        channel = cls(rank, contacts, tokens)
        socks = doors.take()
        try:
            started = channel._thread.run(channel._start(socks, min(timeout, ATTACH_SECONDS)))
            problem = await asyncio.wrap_future(started)
        except BaseException:
            channel._thread.call(lambda: channel._cut_short(socks))
            raise
        if problem:
            _log.warning("rank %d has no control channel: %s", rank, problem)
            await channel.aclose()
            return None
        return channel

    def subscribe(self, key: str, member: Subscriber) -> None:
        """From now on, ``member`` hears what concerns the comm of that key. From any thread."""
        self._thread.call(lambda: self._members.subscribe(key, member))

    def unsubscribe(self, key: str, item: ControlMessage | None = None) -> None:
        """It does not any more; tells the others ``item`` first. From any thread."""

        def leave() -> None:
            if item is not None and not self._closed:
                self._router.send(ALL, "news", comm=key, item=item)
            self._members.unsubscribe(key)

        self._thread.call(leave)

    def tell(self, key: str, item: ControlMessage, then: Callable[[], object] | None = None) -> None:
        """Tell all ranks of a comm; call ``then`` on the control thread once that has left. From any thread."""

        def send() -> None:
            try:
                if not self._closed:
                    self._router.send(ALL, "news", comm=key, item=item)
            finally:
                if then is not None:
                    then()

        if not self._thread.call(send) and then is not None:
            then()

    def ask(
        self, key: str, ranks: Sequence[int], question: ControlMessage, timeout: float
    ) -> Future[dict[int, ControlMessage]]:
        """What ``ranks`` of the job answer within ``timeout`` seconds, by rank. From any other thread."""
        return self._thread.run(self._requests.gather(key, ranks, question, timeout))

    def issued(self) -> None:
        """Something was issued whose fingerprints are to be compared. From any thread; costs next to nothing."""
        self._fingerprints.issued()

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Have the control thread make ``call`` after so many seconds, or when the channel ends. From any thread."""

        def begin() -> None:
            self._begin(asyncio.sleep(seconds)).add_done_callback(lambda _: call())

        if not self._thread.call(begin):
            call()

    def start(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run ``coroutine`` on the control thread. From any thread."""
        self._thread.call(lambda: self._begin(coroutine))

    def call(self, call: Callable[[], object]) -> None:
        """Make ``call`` on the control thread. From any thread."""
        self._thread.call(call)

    def silence(self, rank: int) -> float | None:
        """For how many seconds ``rank`` of the job was not heard, as far as is known here. From any thread."""
        return self._router.silence(rank)

    async def aclose(self) -> None:
        """Say goodbye, and end. On any loop."""
        if self._closed:
            return
        with contextlib.suppress(RuntimeError):  # cancelled, it goes on there: what listens must not stay
            await asyncio.shield(asyncio.wrap_future(self._thread.run(self._close())))

    def end(self) -> None:
        """The same, and wait for nothing. From any thread."""
        self._thread.call(lambda: self._begin(self._close()))

    # -- on the control thread: starting and ending -------------------------------------------------------------------

    async def _start(self, socks: Sequence[socket.socket], timeout: float) -> str:
        """Returns why there is no channel; empty if there is."""
        if self._closed:
            return ""
        for sock in socks:
            self._listener.listen(sock)
        self._beat()
        return "" if await self._uplink.reach(timeout) else f"rank {self._router.above} cannot be reached"

    async def _close(self) -> None:
        if self._closed:
            return
        if self.service.lingers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self.service.settled()
        if self._leaving is None:
            self._leaving = self._thread.loop.create_future()
            self._router.depart()
            self._look_whether_departed()
        await asyncio.wait([self._leaving], timeout=GOODBYE_SECONDS)
        self._begin_closing()

    def _look_whether_departed(self) -> None:
        if self._leaving is not None and not self._leaving.done() and self._router.departed:
            self._leaving.set_result(None)

    def _cut_short(self, socks: Sequence[socket.socket]) -> None:
        """End it, wherever starting has got to."""
        self._begin_closing()
        for sock in socks:  # it may not have come to listening
            sock.close()

    def _begin_closing(self) -> None:
        if self._closed:
            return
        self._closed = True
        for part in (self._listener, self._uplink, self._requests, self._fingerprints, self.service):
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

    def _beat(self) -> None:
        self._router.pulse()
        for joiner in self._joiners.values():
            joiner.send({"kind": "pulse"})
        self._uplink.search()
        self.service.look_around()
        self._pulse = self._thread.loop.call_later(PULSE_SECONDS, self._beat)

    # -- on the control thread: what comes ----------------------------------------------------------------------------

    def _refusal(self, who: Any) -> str:
        if type(who) is int:
            return self._router.refusal(who)
        if not isinstance(who, str) or not who:
            return "it does not say which rank it is"
        if not self._router.is_root or self._router.fenced:
            return NOT_THE_ROOT
        return "there is one of that name already" if who in self._joiners else ""

    def _welcome(self, who: Any, connection: Connection) -> None:
        if isinstance(who, str):
            self._joiners[who] = connection
            connection.received, connection.ended = partial(self._hear_guest, who), partial(self._lose_guest, who)
            return
        connection.received, connection.ended = self._received, self._ended
        self._router.welcome(who, connection)

    def _received(self, connection: Connection, message: ControlMessage) -> None:
        self._router.received(connection, message)
        self._look_whether_departed()

    def _ended(self, connection: Connection, how: str) -> None:
        if not self._closed:
            self._router.ended(connection, how)
            self._uplink.climb()
            self._look_whether_departed()

    def _deliver(self, message: ControlMessage) -> None:
        handler = self._handlers.get(message["kind"])
        if handler is not None:
            handler(message)

    def _lose(self, rank: int, how: str) -> None:
        self._members.lose(rank, how)
        self._requests.gone(rank)
        self.service.gone(rank, how)
        if self._router.fenced:
            for joiner in list(self._joiners.values()):
                joiner.drop("the others go on without its rank")
        if not self._closed:
            self._thread.loop.call_soon(self._uplink.climb)
            self._uplink.search()
            self._thread.loop.call_soon(self._look_whether_departed)
            if self._router.is_root:  # maybe only now
                self._thread.loop.call_soon(self.service.attached)

    def _hear_news(self, message: ControlMessage) -> None:
        key, item, rank = message.get("comm"), message.get("item"), message["from"]
        if not isinstance(key, str) or not isinstance(item, dict):
            raise ValueError("news of no comm")
        if item.get("kind") == "closed":
            self.service.left(key, rank)
            self._fingerprints.forget(key)
        members = item.get("members")
        if item.get("kind") == "followed" and isinstance(members, list):
            self.service.followed(key, members)
        if rank != self.rank:
            self._members.hear(key, rank, item)

    def _look(self, onlooker: Connection, message: ControlMessage) -> None:
        asked = message.get("ranks")
        ranks = [rank for rank in self.topology.contacts if not isinstance(asked, list) or rank in asked]
        showing = self._begin(self._requests.show(onlooker, ranks, bool(message.get("stacks"))))
        showing.add_done_callback(lambda _: onlooker.close())  # also if the channel ends before it has begun

    # -- guests -------------------------------------------------------------------------------------------------------

    def send(self, name: str, message: ControlMessage) -> None:
        """Tell a newcomer, if it is here."""
        joiner = self._joiners.get(name)
        if joiner is not None:
            joiner.send(message)

    def _hear_guest(self, name: str, connection: Connection, message: ControlMessage) -> None:
        key, ranks = message.get("comm"), message.get("ranks")
        if not isinstance(key, str) or not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise ValueError("a report of no comm")
        self.service.take_report(key, ranks, name, message.get("report"))

    def _lose_guest(self, name: str, connection: Connection, how: str) -> None:
        if self._joiners.get(name) is connection:
            del self._joiners[name]
            self.service.gone(name, how)
