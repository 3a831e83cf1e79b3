"""One rank's part in a comm, from connecting to closing; the implementation behind :class:`asynccomm.Comm`.

``submission`` and ``in_flight`` handle its operations. This module connects and ends a session, and acts on messages of
other ranks (``reporter``).

A session is open, then closed or broken, for good. Broken means: the pending operations have failed with one error, the
peers have received the cause, and later calls raise that error again. A session breaks by an operation past its
deadline, by a transport error, and by ``abort`` here or on another rank.
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

TELL_SECONDS = 2.0  # for the store to list the ranks that came
LOST_SECONDS = 0.03  # to wait for the reason of a loss; all ranks are to report the loss within 0.1 s
EXPLAIN_SECONDS = 1.0  # to wait for the reason of other transport errors
CONNECT_SECONDS = 0.5  # the same while connecting; shorter, as ranks that saw this one leave wait for the reason
ROLL_CALL_SECONDS = 0.5  # for peers to report their operations, once an operation is past its deadline

_log = logging.getLogger("asynccomm")
_alive: weakref.WeakSet[Session] = weakref.WeakSet()  # for detaching in a forked child, and at exit


@final
class Session(Submitter):
    """Connects, watches, breaks and closes one comm.

    Args:
        group, options: the comm's public attributes.
        mailbox: the mailbox of the comm's loop.
        identity: the comm's membership in the job, given up when the session has ended.
    """

    def __init__(self, group: CommInfo, options: CommOptions, mailbox: Mailbox, identity: CommIdentity) -> None:
        super().__init__(group, options, mailbox)
        self.identity = identity
        self.backend_name = ""  #: the backend in use, or the last one tried
        self.regrouping: asyncio.Task[Session] | None = None  #: makes the comm that replaces this one
        self.barriers = MonitoredBarriers(group, identity.room)
        self._connecting: asyncio.Timeout | None = None
        self._growing: set[Session] = set()  # children of this session that are connecting
        self._resources = AsyncExitStack()
        self._resources.push_async_callback(identity.leave)
        self._ending: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        # backends hold this callback for long; it must not keep a dropped comm alive
        self.transport_failed = weak_callback(self._transport_failed)  #: the backend calls it with transport errors
        self._aftermath: Future[None] | None = None  # done once the transport of a broken comm has ended
        self._breaking = threading.Lock()  # held briefly, unlike _lock, which a thread stuck in a call may hold
        channel = identity.job.channel
        if channel is not None:
            self.reporter = Reporter(group, channel, identity.key, identity.job_ranks, self, mailbox.loop)
        _alive.add(self)

    async def connect(
        self, backends: Mapping[str, type[Backend]], timeout: float, parent: Session | None = None
    ) -> None:
        """Connect the first of ``backends`` that suits, and accept calls. Any failure ends the session.

        Args:
            backends: by name, in the order to try them.
            timeout: seconds.
            parent: the comm that is split; its failure fails this session while it connects, as ranks may be missing.
        """
        if parent is not None:
            parent._growing.add(self)
        may_connect = parent is None or parent.error is None
        try:
            async with within(timeout) as self._connecting:
                if isinstance(self.error, BrokenError):  # broken before connecting began
                    raise self.error
                if parent is not None:
                    parent.check_open()
                await self.identity.room.set(f"here/{self.group.rank}", b"1")
                await self._connect_first(backends, timeout)
            self._connecting = None
            if self.options.ordering == "agreed":
                self._agree()
            if isinstance(self.error, BrokenError):  # broken while connecting
                self._abort_backend()
                raise self.error
        except BaseException as exc:
            self._connecting = None
            reason = exc
            try:
                if may_connect:  # else the parent's error is the reason
                    reason = await self._why_not_connected(exc)
            finally:
                error = AbortedError(self.group.rank, f"could not connect: {type(reason).__name__}: {reason}")
                # other ranks may still wait for this one; an unsuitable backend fails on all ranks by itself
                self._fail(error, tell=not isinstance(reason, UnsuitableError))
                self.identity.free_name()  # now: closing goes on after a cancellation, and a retry may use the name
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
        """Start agreed ordering: the ranks agree on the order of collectives."""
        assert self.backend is not None
        run, fail = weak_callback(self.run_agreed), weak_callback(self._disagreed)
        self.agreement = OrderingSession(self.group, self.mailbox, self.backend, self._lock, run, fail)
        self._resources.push_async_callback(self.agreement.aclose)

    def _disagreed(self, error: BrokenError) -> None:
        """Break the comm, and notify the other ranks: they must not take this rank's closed transport for the cause."""
        self._fail(error, tell=True)

    async def _why_not_connected(self, exc: BaseException) -> BaseException:
        """The error to raise for ``exc``, which ended connecting; waits for a message with its cause."""
        seconds = 0.0
        if isinstance(exc, PeerLostError):
            seconds = EXPLAIN_SECONDS
        elif isinstance(exc, (BackendError, StoreError)) and not isinstance(exc, UnsuitableError):
            seconds = CONNECT_SECONDS
        if seconds and self.error is None and self.reporter is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds) as self._connecting:
                    await self.mailbox.loop.create_future()  # until _stop_waiting() or the timeout
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
        """Whether closing is complete."""
        return self._closing is not None and self._closing.done() and not self._closing.cancelled()

    def invitation(self) -> Invitation:
        """The invitation for newcomers to this comm."""
        channel = self.identity.job.channel
        assert channel is not None
        contacts = list(channel.topology.contacts.values())
        jobs = list(self.identity.job_ranks)
        return Invitation(self.identity.key, jobs, contacts, channel.tokens, self.backend_name, self.options.ordering)

    async def come_to_rest(self) -> None:
        """Wait until no operation is in flight, before another comm replaces this one."""
        if self.error is None:
            with self._lock:
                self.flush_all()
            while self._busy and self.error is None:
                waiter = self._hear_of_settling()
                if self._busy:
                    await waiter

    @property
    def _busy(self) -> bool:
        """Whether operations are in flight, except receives of streams, which may stay idle for ever."""
        return any(not _of_stream(work) for work in self._pending.copy())

    def give_way(self) -> None:
        """Fail the remaining operations: another comm replaces this one, and no rank will answer them."""
        self._end_streams()
        if self._pending:
            self._fail(AbortedError(self.group.rank, "another comm goes on in place of this one"), tell=False)

    # -- ending -------------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Break the comm and notify the peers; does nothing once broken or closed. From any thread."""
        self._fail(AbortedError(self.group.rank, reason), tell=True)

    async def aclose(self) -> None:
        """Refuse calls, wait for operations in flight, and free everything. Idempotent. Cancelling it aborts."""
        self.check_loop()
        if self._closing is None:  # a separate task: cleaning up goes on when the caller is cancelled
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
        """Settle the receives of streams: they may stay idle for ever, without a reader."""
        ended = ClosedError(f"comm {self.group.name!r} was closed while the stream was open")
        ended.observed = True  # only a reader of the stream needs the error
        for work in list(self._pending):
            if _of_stream(work):
                work.settle(ended)

    async def _close(self, closed: ClosedError) -> None:
        while self._pending:
            waiter = self._hear_of_settling()
            if self._pending:
                await waiter
        await asyncio.sleep(0)  # for an abort from another thread that is still in the mailbox
        while self._ending:
            await asyncio.wait(set(self._ending))
        if self._aftermath is not None:
            await asyncio.shield(asyncio.wrap_future(self._aftermath))  # set by other threads, even without the loop
        await self._free()
        self.error = closed

    async def _free(self) -> None:
        self._deadlines.close()
        if self.reporter is not None:
            self.reporter.end()
        await self._resources.aclose()

    def forget(self) -> None:
        """End a comm that was dropped unclosed, without a reason for the peers. From any thread, at any time."""
        self.identity.free_name()
        self._abort_backend()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing more is freed
            self.mailbox.loop.call_soon_threadsafe(lambda: self._begin(self._let_go()))

    async def _let_go(self) -> None:
        dropped = AbortedError(self.group.rank, f"comm {self.group.name!r} was dropped unclosed")
        self.error = self.error or dropped
        for work in list(self._pending):
            work.settle(dropped)
        await self._free()

    def detach_in_child(self) -> None:
        """Refuse all calls in a forked child, which owns neither the threads nor the connections."""
        self._lock = threading.RLock()  # threads of the parent may have held the old locks
        self._breaking = threading.Lock()
        self.error = ClosedError(f"comm {self.group.name!r} was made before this process was forked; make a new one")
        self.backend = self.reporter = None
        self.identity.detach_in_child()

    def _fail(self, error: BrokenError, *, tell: bool) -> bool:
        """Break by ``error``, unless the session has ended. From any thread, also while others are stuck in calls."""
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
        # notify the peers before the transport ends, so that they get the cause and not a lost connection
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
            with contextlib.suppress(RuntimeError):  # the timeout is over already
                self._connecting.reschedule(0.0)

    def _end(self, error: BrokenError) -> None:
        """Abort the transport, and notify the observer. From any thread."""
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

    # -- messages and errors -------------------------------------------------------------------------------------------

    def break_by(self, error: BrokenError) -> None:
        """Break by ``error``, received from another rank. On the control thread."""
        self._catch_up()
        self._fail(error, tell=False)

    def _catch_up(self) -> None:
        """Settle operations whose data is complete, before the failure or end of a peer fails them."""
        if self._pending and self.backend is not None:
            try:
                self.backend.drain_before_failure()
            except Exception:  # the comm fails in any case
                _log.exception("backend %r could not settle what is done", self.backend_name)

    def outstanding(self, tag: str) -> int:
        """The number of operations under ``tag`` that were issued and not agreed on yet. From any thread."""
        return 0 if self.agreement is None else self.agreement.outstanding(tag)

    def _transport_failed(self, error: BrokenError) -> None:
        """Break by a transport error, after waiting for a message with its cause. From any thread.

        The cause may be a rank that gave up, or a process that ended.
        """
        self._catch_up()
        reporter, channel = self.reporter, self.identity.job.channel
        if channel is None or reporter is None:
            self._fail(error, tell=True)
        elif isinstance(error, CollectiveMismatchError):
            channel.spawn(self._explain_difference(reporter, error))
        elif isinstance(error, (BackendError, PeerLostError)):
            seconds = LOST_SECONDS if isinstance(error, PeerLostError) else EXPLAIN_SECONDS
            channel.call_later(seconds, lambda: self._fail(error, tell=True))
        else:
            self._fail(error, tell=True)

    async def _explain_difference(self, reporter: Reporter, error: CollectiveMismatchError) -> None:
        """Add the call sites of both ranks to ``error``, and break by it. On the control thread."""
        self._fail(await reporter.complete(error), tell=True)

    def _expired(self, work: Work[Any]) -> None:
        self._begin(self._expire(work))

    def _overdue(self, work: Work[Any]) -> None:
        """Break when a thread has waited for ``work`` past its deadline, so the loop must be blocked."""
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
        if not work.done():  # it may be done by now
            self._fail(self._timeout_of(work, found), tell=True)

    async def _arrivals(self, work: Work[Any]) -> _RollCall:
        """Ask which ranks have issued the operation of ``work``; waits ROLL_CALL_SECONDS for their answers."""
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        undecided = work.seq == UNNUMBERED
        if undecided and (self.agreement is None or isinstance(work.driver, DeferredQueue)):
            return _RollCall([self.group.rank])  # held on this rank, and not announced to the others
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
    """The ranks that have not issued an operation, the ranks that have, and the activity of the former."""

    missing: Sequence[int] = ()
    arrived: Sequence[int] = ()
    doing: Sequence[str] = ()


def _abandon_all() -> None:
    """Abandon all backends at exit: transport threads that outlive the interpreter would crash the process."""
    for session in list(_alive):
        if session.backend is None or session.ended:
            continue
        if not session.closed:
            warnings.warn(f"comm {session.group.name!r} was still open when the process ended", ResourceWarning, 1)
        session.backend.close_at_exit()


def _disown_all() -> None:
    for session in list(_alive):
        session.detach_in_child()


os.register_at_fork(after_in_child=_disown_all)
atexit.register(_abandon_all)
