"""Steps in the memory of a host by the fast path of its backend.

A step of a kind that the pipeline has seen runs in C, like a call of a comm on shared memory, and needs a Work and a
submission only if ranks are late. The fast path works for a comm; this module stands for one.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, final

from torch import Tensor

from asynccomm.backends.base import FastCalls
from asynccomm.backends.shm.backend import ShmBackend
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.state import CallCounts
from asynccomm.core.work import Work
from asynccomm.ops import Call
from asynccomm.ops.validation import CommInfo

Check = Callable[..., Call]
"""Makes the call of a step from the lane's group and the tensors; one object for each kind of step."""


class Begun(NamedTuple):
    """A step that the fast path has taken."""

    run: object  #: the run, which goes on in the backend as ``Submission.run``; None: the step is over


_OVER: Final = Begun(None)


@final
class LaneCalls:
    """The fast path of one lane. Used by one thread at a time."""

    def __init__(self, path: FastCalls, counts: CallCounts) -> None:
        self._path = path
        self._counts = counts

    @classmethod
    def of(cls, backend: ShmBackend, group: CommInfo, mailbox: Mailbox) -> LaneCalls | None:
        """The fast path of ``backend`` among the ranks of ``group``; None: it has none."""
        stand_in: Any = _StandIn(group, mailbox)
        path = backend.fast_path(stand_in)
        return None if path is None else cls(path, stand_in.counts)

    def begin(self, number: int, check: Check, tensors: Sequence[Tensor]) -> Begun | None:
        """Begin the step ``check(group, *tensors)``; None: the fast path does not take it.

        Args:
            number: of the operation, for errors.
        """
        self._counts.collectives = number
        taken = self._path.submit(None, None, None, check, *tensors)
        if isinstance(taken, Work):
            return _OVER
        return None if taken is None else Begun(taken)


@final
class _InFlight:
    def __init__(self) -> None:
        self.works: dict[Work[Any], int] = {}

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
        self.recent = deque[Any](maxlen=0)
        self.notes = deque[Any](maxlen=0)
        self.records_sites = False
        self.queues: dict[object, Any] = {}
        self.in_flight = _InFlight()
        self.lock = threading.RLock()
        self.fused_limit = 0

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

    def fused(self, held: object) -> Any:
        raise AssertionError("a lane holds no calls")

    def adopt_held(self, left: object) -> None:
        raise AssertionError("a lane holds no calls")
