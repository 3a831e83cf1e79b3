"""Steps that need no Work and no submission, of kinds that the pipeline has seen.

A step in the memory of a host runs in C, by the fast path of its backend, like a call of a comm on shared memory; it
gets a Work only if ranks are late. The fast path works for a comm; this module stands for one. A small step between
hosts is an exchange of frames.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, final

from torch import Tensor

from asynccomm.backends.base import Backend, FastCalls, Submission
from asynccomm.backends.gloo.carried import CarriedCall
from asynccomm.backends.gloo.collectives import BegunCall, GlooCollectives
from asynccomm.backends.gloo.frames import CarriedReduce
from asynccomm.backends.shm.backend import ShmBackend
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.state import CallCounts, CallLog, ReentrantLock
from asynccomm.core.work import Work
from asynccomm.ops import Call, Op
from asynccomm.ops.validation import CommInfo

Check = Callable[..., Call]
"""Makes the call of a step from the lane's group and the tensors; one object for each kind of step."""


Describe = Callable[[], Submission]
"""Makes the submission of a step, for its kind and for errors."""

REMEMBERED: Final = 4096  # kinds of steps


@final
class QuickStep:
    """A step without a Work and a submission; it stands for both where they are waited for and driven.

    Args:
        tensors: kept until the end.
        over: called at the end, on any thread.
    """

    __slots__ = ("_finished", "_over", "_tensors", "error", "nbytes", "op", "run", "seq", "started")

    def __init__(self, op: Op, seq: int, tensors: Sequence[Tensor], over: Callable[[], object]) -> None:
        self.op = op
        self.seq = seq
        self.run: object = None
        self.nbytes: int = max([tensor.nbytes for tensor in tensors])
        self.error: None = None
        self.started: float = time.monotonic()
        self._tensors = tensors
        self._over = over
        self._finished = False

    @property
    def work(self) -> QuickStep:
        return self

    def done(self) -> bool:
        return self._finished

    def settle(self, _: None = None) -> None:
        """End the step. On any thread."""
        self._finished = True
        self._over()


@final
class LaneCalls:
    """The fast path of one lane. Used by one thread at a time."""

    def __init__(self, backend: Backend, path: FastCalls, counts: CallCounts) -> None:
        self._backend = backend
        self._path = path
        self._counts = counts
        self._ops: dict[Check, Op] = {}

    @classmethod
    def of(cls, backend: ShmBackend, group: CommInfo, mailbox: Mailbox) -> LaneCalls | None:
        """The fast path of ``backend`` among the ranks of ``group``; None: it has none."""
        stand_in: Any = _StandIn(group, mailbox)
        path = backend.fast_path(stand_in)
        return None if path is None else cls(backend, path, stand_in.counts)

    def begin(
        self, number: int, check: Check, tensors: Sequence[Tensor], describe: Describe, over: Callable[[], object]
    ) -> QuickStep | bool:
        """Begin the step ``check(group, *tensors)``.

        Returns the step, which then calls ``over``; True: it is over already; False: the fast path does not take it.

        Args:
            number: of the operation, for errors.
        """
        taken = self.take(number, check, tensors)
        return False if taken is None else self.go_on(taken, number, check, tensors, describe, over)

    def take(self, number: int, check: Check, tensors: Sequence[Tensor]) -> Any:
        """Begin a step in C.

        The result is for ``is_over``, and for ``go_on``, which the caller calls next if the step is not over; None: the
        fast path does not take the step.
        """
        self._counts.collectives = number
        return self._path.submit(None, None, None, check, *tensors)

    @staticmethod
    def is_over(taken: Any) -> bool:
        """Whether the step that ``take`` has begun is over."""
        return isinstance(taken, Work)

    def go_on(
        self,
        taken: Any,
        number: int,
        check: Check,
        tensors: Sequence[Tensor],
        describe: Describe,
        over: Callable[[], object],
    ) -> QuickStep | bool:
        """Go on with a step that ``take`` has begun; as ``begin``."""
        if isinstance(taken, Work):
            return True
        op = self._ops.get(check)
        if op is None:
            if len(self._ops) >= REMEMBERED:
                self._ops.clear()
            op = self._ops[check] = describe().op
        step: Any = QuickStep(op, number, tensors, over)
        step.run = taken
        self._backend.submit((step,))
        return step  # type: ignore[no-any-return]


