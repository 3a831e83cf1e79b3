"""One comm's side of the control channel: messages to the other ranks, messages from them, and replies to requests.

A reporter stores the last calls and their places, for the other ranks and for errors. It keeps no session alive: the
channel holds the reporter, and the reporter holds the comm's session weakly. Without a channel the reporter sends and
receives nothing, and the collectives work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, final

from asynccomm.comm.wire_errors import decode_error, encode_error
from asynccomm.control.channel import ControlChannel
from asynccomm.control.diagnosis import Diagnosis, RankState
from asynccomm.control.fingerprints import Fingerprint
from asynccomm.control.timing import PING_SECONDS
from asynccomm.control.transport.schema import JsonObject
from asynccomm.core.callsite import CallSite, show
from asynccomm.core.stacks import format_stacks
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.errors import AbortedError, AsyncCommError, BrokenError, CollectiveMismatchError, PeerLostError
from asynccomm.ops import Op
from asynccomm.ops.signature import signature
from asynccomm.ops.validation import CommInfo

REMEMBERED: Final = 64  # number of last calls stored; few, so that their memory stays in the cache
COMPARED: Final = 1024  # the same where fingerprints are compared, which may find a difference long after the call
SHOWN: Final = 8  # operations in flight that an answer lists
ANSWER_SECONDS: Final = 0.5  # for peers to answer a request

Called = tuple[Op, CallSite | None, int, float]  # operation, call site, number, time of the call


class SessionView(Protocol):
    """The state of a session that a reporter reads, from any thread, without waiting."""

    @property
    def error(self) -> AsyncCommError | None: ...
    @property
    def counts(self) -> tuple[int, int]:
        """Collectives and point-to-point operations issued so far."""

    def pending(self) -> list[Work[Any]]:
        """The Works that are not done, oldest first."""

    def outstanding(self, tag: str) -> int:
        """The number of operations under ``tag`` that were issued and not agreed on yet."""


class SessionCallbacks(SessionView, Protocol):
    """A session, as a reporter uses it."""

    def break_by(self, error: BrokenError) -> object:
        """Break by ``error``, received from another rank."""


@final
class Reporter:
    """Connects one comm of this rank with the control channel.

    Args:
        channel: the job's control channel; None: there is none.
        key: the comm's key in the channel.
        jobs: the job rank of each rank of the comm.
        session: notified of errors; held weakly.
        loop: the comm's event loop.
    """

    def __init__(
        self,
        group: CommInfo,
        channel: ControlChannel | None,
        key: str,
        jobs: Sequence[int],
        session: SessionCallbacks,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.followers: list[int] | None = None  #: job ranks whose new comm replaces this one; None: no comm does
        self.compares = False  #: whether the control channel compares fingerprints of calls
        self.channel = channel
        self.recent: deque[Called] = deque(maxlen=REMEMBERED)  #: the last calls that were numbered
        self._group = group
        self._key = key
        self._jobs = list(jobs)
        self._ranks = {job: rank for rank, job in enumerate(jobs)}
        self._session = weakref.ref(session)
        self._loop = loop
        self._main = threading.get_ident()
        self._closed: set[int] = set()  # ranks that have left in an orderly way
        self._fingerprints: deque[tuple[int, Op, int]] = deque()
        self._met: dict[str, JsonObject] = {}  # messages naming the next comm's store, by decision key
        self._meeting: list[asyncio.Future[None]] = []
        self._ping: float | None = None  # when a callback was posted to the loop; None: it has run
        if channel is not None:
            channel.subscribe(key, self)

    def compare_fingerprints(self) -> None:
        """Compare the fingerprints of all later calls, as the backend does not."""
        self.compares = True
        self.recent = deque(self.recent, COMPARED)

    # -- from the comm, on any thread ---------------------------------------------------------------------------------

    def issued(self, work: Work[Any], batch: int) -> None:
        """Store a submitted operation; ``batch``: the batch's collectives if it is their first, else 0."""
        self.recent.append((work.op, work.site, work.seq, work.started))
        if self.compares:
            self.compare(work, batch)

    def compare(self, work: Work[Any], batch: int) -> None:
        """Compare an operation that is stored already; arguments as for ``issued``."""
        if not work.op.p2p:
            self._fingerprints.append((work.seq, work.op, batch))
            assert self.channel is not None
            self.channel.fingerprints_ready()

    def tell(self, error: BrokenError, then: Callable[[], object]) -> None:
        """Send the error that breaks the comm to the other ranks; then call ``then``, on any thread."""
        if self.channel is None:
            then()
        else:
            self.channel.broadcast(self._key, {"rank": self._group.rank, **encode_error(error)}, then)

    def say(self, item: JsonObject) -> None:
        """Send the other ranks a message that is no error. From any thread."""
        assert self.channel is not None
        self.channel.broadcast(self._key, {"rank": self._group.rank, **item})

    async def heard_of(self, key: str) -> JsonObject:
        """Wait for the message that says where the members of decision ``key`` meet. On the comm's loop."""
        while key not in self._met:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._meeting.append(waiter)
            if key not in self._met:
                await waiter
        return self._met[key]

    def _wake(self) -> None:
        waiters, self._meeting = self._meeting, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def end(self) -> None:
        """Stop receiving messages, and notify the other ranks."""
        if self.channel is not None:
            item: JsonObject = {"rank": self._group.rank, "kind": "closed"}
            session = self._session()
            error = None if session is None else session.error
            if isinstance(error, PeerLostError):  # the others may not see it: each rank has its own connections
                item |= {"lost": error.rank, "reason": error.detail}
            if self.followers is not None:
                item = {"rank": self._group.rank, "kind": "followed", "members": self.followers}
            self.channel.unsubscribe(self._key, item)

    async def ask(self, ranks: Sequence[int], timeout: float, **question: Any) -> dict[int, JsonObject]:
        """The answers of ``ranks`` of the comm within ``timeout`` seconds. On the comm's loop."""
        channel = self.channel
        if channel is None or not ranks:
            return {}
        jobs = [self._jobs[rank] for rank in ranks]
        try:
            said = await asyncio.wrap_future(channel.request(self._key, jobs, question, timeout))
        except RuntimeError:  # the channel has ended
            return {}
        return {self._ranks[job]: answer for job, answer in said.items()}

    async def states(
        self, ranks: Sequence[int], timeout: float, *, stacks: bool = False, tag: str | None = None
    ) -> dict[int, RankState]:
        """The states of ``ranks``, by rank; with a ``tag``, also the number of operations issued under it."""
        await self.ask(ranks, min(timeout, PING_SECONDS), what="ping")
        began = time.monotonic()
        await asyncio.sleep(max(0.0, PING_SECONDS - (time.monotonic() - began)))
        said = await self.ask(ranks, timeout, what="state", stacks=stacks, tag=tag)
        return {rank: self._state(rank, said.get(rank)) for rank in ranks}

    def _state(self, rank: int, answer: JsonObject | None) -> RankState:
        channel, job = self.channel, self._jobs[rank]
        if answer is not None:
            with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
                return RankState.from_answer(rank, answer)
        if channel is None or job not in channel.topology.contacts:
            return RankState(rank, False, reachable=False)
        if job in channel.gone:
            return RankState(rank, False, gone=channel.gone[job])
        return RankState(rank, False, silent=channel.silence(job))

    async def diagnose(self, timeout: float, *, stacks: bool) -> Diagnosis:
        """The states of all ranks."""
        group = self._group
        others = [rank for rank in range(group.size) if rank != group.rank]
        states = await self.states(others, timeout, stacks=stacks)
        mine = RankState.from_answer(group.rank, self.on_request({"what": "state", "stacks": stacks}))
        states[group.rank] = mine
        return Diagnosis(group.name, tuple(states[rank] for rank in range(group.size)))

    async def complete(self, error: CollectiveMismatchError) -> CollectiveMismatchError:
        """``error`` with the call sites on both ranks, if these answer."""
        sides = [error.rank, error.other_rank]
        said = await self.ask(
            [r for r in sides if r != self._group.rank], ANSWER_SECONDS, what="explain", seq=error.seq
        )
        said[self._group.rank] = self._explain(error.seq)
        sites = [str(said.get(rank, {}).get("site", "")) for rank in sides]
        return CollectiveMismatchError(*error.args[:5], *sites)

    # -- from the channel, on its thread ------------------------------------------------------------------------------

    def on_news(self, job: int, item: JsonObject) -> None:
        """Handle a message of the rank ``job`` of the job."""
        if item.get("kind") == "differs":  # sent by the job's root, which may not be in this comm
            self._break(self._difference(item))
            return
        rank = self._ranks.get(job)
        if rank is None:
            return
        if item.get("kind") == "closed":
            if "lost" in item:
                self._break(self._given_up(rank, item))
            self._closed.add(rank)
            return
        if item.get("kind") == "followed":
            self._closed.add(rank)
            members = item.get("members")
            if self.channel is not None and isinstance(members, list) and self.channel.rank not in members:
                others = [self._ranks[member] for member in members if member in self._ranks]
                self._break(AbortedError(rank, f"ranks {others} go on as another comm, without this rank"))
            return
        if item.get("kind") == "meet":
            self._met[str(item["key"])] = item
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)
            return
        error = decode_error({**item, "rank": rank})
        if error is not None and not (isinstance(error, PeerLostError) and error.rank == self._group.rank):
            self._break(error)

    def _given_up(self, rank: int, item: JsonObject) -> BrokenError:
        """The error where ``rank`` has closed the comm because a rank was lost, which may be this one."""
        error = decode_error({**item, "kind": "lost", "rank": rank})
        assert error is not None
        if isinstance(error, PeerLostError) and error.rank == self._group.rank:
            return PeerLostError(rank, f"it has given this rank up: {error.detail}")
        return error

    def _difference(self, item: JsonObject) -> CollectiveMismatchError:
        seq, sides = int(item["seq"]), item["sides"]
        ranks = [self._ranks[int(job)] for job in item["jobs"]]
        mine, theirs = (str(side.get("op", "something that it does not remember")) for side in sides)
        sites = [str(side.get("site", "")) for side in sides]
        return CollectiveMismatchError(seq, ranks[0], mine, ranks[1], theirs, *sites)

    def on_departure(self, job: int, how: str) -> None:
        """Handle the loss of the rank ``job`` of the job; ``how`` is empty if it has left."""
        rank = self._ranks.get(job)
        if rank is not None and how and rank not in self._closed:
            self._break(PeerLostError(rank, how))

    def _break(self, error: BrokenError) -> None:
        session = self._session()
        if session is not None:
            session.break_by(error)

    def on_request(self, question: JsonObject) -> JsonObject:
        """The answer to a request of another rank or of a diagnosing process."""
        match question.get("what"):
            case "ping":
                self._ask_loop_to_turn()
                return {}
            case "explain":
                return self._explain(int(question["seq"]))
            case "state":
                return self._describe(bool(question.get("stacks")), question.get("tag"))
            case _:
                return {}

    def take_fingerprints(self) -> tuple[int, Sequence[Fingerprint]]:
        """The size of the comm, and the fingerprints of the operations issued since the last call."""
        found: list[Fingerprint] = []
        while self._fingerprints:
            seq, op, batch = self._fingerprints.popleft()
            found.append((seq, *signature(op), batch))
        return self._group.size, found

    def _explain(self, seq: int) -> JsonObject:
        session = self._session()
        calls = [call[:3] for call in self.recent.copy()]  # a copy: other threads append calls
        if session is not None:
            calls += [(work.op, work.site, work.seq) for work in session.pending()]
        for op, site, number in calls:
            if number == seq and not op.p2p:
                return {"op": str(op), "site": show(site)}
        return {}

    def _ask_loop_to_turn(self) -> None:
        def turned() -> None:
            self._ping = None

        if self._ping is None:
            self._ping = time.monotonic()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(turned)

    def _describe(self, stacks: bool, tag: Any) -> JsonObject:
        session = self._session()
        if session is None:
            return {}
        now, error = time.monotonic(), session.error
        collectives, messages = session.counts
        pending = session.pending()
        last = self.recent[-1] if self.recent else None
        answer: JsonObject = {
            "comm": self._group.name,
            "rank": self._group.rank,
            "size": self._group.size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "state": "open" if error is None else f"broken: {error}" if isinstance(error, BrokenError) else "closed",
            "collectives": collectives,
            "finished": collectives - sum(not work.op.p2p and work.seq != UNNUMBERED for work in pending),
            "messages": messages,
            "in_flight": len(pending),
            "pending": [_called((work.op, work.site, work.seq, work.started), now) for work in pending[:SHOWN]],
            "last": None if last is None else _called(last, now),
            "blocked": self._ping is not None and now - self._ping > PING_SECONDS / 2,
            "issued": session.outstanding(tag) if isinstance(tag, str) else 0,
        }
        if self._jobs != list(range(len(self._jobs))):  # omitted where job ranks equal the comm's ranks
            answer["jobs"] = self._jobs
        if stacks:
            answer["stacks"] = format_stacks(self._main, self._loop)
        return answer


def _called(call: Called, now: float) -> dict[str, Any]:
    op, site, seq, when = call
    return {"op": str(op), "seq": seq, "age": round(now - when, 3), "site": show(site)}
