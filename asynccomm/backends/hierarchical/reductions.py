"""The plans of all_reduce, reduce and reduce_scatter.

Contributions are widened once, at the start, and the result is rounded once, at the end: between the levels, sums of
halves travel as floats. AVG is a sum that is divided at the end by the number of all ranks, and PREMUL_SUM multiplies
at the start.

A small all_reduce is reduced to the leader of each host, between the leaders, and broadcast on each host. A large one
goes in pieces: each rank on a rail reduces its part of a piece with its counterparts on the other hosts, so all ranks'
connections carry. On hosts of unequal size there are as many parts as rails, and the other ranks only take part inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.hazards import separated
from asynccomm.backends.hierarchical.memory import cut, landing, room, stored_dtype
from asynccomm.backends.hierarchical.movement import between
from asynccomm.backends.hierarchical.pipeline import Lane, Leg, OpPlan, PiecePlan
from asynccomm.backends.hierarchical.placement import HostPlacement
from asynccomm.ops import AllGather, AllReduce, AllToAll, Broadcast, Call, Reduce, ReduceScatter, layout_of
from asynccomm.ops.base import layout_of_shares
from asynccomm.ops.reduce_op import RedOpType, ReduceOp
from asynccomm.ops.validation import counts_of

SMALL: Final = 512 << 10  # bytes up to which the leaders reduce for their hosts
PIECE: Final = 32 << 20  # bytes of a piece

WITHOUT_FACTOR: Final = {  # the reductions between the steps that multiply and divide
    RedOpType.AVG: ReduceOp.SUM,
    RedOpType.PREMUL_SUM: ReduceOp.SUM,
}


@final
class _Reduction:
    """The contribution of this rank to a reduction, and the memory of the result.

    Attributes:
        given: the contribution: flat, in the dtype ``wide``; the memory of the input if possible.
        op: the reduction of widened elements.
    """

    def __init__(self, where: HostPlacement, submission: Submission) -> None:
        op: Any = submission.op
        buffers = separated(submission, where.rank)
        self._reduction: ReduceOp = op.reduction
        self._size = where.size
        self.wide: torch.dtype = arithmetic.accumulator(op.dtype, self._reduction.type)
        self.stored: torch.dtype = stored_dtype(op.dtype)
        self.each: int = 2 if op.dtype.is_complex else 1  #: reals for each element
        rows = [arithmetic.widen(tensor, self._reduction) for tensor in buffers.inputs]
        self.given: Tensor = rows[0] if len(rows) == 1 else torch.cat(rows)
        self.op: ReduceOp = WITHOUT_FACTOR.get(self._reduction.type, self._reduction)
        if op.dtype == torch.bool and self.op == ReduceOp.SUM:
            self.op = ReduceOp.MAX
        self._buffers = buffers

    def result(self) -> tuple[Tensor, Callable[[], object]]:
        """Flat memory for the result as it is stored, and the function that puts it into the outputs."""
        outputs, lands = self._buffers.outputs, self._buffers.lands
        memory, fill = landing(outputs)

        def land() -> None:
            if fill is not None:
                fill()
            for each in lands:
                each()

        return memory.view(self.stored), land

    @property
    def converted(self) -> bool:
        """Whether widened elements have another dtype than the result; ``given`` is then a copy."""
        return self.wide != self.stored

    def total(self, result: Tensor) -> Tensor:
        """Memory for widened elements in place of ``result``: its own, if the dtype allows that."""
        return room(len(result), self.wide) if self.converted else result

    def narrow(self, total: Tensor, result: Tensor) -> None:
        """Divide and round ``total`` into ``result``; both may be the same memory."""
        arithmetic.narrow(total, result, self._reduction, self._size)


def all_reduce(where: HostPlacement, submission: Submission) -> OpPlan:
    """The plan of an ``AllReduce``."""
    r = _Reduction(where, submission)
    result, land = r.result()
    total = r.given if r.converted else result
    if r.given.nbytes <= SMALL:
        return OpPlan([_by_leaders(where, r, total, result)], land)
    length = max(1, PIECE // r.given.itemsize)
    parts = [slice(start, start + length) for start in range(0, len(total), length)]
    return OpPlan([_in_parts(where, r, r.given[part], total[part], result[part]) for part in parts], land)


def _by_leaders(where: HostPlacement, r: _Reduction, total: Tensor, result: Tensor) -> PiecePlan:
    """To the leader, between leaders, back."""
    n = len(r.given)
    steps = _to_leader(where, r, total)
    if where.leads:
        steps.append(Leg(Lane.ACROSS, partial(_reduce_in_place, r, total)))
    if where.alone:
        return PiecePlan(steps, partial(r.narrow, total, result))

    def back() -> Call:
        op = Broadcast(r.stored, n, 0)
        if not where.leads:
            return Call(op, (), (result,), None)
        r.narrow(total, result)
        return Call(op, (result,), (), None)

    return PiecePlan([*steps, Leg(Lane.DOWN, back)])


def _to_leader(where: HostPlacement, r: _Reduction, total: Tensor) -> list[Leg]:
    """Reduce the contributions of this host into ``total``, on the leader."""
    if where.alone:
        if total.data_ptr() != r.given.data_ptr():
            total.copy_(r.given)
        return []

    def reduced() -> Call:
        op = Reduce(r.wide, len(r.given), 0, r.op)
        inputs = (r.given,)
        if not where.leads:
            return Call(op, inputs, (), None)
        return Call(op, inputs, inputs if _same(total, r.given) else (total,), None)

    return [Leg(Lane.UP, reduced)]


def _reduce_in_place(r: _Reduction, total: Tensor) -> Call:
    tensors = (total,)
    return Call(AllReduce(r.wide, len(total), r.op), tensors, tensors, None)


def _in_parts(where: HostPlacement, r: _Reduction, given: Tensor, total: Tensor, result: Tensor) -> PiecePlan:
    """Reduce-scatter inside the host, reduce on each rail, all-gather inside."""
    counts = cut(len(given), where.rails) + [0] * (len(where.local) - where.rails)
    parts, results = total.split_with_sizes(counts), result.split_with_sizes(counts)
    mine, my_result = parts[where.position], results[where.position]
    numel, uneven = counts_of(counts)
    layout = layout_of_shares(uneven)

    def inside() -> Call:
        op = ReduceScatter(r.wide, numel, r.op, layout=layout, counts=uneven)
        return Call(op, given.split_with_sizes(counts), (mine,), None)

    def together() -> Call:
        r.narrow(mine, my_result)
        return Call(AllGather(r.stored, numel, layout=layout, counts=uneven), (my_result,), tuple(results), None)

    steps = []
    if not where.alone:
        steps.append(Leg(Lane.UP, inside))
    elif not _same(mine, given):
        mine.copy_(given)
    if counts[where.position]:
        steps.append(Leg(Lane.ACROSS, partial(_reduce_in_place, r, mine)))
    if where.alone:
        return PiecePlan(steps, partial(r.narrow, mine, my_result))
    return PiecePlan([*steps, Leg(Lane.DOWN, together)])


def reduce(where: HostPlacement, submission: Submission) -> OpPlan:
    """The plan of a ``Reduce``: to the leaders, to the leader of the root's host, to the root."""
    op: Any = submission.op
    r = _Reduction(where, submission)
    n, root_host, root = len(r.given), where.host_of(op.root), where.position_of(op.root)
    here = root_host == where.host
    is_root = where.rank == op.root
    result, land = r.result() if is_root else (room(n if here and where.leads else 0, r.stored), None)
    total = r.total(result) if here else room(n if where.leads else 0, r.wide)
    steps = _to_leader(where, r, total)

    def to_root_host() -> Call:
        tensors = (total,)
        return Call(Reduce(r.wide, n, root_host, r.op), tensors, tensors if here else (), None)

    def to_root() -> Call:
        if not is_root:
            r.narrow(total, result)
        return between(where, op.root, result)

    if where.leads:
        steps.append(Leg(Lane.ACROSS, to_root_host))
    if here and root and (is_root or where.leads):
        return OpPlan([PiecePlan([*steps, Leg(Lane.DOWN, to_root)])], land)
    return OpPlan([PiecePlan(steps, partial(r.narrow, total, result) if is_root else None)], land)


