"""Small all_reduces that begin their steps in the call.

The first step's own fast path in C refuses every tensor that is not plain, and then nothing has happened. Further steps
follow at once, as long as the other ranks come in time; the pipeline carries out the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor

from asynccomm.backends.base import DirectCalls, Submission
from asynccomm.backends.direct_calls import RepeatedCalls
from asynccomm.backends.gloo.hazard_tracker import HazardTracker
from asynccomm.backends.hierarchical.lane_calls import LaneCalls, RailCalls
from asynccomm.backends.hierarchical.pipeline import Lane, Pipeline
from asynccomm.backends.hierarchical.plain_reductions import ByLeaders, PlainAllReduces
from asynccomm.ops import AllReduce


@final
class DirectAllReduces(RepeatedCalls[ByLeaders]):
    """``backends.base.FastCalls`` for all_reduces of one tensor in place, on a rank that shares its host.

    Args:
        lanes: begin the steps; one is that of ``Lane.UP``.
    """

    def __init__(
        self,
        calls: DirectCalls,
        plain: PlainAllReduces,
        lanes: Mapping[Lane, LaneCalls | RailCalls],
        in_flight: HazardTracker,
        pipeline: Pipeline,
        broken: Callable[[BaseException], object],
    ) -> None:
        super().__init__(calls, frozenset({AllReduce.of}), broken)
        self._plain = plain
        self._lanes = lanes
        self._in_flight = in_flight
        self._pipeline = pipeline

    def _kind_of(self, submission: Submission) -> ByLeaders | None:
        submission.outputs = submission.inputs  # a later call of the operation may be in place
        return self._plain.by_leaders(submission)

    def _start(self, kind: ByLeaders, submission: Submission, number: int) -> object | None:
        """See the base; for ``_go_on`` the number of steps that are over, and the next one if it has begun."""
        tensors = submission.inputs
        usual = submission.outputs is tensors and type(tensors[0]) is Tensor and not tensors[0].is_inference()
        if not (usual and self._in_flight.idle and self._pipeline.idle):
            return None
        over, taken = 0, None
        for lane, check in kind.direct:
            calls = self._lanes[lane]
            try:
                taken = calls.take(number, check, tensors)
            except BaseException as exc:
                if over:
                    self._broken(exc)  # the other ranks may be in the operation already
                raise
            if taken is None or not calls.is_over(taken):
                break
            over, taken = over + 1, None
        if over == len(kind.direct) and kind.is_all_direct:
            kind.remember()
            return True
        return (over, taken) if over or taken is not None else None

    def _go_on(self, submission: Submission, kind: ByLeaders, begun: Any) -> None:
        over = self._in_flight.enter_alone(submission)
        self._pipeline.go_on(submission, kind.plan(submission.inputs[0]), over, *begun)
