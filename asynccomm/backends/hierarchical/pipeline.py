"""The plan of operations through the lanes of a rank: inside the host, between hosts, inside the host again.

Each lane is a backend of its own, among the ranks that use it together: ``UP`` and ``DOWN`` in the shared memory of a
host, ``ACROSS`` on a rail. An operation is one plan or several (pieces of a large one), and a plan is a list of steps
on lanes that never go back. A step is a collective of its lane's backend.

A backend demands its collectives in one order on all its ranks. Each lane therefore takes steps in the order of the
operations, and the first step in its queue waits for the step before it. No deadlock follows, because lanes never go
back: the first unfinished operation waits for none. Different operations, and the pieces of one, are on different lanes
at the same time.

The end of a step may come on any thread, inside a backend that holds locks. No thread therefore waits for another here:
a thread that finds none at work carries out all events that have come, and other threads leave theirs.
"""

from __future__ import annotations

import enum
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from asynccomm.backends.base import Backend, Submission
from asynccomm.backends.hierarchical.labels import label_of
from asynccomm.backends.hierarchical.lane_calls import Check, LaneCalls, QuickStep, RailCalls
from asynccomm.backends.latch import Latch
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, BackendError, BrokenError
from asynccomm.ops import Call

Step: TypeAlias = Work[Any] | QuickStep

LARGE: Final = 1 << 20  # bytes; the steps of larger operations may copy for long, and are not taken on the event loop


class Lane(enum.IntEnum):
    """A part of the way, in order."""

    UP = 0
    ACROSS = 1
    DOWN = 2


class Leg(NamedTuple):
    """One collective on one lane."""

    lane: Lane
    call: Callable[[], Call]  #: makes the call when the step begins, after all earlier steps
    #: the same call, with its label and without side effects, for a lane that needs no submission; and its tensors
    quick: tuple[Check, tuple[Tensor, ...]] | None = None


class PiecePlan(NamedTuple):
    """The steps of an operation, or of a piece of one, on this rank."""

    steps: Sequence[Leg]
    finish: Callable[[], object] | None = None  #: called after the last step


class OpPlan(NamedTuple):
    """An operation on this rank."""

    plans: Sequence[PiecePlan]
    finish: Callable[[], object] | None = None  #: called after the last plan
    label: str = ""  #: of all steps, if it is known already


@final
class _Job:
    """A plan under way."""

    __slots__ = ("at", "label", "over", "plan", "running", "submission")

    def __init__(self, plan: PiecePlan, submission: Submission, label: str, over: Callable[[], object]) -> None:
        self.plan = plan
        self.submission = submission
        self.label = label
        self.over = over
        self.at = 0  # number of finished steps
        self.running = False

    def is_next_on(self, lane: Lane) -> bool:
        return not self.running and self.plan.steps[self.at].lane is lane


