"""Calls that the backend's fast path begins or holds, as operations of a comm."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, final

from asynccomm.backends.base import Backend, FastCalls, HeldCall, Submission
from asynccomm.batching.batches import prepared_op
from asynccomm.batching.fusion import fuse, fusion_key
from asynccomm.batching.queue import DeferredQueue
from asynccomm.comm.held_calls import checked_call, restored, submission_of
from asynccomm.comm.in_flight import InFlight
from asynccomm.comm.submission import Submitter
from asynccomm.core.callsite import CallSite
from asynccomm.core.deadlines import Deadlines
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.state import CallCounts, CallLog, ReentrantLock
from asynccomm.core.work import Work
from asynccomm.observe.watchers import Called
from asynccomm.ops import Call, Op
from asynccomm.ops.validation import CommInfo

_NO_WORK: Final[Any] = None  # of submissions that are only looked at


def fast_path(submitter: Submitter) -> FastCalls | None:
    """The fast path of the backend; its ``submit`` does the same as ``Submitter.call``. None: there is none."""
    assert submitter.backend is not None
    return submitter.backend.fast_path(SubmitterCalls(submitter))


@final
class SubmitterCalls:
    """``backends.base.DirectCalls`` of a submitter, which does not refer to this object."""

    def __init__(self, submitter: Submitter) -> None:
        backend = submitter.backend
        assert backend is not None
        self._submitter = submitter
        self._backend = backend
        self._kinds: dict[object, int] = {}  # of operations that are fused, by their key
        self.group: CommInfo = submitter.group
        self.mailbox: Mailbox = submitter.mailbox
        self.counts: CallCounts = submitter.counts
        self.recent: CallLog[Called] = submitter.recent
        self.notes: deque[Called] = submitter.watchers.notes
        self.note: Callable[[], object] = submitter.watchers.flush
        self.records_sites: bool = submitter.records_sites
        self.queues: dict[object, DeferredQueue] = submitter.queues
        self.in_flight: InFlight = submitter.in_flight
        self.lock: ReentrantLock = submitter.lock
        self.call: Callable[..., Work[Any]] = submitter.call
        self.submit_made: Callable[..., Work[Any]] = submitter.submit_made
        self.number: Callable[[Call, int, CallSite | None, float], Work[Any]] = submitter.number
        self.numbered: Callable[[Call, Work[Any]], None] = submitter.numbered
        self.overdue: Callable[[Work[Any]], None] = submitter.overdue
        self.note_deadline: Callable[[DeferredQueue, Work[Any]], None] = submitter.note_deadline
        self.fused_limit: int = backend.fused_limit
        self.driver: Backend = backend
        self.posted: Callable[[HeldCall], Submission] = partial(
            _posted, self.group, weakref.ref(self.in_flight.deadlines)
        )

    @property
    def compares(self) -> bool:
        """See ``DirectCalls.compares``."""
        return self._submitter.compares

    def adopt(
        self, run: object, arguments: Sequence[Any], result: object, site: CallSite | None, started: float
    ) -> Work[Any]:
        """See ``DirectCalls.adopt``. Under the lock."""
        return self._submitter.submit_begun(checked_call(self.group, arguments), run, result, site, started)

    def fusion_kind(self, op: Op) -> int | None:
        """See ``DirectCalls.fusion_kind``."""
        if op.one_sided or op.p2p:
            return None
        key = fusion_key(op, self._backend.fusion_limit)
        return 0 if key is None else self._kinds.setdefault(key, len(self._kinds) + 1)

    def fused(self, held: Sequence[HeldCall]) -> tuple[Call, Sequence[Any]]:
        """See ``DirectCalls.fused``."""
        arguments = [restored(each) for each in held]
        submissions = [Submission(checked_call(self.group, each), _NO_WORK) for each in arguments]
        return fuse(self.group.size, submissions), [argument for each in arguments for argument in each]

    def adopt_held(self, left: Sequence[tuple[object, Op, Sequence[HeldCall]]]) -> None:
        """See ``DirectCalls.adopt_held``. Under the lock."""
        backend, submitter = self._backend, self._submitter
        for _, _, calls in left:
            for held in calls:
                submitter.take_over(held.work, held.nbytes)
        fused_ops = [prepared_op(run, op, members, backend, self.mailbox) for run, op, members in left]
        for fused in fused_ops:
            fused.prepare(backend)
        backend.submit([fused.submission for fused in fused_ops])
        for fused in fused_ops:
            fused.sent()
            if not fused.submission.work.done():
                submitter.in_flight.deadlines.add(fused.most_urgent)
            for member in fused.members:
                submitter.check_late(member.work)
                if submitter.watchers.all:
                    submitter.watchers.called(Call(member.work.op, (), (), None), member.work)


def _posted(group: CommInfo, deadlines: weakref.ref[Deadlines], held: HeldCall) -> Submission:
    """See ``DirectCalls.posted``."""
    submission = submission_of(group, held, None)
    submission.run = held.run
    if (all_of_them := deadlines()) is not None:
        all_of_them.add(held.work)
    return submission
