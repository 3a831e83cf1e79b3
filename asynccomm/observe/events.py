"""Events of a comm: as a stream for one task, and as hooks.

A stream keeps raw notes in a bounded ring, and makes the events when they are read, so the calling side pays for one
append. When the ring is full, the oldest note is dropped and counted.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Self, final

from asynccomm.core.callsite import CallSite, show
from asynccomm.core.handles import Handle
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.errors import AbortedError, BrokenError, PeerLostError
from asynccomm.observe.watchers import Called, Watcher, Watchers, once
from asynccomm.ops import Call, Op

KEPT: Final = 4096  # notes that wait for the reader of a stream

CallNote = tuple[str, float, Op, int, CallSite | None, float, BaseException | None]  # the arguments of ``of_call``


@final
class Event(NamedTuple):
    """One event of a comm. Times are seconds of ``time.monotonic`` on this rank."""

    kind: str  #: "call", "send", "completion", "failure", "abort", "membership" or "arrivals"
    time: float
    op: Op | None = None  #: None for "abort" and "membership", and for a "failure" of the whole comm
    seq: int = UNNUMBERED  #: number of the operation; -1: not sent yet
    tag: str = ""  #: ``tag=`` of the call
    nbytes: int = 0  #: one rank's share of the operation
    site: str = ""  #: place of the call; empty: unknown
    started: float | None = None  #: time of the call
    error: BaseException | None = None  #: of "failure" and "abort"
    rank: int | None = None  #: the rank that has left ("membership"), or that aborted
    reason: str = ""  #: of "membership": the loss; empty: the rank has closed the comm in order
    arrivals: Mapping[int, float] | None = None  #: of "arrivals": time of each rank's call, by this rank's clock
    members: tuple[int, ...] | None = None  #: of "membership": ranks that go on as another comm; -1 is a newcomer


def of_call(
    kind: str, time: float, op: Op, seq: int, site: CallSite | None, started: float, error: BaseException | None = None
) -> Event:
    """The event of an operation."""
    return Event(kind, time, op, seq, _tag(op), op.nbytes, show(site), started, error)


def of_work(kind: str, time: float, work: Work[Any], error: BaseException | None = None) -> CallNote:
    """The note of an operation that has a Work."""
    return kind, time, work.op, work.seq, work.site, work.started, error


def _tag(op: Op) -> str:
    return str(getattr(op, "tag", "")) if op.p2p else op.label


@final
class _EventMaker:
    """Makes events of notes. Calls that are repeated have the same operation and site, so their texts are made once."""

    def __init__(self) -> None:
        self._op: Op | None = None
        self._site: CallSite | None = None
        self._texts: tuple[str, int, str] = ("", 0, "")

    def events_of(self, note: Event | CallNote | Called) -> tuple[Event, ...]:
        if isinstance(note, Event):
            return (note,)
        if len(note) == 7:
            return (of_call(*note),)
        op, site, seq, started, finished = note
        if op is not self._op or site != self._site:
            self._op, self._site, self._texts = op, site, (_tag(op), op.nbytes, show(site))
        tag, nbytes, place = self._texts
        new = tuple.__new__  # the constructor of a NamedTuple takes twice as long
        return (
            new(Event, ("call", started, op, seq, tag, nbytes, place, started, None, None, "", None, None)),
            new(Event, ("send", started, op, seq, tag, nbytes, place, started, None, None, "", None, None)),
            new(Event, ("completion", finished, op, seq, tag, nbytes, place, started, None, None, "", None, None)),
        )


class _MemberWatcher(Watcher):
    """Makes an event of each change of the comm's members, once for each rank."""

    def __init__(self) -> None:
        self._departed: set[int] = set()

    def _member_event(self, event: Event) -> None:
        """The members have changed."""
        raise NotImplementedError

    def departed(self, rank: int, how: str) -> None:
        if rank not in self._departed:
            self._departed.add(rank)
            self._member_event(Event("membership", time.monotonic(), rank=rank, reason=how))

    def regrouped(self, members: Sequence[int]) -> None:
        self._member_event(Event("membership", time.monotonic(), members=tuple(members)))


