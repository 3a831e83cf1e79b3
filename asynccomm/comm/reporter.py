"""One comm's side of the control channel: messages to the other ranks, messages from them, and replies to requests.

A reporter keeps no comm alive: the channel holds the reporter, and the reporter holds the comm's submitter weakly. A
comm without a control channel has no reporter, and its collectives work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple, final

from msgspec import to_builtins

from asynccomm.backends.base import ConnectionEndedError
from asynccomm.comm.flight import packed
from asynccomm.comm.in_flight import RollCall
from asynccomm.comm.submission import Submitter
from asynccomm.comm.wire_errors import TEXT, decode_error, encode_error
from asynccomm.control.channel import ControlChannel
from asynccomm.control.diagnosis import Diagnosis, RankState
from asynccomm.control.fingerprints import Fingerprint
from asynccomm.control.runs import RankRuns, compact_ranks, expand_ranks
from asynccomm.control.subscribers import EVERY
from asynccomm.control.timing import PING_SECONDS, SILENT_SECONDS
from asynccomm.control.transport.schema import JsonObject, decode
from asynccomm.core.callsite import CallSite, show
from asynccomm.core.hosts import host_name
from asynccomm.core.stacks import format_stacks
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.errors import (
    AbortedError,
    AsyncCommError,
    BackendError,
    BrokenError,
    CollectiveMismatchError,
    PeerLostError,
)
from asynccomm.observe.clocks import ClockOffset, estimate
from asynccomm.observe.watchers import Called
from asynccomm.ops import Op, PeerOp, WindowOp
from asynccomm.ops.signature import signature

SHOWN: Final = 8  # operations in flight that an answer lists
EXPLAINED: Final = 256  # operations at most that an answer about a mismatch describes
ANSWER_SECONDS: Final = 0.5  # for peers to answer a request
CLOCK_SAMPLES: Final = 8  # requests for another rank's time, of which the shortest counts


@final
class Reporter:
    """Connects one comm of this rank with the control channel.

    Args:
        channel: the job's control channel.
        key: the comm's key in the channel.
        jobs: the job rank of each rank of the comm.
        submitter: holds the state of the comm; referenced weakly.
        on_failure: called with errors received from other ranks, on the control thread.
    """

    def __init__(
        self,
        channel: ControlChannel,
        key: str,
        jobs: Sequence[int],
        numbers: Sequence[int],
        submitter: Submitter,
        on_failure: Callable[[BrokenError], object],
    ) -> None:
        self.followers: list[int] | None = None  #: job ranks whose new comm replaces this one; None: no comm does
        self._channel = channel
        self._group = submitter.group
        self._key = key
        self._jobs = list(jobs)
        self._numbers = numbers
        self._ranks = {job: rank for rank, job in enumerate(jobs)}
        self._submitter = weakref.ref(submitter)
        self._on_failure = on_failure
        self._loop = submitter.mailbox.loop
        self._loop_thread = threading.get_ident()
        self._closed: set[int] = set()  # ranks that have left in an orderly way
        self._fingerprints: deque[tuple[int, Op, int]] = deque()
        self._announced: str | None = None  # rank 0's announcement
        self._stores: dict[str, Any] = {}  # addresses of the next comm's store, by decision key
        self._waiters: list[asyncio.Future[None]] = []  # for an announcement or such an address
        #: called with a rank and the numbers and times of its calls, on the control thread
        self.on_arrivals: Callable[[int, Sequence[tuple[int, float]]], object] | None = None
        self._ping: float | None = None  # when a callback was posted to the loop; None: it has run
        channel.subscribe(key, self)

    # -- from the comm, on any thread ---------------------------------------------------------------------------------

    def compare(self, work: Work[Any], batch: int) -> None:
        """Compare a numbered operation; ``batch``: the batch's collectives if it is their first, else 0."""
        if not work.op.p2p:
            self._fingerprints.append((work.seq, work.op, batch))
            self._channel.fingerprints_ready()

    def send_error(self, error: BrokenError, then: Callable[[], object]) -> None:
        """Send the error that breaks the comm to the other ranks; then call ``then``, on any thread."""
        self._channel.broadcast(self._key, {"rank": self._group.rank, **encode_error(error)}, then)

    def send_store(self, key: str, address: list[Any] | None) -> None:
        """Send the members of decision ``key`` the address of their store; None: the old store. From any thread."""
        item = {"rank": self._group.rank, "kind": "meet", "key": key, "store": address}
        self._channel.broadcast(self._key, item)

    async def receive_store(self, key: str) -> Any:
        """Wait for the address that another member of decision ``key`` sends. On the comm's loop."""
        await self._wait_until(lambda: key in self._stores)
        return self._stores[key]

    def send_arrivals(self, calls: Sequence[tuple[int, float]]) -> None:
        """Send the other ranks the numbers and times of this rank's calls of collectives. From any thread."""
        self._channel.broadcast(self._key, {"rank": self._group.rank, "kind": "arrivals", "calls": list(calls)})

    async def clock_offset(self) -> ClockOffset | None:
        """The offset to the clock of the job's lowest rank; None if it does not answer. On the comm's loop."""
        channel = self._channel
        there = channel.topology.contacts
        root = min((rank for rank in there if rank not in channel.gone), default=channel.rank)
        if root == channel.rank:
            return ClockOffset()
        samples = []
        for _ in range(CLOCK_SAMPLES):
            asked = time.monotonic()
            try:
                future = channel.request(EVERY, [root], {"what": "clock"}, ANSWER_SECONDS)
                answers = (await asyncio.wrap_future(future)).get(root, {}).get("comms", {}).values()
            except RuntimeError:  # the channel has ended
                break
            samples += [(asked, float(answer["now"]), time.monotonic()) for answer in answers if "now" in answer][:1]
        return estimate(samples, same_host=there[root].host == there[channel.rank].host)

    async def closed_by(self, ranks: Sequence[int]) -> int:
        """Wait until one of ``ranks`` has closed the comm; returns it. On the comm's loop."""
        await self._wait_until(lambda: not self._closed.isdisjoint(ranks))
        return next(rank for rank in ranks if rank in self._closed)

    def announce(self, text: str) -> None:
        """See ``Announcements``."""
        self._channel.broadcast(self._key, {"rank": self._group.rank, "kind": "announcement", "text": text})

    async def announced(self) -> str:
        """See ``Announcements``. On the comm's loop."""
        await self._wait_until(lambda: self._announced is not None)
        assert self._announced is not None
        return self._announced

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            if not condition():
                await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def end(self) -> None:
        """Stop receiving messages, and notify the other ranks."""
        item: JsonObject = {"kind": "closed"}  # without this rank: equal messages of many ranks travel as one
        submitter = self._submitter()
        error = None if submitter is None else submitter.error
        # the others may not see the loss: each rank has its own connections; the parent's error has the parent's ranks
        if isinstance(error, PeerLostError) and error.comm == self._group.name:
            item = encode_error(error) | item
        if self.followers is not None:
            item = {"kind": "followed", "members": to_builtins(compact_ranks(self.followers))}
        self._channel.unsubscribe(self._key, item)

    async def request(self, ranks: Sequence[int], timeout: float, **question: Any) -> dict[int, JsonObject]:
        """The replies of ``ranks`` of the comm within ``timeout`` seconds. On the comm's loop."""
        if not ranks:
            return {}
        jobs = [self._jobs[rank] for rank in ranks]
        try:
            replies = await asyncio.wrap_future(self._channel.request(self._key, jobs, question, timeout))
        except RuntimeError:  # the channel has ended
            return {}
        return {self._ranks[job]: reply for job, reply in replies.items()}

    async def states(
        self, ranks: Sequence[int], timeout: float, *, stacks: bool = False, tag: str | None = None
    ) -> dict[int, RankState]:
        """The states of ``ranks``, by rank; with a ``tag``, also the number of operations issued under it."""
        await self.request(ranks, min(timeout, PING_SECONDS), what="ping")
        began = time.monotonic()
        await asyncio.sleep(max(0.0, PING_SECONDS - (time.monotonic() - began)))
        relays = {self._ranks[job] for rank in ranks for job in self._relays(rank) if job in self._ranks}
        asked = [*ranks, *sorted(relays - {*ranks})]
        replies = await self.request(asked, timeout, what="state", stacks=stacks, tag=tag)
        silent = {self._jobs[rank] for rank in asked if rank not in replies}
        return {rank: self._state(rank, replies.get(rank), silent) for rank in ranks}

    def _relays(self, rank: int) -> list[int]:
        """The ranks of the job that pass messages on to ``rank`` of the comm."""
        channel, job = self._channel, self._jobs[rank]
        if job not in channel.topology.contacts or job in channel.gone:
            return []
        return channel.topology.between(channel.rank, job, {*channel.gone})

    def _state(self, rank: int, reply: JsonObject | None, silent: Collection[int]) -> RankState:
        """The state in a reply, or the reason why there is none; ``silent`` ranks of the job were asked in vain."""
        channel, job = self._channel, self._jobs[rank]
        if reply is not None:
            with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
                return RankState.from_answer(rank, reply)
        if job not in channel.topology.contacts:
            return RankState(rank, False, reachable=False)
        if job in channel.gone:
            return RankState(rank, False, gone=channel.gone[job])
        for relay in self._relays(rank):
            if relay in silent or (relay not in self._ranks and (channel.silence(relay) or 0.0) > SILENT_SECONDS):
                return RankState(rank, False, relay=self._ranks.get(relay, -1))
        return RankState(rank, False, silent=channel.silence(job))

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._group.size) if rank != self._group.rank]

    async def roll_call(self, work: Work[Any], timeout: float) -> RollCall:
        """The ranks that have issued the operation of ``work``, as far as they reply within ``timeout`` seconds."""
        if isinstance(work.op, (PeerOp, WindowOp)):
            missing = self._others if work.op.peer is None else [work.op.peer]
            states = await self.states(missing, timeout)
            return RollCall(missing, doing=[states[rank].doing for rank in missing])
        proposed = work.seq == UNNUMBERED  # then the ranks count the operations under its tag
        states = await self.states(self._others, timeout, tag=work.op.label if proposed else None)
        hidden = {rank: state.relay for rank, state in states.items() if state.relay is not None and state.relay >= 0}
        known = [rank for rank, state in states.items() if state.reachable and rank not in hidden]
        if proposed:
            missing = [rank for rank in known if not states[rank].issued]
        else:
            missing = [rank for rank in known if states[rank].collectives <= work.seq]
        arrived = sorted({self._group.rank, *known} - {*missing})
        doing = {rank: states[rank].doing for rank in missing}
        for relay in sorted({*hidden.values()}):
            unasked = sorted(rank for rank, by in hidden.items() if by == relay)
            doing[relay] += f"; ranks {unasked} could not be asked, as it passes messages on to them"
        return RollCall(missing, arrived, list(doing.values()))

    async def diagnose(self, timeout: float, *, stacks: bool) -> Diagnosis:
        """The states of all ranks."""
        group = self._group
        states = await self.states(self._others, timeout, stacks=stacks)
        mine = RankState.from_answer(group.rank, self.on_request({"what": "state", "stacks": stacks}))
        states[group.rank] = mine
        return Diagnosis(group.name, tuple(states[rank] for rank in range(group.size)))

    def explained(self, error: BackendError) -> BackendError:
        """``error``, or its reason as far as known: a rank that has closed the comm. On the control thread."""
        if isinstance(error, ConnectionEndedError) and error.rank in self._closed:
            return error.closed
        return error

    async def complete(self, error: CollectiveMismatchError) -> CollectiveMismatchError:
        """``error`` with the call sites on both ranks, if these answer.

        Operations that a scope holds may travel as one. Then the first of them that differs takes its place; where
        all are equal, the first of them is named beside it.
        """
        sides = [error.rank, error.other_rank]
        message = self._message(error)
        if message is not None:  # ranks number their own messages, so only this rank's call is known by its number
            sites = [message if rank == self._group.rank else "" for rank in sides]
            return CollectiveMismatchError(*error.args[:5], *sites)
        others = [rank for rank in sides if rank != self._group.rank]
        numbered = error.seq != UNNUMBERED  # operations without a number are in no order that the ranks share
        replies = await self.request(others, ANSWER_SECONDS, what="explain", seq=error.seq, following=numbered)
        replies[self._group.rank] = self._explain(error.seq, following=numbered)
        calls = [_Explained.from_reply(replies.get(rank, {})) for rank in sides]
        for seq, (mine, theirs) in enumerate(zip(*calls, strict=False) if numbered else (), error.seq):
            if mine.signature != theirs.signature:
                divided = ", of other sizes or dtypes" if mine.op == theirs.op else ""
                return CollectiveMismatchError(
                    seq, error.rank, mine.op, error.other_rank, theirs.op + divided, mine.site, theirs.site
                )
        texts = [error.op, error.other_op]
        if numbered and all(calls):
            ops = [found[0].op for found in calls]
            texts = [text if op in text else f"{op}, merged into {text}" for op, text in zip(ops, texts, strict=True)]
        sites = [found[0].site if found else "" for found in calls]
        return CollectiveMismatchError(error.seq, error.rank, texts[0], error.other_rank, texts[1], *sites)

    # -- from the channel, on its thread ------------------------------------------------------------------------------

    def on_news(self, job: int, item: JsonObject) -> None:
        """Handle a message of the rank ``job`` of the job."""
        if item.get("kind") == "differs":  # sent by the job's root, which may not be in this comm
            self._on_failure(self._mismatch(item))
            return
        rank = self._ranks.get(job)
        if rank is None:
            return
        if item.get("kind") == "closed":
            if "lost" in item:
                self._on_failure(self._closed_by_loss(rank, item))
            self._departed(rank, "")
            self._closed.add(rank)
            self._wake_loop()
            return
        if item.get("kind") == "followed":
            self._closed.add(rank)
            self._wake_loop()
            members = expand_ranks(decode(RankRuns, item.get("members")))
            if self._channel.rank not in members:
                others = [self._ranks[member] for member in members if member in self._ranks]
                self._on_failure(AbortedError(rank, f"ranks {others} go on as another comm, without this rank"))
            return
        if item.get("kind") == "arrivals":
            if self.on_arrivals is not None:
                self.on_arrivals(rank, [(int(seq), float(when)) for seq, when in item["calls"]])
            return
        if item.get("kind") == "meet":
            self._stores[str(item["key"])] = item.get("store")
            self._wake_loop()
            return
        if item.get("kind") == "announcement":
            if rank == 0:
                self._announced = str(item.get("text"))
                self._wake_loop()
            return
        error = decode_error({**item, "rank": rank})
        if error is not None and not (isinstance(error, PeerLostError) and error.rank == self._group.rank):
            self._on_failure(error)

    def _wake_loop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake)

    def _closed_by_loss(self, rank: int, item: JsonObject) -> BrokenError:
        """The error where ``rank`` has closed the comm because a rank was lost, which may be this one."""
        error = decode_error({**item, "kind": "lost", "rank": rank})
        assert error is not None
        if isinstance(error, PeerLostError) and error.rank == self._group.rank:
            return PeerLostError(rank, f"it has declared this rank lost: {error.detail}")
        return error

    def _mismatch(self, item: JsonObject) -> CollectiveMismatchError:
        seq, sides = int(item["seq"]), item["sides"]
        ranks = [self._ranks[int(job)] for job in item["jobs"]]
        mine, theirs = (str(side.get("op", "a call that is no longer recorded")) for side in sides)
        sites = [str(side.get("site", "")) for side in sides]
        return CollectiveMismatchError(seq, ranks[0], mine, ranks[1], theirs, *sites)

    def on_departure(self, job: int, how: str) -> None:
        """Handle the loss of the rank ``job`` of the job; ``how`` is empty if it has left."""
        rank = self._ranks.get(job)
        if rank is not None and how and rank not in self._closed:
            self._departed(rank, how)
            self._on_failure(PeerLostError(rank, how))

    def _departed(self, rank: int, how: str) -> None:
        submitter = self._submitter()
        if submitter is not None:
            submitter.watchers.departed(rank, how)

    def on_request(self, question: JsonObject) -> JsonObject:
        """The reply to a request of another rank or of a diagnosing process."""
        match question.get("what"):
            case "ping":
                self._ping_loop()
                return {}
            case "explain":
                return self._explain(int(question["seq"]), following=bool(question.get("following")))
            case "state":
                return self._describe(bool(question.get("stacks")), question.get("tag"))
            case "flight":
                submitter = self._submitter()
                if submitter is None:
                    return {}
                text = packed(submitter, self._numbers, int(question["bytes"]))
                return {"flight": text, "number": self._numbers[self._group.rank]}
            case "clock":
                return {"now": time.monotonic()}
            case _:
                return {}

    def take_fingerprints(self) -> tuple[int, Sequence[Fingerprint]]:
        """The size of the comm, and the fingerprints of the operations issued since the last call."""
        found: list[Fingerprint] = []
        while self._fingerprints:
            seq, op, batch = self._fingerprints.popleft()
            found.append((seq, *signature(op), batch))
        return self._group.size, found

    def _message(self, error: CollectiveMismatchError) -> str | None:
        """The call site of this rank's message that ``error`` is about, as far as known; None: no message."""
        submitter = self._submitter()
        op = error.op if error.rank == self._group.rank else error.other_op
        if submitter is None:
            return None
        messages = [call for call in _known_calls(submitter) if call[0].p2p and str(call[0]) == op]
        return next((show(site) for _, site, number in messages if number == error.seq), "") if messages else None

    def _explain(self, seq: int, *, following: bool) -> JsonObject:
        """The collective of number ``seq``, with those that are ``following`` it without a gap."""
        submitter = self._submitter()
        if submitter is None:
            return {}
        known: dict[int, tuple[Op, CallSite | None]] = {}
        for op, site, number in _known_calls(submitter):
            if not op.p2p:
                known.setdefault(number, (op, site))
        found: list[JsonObject] = []
        while seq + len(found) in known and len(found) < EXPLAINED:
            op, site = known[seq + len(found)]
            found.append({"op": str(op), "site": show(site), "signature": list(signature(op))})
        return found[0] | ({"following": found[1:]} if following else {}) if found else {}

    def _ping_loop(self) -> None:
        def ran() -> None:
            self._ping = None

        if self._ping is None:
            self._ping = time.monotonic()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(ran)

    def _describe(self, stacks: bool, tag: Any) -> JsonObject:
        submitter = self._submitter()
        if submitter is None:
            return {}
        now, error = time.monotonic(), submitter.error
        collectives, messages = submitter.counts.collectives, submitter.counts.messages
        pending = submitter.in_flight.pending()
        measured = submitter.in_flight.measured
        straggler = None if measured is None else measured.lateness.last
        last = submitter.recent[-1] if submitter.recent else None
        if pending and (last is None or pending[-1].started > last[3]):  # deferred, so it has no number yet
            last = _call(pending[-1])
        answer: JsonObject = {
            "comm": self._group.name,
            "rank": self._group.rank,
            "size": self._group.size,
            "host": host_name(),
            "pid": os.getpid(),
            "state": _state(error),
            "collectives": collectives,
            "finished": collectives - sum(not work.op.p2p and work.seq != UNNUMBERED for work in pending),
            "messages": messages,
            "nbytes": submitter.counts.nbytes,
            "straggler": -1 if straggler is None else straggler.rank,
            "in_flight": len(pending),
            "pending": [_called(_call(work), now) for work in pending[:SHOWN]],
            "last": None if last is None else _called(last, now),
            "blocked": self._ping is not None and now - self._ping > PING_SECONDS / 2,
            "issued": submitter.outstanding(tag) if isinstance(tag, str) else 0,
        }
        if self._jobs != list(range(len(self._jobs))):  # omitted where job ranks equal the comm's ranks
            answer["jobs"] = self._jobs
        if stacks:
            answer["stacks"] = format_stacks(self._loop_thread, self._loop)
        return answer


