"""The plans of all_reduces of plain tensors, kept for the next call of their kind: programs repeat their calls.

The steps are those of ``reductions``. They work in the memory of the tensor, and each lane knows the kind of a step, so
it needs no submission (``lane_calls``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, final

from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.hierarchical import reductions
from asynccomm.backends.hierarchical.labels import label_of, remember
from asynccomm.backends.hierarchical.lane_calls import Check
from asynccomm.backends.hierarchical.memory import cut, stored_dtype
from asynccomm.backends.hierarchical.pipeline import Lane, Leg, OpPlan, PiecePlan
from asynccomm.backends.hierarchical.placement import HostPlacement
from asynccomm.ops import AllGather, AllReduce, Broadcast, Call, Reduce, ReduceScatter
from asynccomm.ops.base import layout_of_shares
from asynccomm.ops.reduce_op import RedOpType, ReduceOp
from asynccomm.ops.validation import counts_of

REMEMBERED: Final = 4096  # kinds of all_reduces


@final
class PlainAllReduces:
    """Plans of all_reduces of one plain tensor in place, of one piece, without memory of their own.

    Programs repeat their calls, so everything but the tensor is kept.
    """

    def __init__(self, where: HostPlacement) -> None:
        self._where = where
        self._kinds: dict[AllReduce, ByLeaders | _OnRails | None] = {}

    def plan(self, submission: Submission) -> OpPlan | None:
        """The plan of an ``AllReduce`` as of ``reductions.all_reduce``; None if it is not such a call."""
        kind = self.kind_of(submission)
        return None if kind is None else kind.plan(submission.inputs[0])

    def by_leaders(self, submission: Submission) -> ByLeaders | None:
        """The steps of calls like an ``AllReduce``, if they are those of a small one."""
        kind = self.kind_of(submission)
        return kind if isinstance(kind, ByLeaders) else None

    def kind_of(self, submission: Submission) -> ByLeaders | _OnRails | None:
        """The steps of calls like an ``AllReduce``; None if it is not such a call."""
        op: Any = submission.op
        inputs = submission.inputs
        if (
            submission.outputs is not inputs
            or len(inputs) != 1
            or op.nbytes > reductions.PIECE
            or op.reduction.factor is not None
        ):
            return None
        tensor = inputs[0]
        if (
            op.layout
            or submission.numbers
            or submission.copies
            or tensor.is_inference()
            or not arithmetic.is_plain(tensor)
        ):
            return None
        if op in self._kinds:
            kind = self._kinds[op]
        else:
            if len(self._kinds) >= REMEMBERED:
                self._kinds.clear()
            kind = self._kinds[op] = self._kind(submission, op)
        return kind

    def _kind(self, submission: Submission, op: AllReduce) -> ByLeaders | _OnRails | None:
        if not _moves_as_it_is(op):
            return None
        if op.nbytes <= reductions.SMALL:
            return ByLeaders(self._where, op, label_of(submission))
        return None if self._where.alone else _OnRails(self._where, op, label_of(submission))


def _moves_as_it_is(op: AllReduce) -> bool:
    """Whether tensors of the dtype are reduced and moved without a conversion."""
    dtype = op.dtype
    as_stored = stored_dtype(dtype) == dtype and not dtype.is_complex
    return as_stored and arithmetic.accumulator(dtype, op.reduction.type) == dtype


def _leg(lane: Lane, check: Check, *tensors: Tensor) -> Leg:
    return Leg(lane, partial(check, None, *tensors), (check, tensors))


@final
class ByLeaders:
    """The steps of small all_reduces of one kind.

    Attributes:
        direct: the first steps of a rank that is not alone on its host, without those behind work on the tensor.
    """

    def __init__(self, where: HostPlacement, op: AllReduce, label: str) -> None:
        self.label = label
        self._op = op
        self._where = where
        self._reduction: ReduceOp = op.reduction
        reduction = reductions.WITHOUT_FACTOR.get(op.reduction.type, op.reduction)
        self._divides: bool = op.reduction.type is RedOpType.AVG
        up = Reduce(op.dtype, op.numel, 0, reduction, label=label)
        across = AllReduce(op.dtype, op.numel, reduction, label=label)
        down = Broadcast(op.dtype, op.numel, 0, label=label)
        leads = where.leads
        # one object for each kind of step, by which its lane knows the kind
        self._up: Check = lambda _, *tensors: Call(up, tensors, tensors if leads else (), None)
        self._across: Check = lambda _, *tensors: Call(across, tensors, tensors, None)
        self._down: Check = lambda _, *tensors: Call(down, tensors * leads, tensors * (not leads), None)
        across_too = [(Lane.ACROSS, self._across)] * leads
        down_too = [(Lane.DOWN, self._down)] * (not (leads and self._divides))
        self.direct: Sequence[tuple[Lane, Check]] = [(Lane.UP, self._up), *across_too, *down_too]

    @property
    def is_all_direct(self) -> bool:
        """Whether ``direct`` has all steps."""
        return self.direct[-1][0] is Lane.DOWN

    def plan(self, tensor: Tensor) -> OpPlan:
        """The plan of a call with ``tensor``."""
        self.remember()
        where = self._where
        steps = []
        if not where.alone:
            steps.append(_leg(Lane.UP, self._up, tensor))
        if where.leads:
            steps.append(_leg(Lane.ACROSS, self._across, tensor))
        divides = self._divides and where.leads
        if where.alone:
            return OpPlan([PiecePlan(steps, partial(self._divide, tensor) if divides else None)], label=self.label)
        steps.append(Leg(Lane.DOWN, partial(self._divide, tensor)) if divides else _leg(Lane.DOWN, self._down, tensor))
        return OpPlan([PiecePlan(steps)], label=self.label)

    def remember(self) -> None:
        """Note the call that the label of the steps stands for."""
        remember(self.label, self._op)

    def _divide(self, tensor: Tensor) -> Call:
        arithmetic.narrow(tensor, tensor, self._reduction, self._where.size)
        return self._down(None, tensor)


@final
class _OnRails:
    """The steps of all_reduces of one kind in parts, a part for each rail; not for a rank that is alone on its host."""

    def __init__(self, where: HostPlacement, op: AllReduce, label: str) -> None:
        self.label = label
        self._op = op
        self._reduction: ReduceOp = op.reduction
        self._size = where.size
        reduction = reductions.WITHOUT_FACTOR.get(op.reduction.type, op.reduction)
        self._divides: bool = op.reduction.type is RedOpType.AVG
        counts = cut(op.numel, where.rails) + [0] * (len(where.local) - where.rails)
        start, position = sum(counts[: where.position]), where.position
        self._mine = slice(start, start + counts[position])
        numel, uneven = counts_of(counts)
        layout = layout_of_shares(uneven)
        up = ReduceScatter(op.dtype, numel, reduction, layout=layout, counts=uneven, label=label)
        across = AllReduce(op.dtype, counts[position], reduction, label=label)
        down = AllGather(op.dtype, numel, layout=layout, counts=uneven, label=label)

        def inside(_: object, tensor: Tensor) -> Call:
            parts = tensor.split_with_sizes(counts)
            return Call(up, tuple(parts), (parts[position],), None)

        def together(_: object, tensor: Tensor) -> Call:
            parts = tensor.split_with_sizes(counts)
            return Call(down, (parts[position],), tuple(parts), None)

        # one object for each kind of step, by which its lane knows the kind
        self._up: Check = inside
        self._across: Check = lambda _, *tensors: Call(across, tensors, tensors, None)
        self._down: Check = together

    def plan(self, tensor: Tensor) -> OpPlan:
        """The plan of a call with ``tensor``."""
        remember(self.label, self._op)
        whole = arithmetic.flat(tensor)
        mine = whole[self._mine]
        steps = [_leg(Lane.UP, self._up, whole)]
        if len(mine):
            steps.append(_leg(Lane.ACROSS, self._across, mine))
        divides = self._divides and len(mine)
        steps.append(
            Leg(Lane.DOWN, partial(self._divide, whole, mine)) if divides else _leg(Lane.DOWN, self._down, whole)
        )
        return OpPlan([PiecePlan(steps)], label=self.label)

    def _divide(self, whole: Tensor, mine: Tensor) -> Call:
        arithmetic.narrow(mine, mine, self._reduction, self._size)
        return self._down(None, whole)
