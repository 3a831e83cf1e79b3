"""Calls become operations of a comm: sent at once, deferred in a scope, or ordered by agreement of all ranks.

Submitting happens under one lock: so calls may come from any thread, and the order of numbers is the order on the wire.
Afterwards the backend settles the Work; ``in_flight`` has the operations that are not settled.

A call in a scope of ``coalesce()`` is deferred. When the scope is left, its operations are planned (``batching.plan``),
fused, numbered and handed to the backend. On a comm with agreed ordering a collective waits until all ranks have
called it (``batching.ordering.transport``).
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, final

from asynccomm.backends.base import Backend, BackendWindow, HeldCall, Submission
from asynccomm.batching.batches import Batch, FusedOp, batches_of
from asynccomm.batching.composite import CompositeWork
from asynccomm.batching.fusion import check_fusible
from asynccomm.batching.plan import check_apart, item_of
from asynccomm.batching.queue import DeferredQueue, current_owner
from asynccomm.comm.agreed_order import AgreedOrder
from asynccomm.comm.in_flight import InFlight, RollCall, timeout_error
from asynccomm.core.callsite import CallSite, call_site
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.state import CallCounts, CallLog, ReentrantLock
from asynccomm.core.work import UNNUMBERED, Driver, Orphaned, Work
from asynccomm.errors import AsyncCommError, BrokenError, NotSentError, StoreTimeoutError, describe_exception
from asynccomm.observe.profiling import is_profiling, recorded
from asynccomm.observe.watchers import Called, Watcher, Watchers
from asynccomm.ops import Call, GroupedOp, Op, Several
from asynccomm.ops.validation import CommInfo
from asynccomm.options import check_strings, seconds

COMPARED: Final = 1024  # the same where fingerprints are compared, which may find a difference long after the call

DEPTH: Final = 4  # frames from call_site() to the user's call: call_site, ``submit_made``, its caller, and a method

_log = logging.getLogger("asynccomm")


@final
class Submitter:
    """Numbers operations and hands them to a backend.

    Args:
        group, mailbox: the comm, and the mailbox of its loop.
        in_flight: gets every operation that is called.
        on_failure: called with an error that breaks the comm, on any thread.
    """

    def __init__(
        self, group: CommInfo, mailbox: Mailbox, in_flight: InFlight, on_failure: Callable[[BrokenError], object]
    ) -> None:
        self.group = group
        self.mailbox = mailbox
        self.in_flight = in_flight
        self.on_failure = on_failure
        self.backend: Backend | None = None  #: None until connected, and in a forked child
        self.in_child: bool = False  #: whether this process is a forked child of the comm's
        self.counts: CallCounts = in_flight.counts
        self.ordering: AgreedOrder | None = None  #: orders the collectives; None: the program does
        self.lock: ReentrantLock = ReentrantLock()  #: held while submitting, so that calls have one order
        self.records_sites = False  #: whether the place of each call is recorded, which the other ranks may request
        self._error: AsyncCommError | None = None
        self.watchers: Watchers = Watchers(self.counts)
        #: the last calls that were numbered; ``in_flight.ended`` has the ends of those without a time of the end
        self.recent: CallLog[Called] = CallLog((), in_flight.recorded)
        self._compare: Callable[[Work[Any], int], object] | None = None
        self._aside = 0  # operations that do not use the backend
        self.queues: dict[object, DeferredQueue] = self.in_flight.queues

    def compare(self, compare: Callable[[Work[Any], int], object]) -> None:
        """Call ``compare(work, batch)`` with each later operation; ``batch`` as for ``Reporter.compare``."""
        self._compare = compare
        self.counts.detours += 1
        self.recent = CallLog(self.recent, max(COMPARED, self.in_flight.recorded))

    @property
    def compares(self) -> bool:
        """Whether each operation is compared with those of the other ranks."""
        return self._compare is not None

    @property
    def error(self) -> AsyncCommError | None:
        """The error that later calls raise."""
        return self._error

    @error.setter
    def error(self, error: AsyncCommError) -> None:
        self._error = error
        self.counts.closed = True

    def watch(self, watcher: Watcher) -> None:
        """Notify ``watcher`` of later calls. From any thread."""
        with self.lock:
            self.watchers.add(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Notify ``watcher`` no more. Idempotent. From any thread."""
        with self.lock:
            self.watchers.remove(watcher)

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(
        self,
        timeout: float | timedelta | None,
        hints: Mapping[str, str] | None,
        tag: str | None,
        check: Callable[..., Call | Several],
        *arguments: Any,
    ) -> Work[Any]:
        """Submit ``check(group, *arguments)``. From any thread."""
        return self.submit_made(check(self.group, *arguments), timeout, hints, tag)

    def submit_made(
        self,
        made: Call | Several,
        timeout: float | timedelta | None,
        hints: Mapping[str, str] | None,
        tag: str | None,
    ) -> Work[Any]:
        """Submit the checked calls of a method, as one operation if there is one call. From any thread."""
        site = call_site(DEPTH) if self.records_sites else None
        if is_profiling():
            call = made.calls[0] if isinstance(made, Several) else made
            values = (call.inputs, call.outputs) if call.outputs is not call.inputs else call.inputs
            submit = recorded(f"asynccomm::{call.op.name}", values, self._submit_made)
            return submit(made, timeout, hints, tag, site)
        return self._submit_made(made, timeout, hints, tag, site)

    def _submit_made(
        self,
        made: Call | Several,
        timeout: float | timedelta | None,
        hints: Mapping[str, str] | None,
        tag: str | None,
        site: CallSite | None,
    ) -> Work[Any]:
        if isinstance(made, Several):
            calls = made.calls if tag is None else [call.labelled(tag) for call in made.calls]
            if len(calls) > 1:
                return self.submit_together(calls, made.result, timeout, hints, site)
            return self.submit(calls[0]._replace(result=made.result), timeout, hints, site)
        return self.submit(made if tag is None else made.labelled(tag), timeout, hints, site)

    def submit_begun(self, call: Call, run: object, result: object, site: CallSite | None, started: float) -> Work[Any]:
        """Number ``call``, which the backend's fast path has begun as ``run``. Under the lock."""
        call = call._replace(result=result)
        work = self._work(call, self.counts.limit, site, self.backend)
        work.started = started
        self._send_one(call, work, run)
        self.watchers.called(call, work)
        return work

    def number(self, call: Call, nbytes: int, site: CallSite | None, started: float) -> Work[Any]:
        """The Work of a collective that the backend's fast path has begun, and now goes on with. Under the lock.

        ``numbered`` is called next. There is no scope, no agreed ordering, and no watcher that detours: of the reasons
        for detours, ``compares`` alone is served.
        """
        counts = self.counts
        work = self._work(call, counts.limit, site, self.backend)
        work.started = started
        work.seq = counts.collectives
        counts.collectives += 1
        counts.submitted += 1
        counts.nbytes += nbytes
        self.recent.append((work.op, site, work.seq, started, None))
        self.in_flight.works[work] = nbytes
        return work

    def numbered(self, call: Call, work: Work[Any]) -> None:
        """Watch a Work of ``number``, which the backend has taken, and compare it. Under the lock."""
        if self._compare is not None:
            self._compare(work, 1)
        self._watch(work)
        self.watchers.called(call, work)

    def note_deadline(self, queue: DeferredQueue, work: Work[Any]) -> None:
        """Have the comm look at the deadline of ``work``, which ``queue`` holds."""
        if (due := work.started + work.timeout) < queue.due:
            queue.due = due
            self.in_flight.deadlines.add(work)

    def submit(
        self,
        call: Call,
        timeout: float | timedelta | None,
        hints: Mapping[str, str] | None,
        site: CallSite | None = None,
    ) -> Work[Any]:
        """Number ``call`` and hand it to the backend, or defer it. From any thread.

        The path of every small operation: a call that is sent at once runs little more than the code in here.
        """
        counts, running = self.counts, asyncio._get_running_loop()
        if timeout is None and hints is None and (running is self.mailbox.loop or running is None):
            limit = counts.limit
        else:
            limit = self._checked(timeout, hints)
        if self.watchers.all:
            self.watchers.before(call.op)
        with self.lock:
            if self._error is not None:
                self.check_open()
            if self.queues and (queue := self.queues.get(current_owner())) is not None:
                work = self._defer(call, limit, site, queue)
            elif self.ordering is not None and not call.op.p2p:
                work = self._work(call, limit, site, None)  # until the ranks have agreed on it
                self.ordering.issue([self._submission(call, work, self.call_context())])
            else:
                work = self._work(call, limit, site, self.backend)
                self._send_one(call, work)
            if self.watchers.all:
                self.watchers.called(call, work)
        return work

    def submit_to(self, window: BackendWindow, call: Call, timeout: float | timedelta | None) -> Work[Any]:
        """Number ``call`` and hand it to ``window``, also in a scope. From any thread."""
        site = call_site(DEPTH) if self.records_sites else None
        limit = self._checked(timeout, None)
        self.watchers.before(call.op)
        with self.lock:
            self.check_open()
            work = self._work(call, limit, site, window)
            self._send_one(call, work, target=window)
            if self.watchers.all:
                self.watchers.called(call, work)
        return work

    def _send_one(self, call: Call, work: Work[Any], run: object = None, target: BackendWindow | None = None) -> None:
        """Hand a call to the backend, which may have begun ``run`` already, or to ``target``. Under the lock."""
        backend, in_flight, counts = target or self.backend, self.in_flight, self.counts
        assert backend is not None
        p2p = call.op.p2p
        # counted before: the operation may be done in submit(), and a listener of its Work may call the next one
        if p2p:
            work.seq = counts.messages
            counts.messages += 1
        else:
            work.seq = counts.collectives
            counts.collectives += 1
        self.recent.append((work.op, work.site, work.seq, work.started, None))
        submission = Submission(call, work)
        submission.run = run
        in_flight.works[work] = submission.nbytes
        try:
            backend.submit((submission,))
        except BaseException:
            in_flight.settled(work)
            if p2p:
                counts.messages -= 1
            else:
                counts.collectives -= 1
            raise
        counts.submitted += 1
        counts.nbytes += submission.nbytes
        if self._compare is not None:
            self._compare(work, 1)
        self._watch(work)

    def _watch(self, work: Work[Any]) -> None:
        """Heed the end of the comm, and a deadline, of an operation that the backend has taken. Under the lock."""
        if self._error is not None:
            self.check_late(work)
        if work in self.in_flight.works:  # not settled in submit(), as most small operations are
            self.in_flight.deadlines.add(work)

    def _defer(self, call: Call, limit: float, site: CallSite | None, queue: DeferredQueue) -> Work[Any]:
        """Hold ``call`` until the scope sends its operations."""
        if self.ordering is None:
            check_fusible(self.group.size, call)
        work = self._work(call, limit, site, queue)
        item = self._submission(call, work, self.call_context())
        queue.works.append(work)
        self._add(queue, [item])
        if work.seq == UNNUMBERED:
            self.note_deadline(queue, work)
        return work

    def submit_together(
        self,
        calls: Sequence[Call],
        result: Any,
        timeout: float | timedelta | None,
        hints: Mapping[str, str] | None,
        site: CallSite | None = None,
    ) -> Work[Any]:
        """Number ``calls`` and submit them as one batch, with one Work of ``result`` for all. From any thread.

        The Work is done when all operations are, and carries the number of the first.
        """
        limit = self._checked(timeout, hints)
        for call in calls if self.watchers.all else ():
            self.watchers.before(call.op)
        check_apart([item_of(call.op, call.inputs, call.outputs, [t for _, t in call.copies]) for call in calls])
        whole = CompositeWork()

        def settled(part: Work[Any]) -> None:
            self.in_flight.settled(part)
            whole.settled(part)

        with self.lock:
            self.check_open()
            queue = self.queues.get(current_owner()) if self.queues else None
            ordering = None if queue is not None or calls[0].op.p2p else self.ordering
            driver = queue if queue is not None else self.backend if ordering is None else None
            context = None if driver is self.backend else self.call_context()
            parts = [self._work(call._replace(result=None), limit, site, driver, on_settled=settled) for call in calls]
            whole.expect(parts)
            together = GroupedOp(tuple([call.op for call in calls]))
            whole.work = self._work(Call(together, (), (), result), limit, site, whole, on_settled=_ignore)
            items = [self._submission(call, part, context, whole) for call, part in zip(calls, parts, strict=True)]
            if queue is not None:
                queue.works.append(whole.work)
                self._add(queue, items)
                self.in_flight.deadlines.add(parts[0])
            elif ordering is not None:
                ordering.issue(items)
            else:
                try:
                    # one batch, which is sent or refused as a whole
                    self._send(Batch(items, [FusedOp(item, (item,)) for item in items]))
                except BaseException:
                    for part in parts:
                        self.in_flight.works.pop(part, None)
                    self.counts.submitted -= len(parts)
                    raise
            if self.watchers.all:
                for call, part in zip(calls, parts, strict=True):
                    self.watchers.called(call, part)
        return whole.work

    def add_aside(self, op: Op, timeout: float | timedelta | None) -> Work[Any]:
        """The Work of an operation outside the backend and all sequences; the caller settles it. From any thread."""
        site = call_site(DEPTH) if self.records_sites else None
        limit = self._checked(timeout, None)
        self.watchers.before(op)
        with self.lock:
            self.check_open()
            on_settled = self.in_flight.settled
            work: Work[Any] = Work(
                op, self._aside, self.mailbox, value=None, timeout=limit, on_settled=on_settled, on_overdue=_settle_late
            )
            work.site = site
            self._aside += 1
            self.counts.submitted += 1
            self.in_flight.works[work] = 0
            self.watchers.called(Call(op, (), (), None), work)
        self.check_late(work)
        return work

    def sends_now(self, *, p2p: bool) -> bool:
        """Whether operations of the caller are sent in the call, in the order of the calls."""
        return (p2p or self.ordering is None) and not (self.queues and current_owner() in self.queues)

    def _checked(self, timeout: float | timedelta | None, hints: Mapping[str, str] | None) -> float:
        """Check ``timeout``, ``hints`` and the calling thread; returns the time limit in seconds."""
        if hints is not None:
            check_strings(hints)
        self.check_loop()
        return self.counts.limit if timeout is None else seconds("timeout", timeout, 0.0)

    def check_loop(self) -> None:
        running = asyncio._get_running_loop()
        if running is not None and running is not self.mailbox.loop:
            if self.in_child:
                self.check_open()
            raise RuntimeError(
                f"comm {self.group.name!r} belongs to another event loop than the running one; a comm is used on the "
                f"loop it was made on, and from threads that run none"
            )

    def check_open(self) -> None:
        error = self.error
        if error is not None:
            again = type(error)(*error.args)  # a new error: the pending Works raise the first
            raise again from error

    def check_late(self, work: Work[Any]) -> None:
        """Settle ``work``, now in flight, if the comm broke meanwhile: the failure may have missed it."""
        error = self.error
        if isinstance(error, BrokenError):
            work.settle(error)

    def take_over(self, work: Work[Any], nbytes: int) -> None:
        """Enter an operation that the fast path has held; a failure of the comm may have settled it meanwhile."""
        self.in_flight.works[work] = nbytes
        self.check_late(work)
        if work.done():
            self.in_flight.works.pop(work, None)

    def overdue(self, work: Work[Any]) -> None:
        """Break when a thread has waited for ``work`` past its deadline, so the loop must be blocked."""
        error = timeout_error(self.group, work, RollCall())
        self.on_failure(error)
        work.settle(error)  # if the comm was dropped, so that no session is left to break

    # -- operations sent together --------------------------------------------------------------------------------------

    def _work(
        self,
        call: Call,
        limit: float,
        site: CallSite | None,
        driver: Driver | None,
        on_settled: Callable[[Work[Any]], object] | None = None,
    ) -> Work[Any]:
        work: Work[Any] = Work(
            call.op,
            UNNUMBERED,
            self.mailbox,
            value=call.result,
            finish=call.finish,
            timeout=limit,
            on_settled=self.in_flight.settled if on_settled is None else on_settled,
            on_overdue=self.overdue,
            driver=driver,
        )
        work.site = site
        return work

    def call_context(self) -> Any:
        assert self.backend is not None
        return self.backend.call_context()

    def _submission(
        self, call: Call, work: Work[Any], call_context: Any, whole: CompositeWork | None = None
    ) -> Submission:
        """The submission of ``call``, which is now in flight."""
        submission = Submission(call, work)
        submission.whole = whole
        submission.call_context = call_context
        self.in_flight.works[work] = submission.nbytes
        self.counts.submitted += 1
        self.check_late(work)
        return submission

    def _send(self, batch: Batch) -> None:
        """Number a batch and submit it to the backend. Under the lock."""
        backend = self.backend
        assert backend is not None
        counts = self.counts
        before = counts.collectives, counts.messages
        numbers = list(before)
        for item in batch.items:
            item.work.seq = numbers[item.op.p2p]
            numbers[item.op.p2p] += 1
        for fused in batch.fused_ops:
            fused.prepare(backend)
        counts.collectives, counts.messages = numbers  # as in _send_one
        try:
            backend.submit([fused.submission for fused in batch.fused_ops])
        except BaseException:
            counts.collectives, counts.messages = before
            for item in batch.items:
                item.work.seq = UNNUMBERED
            raise
        self.in_flight.batches += len(batch.items) > 1
        collectives = sum([not item.op.p2p for item in batch.items])
        for item in batch.items:
            work = item.work
            self.recent.append((work.op, work.site, work.seq, work.started, None))
            counts.nbytes += item.nbytes
            if self._compare is not None:
                self._compare(work, collectives)
            if not item.op.p2p:
                collectives = 0  # compared with the first
            self.check_late(work)
        if self.watchers.all:
            self.watchers.sent([item.work for item in batch.items])
        for fused in batch.fused_ops:
            fused.sent()
            if not fused.submission.work.done():
                self.in_flight.deadlines.add(fused.most_urgent)
        for whole in dict.fromkeys([item.whole for item in batch.items if item.whole is not None]):
            whole.sent()

    def send_planned(self, items: Sequence[Submission]) -> None:
        assert self.backend is not None
        for batch in batches_of(items, self.group.size, self.backend, self.mailbox):
            self._send(batch)

    def _add(self, queue: DeferredQueue, items: Sequence[Submission]) -> None:
        """Defer the operations of one call. A full batch is sent; if that fails, this call fails with it."""
        try:
            for item in items:
                queue.add(item)
        except BaseException as exc:
            self.drop(items, describe_exception(exc))
            raise

    def drop(self, items: Sequence[Submission | HeldCall], reason: str) -> None:
        """Fail the operations of ``items`` that were not sent. From any thread."""
        for item in items:
            work = item.work
            if work.seq == UNNUMBERED:
                error = NotSentError(work.op, self.group.name, reason)
                error.observed = True  # the cause of the drop was raised already
                work.settle(error)

    # -- agreed ordering ----------------------------------------------------------------------------------------------

    def start_ordering(self) -> AgreedOrder:
        """Have the ranks agree on the order of collectives."""
        assert self.backend is not None
        send = weak_callback(self.send_planned)
        self.ordering = AgreedOrder(
            self.group, self.mailbox, self.backend, self.lock, self.in_flight.deadlines, send, self.on_failure
        )
        self.counts.detours += 1
        return self.ordering

    def is_held(self, work: Work[Any]) -> bool:
        """Whether ``work`` is not numbered, and the other ranks have no announcement of it."""
        return work.seq == UNNUMBERED and (self.ordering is None or isinstance(work.driver, DeferredQueue))

    def outstanding(self, tag: str) -> int:
        """The number of operations under ``tag`` that were issued and not agreed on yet. From any thread."""
        return 0 if self.ordering is None else self.ordering.outstanding(tag)

    # -- ending -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Settle operations that have all their data, before the failure or end of a peer fails them."""
        if self.in_flight.works and self.backend is not None:
            try:
                self.backend.drain_before_failure()
            except Exception:  # the comm fails in any case
                _log.exception("comm %r: the backend could not settle completed operations", self.group.name)

    def withdraw_tensors(self) -> None:
        """See ``Backend.withdraw_tensors``. From any thread."""
        if self.backend is not None:
            self.backend.withdraw_tensors()

    def abort(self) -> None:
        """Abort the transport. From any thread."""
        if self.ordering is not None:
            self.ordering.end()
        if self.backend is not None:
            self.backend.abort()

    def detach_in_child(self, error: AsyncCommError) -> None:
        """Raise ``error`` from all calls in a forked child, which owns neither the threads nor the connections.

        So do waits for operations in flight. They are not settled: their callbacks are the parent's.
        """
        self.lock = ReentrantLock()  # a thread of the parent may have held the old one
        self.error = error
        self.backend = None
        self.in_child = True
        orphaned = Orphaned(error)
        for work in self.in_flight.all():
            work.driver = orphaned


def weak_callback(method: Callable[[Any], object]) -> Callable[[Any], None]:
    """A callback that calls ``method`` without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        target = reference()
        if target is not None:
            target(argument)

    return call


def _ignore(work: Work[Any]) -> None:
    pass


def _settle_late(work: Work[Any]) -> None:
    """Settle ``work`` when a thread has waited for it past its deadline, so the loop must be blocked."""
    work.settle(StoreTimeoutError(f"{work.op} was not done within {work.timeout:g} s: the event loop is blocked"))
