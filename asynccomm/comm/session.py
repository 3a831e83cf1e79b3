"""One rank's part in a comm, from its beginning to its end. The engine room of :class:`asynccomm.Comm`.

What it submits is the business of ``submission`` and ``in_flight``. Here is the rest: how it connects, how it ends, and
what becomes of what the ranks tell each other (``reporter``).

States: open, then closed or broken, for good. Broken means: what was pending has failed with one error, the peers have
been told why, and later calls raise that error again. What breaks a session: an operation past its deadline, a
transport error, ``abort`` here or on another rank.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, NamedTuple, final

from asynccomm.backends.base import Backend, BackendContext, UnsuitableError, own_hints
from asynccomm.batching.ordering.transport import OrderingSession
from asynccomm.batching.queue import DeferredQueue
from asynccomm.comm.in_flight import weak_callback
from asynccomm.comm.monitored_barrier import MonitoredBarriers
from asynccomm.comm.reporter import Reporter
from asynccomm.comm.submission import Submitter
from asynccomm.core.callsite import show
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.errors import (
    AbortedError,
    AsyncCommError,
    BackendError,
    BrokenError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    StoreError,
)
from asynccomm.ops import MessageSpace, Recv, RecvParcel, Send, SendParcel
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions
from asynccomm.rendezvous.job import CommIdentity
from asynccomm.rendezvous.lobby import Invitation
from asynccomm.store.base import within

TELL_SECONDS = 2.0  # for the store to say who came
LOST_SECONDS = 0.03  # to look for the reason why a rank is gone; all are to know within 0.1 that it is
EXPLAIN_SECONDS = 1.0  # the same for other errors of the transport
CONNECT_SECONDS = 0.5  # the same for what a rank could not connect for; less, as who saw it leave waits to hear of it
ROLL_CALL_SECONDS = 0.5  # for peers to say what they have issued, once an operation is past its deadline

_log = logging.getLogger("asynccomm")
_alive: weakref.WeakSet[Session] = weakref.WeakSet()  # only to disown them in a forked child


@final
class Session(Submitter):
    """Connects, submits, watches, and ends.

    Args:
        group, options: as the comm shows them.
        mailbox: of the comm's loop.
        identity: the comm's, which it leaves when the session has ended.
    """

    def __init__(self, group: CommInfo, options: CommOptions, mailbox: Mailbox, identity: CommIdentity) -> None:
        super().__init__(group, options, mailbox)
        self.identity = identity
        self.backend_name = ""  #: of the one in use, or the last one tried
        self.regrouping: asyncio.Task[Session] | None = None  #: makes what goes on in place of this
        self.barriers = MonitoredBarriers(group, identity.room)
        self._connecting: asyncio.Timeout | None = None
        self._growing: set[Session] = set()  # split off this one, and not connected yet
        self._resources = AsyncExitStack()
        self._resources.push_async_callback(identity.leave)
        self._ending: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        # others hold these for long; they must not keep a forgotten comm alive
        self.transport_failed = weak_callback(self._transport_failed)  #: for the backend: hears of transport errors
        self._aftermath: Future[None] | None = None  # done once the transport of a broken comm has ended
        self._breaking = threading.Lock()  # held for moments: the other one may be held by who is stuck in a call
        channel = identity.job.channel
        if channel is not None:
            self.reporter = Reporter(group, channel, identity.key, identity.job_ranks, self, mailbox.loop)
        _alive.add(self)

    async def connect(
        self, backends: Mapping[str, type[Backend]], timeout: float, parent: Session | None = None
    ) -> None:
        """Connect the first of ``backends`` that suits and begin to take calls; any other failure ends the session.

        Args:
            backends: by name, in the order to try them.
            timeout: seconds.
            parent: fails this one, too, while it connects: the others may not come any more.
        """
        if parent is not None:
            parent._growing.add(self)
        may_connect = parent is None or parent.error is None
        try:
            async with within(timeout) as self._connecting:
                if isinstance(self.error, BrokenError):  # before anybody could be told to stop
                    raise self.error
                if parent is not None:
                    parent.check_open()
                await self.identity.room.set(f"here/{self.group.rank}", b"1")
                await self._connect_first(backends, timeout)
            self._connecting = None
            if self.options.ordering == "agreed":
                self._agree()
            if isinstance(self.error, BrokenError):  # just now
                self._abort_backend()
                raise self.error
        except BaseException as exc:
            self._connecting = None
            reason = exc
            try:
                if may_connect:  # else the parent's error says it all
                    reason = await self._why_not_connected(exc)
            finally:
                error = AbortedError(self.group.rank, f"could not connect: {type(reason).__name__}: {reason}")
                # the others may still be connecting, to who will not come; what does not suit they all find out
                self._fail(error, tell=not isinstance(reason, UnsuitableError))
                self.identity.free_name()  # now: closing goes on when this is cancelled, and another try may come
                await self.aclose()
            if reason is exc:
                raise
            raise reason from exc
        finally:
            if parent is not None:
                parent._growing.discard(self)

    async def _connect_first(self, backends: Mapping[str, type[Backend]], timeout: float) -> None:
        last = list(backends)[-1]
        for name, backend in backends.items():
            self.backend_name = name
            hints = own_hints(backend, self.options.hints)
            context = BackendContext(
                group=self.group,
                members=self.identity.members,
                store=self.identity.room.prefix(name),
                mailbox=self.mailbox,
                timeout=timeout,
                on_error=self.transport_failed,
                hints=hints,
                high_priority_stream=self.options.high_priority_stream,
            )
            try:
                self.backend = await backend.connect(context)
            except UnsuitableError as exc:
                if name == last:
                    raise
                _log.info("backend %r does not suit, so another is tried: %s", name, exc)
            else:
                if self.reporter is not None and not backend.compares:
                    self.reporter.compare_fingerprints()
                self._resources.push_async_callback(self.backend.aclose)
                self.options = replace(self.options, hints=hints)
                return

    def _agree(self) -> None:
        """From now on, have the ranks agree on the order of collectives."""
        assert self.backend is not None
        run, fail = weak_callback(self.run_agreed), weak_callback(self._disagreed)
        self.agreement = OrderingSession(self.group, self.mailbox, self.backend, self._lock, run, fail)
        self._resources.push_async_callback(self.agreement.aclose)

    def _disagreed(self, error: BrokenError) -> None:
        """What all hear is told, too: who hears it first ends its transport, and must not be taken for the cause."""
        self._fail(error, tell=True)

    async def _why_not_connected(self, exc: BaseException) -> BaseException:
        """What to raise for ``exc``, which ended connecting. What is behind it may be on its way to us."""
        seconds = 0.0
        if isinstance(exc, PeerLostError):
            seconds = EXPLAIN_SECONDS
        elif isinstance(exc, (BackendError, StoreError)) and not isinstance(exc, UnsuitableError):
            seconds = CONNECT_SECONDS
        if seconds and self.error is None and self.reporter is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds) as self._connecting:
                    await self.mailbox.loop.create_future()  # until the news
            self._connecting = None
        late = isinstance(exc, TimeoutError) and not isinstance(exc, AsyncCommError)
        if isinstance(self.error, BrokenError) and (late or seconds):
            return self.error
        if not late:
            return exc
        group = self.group
        limit = self.options.timeout
        error = f"{self.backend_name} did not connect rank {group.rank} of comm {group.name!r} within {limit:g} s"
        with contextlib.suppress(TimeoutError, AsyncCommError):
            async with asyncio.timeout(TELL_SECONDS):
                ranks = range(group.size)
                came = await asyncio.gather(*(self.identity.room.check([f"here/{rank}"]) for rank in ranks))
                if absent := [rank for rank in ranks if not came[rank]]:
                    error += f"; ranks {absent} did not come"
        return BackendError(error)

    @property
    def closed(self) -> bool:
        """Whether ``aclose`` was called."""
        return self._closing is not None

    @property
    def ended(self) -> bool:
        """Whether closing has come to its end."""
        return self._closing is not None and self._closing.done() and not self._closing.cancelled()

    def invitation(self) -> Invitation:
        """For newcomers to this comm."""
        channel = self.identity.job.channel
        assert channel is not None
        contacts = list(channel.topology.contacts.values())
        jobs = list(self.identity.job_ranks)
        return Invitation(self.identity.key, jobs, contacts, channel.tokens, self.backend_name, self.options.ordering)

    async def come_to_rest(self) -> None:
        """Wait until nothing is in flight: another comm is to go on in place of this one."""
        if self.error is None:
            with self._lock:
                self.flush_all()
            while self._busy and self.error is None:
                waiter = self._hear_of_settling()
                if self._busy:
                    await waiter

    @property
    def _busy(self) -> bool:
        """Whether anything is in flight but the receives of streams, which may be idle for ever."""
        return any(not _of_stream(work) for work in self._pending.copy())

    def give_way(self) -> None:
        """Another comm goes on in place of this one: what was called meanwhile has no answer to wait for."""
        self._end_streams()
        if self._pending:
            self._fail(AbortedError(self.group.rank, "another comm goes on in place of this one"), tell=False)

    # -- ending -------------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Break, and tell the peers; does nothing once broken or closed. From any thread."""
        self._fail(AbortedError(self.group.rank, reason), tell=True)

    async def aclose(self) -> None:
        """Take no more calls, wait for what is in flight, free everything. Idempotent. Cancelling it aborts."""
        self.check_loop()
        if self._closing is None:  # a task of its own: cleaning up goes on when the caller is cancelled
            closed = ClosedError(f"comm {self.group.name!r} is closed")
            with self._lock:
                self.flush_all()
                with self._breaking:
                    self.error = self.error or closed
            self._end_streams()
            if self.regrouping is not None:
                self.regrouping.cancel()
            self._closing = self.mailbox.loop.create_task(self._close(closed), name="asynccomm close")
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self.abort("closing was cancelled")
            raise

    def _end_streams(self) -> None:
        """Give up the receives of streams: they may be idle for ever, and be nobody's any more."""
        ended = ClosedError(f"comm {self.group.name!r} was closed while the stream was open")
        ended.observed = True  # it is news only to somebody who still reads
        for work in list(self._pending):
            if _of_stream(work):
                work.settle(ended)

    async def _close(self, closed: ClosedError) -> None:
        while self._pending:
            waiter = self._hear_of_settling()
            if self._pending:
                await waiter
        await asyncio.sleep(0)  # an abort from another thread may just be on its way through the mailbox
        while self._ending:
            await asyncio.wait(set(self._ending))
        if self._aftermath is not None:
            await asyncio.shield(asyncio.wrap_future(self._aftermath))  # others set it, also when the loop has ended
        await self._free()
        self.error = closed

    async def _free(self) -> None:
        self._deadlines.close()
        if self.reporter is not None:
            self.reporter.end()
        await self._resources.aclose()

    def forget(self) -> None:
        """End without telling anybody why: the comm was dropped unclosed. From any thread, at any time."""
        self.identity.free_name()
        self._abort_backend()
        with contextlib.suppress(RuntimeError):  # the loop is closed; as if it turned no more, the seat is left
            self.mailbox.loop.call_soon_threadsafe(lambda: self._begin(self._let_go()))

    async def _let_go(self) -> None:
        dropped = AbortedError(self.group.rank, f"comm {self.group.name!r} was dropped unclosed")
        self.error = self.error or dropped
        for work in list(self._pending):
            work.settle(dropped)
        await self._free()

    def detach_in_child(self) -> None:
        """Refuse everything: this is a forked child, where neither threads nor connections are ours."""
        self._lock = threading.RLock()  # threads that are not in the child may have held the old ones
        self._breaking = threading.Lock()
        self.error = ClosedError(f"comm {self.group.name!r} was made before this process was forked; make a new one")
        self.backend = self.reporter = None
        self.identity.detach_in_child()

    def _fail(self, error: BrokenError, *, tell: bool) -> bool:
        """Become broken by ``error``, unless it has ended otherwise; from any thread, whatever others are stuck in."""
        with self._breaking:
            draining = isinstance(self.error, ClosedError) and self._pending
            if self.error is not None and not draining:
                return False
            self.error = error
            self._aftermath = Future()
        for work in list(self._pending):
            work.settle(error)
        for child in list(self._growing):
            child._fail(error, tell=True)
        # the others are told before the transport goes, so that they hear of the cause and not of a lost connection
        if tell and self.reporter is not None:
            self.reporter.tell(error, lambda: self._end(error))
        else:
            self._end(error)
        self.mailbox.post(self._stop_waiting)
        return True

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self.mailbox.loop.create_task(coroutine)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _stop_waiting(self) -> None:
        self._deadlines.close()
        if self._connecting is not None:
            with contextlib.suppress(RuntimeError):  # it is at its end already
                self._connecting.reschedule(0.0)

    def _end(self, error: BrokenError) -> None:
        """End the transport; from any thread."""
        assert self._aftermath is not None
        try:
            self._abort_backend()
            if self.observer is not None:
                self.observer.broke(error)
        finally:
            self._aftermath.set_result(None)
        if self.options.abort_process_on_timeout_or_error and not isinstance(error, AbortedError):
            _log.critical("ending the process: %s", error)
            os.abort()

    def _abort_backend(self) -> None:
        if self.agreement is not None:
            self.agreement.end()
        if self.backend is not None:
            self.backend.abort()

    # -- what others tell us ------------------------------------------------------------------------------------------

    def break_by(self, error: BrokenError) -> None:
        """Others have told of ``error``. On the control thread."""
        self._catch_up()
        self._fail(error, tell=False)

    def _catch_up(self) -> None:
        """Settle what needs nobody else any more: who has had its part may fail, or end, before others have looked."""
        if self._pending and self.backend is not None:
            try:
                self.backend.catch_up()
            except Exception:  # the failure is what matters
                _log.exception("backend %r could not settle what is done", self.backend_name)

    def outstanding(self, tag: str) -> int:
        """Operations under ``tag`` that were issued and not agreed on yet. From any thread."""
        return 0 if self.agreement is None else self.agreement.outstanding(tag)

    def _transport_failed(self, error: BrokenError) -> None:
        """From any thread. What is behind it may be on its way to us: a rank gave up, or its process ended."""
        self._catch_up()
        reporter, channel = self.reporter, self.identity.job.channel
        if channel is None or reporter is None:
            self._fail(error, tell=True)
        elif isinstance(error, CollectiveMismatchError):
            channel.start(self._explain_difference(reporter, error))
        elif isinstance(error, (BackendError, PeerLostError)):
            seconds = LOST_SECONDS if isinstance(error, PeerLostError) else EXPLAIN_SECONDS
            channel.later(seconds, lambda: self._fail(error, tell=True))
        else:
            self._fail(error, tell=True)

    async def _explain_difference(self, reporter: Reporter, error: CollectiveMismatchError) -> None:
        """On the control thread."""
        self._fail(await reporter.complete(error), tell=True)

    def _expired(self, work: Work[Any]) -> None:
        self._begin(self._expire(work))

    def _overdue(self, work: Work[Any]) -> None:
        """A thread has waited for ``work`` for longer than the loop, which must be blocked, should have let it."""
        self._fail(self._timeout_of(work, _RollCall()), tell=True)

    def _timeout_of(self, work: Work[Any], found: _RollCall) -> CollectiveTimeoutError:
        elapsed = time.monotonic() - work.started
        group = self.group
        return CollectiveTimeoutError(
            work.op,
            work.seq,
            group.name,
            group.rank,
            elapsed,
            work.timeout,
            tuple(found.missing),
            tuple(found.arrived),
            tuple(found.doing),
            show(work.site),
        )

    async def _expire(self, work: Work[Any]) -> None:
        found = await self._arrivals(work)
        if not work.done():  # it may have come in meanwhile
            self._fail(self._timeout_of(work, found), tell=True)

    async def _arrivals(self, work: Work[Any]) -> _RollCall:
        """Which ranks have issued what ``work`` is part of, as far as can be found out in a second."""
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        undecided = work.seq == UNNUMBERED
        if undecided and (self.agreement is None or isinstance(work.driver, DeferredQueue)):
            return _RollCall([self.group.rank])  # it is held back here, and nobody has heard of it
        reporter = self.reporter
        if reporter is None:
            return _RollCall()
        if isinstance(work.op, (Send, Recv, SendParcel, RecvParcel)):
            missing = others if work.op.peer is None else [work.op.peer]
            states = await reporter.states(missing, ROLL_CALL_SECONDS)
            return _RollCall(missing, doing=[states[rank].doing for rank in missing])
        states = await reporter.states(others, ROLL_CALL_SECONDS, tag=work.op.label if undecided else None)
        known = [rank for rank in others if states[rank].reachable]
        if undecided:
            missing = [rank for rank in known if not states[rank].issued]
        else:
            missing = [rank for rank in known if states[rank].collectives <= work.seq]
        arrived = sorted({self.group.rank, *known} - {*missing})
        return _RollCall(missing, arrived, [states[rank].doing for rank in missing])


def _of_stream(work: Work[Any]) -> bool:
    return isinstance(work.op, RecvParcel) and work.op.channel is MessageSpace.STREAMS


class _RollCall(NamedTuple):
    """The ranks that have not issued an operation, those that have, and what the former do instead."""

    missing: Sequence[int] = ()
    arrived: Sequence[int] = ()
    doing: Sequence[str] = ()


def _abandon_all() -> None:
    """At exit. A transport whose threads run into the end of the interpreter would take the process down with it."""
    for session in list(_alive):
        if session.backend is None or session.ended:
            continue
        if not session.closed:
            warnings.warn(f"comm {session.group.name!r} was still open when the process ended", ResourceWarning, 1)
        session.backend.abandon()


def _disown_all() -> None:
    for session in list(_alive):
        session.detach_in_child()


os.register_at_fork(after_in_child=_disown_all)
atexit.register(_abandon_all)
