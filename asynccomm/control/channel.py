"""The control channel of a job's rank: one connection up the tree, shared by all comms that were split off one another.

Each comm enrols with the key that its ranks share and a :class:`Member`, which hears its news, is asked what it is at,
and hears who is gone. All of that happens on the control thread, whatever the comm's own loop is doing.

What concerns a comm that a rank has not enrolled yet is kept for it: others may be quicker, and give up before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import socket
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Protocol, final

from asynccomm.control.elections import Elections
from asynccomm.control.frames import MESSAGE_BYTES, Message
from asynccomm.control.ledger import Difference, Ledgers, Print
from asynccomm.control.links import Connection, Listener, Tokens, connect, listens, local_socket, tcp_socket
from asynccomm.control.node import ALL, HERE, ROOT, Node
from asynccomm.control.roster import Contact, Roster
from asynccomm.control.thread import ControlThread, control_thread

__all__ = ["Channel", "Doors", "Member", "Tokens", "run_name"]

ATTACH_SECONDS: Final = 10.0  # for the first connection; without it, there is no control channel
REACH_SECONDS: Final = 5.0  # after which one that cannot be reached counts as lost
RETRY_SECONDS: Final = 0.02  # until another try to reach the next one above
REFUSED_SECONDS: Final = 0.2  # that a rank does not listen, without news that it has left, until it counts as lost
GOODBYE_SECONDS: Final = 0.5  # for the others to hear that this rank leaves
PULSE_SECONDS: Final = 1.0  # between heartbeats
PRINT_SECONDS: Final = 0.05  # between looks at what was issued, while something is
PRINTS: Final = 4096  # in one message
ANSWER_SECONDS: Final = 1.0  # for two ranks that differ to say what they have issued
PING_SECONDS: Final = 0.1  # for the loops to turn, before they count as blocked
NOT_THERE: Final = "it does not listen any more"
EVERY: Final = "*"  # in place of a comm's key
QUIET_LOOKS: Final = 4  # looks without anything new, after which they end
KEPT_COMMS: Final = 256  # comms that are not enrolled yet, for which news are kept
KEPT_NEWS: Final = 64  # of each
LINGER_SECONDS: Final = 30.0  # for the others to learn what was agreed on with this rank
ANSWER_BYTES: Final = MESSAGE_BYTES - 4096  # the rest is for the message that carries it
MAX_NAME: Final = 40  # characters; the system takes names of about a hundred bytes

NOT_THE_ROOT: Final = "newcomers talk to the root"

_log = logging.getLogger("asynccomm")


class Member(Protocol):
    """A comm on one rank, seen by the control channel. All methods are called on the control thread; none may wait."""

    def hear(self, rank: int, item: Message) -> None:
        """``rank`` of the job has news."""

    def lose(self, rank: int, how: str) -> None:
        """``rank`` of the job is gone; ``how`` is empty if it left in good order."""

    def answer(self, question: Message) -> Message:
        """What a rank of the comm, or somebody who looks on, wants to know."""

    def prints(self) -> tuple[int, Sequence[Print]]:
        """The size of the comm, and the fingerprints of the collectives issued since this was last called."""


def run_name(run: str) -> str:
    """What a run is called in the names of its ranks' sockets."""
    text = run.encode("ascii", "replace").decode()
    return "".join(char if char.isprintable() else "?" for char in text).replace("/", "-")[:MAX_NAME]