def reduce_scatter(where: HostPlacement, submission: Submission) -> OpPlan:
    """The plan of a ``ReduceScatter`` or ``ReduceScatterSingle``."""
    op: Any = submission.op
    r = _Reduction(where, submission)
    counts = [r.each * n for n in getattr(op, "counts", ()) or [op.numel] * where.size]
    result, land = r.result()
    if where.even and r.given.nbytes > SMALL:
        return OpPlan([_scatter_on_rails(where, r, counts, result)], land)
    return OpPlan([_scatter_by_leaders(where, r, counts, result)], land)


def _scatter_on_rails(where: HostPlacement, r: _Reduction, counts: Sequence[int], result: Tensor) -> PiecePlan:
    """Inside the host each rank gets the shares of its rail, which the ranks of the rail then divide."""
    shares = r.given.split_with_sizes(list(counts))
    rails = list(zip(*where.hosts, strict=True))  # the ranks of each
    sizes = [[counts[rank] for rank in rail] for rail in rails]
    mine = sizes[where.position]
    partials = room(sum(mine), r.wide)
    total = r.total(result)

    def inside() -> Call:
        numel, uneven = counts_of([sum(each) for each in sizes])
        layout = layout_of([n for each in sizes for n in each])
        inputs = tuple([shares[rank] for rail in rails for rank in rail])
        op = ReduceScatter(r.wide, numel, r.op, layout=layout, counts=uneven)
        return Call(op, inputs, partials.split_with_sizes(mine), None)

    def across() -> Call:
        return _divided(r, mine, partials, total)

    return PiecePlan([Leg(Lane.UP, inside), Leg(Lane.ACROSS, across)], partial(r.narrow, total, result))