class _RailKind(NamedTuple):
    """A kind of step of a rail; None: frames do not carry it, or not in C."""

    op: Op
    reduce: CarriedReduce | None
    in_c: CarriedCall | None


@final
class RailCalls:
    """The all_reduces of a rail that frames carry, without a Work and a submission for each step."""

    def __init__(self, collectives: GlooCollectives, rank: int, size: int) -> None:
        self._collectives = collectives
        self._rank = rank
        self._size = size
        self._kinds: dict[Check, _RailKind] = {}

    def begin(
        self, number: int, check: Check, tensors: Sequence[Tensor], describe: Describe, over: Callable[[], object]
    ) -> QuickStep | bool:
        """As that of ``LaneCalls``, for the all_reduce ``check(None, *tensors)``."""
        known = self._kinds.get(check)
        if known is None:
            if len(self._kinds) >= REMEMBERED:
                self._kinds.clear()
            step = describe()
            reduce = CarriedReduce.of(step, self._size)
            in_c = None if reduce is None else CarriedCall.of(step, self._rank, self._size)
            known = self._kinds[check] = _RailKind(step.op, reduce, in_c)
        if known.reduce is None:
            return False
        taken = self.take(number, check, tensors)
        if taken is not None:
            return self.is_over(taken) or self.go_on(taken, number, check, tensors, describe, over)
        quick = QuickStep(known.op, number, tensors, over)
        return self._collectives.exchange(known.reduce, tensors[0], number, describe, quick.settle) and quick

    def take(self, number: int, check: Check, tensors: Sequence[Tensor]) -> BegunCall | bool | None:
        """As that of ``LaneCalls``, for a kind of step that ``begin`` has seen."""
        known = self._kinds.get(check)
        if known is None or known.in_c is None:
            return None
        memory = known.in_c.memory(tensors, tensors)
        return None if memory is None else self._collectives.carry_now(known.in_c, memory, number) or None

    @staticmethod
    def is_over(taken: Any) -> bool:
        """Whether the step that ``take`` has begun is over."""
        return taken is True

    def go_on(
        self,
        taken: Any,
        number: int,
        check: Check,
        tensors: Sequence[Tensor],
        describe: Describe,
        over: Callable[[], object],
    ) -> QuickStep:
        """As that of ``LaneCalls``."""
        known = self._kinds[check]
        assert known.reduce is not None
        step = QuickStep(known.op, number, tensors, over)
        self._collectives.go_on(taken, known.reduce, tensors[0], describe, step.settle)
        return step


@final
class _InFlight:
    def __init__(self) -> None:
        self.works: dict[Work[Any], int] = {}
        self.waiters: list[Any] = []

    def settled(self, work: Work[Any]) -> None:
        raise AssertionError("a lane holds no calls")


@final
class _StandIn:
    """``backends.base.DirectCalls`` for steps: calls that are not for the fast path, and those begun, are returned."""

    def __init__(self, group: CommInfo, mailbox: Mailbox) -> None:
        self.group = group
        self.mailbox = mailbox
        self.counts = CallCounts()
        self.counts.limit = math.inf
        self.recent: CallLog[Any] = CallLog((), 0)
        self.notes = deque[Any](maxlen=0)
        self.records_sites = False
        self.queues: dict[object, Any] = {}
        self.in_flight = _InFlight()
        self.lock = ReentrantLock()
        self.fused_limit = 0
        self.driver = None

    def call(self, *_: object) -> None:
        """Leave the step to the caller."""

    def adopt(self, run: object, *_: object) -> object:
        """Return the run, which the caller submits."""
        return run

    def fusion_kind(self, op: object) -> None:
        """Steps are not fused."""

    def note(self) -> None:
        """Nothing is noted."""

    def overdue(self, work: Work[Any]) -> None:
        raise AssertionError("a step has no deadline")

    def note_deadline(self, queue: object, work: Work[Any]) -> None:
        raise AssertionError("a lane holds no calls")

    def posted(self, held: object) -> Any:
        raise AssertionError("a lane posts no messages")

    def fused(self, held: object) -> Any:
        raise AssertionError("a lane holds no calls")

    def adopt_held(self, left: object) -> None:
        raise AssertionError("a lane holds no calls")
