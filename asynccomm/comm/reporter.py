"""One comm's side of the control channel: what it tells the other ranks, what it hears, and what it answers them.

It remembers what was called last and where, for them and for errors. It outlives nothing: the channel holds this, and
this holds the comm's session only weakly. Without a channel it tells and hears nothing, and the collectives work.
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
from asynccomm.control.transport.framing import ControlMessage
from asynccomm.core.callsite import CallSite, show
from asynccomm.core.stacks import format_stacks
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.errors import AbortedError, AsyncCommError, BrokenError, CollectiveMismatchError, PeerLostError
from asynccomm.ops import Op
from asynccomm.ops.signature import signature
from asynccomm.ops.validation import CommInfo

REMEMBERED: Final = 64  # calls that are done; few, so that the memory for the next is warm
COMPARED: Final = 1024  # the same, where others may be found to differ long after
SHOWN: Final = 8  # operations in flight, in an answer
PING_SECONDS: Final = 0.1  # for a loop to turn, before it counts as blocked
ANSWER_SECONDS: Final = 0.5  # for peers to say what they are at

Called = tuple[Op, CallSite | None, int, float]  # operation, where, its number, when


class SessionView(Protocol):
    """What a session says of itself. To be read from any thread, without waiting."""

    @property
    def error(self) -> AsyncCommError | None: ...
    @property
    def counts(self) -> tuple[int, int]:
        """Collectives and point-to-point operations issued so far."""

    def pending(self) -> list[Work[Any]]:
        """What is not done, oldest first."""

    def outstanding(self, tag: str) -> int:
        """Operations under ``tag`` that were issued and not agreed on yet."""


class SessionCallbacks(SessionView, Protocol):
    """A session."""

    def break_by(self, error: BrokenError) -> object:
        """Become broken by what others tell."""


@final
class Reporter:
    """The rank's reporter of one comm.

    Args:
        channel: of the job; None: there is none.
        key: of the comm in the channel.
        jobs: the ranks of the comm, by what they are called in the job.
        session: told what happens; held weakly.
        loop: the comm's.
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
        self.followers: list[int] | None = None  #: those who go on as another comm in place of this one, if they do
        self.compares = False  #: whether fingerprints are compared here
        self.channel = channel
        self.recent: deque[Called] = deque(maxlen=REMEMBERED)  #: the last calls that were numbered
        self._group = group
        self._key = key
        self._jobs = list(jobs)
        self._ranks = {job: rank for rank, job in enumerate(jobs)}
        self._session = weakref.ref(session)
        self._loop = loop
        self._main = threading.get_ident()
        self._closed: set[int] = set()  # ranks that have closed the comm in good order
        self._fingerprints: deque[tuple[int, Op, int]] = deque()
        self._met: dict[str, ControlMessage] = {}  # where members of the next comm meet, by what was decided
        self._meeting: list[asyncio.Future[None]] = []
        self._ping: float | None = None  # when the loop was asked to turn, if it has not
        if channel is not None:
            channel.subscribe(key, self)

    def compare_fingerprints(self) -> None:
        """Of all calls from now on: the backend does not."""
        self.compares = True
        self.recent = deque(self.recent, COMPARED)

    # -- from the comm, on any thread ---------------------------------------------------------------------------------

    def issued(self, work: Work[Any], batch: int) -> None:
        """An operation was numbered and handed on; ``batch`` collectives with it if it is their first, else 0."""
        self.recent.append((work.op, work.site, work.seq, work.started))
        if self.compares:
            self.compare(work, batch)

    def compare(self, work: Work[Any], batch: int) -> None:
        """The same, of one that is remembered already."""
        if not work.op.p2p:
            self._fingerprints.append((work.seq, work.op, batch))
            assert self.channel is not None
            self.channel.issued()

    def tell(self, error: BrokenError, then: Callable[[], object]) -> None:
        """Tell the others what the comm breaks with; ``then`` is called once that is on its way, on any thread."""
        if self.channel is None:
            then()
        else:
            self.channel.tell(self._key, {"rank": self._group.rank, **encode_error(error)}, then)

    def say(self, item: ControlMessage) -> None:
        """Tell the others something that is no error. From any thread."""
        assert self.channel is not None
        self.channel.tell(self._key, {"rank": self._group.rank, **item})

    async def heard_of(self, key: str) -> ControlMessage:
        """What a rank says of where the members of a decision meet, once it does. On the comm's loop."""
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
        """Hear nothing more, and tell the others of it."""
        if self.channel is not None:
            item: ControlMessage = {"rank": self._group.rank, "kind": "closed"}
            session = self._session()
            error = None if session is None else session.error
            if isinstance(error, PeerLostError):  # which the others may see otherwise: each has its own connections
                item |= {"lost": error.rank, "reason": error.detail}
            if self.followers is not None:
                item = {"rank": self._group.rank, "kind": "followed", "members": self.followers}
            self.channel.unsubscribe(self._key, item)

    async def ask(self, ranks: Sequence[int], timeout: float, **question: Any) -> dict[int, ControlMessage]:
        """What ``ranks`` of the comm answer within ``timeout`` seconds. On the comm's loop."""
        channel = self.channel
        if channel is None or not ranks:
            return {}
        jobs = [self._jobs[rank] for rank in ranks]
        try:
            said = await asyncio.wrap_future(channel.ask(self._key, jobs, question, timeout))
        except RuntimeError:  # it has ended
            return {}
        return {self._ranks[job]: answer for job, answer in said.items()}

    async def states(
        self, ranks: Sequence[int], timeout: float, *, stacks: bool = False, tag: str | None = None
    ) -> dict[int, RankState]:
        """What ``ranks`` are at, by rank; with a ``tag``, also how much they have issued under it."""
        await self.ask(ranks, min(timeout, PING_SECONDS), what="ping")
        began = time.monotonic()
        await asyncio.sleep(max(0.0, PING_SECONDS - (time.monotonic() - began)))
        said = await self.ask(ranks, timeout, what="state", stacks=stacks, tag=tag)
        return {rank: self._state(rank, said.get(rank)) for rank in ranks}

    def _state(self, rank: int, answer: ControlMessage | None) -> RankState:
        channel, job = self.channel, self._jobs[rank]
        if answer is not None:
            with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
                return RankState.of_answer(rank, answer)
        if channel is None or job not in channel.topology.contacts:
            return RankState(rank, False, reachable=False)
        if job in channel.gone:
            return RankState(rank, False, gone=channel.gone[job])
        return RankState(rank, False, silent=channel.silence(job))

    async def diagnose(self, timeout: float, *, stacks: bool) -> Diagnosis:
        """What all ranks are at."""
        group = self._group
        others = [rank for rank in range(group.size) if rank != group.rank]
        states = await self.states(others, timeout, stacks=stacks)
        mine = RankState.of_answer(group.rank, self.answer({"what": "state", "stacks": stacks}))
        states[group.rank] = mine
        return Diagnosis(group.name, tuple(states[rank] for rank in range(group.size)))

    async def complete(self, error: CollectiveMismatchError) -> CollectiveMismatchError:
        """``error`` with the places where both sides called, as far as they can be found out."""
        sides = [error.rank, error.other_rank]
        said = await self.ask(
            [r for r in sides if r != self._group.rank], ANSWER_SECONDS, what="explain", seq=error.seq
        )
        said[self._group.rank] = self._explain(error.seq)
        sites = [str(said.get(rank, {}).get("site", "")) for rank in sides]
        return CollectiveMismatchError(*error.args[:5], *sites)

    # -- from the channel, on its thread ------------------------------------------------------------------------------

    def hear(self, job: int, item: ControlMessage) -> None:
        """Another rank has news."""
        if item.get("kind") == "differs":  # from the root of the job, which need not be in this comm
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

    def _given_up(self, rank: int, item: ControlMessage) -> BrokenError:
        """``rank`` has closed the comm because it lost one of its ranks, which may be this one."""
        error = decode_error({**item, "kind": "lost", "rank": rank})
        assert error is not None
        if isinstance(error, PeerLostError) and error.rank == self._group.rank:
            return PeerLostError(rank, f"it has given this rank up: {error.detail}")
        return error

    def _difference(self, item: ControlMessage) -> CollectiveMismatchError:
        seq, sides = int(item["seq"]), item["sides"]
        ranks = [self._ranks[int(job)] for job in item["jobs"]]
        mine, theirs = (str(side.get("op", "something that it does not remember")) for side in sides)
        sites = [str(side.get("site", "")) for side in sides]
        return CollectiveMismatchError(seq, ranks[0], mine, ranks[1], theirs, *sites)

    def lose(self, job: int, how: str) -> None:
        """A rank of the job is gone."""
        rank = self._ranks.get(job)
        if rank is not None and how and rank not in self._closed:
            self._break(PeerLostError(rank, how))

    def _break(self, error: BrokenError) -> None:
        session = self._session()
        if session is not None:
            session.break_by(error)

    def answer(self, question: ControlMessage) -> ControlMessage:
        """What another rank, or somebody who looks on, wants to know."""
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

    def fingerprints(self) -> tuple[int, Sequence[Fingerprint]]:
        """The size of the comm, and the fingerprints of what was issued since the last call."""
        found: list[Fingerprint] = []
        while self._fingerprints:
            seq, op, batch = self._fingerprints.popleft()
            found.append((seq, *signature(op), batch))
        return self._group.size, found

    def _explain(self, seq: int) -> ControlMessage:
        session = self._session()
        calls = [call[:3] for call in self.recent.copy()]  # other threads add to it
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

    def _describe(self, stacks: bool, tag: Any) -> ControlMessage:
        session = self._session()
        if session is None:
            return {}
        now, error = time.monotonic(), session.error
        collectives, messages = session.counts
        pending = session.pending()
        last = self.recent[-1] if self.recent else None
        answer: ControlMessage = {
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
        if self._jobs != list(range(len(self._jobs))):  # not said where it goes without saying
            answer["jobs"] = self._jobs
        if stacks:
            answer["stacks"] = format_stacks(self._main, self._loop)
        return answer


def _called(call: Called, now: float) -> dict[str, Any]:
    op, site, seq, when = call
    return {"op": str(op), "seq": seq, "age": round(now - when, 3), "site": show(site)}
