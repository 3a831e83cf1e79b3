"""Repeated collectives that frames carry, from the call to their end, in C.

A collective of plain tensors without conversions is remembered by its operation. With nothing else in flight, a later
call exchanges its frames at once, and often is over before it has a Work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from asynccomm.backends.base import DirectCalls, Submission
from asynccomm.backends.direct_calls import RepeatedCalls
from asynccomm.backends.gloo.carried import CarriedCall
from asynccomm.backends.gloo.collectives import GlooCollectives
from asynccomm.ops import (
    AllGather,
    AllReduce,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    dims,
)

_CHECKS: Final[frozenset[Callable[..., Any]]] = frozenset(
    {
        AllGather.of,
        AllReduce.of,
        AllToAllSingle.of,
        Barrier.of,
        Broadcast.of,
        Gather.of,
        Reduce.of,
        ReduceScatter.of,
        Scatter.of,
        dims.all_gather_single,
        dims.reduce_scatter_single,
    }
)


@final
class CarriedCollectives(RepeatedCalls[CarriedCall]):
    """``backends.base.FastCalls`` of a gloo comm."""

    def __init__(
        self, calls: DirectCalls, collectives: GlooCollectives, broken: Callable[[BaseException], object]
    ) -> None:
        super().__init__(calls, _CHECKS, broken)
        self._collectives = collectives

    def _kind_of(self, submission: Submission) -> CarriedCall | None:
        group = self._calls.group
        return CarriedCall.of(submission, group.rank, group.size)

    def _start(self, kind: CarriedCall, submission: Submission, number: int) -> object | None:
        memory = kind.memory(submission.inputs, submission.outputs)
        if memory is None or not self._collectives.idle:
            return None
        try:
            return self._collectives.carry_now(kind, memory, number) or None
        except BaseException as exc:
            self._broken(exc)  # the other ranks may be in the operation already
            raise

    def _go_on(self, submission: Submission, _: CarriedCall, begun: Any) -> None:
        self._collectives.go_on_alone(submission, begun)
