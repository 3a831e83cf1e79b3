"""Calls become operations of a comm: sent at once, held in a scope, or ordered by agreement of all ranks.

A call in a scope of ``coalesce()`` is held. When the scope is left, its operations are planned (``batching.plan``),
merged, numbered and handed to the backend. On a comm with agreed ordering a collective waits until all ranks have
called it (``batching.ordering.transport``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from asynccomm.backends.base import Backend, Submission
from asynccomm.batching.batches import Batch, FusedOp, batches_of, planned
from asynccomm.batching.composite import CompositeWork
from asynccomm.batching.fusion import can_fuse, check_fusible
from asynccomm.batching.hazards import PendingHazards
from asynccomm.batching.ordering.transport import SELF, OrderingSession
from asynccomm.batching.plan import BatchLimiter, check_apart, check_messages, item_of
from asynccomm.batching.queue import DeferredQueue, current_owner
from asynccomm.comm.in_flight import InFlight
from asynccomm.core.callsite import call_site
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.errors import NotSentError
from asynccomm.ops import Call, GroupedOp
from asynccomm.ops.signature import signature_of
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions

_DEPTH = 5  # frames from the user's call to the capture of the call site: a method, _submit, submit, _sent, call_site


class Submitter(InFlight):
    """Takes calls; arguments as for :class:`InFlight`."""

    def __init__(self, group: CommInfo, options: CommOptions, mailbox: Mailbox) -> None:
        super().__init__(group, options, mailbox)
        self._holds: dict[object, DeferredQueue] = {}  # by the task or thread that is in a scope
        self.agreement: OrderingSession | None = None  #: orders the operations; None: the program does
        self._undecided = PendingHazards()

    def submit(self, call: Call, timeout: float | timedelta | None, hints: Mapping[str, str] | None) -> Work[Any]:
        """Number ``call`` and hand it to the backend, or hold it in the caller's scope. From any thread."""
        running = asyncio._get_running_loop()
        if timeout is None and hints is None and (running is self.mailbox.loop or running is None):
            limit = self._limit
        else:
            limit = self._checked(timeout, hints)
        op = call.op
        with self._lock:
            if self.error is not None:
                self.check_open()
            if self._holds and (hold := self._holds.get(current_owner())) is not None:
                work = self._held_back(call, limit, hold)
            elif self.agreement is not None and not op.p2p:
                work = self._put_forward(call, limit)
            else:
                work = self._sent(call, limit)
            if self.observer is not None:
                self.observer.called(call, work)
        return work

    def _held_back(self, call: Call, limit: float, hold: DeferredQueue) -> Work[Any]:
        """Hold ``call`` until the scope sends its operations."""
        if self.agreement is None:
            check_fusible(self.group.size, call)
        assert self.backend is not None
        work = self._work(call, limit, hold)
        submission = self._submission(call, work, None, self.backend.call_context())
        self._called += 1
        hold.works.append(work)
        self._add(hold, [submission])
        if work.seq == UNNUMBERED and (due := work.started + limit) < hold.due:
            hold.due = due
            self._deadlines.add(work)
        return work

    def _put_forward(self, call: Call, limit: float) -> Work[Any]:
        """Hold ``call`` until the ranks have agreed on it."""
        assert self.backend is not None
        work = self._work(call, limit, None)
        self._called += 1
        self._issue([self._submission(call, work, None, self.backend.call_context())])
        self._deadlines.add(work)
        return work

    def _sent(self, call: Call, limit: float) -> Work[Any]:
        """Send ``call`` at once. On the path of every small operation, so only the cheapest code is in here."""
        op, backend, reporter = call.op, self.backend, self.reporter
        assert backend is not None
        seq = self._p2p if op.p2p else self._collectives
        work: Work[Any] = Work(
            op,
            seq,
            self.mailbox,
            value=call.result,
            finish=call.finish,
            timeout=limit,
            on_settled=self._settled,
            on_overdue=self._overdue,
            driver=backend,
        )
        if reporter is not None:
            work.site = call_site(_DEPTH)
            reporter.recent.append((op, work.site, seq, work.started))
        submission = Submission(call, work)
        self._pending[work] = submission.nbytes
        try:
            backend.submit((submission,))
        except BaseException:
            self._settled(work)
            raise
        if op.p2p:
            self._p2p += 1
        else:
            self._collectives += 1
        self._called += 1
        if reporter is not None and reporter.compares:
            reporter.compare(work, 1)
        if self.error is not None:
            self._check_late([work])
        if not work.done():
            self._deadlines.add(work)
        return work

    def sends_now(self, *, p2p: bool) -> bool:
        """Whether operations of the caller are sent in the call, in the order of the calls."""
        return (p2p or self.agreement is None) and not (self._holds and current_owner() in self._holds)

    def submit_together(
        self, calls: Sequence[Call], result: Any, timeout: float | timedelta | None, hints: Mapping[str, str] | None
    ) -> Work[Any]:
        """Number ``calls`` and submit them as one batch, with one Work of ``result`` for all. From any thread.

        The Work is done when all operations are, and carries the number of the first.
        """
        limit = self._checked(timeout, hints)
        check_apart([item_of(call.op, call.inputs, call.outputs, [t for _, t in call.copies]) for call in calls])
        whole = CompositeWork()

        def settled(part: Work[Any]) -> None:
            self._settled(part)
            whole.settled(part)

        with self._lock:
            self.check_open()
            backend = self.backend
            assert backend is not None
            hold = self._holds.get(current_owner()) if self._holds else None
            agree = hold is None and self.agreement is not None and not calls[0].op.p2p
            driver = None if agree else backend if hold is None else hold
            call_context = None if driver is backend else backend.call_context()
            parts = [self._work(call._replace(result=None), limit, driver, settled=settled) for call in calls]
            whole.expect(parts)
            together = GroupedOp(tuple([call.op for call in calls]))
            whole.work = self._work(Call(together, (), (), result), limit, whole, settled=_nothing)
            items = [self._submission(call, part, whole, call_context) for call, part in zip(calls, parts, strict=True)]
            if hold is not None:
                self._called += len(items)
                hold.works.append(whole.work)
                self._add(hold, items)
                self._deadlines.add(parts[0])
            elif agree:
                self._called += len(items)
                self._issue(items)
                self._deadlines.add(parts[0])
            else:
                fused_ops = [FusedOp(item, (item,)) for item in items]
                try:
                    self._hand_on(Batch(items, fused_ops))
                except BaseException:
                    for part in parts:
                        self._pending.pop(part, None)
                    raise
                self._called += len(items)
            if self.observer is not None:
                for call, part in zip(calls, parts, strict=True):
                    self.observer.called(call, part)
        return whole.work

    # -- operations sent together --------------------------------------------------------------------------------------

    def _submission(
        self, call: Call, work: Work[Any], whole: CompositeWork | None = None, call_context: Any = None
    ) -> Submission:
        submission = Submission(call, work)
        submission.whole = whole
        submission.call_context = call_context
        self._pending[work] = submission.nbytes
        if self.error is not None:
            self._check_late([work])
        return submission

    def _add(self, hold: DeferredQueue, items: Sequence[Submission]) -> None:
        """Hold the operations of one call. A full batch is sent; if that fails, this call fails with it."""
        try:
            for item in items:
                hold.add(item)
        except BaseException as exc:
            self.drop(items, named(exc))
            raise

    def open_hold(self, meter: BatchLimiter, send: Callable[[DeferredQueue], object] | None = None) -> DeferredQueue:
        """Hold later operations of the caller; an open queue of the same caller serves both scopes."""
        self.check_loop()
        with self._lock:
            self.check_open()
            owner = current_owner()
            hold = self._holds.get(owner)
            if hold is None:
                hold = self._holds[owner] = DeferredQueue(owner, meter, self.flush if send is None else send)
            else:
                hold.depth += 1
            return hold

    def close_hold(self, hold: DeferredQueue) -> None:
        """Leave one scope of ``hold``; the last one ends the holding."""
        with self._lock:
            hold.depth -= 1
            if not hold.depth:
                self._holds.pop(hold.owner, None)

    def flush(self, hold: DeferredQueue) -> None:
        """Send the operations in ``hold``. From any thread.

        Raises: ValueError if they cannot be sent together; none is sent then.
        """
        with self._lock:
            held = [item for item in hold.take() if not item.work.done()]
            if not held:
                return  # nothing was held, or the comm has broken
            assert self.backend is not None
            try:
                if self.agreement is not None:
                    check_messages([planned(item) for item in held])
                    held = self._issue_all(held)
                for batch in batches_of(held, self.group.size, self.backend, self.mailbox):
                    self._hand_on(batch)
            except BaseException as exc:
                self.drop(held, named(exc))
                raise

    # -- the order agreed by the ranks ---------------------------------------------------------------------------------

    def _issue(self, items: Sequence[Submission]) -> None:
        """Announce ``items``, of one call, for an agreed place in the order. Under the lock."""
        assert self.agreement is not None
        ops = [item.op for item in items]
        nbytes = sum([op.nbytes for op in ops])
        conflicts = self._undecided.enter(items)
        if conflicts or not all(can_fuse(self.group.size, item) for item in items):
            nbytes = SELF  # a separate batch on all ranks: their tensors may not conflict
        text = str(ops[0] if len(ops) == 1 else GroupedOp(tuple(ops)))
        self.agreement.issue(ops[0].label, signature_of(ops), text, nbytes, items)

    def _issue_all(self, held: Sequence[Submission]) -> list[Submission]:
        """Announce the collectives of ``held``; returns the remaining items, which are messages."""
        messages = []
        wholes: dict[object, list[Submission]] = {}
        for item in held:
            if item.op.p2p:
                messages.append(item)
            else:
                item.work.driver = None
                wholes.setdefault(item if item.whole is None else item.whole, []).append(item)
        for items in wholes.values():
            self._issue(items)
            self._deadlines.add(items[0].work)
        return messages

    def run_agreed(self, batch: Sequence[Sequence[Submission]]) -> None:
        """Hand an agreed batch to the backend, all calls at once. On the loop."""
        with self._lock:
            items = [item for call in batch for item in call]
            self._undecided.leave(items)
            items = [item for item in items if not item.work.done()]
            if not items:
                return  # the comm has broken
            assert self.backend is not None
            for part in batches_of(items, self.group.size, self.backend, self.mailbox):
                self._hand_on(part)

    def flush_all(self) -> None:
        """Send the operations of all scopes: the comm is closing. Operations that cannot be sent have failed."""
        for hold in list(self._holds.values()):
            with contextlib.suppress(Exception):
                hold.send()
            self.drop(hold.take(), "the comm was closed")  # the operations of a time_estimator()

    def give_up(self, hold: DeferredQueue, since: int = 0) -> list[Submission]:
        """Take the items of ``hold``, from number ``since`` on, out of it."""
        with self._lock:
            return hold.take(since)

    def check_estimates(self) -> None:
        """Raise NotImplementedError if the backend has no estimates."""
        self.check_open()
        assert self.backend is not None
        if type(self.backend).estimate is Backend.estimate:
            self.backend.estimate(())

    def estimate(self, held: Sequence[Submission]) -> list[Future[float]]:
        """The seconds for each batch of ``held``. Raises: the errors of ``flush`` and ``Backend.estimate``."""
        with self._lock:
            self.check_open()
            assert self.backend is not None
            batches = batches_of(held, self.group.size, self.backend, self.mailbox)
            return [self.backend.estimate([fused.submission for fused in batch.fused_ops]) for batch in batches]

    def drop(self, items: Sequence[Submission], reason: str) -> None:
        """Fail the operations of ``items`` that were not sent. From any thread."""
        for item in items:
            work = item.work
            if work.seq == UNNUMBERED:
                error = NotSentError(work.op, self.group.name, reason)
                error.observed = True  # the cause of the drop was raised already
                work.settle(error)


def _nothing(work: Work[Any]) -> None:
    pass


def named(exc: BaseException) -> str:
    """The text that describes ``exc`` in errors."""
    text = str(exc)
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__