@final
class EventStream(Handle, _MemberWatcher, AsyncIterator[Event]):
    """The events of a comm from now on, for one reader: ``async for event in comm.events()``.

    The stream ends when the comm closes or ``close`` is called. Cancelling a wait for the next event is safe. Raises:
    RuntimeError while another task waits for the next event.

    Args:
        mailbox: of the comm's loop.
        size: notes that may wait for the reader; a call that finishes at once is one note.
        watchers: of the comm.
        detach: removes this watcher from the comm.
    """

    _instead = "call comm.events() there"

    def __init__(
        self, mailbox: Mailbox, size: int, watchers: Watchers, detach: Callable[[EventStream], object]
    ) -> None:
        super().__init__()
        self.dropped: int = 0  #: notes that were dropped because the reader was too slow
        self._mailbox = mailbox
        self._notes: deque[Event | CallNote | Called] = deque(maxlen=size)
        self._size = size
        self._watchers = watchers
        self._ready: deque[Event] = deque()  # events of the last note that was read
        self._maker = _EventMaker()
        self._deferred: set[Work[Any]] = set()
        self._detach = detach
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._lock = threading.Lock()  # for notes, and the count of those dropped

    # -- as a watcher -------------------------------------------------------------------------------------------------

    def finished(self, calls: Sequence[Called]) -> None:
        self._add_all(calls)

    def called(self, call: Call, work: Work[Any]) -> None:
        self._add(of_work("call", work.started, work))
        if work.seq == UNNUMBERED:
            self._deferred.add(work)
        else:
            self._add(of_work("send", work.started, work))
        work.listen(partial(once, [work], self._settled))

    def sent(self, works: Sequence[Work[Any]]) -> None:
        for work in works:
            if work in self._deferred:  # else ``called`` follows
                self._deferred.discard(work)
                now, finished = time.monotonic(), work.finished  # it may have been done while it was sent
                self._add(of_work("send", now if finished is None else min(now, finished), work))

    def _settled(self, work: Work[Any]) -> None:
        if work.seq != UNNUMBERED:  # done before ``sent``
            self.sent([work])
        self._deferred.discard(work)
        error = work._error  # exception() would mark the error as retrieved
        when = time.monotonic() if work.finished is None else work.finished
        self._add(of_work("completion" if error is None else "failure", when, work, error))

    def broke(self, error: BrokenError) -> None:
        if isinstance(error, AbortedError):
            self._add(Event("abort", time.monotonic(), error=error, rank=error.rank, reason=error.reason))
            return
        if isinstance(error, PeerLostError):  # often found by the transport, before the control channel
            self.departed(error.rank, error.detail)
        self._add(Event("failure", time.monotonic(), error=error))

    def _member_event(self, event: Event) -> None:
        self._add(event)

    def arrived(self, op: Op, seq: int, arrivals: Mapping[int, float]) -> None:
        self._add(Event("arrivals", time.monotonic(), op, seq, op.label, op.nbytes, arrivals=dict(arrivals)))

    def _add(self, note: Event | CallNote | Called) -> None:
        self._add_all((note,))

    def _add_all(self, notes: Sequence[Event | CallNote | Called]) -> None:
        with self._lock:
            if self._closed:  # an operation that was in flight at ``close``
                return
            self.dropped += max(0, len(self._notes) + len(notes) - self._size)
            self._notes.extend(notes)
        self._wake()

    # -- for the reader -----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Wake the reader, if it waits. From any thread."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._watchers.calm(self)
            self._mailbox.post(partial(_settle, waiter))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._ready:
            if not self._notes:
                self._watchers.flush()
            if self._notes:
                with self._lock:
                    note = self._notes.popleft()
                self._ready.extend(self._maker.events_of(note))
            elif self._closed:
                raise StopAsyncIteration
            else:
                if self._waiter is not None and not self._waiter.done():
                    raise RuntimeError("another task waits for the next event: each reader needs a stream of its own")
                waiter = self._waiter = self._mailbox.loop.create_future()
                self._watchers.hurry(self)
                if not self._notes and not self._closed:  # a thread that adds a note looks for the waiter afterwards
                    await waiter
        return self._ready.popleft()

    def close(self) -> None:
        """End the stream after the events so far. Idempotent, from any thread."""
        self._detach(self)
        self.closed()

    def closed(self) -> None:
        self._closed = True
        self._wake()


@final
class Hook(Handle, _MemberWatcher):
    """Functions that are called with the events of a comm; ``remove`` ends that.

    Args:
        pre: called with the "call" event before the operation is sent; an exception refuses the call.
        post: called with the "completion" or "failure" event, on the thread that finds the end.
        abort: called with the error when the comm breaks.
        membership: called with each "membership" event, on the thread that finds the change.
        detach: removes this watcher from the comm.
    """

    _instead = "call comm.add_hook() there"
    detours = True

    def __init__(
        self,
        pre: Callable[[Event], object] | None,
        post: Callable[[Event], object] | None,
        abort: Callable[[BrokenError], object] | None,
        membership: Callable[[Event], object] | None,
        detach: Callable[[Hook], object],
    ) -> None:
        super().__init__()
        self._pre, self._post, self._abort, self._membership = pre, post, abort, membership
        self._detach = detach
        self._removed = False  # operations in flight at ``remove`` notify this watcher still

    def before(self, op: Op) -> None:
        if self._pre is not None and not self._removed:
            now = time.monotonic()
            self._pre(of_call("call", now, op, UNNUMBERED, None, now))

    def called(self, call: Call, work: Work[Any]) -> None:
        if self._post is not None:
            work.listen(partial(once, [work], self._settled))

    def _settled(self, work: Work[Any]) -> None:
        assert self._post is not None
        if self._removed:
            return
        error = work._error
        when = time.monotonic() if work.finished is None else work.finished
        event = of_call(*of_work("completion" if error is None else "failure", when, work, error))
        self._guarded(partial(self._post, event))

    def _member_event(self, event: Event) -> None:
        if self._membership is not None and not self._removed:
            self._guarded(partial(self._membership, event))

    def broke(self, error: BrokenError) -> None:
        if isinstance(error, PeerLostError):  # often found by the transport, before the control channel
            self.departed(error.rank, error.detail)
        if self._abort is not None and not self._removed:
            self._guarded(partial(self._abort, error))

    def _guarded(self, call: Callable[[], object]) -> None:
        """Call a function of the user; its exception goes to the excepthook of threads, and hurts no operation."""
        try:
            call()
        except Exception as exc:
            threading.excepthook(
                threading.ExceptHookArgs((type(exc), exc, exc.__traceback__, threading.current_thread()))
            )

    def remove(self) -> None:
        """End the calls of the functions, also for operations in flight. Idempotent, from any thread.

        A call that runs on another thread meanwhile goes on.
        """
        self._removed = True
        self._detach(self)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
