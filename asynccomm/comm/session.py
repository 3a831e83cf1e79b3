"""One rank's part in a comm, from connecting to closing; the implementation behind :class:`asynccomm.Comm`.

``submission`` and ``in_flight`` handle its operations, and ``reporter`` the messages of other ranks. This module
connects, breaks and closes the comm.

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
import warnings
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, Protocol, final

from asynccomm.backends.base import Backend
from asynccomm.comm.deferring import DeferredCalls
from asynccomm.comm.flight import RecordedComm, dump_at_signal, dump_failure
from asynccomm.comm.in_flight import InFlight, RollCall, timeout_error
from asynccomm.comm.losses import located, may_be_recorded
from asynccomm.comm.monitored_barrier import MonitoredBarriers
from asynccomm.comm.reporter import Reporter
from asynccomm.comm.submission import Submitter, weak_callback
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.tasks import detach
from asynccomm.core.work import Work
from asynccomm.errors import (
    AbortedError,
    AsyncCommError,
    BackendError,
    BrokenError,
    ClosedError,
    CollectiveMismatchError,
    PeerLostError,
    describe_exception,
)
from asynccomm.ops import Op, PeerParcel
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions
from asynccomm.rendezvous.job import CommIdentity
from asynccomm.rendezvous.lobby import Invitation

LOST_SECONDS = 0.03  # to wait for the reason of a loss; all ranks are to report the loss within 0.1 s
EXIT_SECONDS, EXIT_CHECKS = 0.002, 25  # between looks for the exit code of a lost process, in the same time
EXPLAIN_SECONDS: Final = 1.0  # to wait for the reason of other transport errors
ROLL_CALL_SECONDS = 0.5  # for peers to report their operations, once an operation is past its deadline

_log = logging.getLogger("asynccomm")


class Dependent(Protocol):
    """An object that works beside the operations, and ends with the comm."""

    def comm_ended(self, error: AsyncCommError) -> None:
        """The comm is closed or broken. From any thread; must be quick, and not raise."""


_alive: weakref.WeakSet[Session] = weakref.WeakSet()  # for detaching in a forked child, and at exit
on_close: list[Callable[[Session], object]] = []  #: called with sessions that close, after their last operation


@final
class Session:
    """Connects, watches, breaks and closes one comm.

    Args:
        group, options: the comm's public attributes.
        mailbox: the mailbox of the comm's loop.
        identity: the comm's membership in the job, given up when the session has ended.
    """

    def __init__(self, group: CommInfo, options: CommOptions, mailbox: Mailbox, identity: CommIdentity) -> None:
        self.group = group
        self.options: CommOptions = options
        self.mailbox = mailbox
        self.identity = identity
        self.backend_name: str = ""  #: the backend in use, or the last one tried
        #: by name, the backends from which the one in use was chosen, and the hints for all of them
        self.candidates: Mapping[str, type[Backend]] = {}
        self.hints: Mapping[str, str] = options.hints
        self.measures: bool = options.hints.get("metrics") == "on"  #: whether the comm has metrics
        self.regrouping: asyncio.Task[Session] | None = None  #: makes the comm that replaces this one
        self.reporter: Reporter | None = None  #: None: the comm has no control channel
        self.barriers: MonitoredBarriers = MonitoredBarriers(group, identity.room)
        # weak callbacks: pending Works, the control channel and the backend must not keep a dropped comm alive
        self.in_flight: InFlight = InFlight(options, mailbox, weak_callback(self._expired))
        self.submitter: Submitter = Submitter(group, mailbox, self.in_flight, weak_callback(self.fail))
        self.deferred: DeferredCalls = DeferredCalls(self.submitter)
        #: the backend calls it with transport errors
        self.transport_failed: Callable[[Any], None] = weak_callback(self._transport_failed)
        self.connecting: asyncio.Timeout | None = None  #: while ``connecting.connect_session`` waits
        self.children: set[Session] = set()  #: of this session, while they connect
        self.dependents: weakref.WeakSet[Dependent] = weakref.WeakSet()  #: end with the comm
        self.resources: AsyncExitStack = AsyncExitStack()  #: closed when the session has ended
        self.resources.push_async_callback(identity.leave)
        self._tasks: set[asyncio.Task[None]] = set()  # closing waits for them
        self._closing: asyncio.Task[None] | None = None
        self._transport_ended: Future[None] | None = None  # set when the comm breaks; done once its transport has ended
        self._breaking = threading.Lock()  # held briefly, unlike the submitter's, which a thread stuck in a call holds
        channel = identity.job.channel
        if channel is not None:  # last, as it delivers messages at once
            on_failure = weak_callback(self.break_by)
            self.reporter = Reporter(
                channel, identity.key, identity.job_ranks, identity.numbers, self.submitter, on_failure
            )
            self.submitter.records_sites = True
        _alive.add(self)
        handle_dump_signal()

    @property
    def error(self) -> AsyncCommError | None:
        """The error that later calls raise."""
        return self.submitter.error

    @property
    def backend(self) -> Backend | None:
        """None until connected, and in a forked child."""
        return self.submitter.backend

    @property
    def in_child(self) -> bool:
        """Whether this process is a forked child of the comm's."""
        return self.submitter.in_child

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
        names = list(self.candidates)
        return Invitation(
            self.identity.key, jobs, contacts, channel.tokens, self.backend_name, names, self.options.ordering
        )

    async def wait_idle(self) -> None:
        """Wait until no operation is in flight, except open-ended ones, before another comm replaces this one."""
        if self.error is None:
            with self.submitter.lock:
                self.deferred.flush_all()
        await self.in_flight.wait_while(
            lambda: self.error is None and any(not work.op.open_ended for work in self.in_flight.all())
        )

    def retire(self) -> None:
        """Fail the remaining operations: another comm replaces this one, and no rank will answer them."""
        self._end_open_ended()
        if self.in_flight.all():
            self.fail(AbortedError(self.group.rank, "another comm goes on in place of this one"), notify=False)

    def set_timeout(self, timeout: float) -> None:
        """Give later operations ``timeout`` seconds. From any thread."""
        with self.submitter.lock:
            self.options = replace(self.options, timeout=timeout)
            self.in_flight.set_timeout(timeout)

    def run_aside(
        self, op: Op, steps: Callable[[Work[Any]], Coroutine[Any, Any, None]], timeout: float | timedelta | None
    ) -> Work[Any]:
        """Run ``steps`` on the loop, for an operation outside the backend and all sequences. From any thread.

        Args:
            steps: a coroutine function whose end, or an AsyncCommError, settles the operation. It enforces the time
                limit itself.
        """
        work = self.submitter.add_aside(op, timeout)
        self.mailbox.post(lambda: self.spawn(self._run_aside(work, steps)))
        return work

    async def _run_aside(self, work: Work[Any], steps: Callable[[Work[Any]], Coroutine[Any, Any, None]]) -> None:
        if work.done():
            return  # the comm broke
        task = asyncio.current_task()
        assert task is not None
        work.add_done_callback(lambda _: task.cancel())
        error: AsyncCommError | None = AbortedError(self.group.rank, f"{work.op} was interrupted")
        try:
            await steps(work)
            error = None
        except AsyncCommError as exc:
            error = exc
        finally:
            work.settle(error)

    # -- ending -------------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Break the comm and notify the peers; does nothing once broken or closed. From any thread."""
        self.fail(AbortedError(self.group.rank, reason))

    async def aclose(self) -> None:
        """Refuse calls, wait for operations in flight, and free everything. Idempotent. Cancelling it aborts."""
        if self.in_child:  # the operations and connections are the parent's
            return
        self.submitter.check_loop()
        if self._closing is None:  # a separate task: cleaning up goes on when the caller is cancelled
            closed = ClosedError(f"comm {self.group.name!r} is closed")
            with self.submitter.lock:
                self.deferred.flush_all()
                with self._breaking:
                    self.submitter.error = self.error or closed
            self._end_open_ended()
            self._end_dependents(closed)
            if self.regrouping is not None:
                self.regrouping.cancel()
            closing = self.mailbox.loop.create_task(self._close(closed), name="asynccomm close")
            self._closing = detach(closing)  # the comm may be dropped meanwhile
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self.abort("closing was cancelled")
            self.identity.free_name()  # closing goes on, and the program may make the comm again
            raise

    def _end_open_ended(self) -> None:
        """Settle the open-ended operations: the receives of streams may even be without a reader."""
        name = self.group.name
        stream_ended = ClosedError(f"comm {name!r} was closed while the stream was open")
        stream_ended.observed = True  # only a reader of the stream needs the error
        wait_ended = ClosedError(f"comm {name!r} was closed before the signal came")
        for work in self.in_flight.all():
            if work.op.open_ended:
                work.settle(stream_ended if isinstance(work.op, PeerParcel) else wait_ended)

    def _end_dependents(self, error: AsyncCommError) -> None:
        for dependent in list(self.dependents):
            dependent.comm_ended(error)

    async def _close(self, closed: ClosedError) -> None:
        await self.in_flight.wait_while(lambda: bool(self.in_flight.all()))
        await asyncio.sleep(0)  # for an abort from another thread that is still in the mailbox
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        if self._transport_ended is not None:  # set by other threads, even without the loop
            await asyncio.shield(asyncio.wrap_future(self._transport_ended))
        for listener in on_close:
            listener(self)
        await self._free()
        self.submitter.error = closed

    async def _free(self) -> None:
        self._end_observers()
        await self.resources.aclose()

    def _end_observers(self) -> None:
        self.in_flight.deadlines.close()
        self.submitter.watchers.closed()
        if self.reporter is not None:
            self.reporter.end()

    def discard(self) -> None:
        """End a comm that was dropped unclosed, without a reason for the peers. From any thread, at any time."""
        self.identity.free_name()
        self.submitter.abort()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing more is freed
            self.mailbox.loop.call_soon_threadsafe(self._discard)

    def _discard(self) -> None:
        dropped = AbortedError(self.group.rank, f"comm {self.group.name!r} was dropped unclosed")
        self.submitter.error = self.error or dropped
        for work in self.in_flight.all():
            work.settle(dropped)
        self._end_observers()
        task = self.spawn(self.resources.aclose())
        # a loop in its last turns ends before the task: the ResourceWarning of the comm is enough
        task._log_destroy_pending = False  # type: ignore[attr-defined]

    def detach_in_child(self) -> None:
        """Refuse all calls in a forked child, which owns neither the threads nor the connections."""
        self._breaking = threading.Lock()  # a thread of the parent may have held the old one
        name = self.group.name
        self.submitter.detach_in_child(
            ClosedError(f"comm {name!r} was made before this process was forked; make a new one")
        )
        self.reporter = None
        self.identity.detach_in_child()

    def fail(self, error: BrokenError, *, notify: bool = True, message: BrokenError | None = None) -> None:
        """Break by ``error``, unless the session has ended. From any thread, also while others are stuck in calls.

        Args:
            notify: send the error to the other ranks.
            message: sent in place of ``error``, which is of another comm.
        """
        error = self._located(error)
        with self._breaking:
            # without a backend in a forked child: the operations are the parent's
            draining = isinstance(self.error, ClosedError) and self.backend is not None and self.in_flight.all()
            if self.error is not None and not draining:
                return
            self.submitter.withdraw_tensors()  # before the error is seen anywhere
            self.submitter.error = error
            self._transport_ended = ended = Future[None]()
        for work in self.in_flight.all():
            work.settle(error)
        self._end_dependents(error)
        # notify the peers before the transport ends, so that they get the cause and not a lost connection
        reporter = self.reporter if notify else None
        if reporter is not None:
            reporter.send_error(message or error, lambda: self._end(error, ended))
        for child in list(self.children):  # later: so that the peers get the cause first
            child.fail(error, message=child._message_about(error))
        if reporter is None:
            self._end(error, ended)
        self.mailbox.post(self._end_waits)

    def gave_up(self, reason: BaseException) -> AbortedError:
        """The error for the other ranks where this one cannot connect because of ``reason``."""
        return AbortedError(self.group.rank, f"could not connect: {describe_exception(reason)}")

    def _message_about(self, error: BrokenError) -> BrokenError:
        """The error for the other ranks where the parent fails by ``error``, which has the parent's rank numbers."""
        parent_ranks = self.identity.parent_ranks
        if isinstance(error, PeerLostError) and error.rank in parent_ranks:
            return PeerLostError(parent_ranks.index(error.rank), error.detail)
        return self.gave_up(error)

    def _located(self, error: BrokenError) -> BrokenError:
        """``error``, with the lost process where it is a loss."""
        if not isinstance(error, PeerLostError) or error.comm:
            return error
        members, group = self.identity.members, self.group
        return located(error, group.name, members[error.rank], members[group.rank])

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``coroutine``; closing waits for it. On the loop."""
        task = self.mailbox.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _end_waits(self) -> None:
        self.in_flight.deadlines.close()
        if self.connecting is not None:
            with contextlib.suppress(RuntimeError):  # the timeout is over already
                self.connecting.reschedule(0.0)

    def _end(self, error: BrokenError, ended: Future[None]) -> None:
        """Abort the transport, and notify the observer. From any thread."""
        try:
            self.submitter.abort()
            self.submitter.watchers.broke(error)
            dump_failure(error, self.submitter, lambda: _recorded(self))
        finally:
            ended.set_result(None)
        if self.options.abort_process_on_timeout_or_error and not isinstance(error, AbortedError):
            _log.critical("ending the process: %s", error)
            os.abort()

    # -- messages and errors -------------------------------------------------------------------------------------------

    def break_by(self, error: BrokenError) -> None:
        """Break by ``error``, received from another rank. On the control thread."""
        self.submitter.drain()
        if isinstance(error, PeerLostError):
            self._fail_by_loss(error, EXIT_CHECKS)
        else:
            self.fail(error, notify=False)

    def _fail_by_loss(self, error: PeerLostError, checks: int, *, notify: bool = False) -> None:
        """Break once the launcher has recorded the end of the lost process, or after ``checks`` checks."""
        members, channel = self.identity.members, self.identity.job.channel
        if channel is not None and checks and may_be_recorded(members[error.rank], members[self.group.rank]):
            channel.call_later(EXIT_SECONDS, lambda: self._fail_by_loss(error, checks - 1, notify=notify))
        else:
            self.fail(error, notify=notify)

    def _transport_failed(self, error: BrokenError) -> None:
        """Break by a transport error, after waiting for a message with its cause. From any thread.

        The cause may be a rank that gave up, or a process that ended.
        """
        self.submitter.drain()
        reporter, channel = self.reporter, self.identity.job.channel
        if channel is None or reporter is None:
            self.fail(error)
        elif isinstance(error, CollectiveMismatchError):
            channel.spawn(self._explain_mismatch(reporter, error))
        elif isinstance(error, PeerLostError):
            channel.call_later(LOST_SECONDS, lambda: self._fail_by_loss(error, EXIT_CHECKS, notify=True))
        elif isinstance(error, BackendError):
            channel.call_later(EXPLAIN_SECONDS, lambda: self.fail(reporter.explained(error)))
        else:
            self.fail(error)

    async def _explain_mismatch(self, reporter: Reporter, error: CollectiveMismatchError) -> None:
        """Add the call sites of both ranks to ``error``, and break by it. On the control thread."""
        self.fail(await reporter.complete(error))

    def _expired(self, work: Work[Any]) -> None:
        self.spawn(self._expire(work))

    async def _expire(self, work: Work[Any]) -> None:
        """Ask which ranks have issued the operation of ``work``, which is past its deadline, and break."""
        found = RollCall()
        if self.submitter.is_held(work):
            found = RollCall([self.group.rank])
        elif self.reporter is not None:
            found = await self.reporter.roll_call(work, ROLL_CALL_SECONDS)
        if work.done():  # by now
            self.in_flight.deadlines.look()
            return
        error = timeout_error(self.group, work, found)
        all_here = bool(found.arrived) and not found.missing
        for advice in self.backend.advice() if all_here and self.backend is not None else ():
            error.add_note(advice)
        self.fail(error)


def open_sessions() -> list[Session]:
    """The sessions of this process that have connected and have not finished closing."""
    return [session for session in list(_alive) if session.backend is not None and not session.ended]


def handle_dump_signal() -> None:
    """Have the signal for dumps write one of this process's comms: see ``flight.dump_at_signal``."""
    dump_at_signal(_recorded)


def _recorded(own: Session | None = None) -> list[RecordedComm]:
    """The open comms of this process for its flight recorder: ``own``, and those that have not given up their names."""
    sessions = [each for each in open_sessions() if each.identity.has_name or each is own]
    return [(each.submitter, each.identity.numbers) for each in sessions]


def _close_all() -> None:
    """Abandon all backends at exit: transport threads that outlive the interpreter would crash the process."""
    for session in list(_alive):
        if session.backend is None or session.ended:
            continue
        if not session.closed:
            warnings.warn(f"comm {session.group.name!r} was still open when the process ended", ResourceWarning, 1)
        session.backend.close_at_exit()


def _detach_all() -> None:
    for session in list(_alive):
        session.detach_in_child()


os.register_at_fork(after_in_child=_detach_all)
atexit.register(_close_all)