@final
class Doors:
    """Where one rank listens, from before it is known who the others are.

    Args:
        rank: of the job.
        name: shown to who lists the sockets of the system.
    """

    def __init__(self, rank: int, name: str) -> None:
        self._socks: list[socket.socket] = []
        self._taken = False
        local = f"asynccomm/{run_name(name)}/{rank}/{os.getpid()}/{secrets.token_hex(8)}"
        sock = local_socket(local)
        if sock is not None:
            self._socks.append(sock)
        self.contact = Contact(rank, socket.gethostname(), os.getpid(), local if sock is not None else "")

    def open_tcp(self, address: str) -> None:
        """Listen on TCP, too, for ranks on other hosts. Raises: OSError."""
        sock = tcp_socket(address)
        self._socks.append(sock)
        contact = self.contact
        port = sock.getsockname()[1]
        self.contact = Contact(contact.rank, contact.host, contact.pid, contact.local, address, port)

    def take(self) -> list[socket.socket]:
        """The listening sockets, whose owner the caller becomes."""
        socks, self._socks = self._socks, []
        return socks

    def close(self) -> None:
        """Close what nobody has taken."""
        for sock in self.take():
            sock.close()


@final
class Channel:
    """One rank's end.

    Args:
        rank: in the job.
        contacts: of all ranks that have a channel, this one included.
        tokens: of the job.
    """

    def __init__(self, rank: int, contacts: Sequence[Contact], tokens: Tokens) -> None:
        self.rank = rank
        self.roster = Roster(contacts)
        self.gone: dict[int, str] = {}  #: ranks of the job that are, and how; to be read from any thread
        self.tokens = tokens
        self._thread: ControlThread = control_thread()
        self._node = Node(rank, self.roster, self._deliver, self._lose)
        self._listener = Listener(tokens, self._refusal, self._welcome, self._look)
        self._members: dict[str, Member] = {}
        self._kept: OrderedDict[str, list[tuple[int, Message]]] = OrderedDict()
        self._questions: dict[int, tuple[set[int], dict[int, Any], asyncio.Future[None]]] = {}
        self._asked = 0
        self._ledgers = Ledgers()
        self._guests: dict[str, Connection] = {}
        self.elections = Elections(self._node, self._thread.loop, self)  #: on the control thread
        self._tasks: set[asyncio.Task[Any]] = set()
        self._climbing: asyncio.Task[None] | None = None
        self._looking = False  # at what is issued
        self._quiet = 0
        self._pulse: asyncio.TimerHandle | None = None
        self._search: asyncio.Task[None] | None = None  # at the root: for ranks that are not connected
        self._leaving: asyncio.Future[None] | None = None  # done once the others know
        self._closed = False
        self._handlers: dict[str, Callable[[Message], object]] = {
            "news": self._hear_news,
            "ask": self._hear_question,
            "reply": self._hear_reply,
            "prints": self._hear_prints,
            "report": self.elections.hear_report,
            "order": self.elections.hear_order,
            "poll": lambda message: self.elections.hear_poll(message, self._members.__contains__),
            HERE: self._hear_here,
        }

    # -- from any thread ----------------------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls,
        rank: int,
        contacts: Sequence[Contact],
        tokens: Tokens,
        doors: Doors,
        timeout: float = ATTACH_SECONDS,
    ) -> Channel | None:
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

    def enroll(self, key: str, member: Member) -> None:
        """From now on, ``member`` hears what concerns the comm of that key. From any thread."""
        self._thread.call(lambda: self._enroll(key, member))

    def withdraw(self, key: str, item: Message | None = None) -> None:
        """It does not any more; tells the others ``item`` first. From any thread."""

        def leave() -> None:
            if item is not None and not self._closed:
                self._node.send(ALL, "news", comm=key, item=item)
            self._members.pop(key, None)

        self._thread.call(leave)

    def tell(self, key: str, item: Message, then: Callable[[], object] | None = None) -> None:
        """Tell all ranks of a comm; call ``then`` on the control thread once that has left. From any thread."""

        def send() -> None:
            try:
                if not self._closed:
                    self._node.send(ALL, "news", comm=key, item=item)
            finally:
                if then is not None:
                    then()

        if not self._thread.call(send) and then is not None:
            then()

    def ask(self, key: str, ranks: Sequence[int], question: Message, timeout: float) -> Future[dict[int, Message]]:
        """What ``ranks`` of the job answer within ``timeout`` seconds, by rank. From any other thread."""
        return self._thread.run(self.gather(key, ranks, question, timeout))

    def issued(self) -> None:
        """Something was issued whose fingerprints are to be compared. From any thread; costs next to nothing."""
        if not self._looking:
            self._looking = True
            self._thread.call(self._look_at_prints)

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Have the control thread make ``call`` after so many seconds, or when the channel ends. From any thread."""
        if not self._thread.call(lambda: self._begin(self._wait_and(seconds, call))):
            call()

    def start(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run ``coroutine`` on the control thread. From any thread."""
        self._thread.call(lambda: self._begin(coroutine))

    def call(self, call: Callable[[], object]) -> None:
        """Make ``call`` on the control thread. From any thread."""
        self._thread.call(call)

    def silence(self, rank: int) -> float | None:
        """For how many seconds ``rank`` of the job was not heard, as far as is known here. From any thread."""
        return self._node.silence(rank)

    async def aclose(self) -> None:
        """Say goodbye, and end. On any loop."""
        if self._closed:
            return
        with contextlib.suppress(RuntimeError):  # cancelled, it goes on there: what listens must not stay
            await asyncio.shield(asyncio.wrap_future(self._thread.run(self._close())))

    # -- on the control thread: starting and ending -------------------------------------------------------------------

    async def _start(self, socks: Sequence[socket.socket], timeout: float) -> str:
        """Returns why there is no channel; empty if there is."""
        for sock in socks:
            await self._listener.listen(sock)
        if self._closed:
            return ""
        self._beat()
        self._climb()
        if self._climbing is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._climbing), timeout)
            except TimeoutError:
                return f"rank {self._node.above} cannot be reached"
        return ""

    async def _close(self) -> None:
        if self._closed:
            return
        if self.elections.lingers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self.elections.settled()
        if self._leaving is None:
            self._leaving = self._thread.loop.create_future()
            self._node.depart()
            self._look_whether_departed()
        await asyncio.wait([self._leaving], timeout=GOODBYE_SECONDS)
        self._begin_closing()

    def _look_whether_departed(self) -> None:
        if self._leaving is not None and not self._leaving.done() and self._node.departed:
            self._leaving.set_result(None)

    def _cut_short(self, socks: Sequence[socket.socket]) -> None:
        """End it, wherever starting has got to."""
        self._begin_closing()
        loop = self._thread.loop

        def close_rest() -> None:
            for sock in socks:
                if sock.fileno() >= 0:  # it was not listened on yet, or not quite
                    loop.remove_reader(sock)
                    sock.close()

        loop.call_soon(loop.call_soon, loop.call_soon, close_rest)  # after the listener's own

    def _begin_closing(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        self.elections.close()
        for guest in self._guests.values():
            guest.close()
        if self._pulse is not None:
            self._pulse.cancel()
        for task in self._tasks:
            task.cancel()
        for link in self._node.links:
            link.close()
        for _, _, enough in self._questions.values():
            if not enough.done():
                enough.set_result(None)
        # the sockets are closed in the loop's next turns
        self._thread.loop.call_later(0.0, lambda: self._thread.loop.call_soon(self._thread.release))

    def _climb(self) -> None:
        """Connect to the rank above, unless there is a connection or a try already."""
        if self._closed or self._node.up is not None or self._node.above is None or self._climbing is not None:
            return
        self._climbing = self._begin(self._connect_above())
        self._climbing.add_done_callback(self._climbed)

    def _climbed(self, task: asyncio.Task[None]) -> None:
        self._climbing = None
        if not task.cancelled() and task.exception() is None:
            self._climb()  # who is above may have changed meanwhile

    async def _connect_above(self) -> None:
        tried = self._thread.loop.time()
        refused: dict[int, float] = {}  # since when
        while (above := self._node.above) is not None and self._node.up is None:
            contacts = self.roster.contacts
            try:
                link = await connect(
                    contacts[above], self._is_near(above), self.tokens, self.rank, self._received, self._ended
                )
            except PermissionError as exc:  # the others have given this rank up
                self._node.fence(exc.strerror or "")
                return
            except OSError as exc:
                now = self._thread.loop.time()
                if not isinstance(exc, ConnectionRefusedError):
                    refused.pop(above, None)
                    if now - tried > REACH_SECONDS:
                        self._node.give_up(above, f"it cannot be reached: {exc}")
                        tried = now
                elif now - refused.setdefault(above, now) > REFUSED_SECONDS:
                    self._node.give_up(above, NOT_THERE)
                    continue
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if above in self._node.gone:
                link.close()
                continue
            self._node.attach(above, link)
            self.elections.attached()

    def _is_near(self, rank: int) -> bool:
        contacts = self.roster.contacts
        return contacts[rank].host == contacts[self.rank].host

    async def _look_for_absent(self) -> None:
        """A rank that is not connected may have gone when nobody saw it."""
        refused: dict[int, float] = {}  # since when
        while True:
            for rank in self._node.absent:
                if await listens(self.roster.contacts[rank], self._is_near(rank)):
                    refused.pop(rank, None)
                    continue
                now = self._thread.loop.time()
                if now - refused.setdefault(rank, now) > REFUSED_SECONDS and rank in self._node.absent:
                    self._node.give_up(rank, NOT_THERE)
            if not refused.keys() & set(self._node.absent):
                return  # those that listen will come; there is another look with the next heartbeat
            await asyncio.sleep(RETRY_SECONDS)

    async def _wait_and(self, seconds: float, call: Callable[[], object]) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            call()

    def _search_absent(self) -> None:
        """At the root: see whether those live that should be connected and are not."""
        if self._node.absent and not self._closed and (self._search is None or self._search.done()):
            self._search = self._begin(self._look_for_absent())

    def _begin(self, coroutine: Any) -> asyncio.Task[Any]:
        task = self._thread.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _beat(self) -> None:
        self._node.pulse()
        for guest in self._guests.values():
            guest.send({"kind": "pulse"})
        self._search_absent()
        self.elections.look_around()
        self._pulse = self._thread.loop.call_later(PULSE_SECONDS, self._beat)

    # -- on the control thread: what comes ----------------------------------------------------------------------------

    def _refusal(self, who: Any) -> str:
        if type(who) is int:
            return self._node.refusal(who)
        if not isinstance(who, str) or not who:
            return "it does not say which rank it is"
        if not self._node.is_root or self._node.fenced:
            return NOT_THE_ROOT
        return "there is one of that name already" if who in self._guests else ""

    def _welcome(self, who: Any, connection: Connection) -> None:
        if isinstance(who, str):
            self._guests[who] = connection
            connection.received, connection.ended = partial(self._hear_guest, who), partial(self._lose_guest, who)
            return
        connection.received, connection.ended = self._received, self._ended
        self._node.welcome(who, connection)

    def _received(self, connection: Connection, message: Message) -> None:
        self._node.received(connection, message)
        self._look_whether_departed()

    def _ended(self, connection: Connection, how: str) -> None:
        if not self._closed:
            self._node.ended(connection, how)
            self._climb()
            self._look_whether_departed()

    def _deliver(self, message: Message) -> None:
        handler = self._handlers.get(message["kind"])
        if handler is not None:
            handler(message)

    def _lose(self, rank: int, how: str) -> None:
        self.gone[rank] = how
        for key, member in list(self._members.items()):
            self._guarded(partial(member.lose, rank, how), key)
        for due, _, enough in self._questions.values():
            due.discard(rank)
            if not due and not enough.done():
                enough.set_result(None)
        self.elections.gone(rank, how)
        if self._node.fenced:
            for guest in list(self._guests.values()):
                guest.drop("the others go on without its rank")
        if not self._closed:
            self._thread.loop.call_soon(self._climb)
            self._search_absent()
            self._thread.loop.call_soon(self._look_whether_departed)
            if self._node.is_root:  # maybe only now
                self._thread.loop.call_soon(self.elections.attached)

    def _enroll(self, key: str, member: Member) -> None:
        self._members[key] = member
        for rank, how in self.gone.items():
            self._guarded(partial(member.lose, rank, how), key)
        for rank, item in self._kept.pop(key, ()):
            self._guarded(partial(member.hear, rank, item), key)

    def _hear_news(self, message: Message) -> None:
        key, item, rank = message.get("comm"), message.get("item"), message["from"]
        if not isinstance(key, str) or not isinstance(item, dict):
            raise ValueError("news of no comm")
        if item.get("kind") == "closed":
            self.elections.left(key, rank)
            self._ledgers.forget(key)
        members = item.get("members")
        if item.get("kind") == "followed" and isinstance(members, list):
            self.elections.followed(key, members)
        if rank == self.rank:
            return
        member = self._members.get(key)
        if member is not None:
            self._guarded(partial(member.hear, rank, item), key)
            return
        kept = self._kept.setdefault(key, [])
        if len(kept) < KEPT_NEWS:
            kept.append((rank, item))
        if len(self._kept) > KEPT_COMMS:
            self._kept.popitem(last=False)

    def _guarded(self, call: Callable[[], object], key: str) -> None:
        """A comm that cannot take something must not end the channel of the others."""
        try:
            call()
        except Exception:
            _log.exception("comm %s could not take a message of the control channel", key)

    def _hear_here(self, message: Message) -> None:
        self.elections.here(message["from"])

    # -- guests -------------------------------------------------------------------------------------------------------

    def send(self, name: str, message: Message) -> None:
        """Tell a newcomer, if it is here."""
        guest = self._guests.get(name)
        if guest is not None:
            guest.send(message)

    def _hear_guest(self, name: str, connection: Connection, message: Message) -> None:
        key, ranks = message.get("comm"), message.get("ranks")
        if not isinstance(key, str) or not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise ValueError("a report of no comm")
        self.elections.take_report(key, ranks, name, message.get("report"))

    def _lose_guest(self, name: str, connection: Connection, how: str) -> None:
        if self._guests.get(name) is connection:
            del self._guests[name]
            self.elections.gone(name, how)

    # -- questions ----------------------------------------------------------------------------------------------------

    async def gather(self, key: str, ranks: Sequence[int], question: Message, timeout: float) -> dict[int, Message]:
        """What ``ranks`` answer, as far as they do within ``timeout`` seconds. On the control thread."""
        if self._closed:
            return {}
        due = {rank for rank in ranks if rank not in self.gone and rank in self.roster.contacts}
        answers: dict[int, Message] = {}
        enough: asyncio.Future[None] = self._thread.loop.create_future()
        number = self._asked
        self._asked += 1
        self._questions[number] = due, answers, enough
        try:
            for rank in list(due):
                self._node.send(rank, "ask", comm=key, question=question, number=number)
            if due:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if timeout == math.inf else timeout):
                        await enough
            return answers
        finally:
            del self._questions[number]

    def _hear_question(self, message: Message) -> None:
        key, question = message.get("comm"), message.get("question")
        if not isinstance(key, str) or not isinstance(question, dict):
            raise ValueError("a question of no comm")
        self._node.send(message["from"], "reply", number=message.get("number"), answer=self._fitting(key, question))

    def _look(self, connection: Connection, message: Message) -> None:
        asked = message.get("ranks")
        ranks = [rank for rank in self.roster.contacts if not isinstance(asked, list) or rank in asked]
        self._begin(self._show(connection, ranks, bool(message.get("stacks"))))

    async def _show(self, connection: Connection, ranks: Sequence[int], stacks: bool) -> None:
        """Tell somebody who looks on what ``ranks`` are at; each in a message of its own, or many would be too long."""
        try:
            said: dict[int, Message] = {}
            if ranks:
                await self.gather(EVERY, ranks, {"what": "ping"}, ANSWER_SECONDS)
                await asyncio.sleep(PING_SECONDS)
                said = await self.gather(EVERY, ranks, {"what": "state", "stacks": stacks}, ANSWER_SECONDS)
            for rank, answer in said.items():
                connection.send({"said": {rank: answer}})
            silent = {rank: self._node.silence(rank) for rank in ranks if rank not in said and rank not in self.gone}
            doors = {rank: contact.local for rank, contact in self.roster.contacts.items()}
            connection.send({"silent": silent, "gone": self.gone, "doors": doors})
        finally:  # also if the channel ends meanwhile
            connection.close()

    def _fitting(self, key: str, question: Message) -> Message:
        """The answer; without stacks if it would be too long with them, as with ten thousand tasks."""
        answer = self._answer(key, question)
        if question.get("stacks") and len(json.dumps(answer)) > ANSWER_BYTES:
            return self._answer(key, {**question, "stacks": False})
        return answer

    def _answer(self, key: str, question: Message) -> Message:
        if key == EVERY:
            return {"comms": {each: self._answer(each, question) for each in list(self._members)}}
        member = self._members.get(key)
        if member is None:
            return {}
        try:
            return member.answer(question)
        except Exception as exc:
            _log.exception("comm %s could not answer a question of the control channel", key)
            return {"problem": f"{type(exc).__name__}: {exc}"}

    def _hear_reply(self, message: Message) -> None:
        number, answer = message.get("number"), message.get("answer")
        if type(number) is not int or not isinstance(answer, dict):
            raise ValueError("no reply")
        asked = self._questions.get(number)
        if asked is None:
            return
        due, answers, enough = asked
        rank = message["from"]
        if rank in due:
            due.discard(rank)
            answers[rank] = answer
            if not due and not enough.done():
                enough.set_result(None)

    # -- fingerprints -------------------------------------------------------------------------------------------------

    def _look_at_prints(self) -> None:
        """Send what was issued to the root, and look again soon as long as there is something."""
        if self._closed:
            return
        self._quiet = 0 if self._send_prints() else self._quiet + 1
        if self._quiet < QUIET_LOOKS:
            self._thread.loop.call_later(PRINT_SECONDS, self._look_at_prints)
            return
        self._quiet = 0
        self._looking = False
        if self._send_prints():  # came before the flag was down, so nobody has called
            self.issued()

    def _send_prints(self) -> bool:
        """Returns whether there were any."""
        found = False
        for key, member in list(self._members.items()):
            size, prints = member.prints()
            for first in range(0, len(prints), PRINTS):
                found = True
                self._node.send(ROOT, "prints", comm=key, size=size, prints=prints[first : first + PRINTS])
        return found

    def _hear_prints(self, message: Message) -> None:
        """At the root."""
        key = message.get("comm")
        found = self._ledgers.take(key, message["from"], message.get("size"), message.get("prints"))
        if found is not None:
            assert isinstance(key, str)
            self._begin(self._report_mismatch(key, found))

    async def _report_mismatch(self, key: str, found: Difference) -> None:
        """Ask the two ranks what they have issued, and tell all."""
        sides = [found.rank, found.other]
        said = await self.gather(key, sides, {"what": "explain", "seq": found.seq}, ANSWER_SECONDS)
        item = {"kind": "differs", "seq": found.seq, "jobs": sides, "sides": [said.get(side, {}) for side in sides]}
        self._node.send(ALL, "news", comm=key, item=item)
        member = self._members.get(key)
        if member is not None:
            self._guarded(partial(member.hear, self.rank, item), key)