class _Explained(NamedTuple):
    """A collective as its rank describes it, after a mismatch."""

    op: str
    site: str
    signature: Any

    @classmethod
    def from_reply(cls, reply: JsonObject) -> list[_Explained]:
        """The collectives in a reply, up to the first one that cannot be read."""
        found = []
        with contextlib.suppress(TypeError, KeyError, ValueError):
            for call in (reply, *reply.get("following", ())):
                found.append(cls(str(call["op"]), str(call["site"]), list(call["signature"])))
        return found


def _known_calls(submitter: Submitter) -> list[tuple[Op, CallSite | None, int]]:
    """Operations, call sites and numbers of the last calls, and of those in flight."""
    calls = [call[:3] for call in submitter.recent.copy()]  # a copy: other threads append calls
    return calls + [(work.op, work.site, work.seq) for work in submitter.in_flight.pending()]


def _state(error: AsyncCommError | None) -> str:
    """The state of a comm for a ``RankState``."""
    if isinstance(error, BrokenError):
        return f"broken: {error}"[:TEXT]
    return "open" if error is None else "closed"


def _call(work: Work[Any]) -> Called:
    return work.op, work.site, work.seq, work.started, None


def _called(call: Called, now: float) -> dict[str, Any]:
    op, site, seq, when, _ = call
    return {"op": str(op), "seq": seq, "age": round(now - when, 3), "site": show(site), "p2p": op.p2p}
