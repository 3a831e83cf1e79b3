"""Repeated collectives that frames carry, from the call to their end, in C.

A collective of plain tensors without conversions is remembered by its operation. With nothing else in flight, a later
call exchanges its frames at once, and often is over before it has a Work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor

from asynccomm.backends.base import DirectCalls, Submission
from asynccomm.backends.direct_calls import CheckedCalls
from asynccomm.backends.gloo.carried import CarriedCall
from asynccomm.backends.gloo.collectives import GlooCollectives
from asynccomm.core.callsite import CallSite
from asynccomm.core.work import Work
from asynccomm.ops import AllGather, AllReduce, Barrier, Broadcast, Call, Gather, Op, Reduce, Scatter, dims

REMEMBERED: Final = 4096  # operations
_CHECKS: Final[frozenset[Callable[..., Any]]] = frozenset(
    {
        AllGather.of,
        AllReduce.of,
        Barrier.of,
        Broadcast.of,
        Gather.of,
        Reduce.of,
        Scatter.of,
        dims.all_gather_single,
    }
)
_UNPLANNED: Final[Any] = None  # the Work of a submission that is only looked at


@final
class CarriedCollectives(CheckedCalls):
    """``backends.base.FastCalls`` for repeated collectives.

    Args:
        broken: called with an exception that leaves an operation half done.
    """

    def __init__(
        self, calls: DirectCalls, collectives: GlooCollectives, broken: Callable[[BaseException], object]
    ) -> None:
        super().__init__(calls, _CHECKS)
        self._collectives = collectives
        self._broken = broken
        self._known: dict[Op, CarriedCall | None] = {}  # None: the ordinary path takes it

    def _begin(self, call: Any, site: CallSite | None, started: float) -> Work[Any] | None:
        if type(call) is not Call or call.copies or torch.is_inference_mode_enabled():
            return None
        op: Any = call.op
        if op.reduction is not None and op.reduction.factor is not None:  # such operations are costly to compare
            return None
        kind = self._known.get(op)
        if kind is None:
            if op not in self._known:
                self._learn(call)
            return None
        kept = _kept(call)  # another thread may give the caller's tensors other memory
        memory = kind.memory(kept.inputs, kept.outputs)
        if memory is None:
            return None
        calls, counts = self._calls, self._counts
        with calls.lock:
            if counts.closed or not self._collectives.idle:
                return None
            try:
                begun = self._collectives.carry_now(kind, memory, counts.collectives)
                if begun is False:
                    return None
                work = calls.number(call, kind.larger_side, site, started)
                if begun is True:
                    work.settle()
                else:
                    self._collectives.go_on_alone(Submission(kept, work), begun)
                calls.numbered(call, work)
            except BaseException as exc:
                self._broken(exc)  # the other ranks may be in the operation already
                raise
        return work

    def _learn(self, call: Call) -> None:
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        group = self._calls.group
        self._known[call.op] = CarriedCall.of(Submission(call, _UNPLANNED), group.rank, group.size)


def _kept(call: Call) -> Call:
    """``call`` with tensors that keep the memory of its tensors."""
    inputs = tuple(map(Tensor.detach, call.inputs))
    outputs = inputs if call.outputs is call.inputs else tuple(map(Tensor.detach, call.outputs))
    return call._replace(inputs=inputs, outputs=outputs)