def _scatter_by_leaders(where: HostPlacement, r: _Reduction, counts: Sequence[int], result: Tensor) -> PiecePlan:
    """All shares to the leader, those of each host to its leader, and each to its rank."""
    if not where.in_order:
        shares = r.given.split_with_sizes(list(counts))
        r.given = torch.cat([shares[rank] for rank in where.order])
    leads = where.leads
    by_host = [sum([counts[rank] for rank in host]) for host in where.hosts]
    local = [counts[rank] for rank in where.local]
    total = room(len(r.given) if leads else 0, r.wide)
    ours = r.total(result) if where.alone else room(by_host[where.host] if leads else 0, r.wide)
    steps = _to_leader(where, r, total)
    if leads:
        steps.append(Leg(Lane.ACROSS, lambda: _divided(r, by_host, total, ours)))
    if where.alone:
        return PiecePlan(steps, partial(r.narrow, ours, result))

    def down() -> Call:
        sends = local if leads else [0] * len(local)
        receives = [len(result), *[0] * (len(local) - 1)]
        stored = room(len(ours), r.stored)
        r.narrow(ours, stored)
        op = AllToAll(r.stored, tuple(sends), tuple(receives))
        return Call(op, stored.split_with_sizes(sends), result.split_with_sizes(receives), None)

    return PiecePlan([*steps, Leg(Lane.DOWN, down)])


def _divided(r: _Reduction, counts: Sequence[int], shares: Tensor, output: Tensor) -> Call:
    """Reduce ``shares``, of ``counts`` elements for each rank of the lane, into this rank's ``output``."""
    numel, uneven = counts_of(counts)
    op = ReduceScatter(r.wide, numel, r.op, layout=layout_of_shares(uneven), counts=uneven)
    return Call(op, tuple(shares.split_with_sizes(list(counts))), (output,), None)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()