@final
class Pipeline:
    """The lanes of one rank.

    Args:
        name: of the thread for steps that copy much.
        backends: of the lanes that this rank is on.
        quick: begin steps without a submission, on lanes that have such a way.
        failed: called with an error that breaks the comm.
    """

    def __init__(
        self,
        name: str,
        mailbox: Mailbox,
        backends: Mapping[Lane, Backend],
        quick: Mapping[Lane, LaneCalls | RailCalls],
        failed: Callable[[BrokenError], object],
    ) -> None:
        self._mailbox = mailbox
        self._backends = backends
        self._quick = quick
        self._failed = failed
        self._queues: dict[Lane, deque[_Job]] = {lane: deque() for lane in backends}
        self._events: deque[Callable[[], object]] = deque()
        self._working = threading.Lock()  # held by the thread that carries out events; no thread waits for it
        self._aside = OrderedExecutor(f"{name}-steps", 1)
        self._main = threading.get_ident()
        self._ended = False
        self._steps: dict[Work[Any], tuple[Lane, Step]] = {}  # the last step of each operation that has one
        self._blocked: set[Work[Any]] = set()  # operations that must end without the event loop

    @property
    def idle(self) -> bool:
        """Whether no thread is at work, and no event waits for one. Under the comm's lock."""
        return not (self._events or self._working.locked())

    def start(self, submission: Submission, way: OpPlan, over: Callable[[], object]) -> None:
        """Carry out ``way``, then call ``over``. One call at a time, in the order of the operations."""
        end = partial(self._end, submission.work, way, over)
        label = way.label or label_of(submission)
        if len(way.plans) == 1:
            jobs = [_Job(way.plans[0], submission, label, end)]
        else:
            latch = Latch(len(way.plans), end)
            jobs = [_Job(plan, submission, label, latch) for plan in way.plans]
        self._post(partial(self._enter, jobs))

    def go_on(self, submission: Submission, way: OpPlan, over: Callable[[], object], at: int, taken: object) -> None:
        """Carry out the rest of ``way``, a single plan, as ``start`` does.

        Under the comm's lock, since ``idle``, and with no operation in flight: no other thread then begins a step.

        Args:
            at: number of steps that are over.
            taken: the next step, which has begun: as of ``LaneCalls.take``; None: it has not.
        """
        plan = way.plans[0]
        job = _Job(plan, submission, way.label, partial(self._end, submission.work, way, over))
        job.at = at
        for step in plan.steps[at + 1 :]:
            self._queues[step.lane].append(job)
        self._post(partial(self._begin, job, taken))

    def call(self, submit: Callable[[], object]) -> None:
        """Call ``submit``, which uses the backend of a lane, in turn with the steps: these take one call at a time."""
        self._post(submit)

    def end(self) -> None:
        """Carry out no more steps: the comm is broken or closed. From any thread, more than once."""
        self._ended = True
        self._aside.end()

    def before_await(self, work: Work[Any]) -> None:
        """See ``Backend.before_await``."""
        last: tuple[Lane, Step] | None = None
        while not work.done():  # a step that ends here begins the next
            step = self._steps.get(work)
            if step is None or step is last:
                return
            last = step
            if not step[1].done():
                self._backends[step[0]].before_await(step[1])  # type: ignore[arg-type]  # as in _waits_for

    def before_block(self, work: Work[Any]) -> None:
        """See ``Backend.before_block``."""
        self._blocked.add(work)
        for lane, step in list(self._steps.values()):  # earlier operations, too: their steps come first
            if not step.done():
                self._backends[lane].before_block(step)  # type: ignore[arg-type]  # as in _waits_for
        if work.done():
            self._blocked.discard(work)

    def _end(self, work: Work[Any], way: OpPlan, over: Callable[[], object], _: AsyncCommError | None = None) -> None:
        self._steps.pop(work, None)
        self._blocked.discard(work)
        if way.finish is not None:
            way.finish()
        over()

    # -- events --------------------------------------------------------------------------------------------------------

    def _post(self, event: Callable[[], object], *, large: bool = False) -> None:
        self._events.append(event)
        if large and threading.get_ident() == self._main:
            self._aside.put(0, self._carry_out)
        else:
            self._carry_out()

    def _carry_out(self) -> None:
        if torch.is_inference_mode_enabled():  # the caller's mode: memory made in it could not be written to later
            with torch.inference_mode(False):
                self._carry_out()
            return
        while self._events and self._working.acquire(blocking=False):
            try:
                while self._events:
                    event = self._events.popleft()
                    if not self._ended:
                        self._take(event)
                    del event
                if self._ended:
                    for queue in self._queues.values():
                        queue.clear()
                    self._steps.clear()
            finally:
                self._working.release()

    def _take(self, event: Callable[[], object]) -> None:
        try:
            event()
        except BrokenError as exc:
            self._break(exc)
        except BaseException as exc:  # out of memory, Ctrl-C, or a bug: without an error, the peers would wait forever
            error = BackendError(f"hierarchical failed: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            self._break(error)
            if not isinstance(exc, Exception):
                raise

    def _break(self, error: BrokenError) -> None:
        self._ended = True
        self._failed(error)

    def _enter(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            if not job.plan.steps:
                self._finish(job)
                continue
            for step in job.plan.steps:
                self._queues[step.lane].append(job)
            self._advance(job.plan.steps[0].lane)

    def _advance(self, lane: Lane) -> None:
        queue = self._queues[lane]
        while queue and not self._ended and queue[0].is_next_on(lane):
            self._begin(queue.popleft())

    def _begin(self, job: _Job, taken: object = None) -> None:
        """Begin the next step of ``job``, or go on with it if it is ``taken``."""
        job.running = True
        lane, make, quick = job.plan.steps[job.at]
        outer = job.submission
        if quick is not None and (calls := self._quick.get(lane)) is not None:
            describe, over = partial(self._described, job, make), partial(self._stepped, job)
            if taken is None:
                begun = calls.begin(outer.work.seq, *quick, describe, over)
            else:
                begun = calls.go_on(taken, outer.work.seq, *quick, describe, over)
            if begun is True:
                self._go_on(job, None)
                return
            if begun:
                self._waits_for(outer.work, lane, begun)
                return
        step = self._described(job, make)
        self._backends[lane].submit((step,))
        self._waits_for(outer.work, lane, step.work)

    def _described(self, job: _Job, make: Callable[[], Call]) -> Submission:
        """The submission of the next step of ``job``."""
        call, outer = make(), job.submission
        op = call.op if call.op.p2p or call.op.label == job.label else replace(call.op, label=job.label)
        work: Work[Any] = Work(
            op, outer.work.seq, self._mailbox, value=None, timeout=math.inf, on_settled=partial(self._settled, job)
        )
        step = Submission(call if call.op is op else call._replace(op=op), work)
        step.members = outer.members or (outer.work.op,)
        step.numbers = outer.numbers or (outer.work.seq,)
        return step

    def _waits_for(self, work: Work[Any], lane: Lane, step: Step) -> None:
        """Note that ``step`` of the operation of ``work`` has begun."""
        if not step.done():
            self._steps[work] = lane, step
            if self._blocked:
                self._backends[lane].before_block(step)  # type: ignore[arg-type]  # a QuickStep stands for a Work

    def _stepped(self, job: _Job) -> None:
        """Handle the end of a quick step. On any thread."""
        self._post(partial(self._go_on, job, None), large=job.submission.nbytes > LARGE)

    def _settled(self, job: _Job, work: Work[Any]) -> None:
        """Handle the end of a step. On any thread."""
        self._post(partial(self._go_on, job, work.take_error()), large=job.submission.nbytes > LARGE)

    def _go_on(self, job: _Job, error: AsyncCommError | None) -> None:
        if error is not None:
            raise error
        job.at += 1
        job.running = False
        if job.at == len(job.plan.steps):
            self._finish(job)
        else:
            self._advance(job.plan.steps[job.at].lane)

    def _finish(self, job: _Job) -> None:
        if job.plan.finish is not None:
            job.plan.finish()
        job.over()
