"""The lowering of operations to NCCL calls: the calls, their memory, and torch's steps before and after them.

This module only builds plans; nothing runs. All calls of a batch become one group. Data that is not reduced moves as
bytes, directly from and to the tensors' own memory if that is plain. Tensors that NCCL cannot reduce directly (bools,
16-bit integers, strided or complex tensors) are converted on the stream; NCCL has no bitwise reductions, so these
become a gather and torch's own operations.

Several tensors, or shares of different sizes, become several calls in the group, without packing copies. The calls
depend on the operation alone, never on the memory layout of this rank's tensors: all ranks make the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.hazards import find, in_order
from asynccomm.backends.nccl.api import FLOAT8
from asynccomm.backends.nccl.plan import LoweredBatch
from asynccomm.backends.regions import adjoining, bytes_of
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Broadcast,
    Gather,
    Op,
    Recv,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    Send,
)
from asynccomm.ops.dtypes import REAL
from asynccomm.ops.reduce_op import RedOpType, ReduceOp

_SUM_LIKE: Final = frozenset({RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM})
_PLAIN: Final = frozenset({RedOpType.SUM, RedOpType.PRODUCT, RedOpType.MIN, RedOpType.MAX})
# a bool is a byte, 0 or 1
_OF_BOOLS: Final = {
    RedOpType.SUM: RedOpType.MAX,
    RedOpType.PRODUCT: RedOpType.MIN,
    RedOpType.MIN: RedOpType.MIN,
    RedOpType.MAX: RedOpType.MAX,
    RedOpType.BAND: RedOpType.MIN,
    RedOpType.BOR: RedOpType.MAX,
}
_BYTE: Final = torch.uint8
_OUT_OF_PLACE: Final = frozenset({Gather, Scatter, AllToAll, AllToAllSingle})  # lowered to sends and receives

Tensors = tuple[Tensor, ...]


def lower(submission: Submission, plan: LoweredBatch) -> None:
    """Add the lowered operation of ``submission`` to ``plan``."""
    op, inputs, outputs = submission.op, submission.inputs, submission.outputs
    plan.op = op
    for fill, tensor in submission.copies:
        plan.prepare(partial(fill, tensor))
    copied, staged = find(op, inputs, outputs, plan.rank, _OUT_OF_PLACE)
    if copied:
        inputs = tuple([plan.snapshot(tensor) if i in copied else tensor for i, tensor in enumerate(inputs)])
    if not staged:
        _lower(plan, op, inputs, outputs)
        return
    places = tuple([plan.room(output.numel(), output.dtype).view(output.shape) for output in outputs])
    _lower(plan, op, inputs, places)
    lands = [partial(arithmetic.write, *pair) for pair in zip(outputs, places, strict=True)]
    for land in in_order(op, len(inputs), lands):
        plan.finish(land)


def _lower(plan: LoweredBatch, op: Op, inputs: Tensors, outputs: Tensors) -> None:
    match op:
        case AllReduce(reduction=reduction):
            how = _ReductionPlan(plan, op.dtype, reduction)
            for source, output in zip(inputs, outputs, strict=True):
                _reduce(plan, "all_reduce", source, output, how)
        case Reduce(reduction=reduction, root=root):
            how = _ReductionPlan(plan, op.dtype, reduction)
            _reduce(plan, "reduce", inputs[0], outputs[0] if outputs else None, how, root)
        case ReduceScatterSingle(reduction=reduction):
            _reduce_scatter_single(plan, inputs[0], outputs[0], reduction)
        case ReduceScatter():
            _reduce_scatter(plan, op, inputs, outputs)
        case Broadcast(root=root):
            for tensor in inputs or outputs:
                memory = plan.source(tensor) if root == plan.rank else plan.target(tensor)
                plan.call("broadcast", memory, memory, memory.numel(), peer=root)
        case AllGatherSingle():
            _all_gather_single(plan, inputs[0], outputs[0])
        case AllGather():
            _all_gather(plan, op, inputs, outputs)
        case Gather(root=root):
            _gather(plan, inputs[0], outputs, root)
        case Scatter(root=root):
            _scatter(plan, inputs, outputs[0], root)
        case AllToAllSingle():
            _all_to_all_single(plan, inputs[0], outputs[0])
        case AllToAll():
            _all_to_all(plan, inputs, outputs)
        case Send(peer=peer):  # within a graph only: other messages are matched on the host
            plan.call("send", plan.source(inputs[0]), None, inputs[0].nbytes, peer=peer)
        case Recv(peer=peer):
            if peer is None:
                raise ValueError("a receive within a CUDA graph must name its source: src=")
            plan.call("recv", None, plan.target(outputs[0]), outputs[0].nbytes, peer=peer)
        case other:
            raise AssertionError(f"no such collective: {other}")


# -- data movement -------------------------------------------------------------------------------------------------


def _all_gather_single(plan: LoweredBatch, source: Tensor, output: Tensor) -> None:
    target = plan.target(output)
    plan.call("all_gather", plan.source(source), target, source.nbytes)


def _all_gather(plan: LoweredBatch, op: AllGather, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    if not op.counts and len(inputs) == 1:
        whole = adjoining(outputs)
        if whole is None:
            whole = plan.room(sum([output.nbytes for output in outputs]), _BYTE)
            _spread(plan, whole, outputs)
        _all_gather_single(plan, inputs[0], whole)
        return
    count = len(inputs)
    sources = [plan.source(source) for source in inputs]
    for i, output in enumerate(outputs):
        root, which = divmod(i, count)
        target = plan.target(output)
        plan.call("broadcast", sources[which] if root == plan.rank else target, target, target.numel(), peer=root)


def _gather(plan: LoweredBatch, source: Tensor, outputs: Sequence[Tensor], root: int) -> None:
    share = source.nbytes
    data = plan.source(source)
    whole = adjoining(outputs) if outputs else None
    if "gather" in plan.ability.native:
        target = None
        if outputs:
            target = whole if whole is not None else plan.room(share * plan.size, _BYTE)
            if whole is None:
                _spread(plan, target, outputs)
        plan.call("gather", data, target, share, peer=root)
        return
    plan.call("send", data, None, share, peer=root)
    for rank, output in enumerate(outputs):
        plan.call("recv", None, plan.target(output), share, peer=rank)


def _scatter(plan: LoweredBatch, inputs: Sequence[Tensor], output: Tensor, root: int) -> None:
    share = output.nbytes
    if "scatter" in plan.ability.native:
        source = None
        if inputs:
            whole = adjoining(inputs)
            source = plan.room(share * plan.size, _BYTE) if whole is None else whole
            if whole is None:
                _collect(plan, source, inputs)
        plan.call("scatter", source, plan.target(output), share, peer=root)
        return
    for rank, tensor in enumerate(inputs):
        plan.call("send", plan.source(tensor), None, share, peer=rank)
    plan.call("recv", None, plan.target(output), share, peer=root)


def _all_to_all_single(plan: LoweredBatch, source: Tensor, output: Tensor) -> None:
    target = plan.target(output)
    data = plan.source(source)
    share = target.numel() // plan.size
    if "all_to_all" in plan.ability.native:
        plan.call("all_to_all", data, target, share)
        return
    for rank in range(plan.size):
        part = slice(rank * share, (rank + 1) * share)
        plan.call("send", data[part], None, share, peer=rank)
        plan.call("recv", None, target[part], share, peer=rank)


def _all_to_all(plan: LoweredBatch, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    for rank, (source, output) in enumerate(zip(inputs, outputs, strict=True)):
        plan.call("send", plan.source(source), None, source.nbytes, peer=rank)
        plan.call("recv", None, plan.target(output), output.nbytes, peer=rank)


def _collect(plan: LoweredBatch, memory: Tensor, tensors: Sequence[Tensor]) -> None:
    """Before the calls, copy ``tensors`` into consecutive bytes of ``memory``."""
    for part, tensor in zip(memory.split_with_sizes([tensor.nbytes for tensor in tensors]), tensors, strict=True):
        plan.prepare(partial(arithmetic.write, part.view(tensor.dtype).view(tensor.shape), tensor))


def _spread(plan: LoweredBatch, memory: Tensor, tensors: Sequence[Tensor]) -> None:
    """After the calls, copy consecutive bytes of ``memory`` into ``tensors``."""
    for part, tensor in zip(memory.split_with_sizes([tensor.nbytes for tensor in tensors]), tensors, strict=True):
        plan.finish(partial(arithmetic.write, tensor, part.view(tensor.dtype).view(tensor.shape)))


# -- reductions ----------------------------------------------------------------------------------------------------


@final
class _ReductionPlan:
    """The plan of one reduction of tensors of one dtype.

    NCCL reduces memory of dtype ``dtype`` by ``kind``; a ``kind`` of None means that NCCL has no such reduction.
    """

    def __init__(self, plan: LoweredBatch, dtype: torch.dtype, reduction: ReduceOp) -> None:
        self._plan = plan
        if isinstance(reduction.factor, Tensor) and reduction.factor.device.type == "cpu":
            reduction = ReduceOp.PREMUL_SUM(reduction.factor.item())  # a copy to the device would wait for the stream
        self.given = reduction
        kind = reduction.type
        self.bools = dtype == torch.bool
        self.pairs = 2 if dtype.is_complex else 1
        self.kind: RedOpType | None = kind
        self._as_it_is = False  # whether tensors need no conversion
        self.factor: Tensor | None = None
        if self.bools:
            self.dtype, self.kind, self._as_it_is = _BYTE, _OF_BOOLS.get(kind), True
        elif kind in (RedOpType.SUM, RedOpType.AVG) and dtype in (torch.complex64, torch.complex128):
            self.dtype, self._as_it_is = REAL[dtype], True
        elif kind in _PLAIN and dtype in plan.ability.dtypes:
            self.dtype, self._as_it_is = dtype, True
        elif kind in (RedOpType.AVG, RedOpType.PREMUL_SUM) and self._can_scale(dtype):
            self.dtype, self._as_it_is = dtype, True
            if kind is RedOpType.PREMUL_SUM:
                self.factor = self._scalar(reduction, dtype)
        else:
            self.dtype = arithmetic.accumulator(dtype, kind)
            if kind in _SUM_LIKE:  # ``widen`` applies the factor, ``narrow`` divides
                self.kind = RedOpType.SUM
            elif kind not in _PLAIN:
                self.kind = None

    def _can_scale(self, dtype: torch.dtype) -> bool:
        """Whether NCCL multiplies and divides values of ``dtype``, as its users would."""
        alone = self._plan.size == 1  # NCCL (2.30) has a kernel of its own for one rank, without float8
        return dtype.is_floating_point and dtype in self._plan.ability.dtypes and not (alone and dtype in FLOAT8)

    def _scalar(self, reduction: ReduceOp, dtype: torch.dtype) -> Tensor:
        memory = self._plan.room(1, dtype)
        factor = reduction.factor
        if isinstance(factor, Tensor):
            self._plan.prepare(partial(arithmetic.write, memory, factor.detach().reshape(1)))
        else:
            assert isinstance(factor, (int, float))
            self._plan.prepare(partial(memory.fill_, factor))
        return memory

    def _serves(self, tensor: Tensor) -> bool:
        """Whether NCCL can use ``tensor`` without a view of it: the usual case, on the path of every call."""
        same = self._as_it_is and self.kind is not None and tensor.dtype is self.dtype
        return same and arithmetic.is_plain(tensor)

    def source(self, tensor: Tensor) -> Tensor:
        """This rank's contribution, as memory of ``dtype``; flat if torch combines it."""
        plan = self._plan
        if self._serves(tensor):
            return tensor
        if self._as_it_is:
            return plan.source(tensor).view(self.dtype)
        memory = plan.room(self.pairs * tensor.numel(), self.dtype)
        plan.prepare(lambda: memory.copy_(arithmetic.widen(tensor, self.given)))
        return memory

    def target(self, output: Tensor) -> Tensor:
        """Memory for the result: that of ``output``, or new memory with a later copy."""
        if self._serves(output):
            return output
        if self._as_it_is and arithmetic.is_plain(output):
            return bytes_of(output).view(self.dtype)
        memory = self._plan.room(self.pairs * output.numel(), self.dtype)
        self.land(memory, output)
        return memory

    def land(self, memory: Tensor, output: Tensor) -> None:
        """After the calls, convert and copy the result from ``memory`` to ``output``."""
        if self._as_it_is:
            values = memory.view(_BYTE).view(output.dtype).view(output.shape)
            self._plan.finish(partial(arithmetic.write, output, values))
        else:
            self._plan.finish(partial(arithmetic.narrow, memory, output, self.given, self._plan.size))

    def combine(self, rows: Tensor, output: Tensor) -> None:
        """Reduce ``rows``, one from each rank, by torch's operations."""
        given, size = self.given, self._plan.size

        def step() -> None:
            arithmetic.narrow(arithmetic.combine(rows, given, bools=self.bools), output, given, size)

        self._plan.finish(step)


def _reduce(
    plan: LoweredBatch,
    name: str,
    source: Tensor,
    output: Tensor | None,
    how: _ReductionPlan,
    root: int = -1,
) -> None:
    """Lower all_reduce, or a reduce to ``root``."""
    in_place = output is source
    data = how.source(source)
    if how.kind is None:
        rows = None
        if output is not None:
            rows = plan.room(plan.size * data.numel(), how.dtype)
            how.combine(rows.view(plan.size, -1), output)
        _collect_rows(plan, data, rows, root)
        return
    target = None
    if in_place:
        target = data
        if data.data_ptr() != source.data_ptr():
            how.land(data, source)
    elif output is not None:
        target = how.target(output)
    plan.call(name, data, target, data.numel(), how.dtype, root, how.kind, how.factor)


def _collect_rows(plan: LoweredBatch, data: Tensor, rows: Tensor | None, root: int) -> None:
    share = data.nbytes
    received = None if rows is None else rows.view(_BYTE)
    if root < 0:
        plan.call("all_gather", data.view(_BYTE), received, share)
        return
    plan.call("send", data.view(_BYTE), None, share, peer=root)
    if received is not None:
        for rank in range(plan.size):
            plan.call("recv", None, received[rank * share : (rank + 1) * share], share, peer=rank)


def _reduce_scatter_single(plan: LoweredBatch, source: Tensor, output: Tensor, reduction: ReduceOp) -> None:
    how = _ReductionPlan(plan, source.dtype, reduction)
    share = how.pairs * output.numel()
    if how.kind is None:
        data = how.source(source)
        rows = plan.room(plan.size * share, how.dtype)
        _exchange_rows(plan, [data[i * share : (i + 1) * share] for i in range(plan.size)], rows)
        how.combine(rows.view(plan.size, -1), output)
        return
    plan.call("reduce_scatter", how.source(source), how.target(output), share, how.dtype, -1, how.kind, how.factor)


def _reduce_scatter(plan: LoweredBatch, op: ReduceScatter, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    count = len(outputs)
    if not op.counts and count == 1:
        whole = adjoining(inputs)
        if whole is None:
            whole = plan.room(sum([tensor.nbytes for tensor in inputs]), _BYTE)
            _collect(plan, whole, inputs)
        _reduce_scatter_single(plan, whole.view(op.dtype), outputs[0], op.reduction)
        return
    how = _ReductionPlan(plan, op.dtype, op.reduction)
    sources = [how.source(tensor) for tensor in inputs]
    for which, output in enumerate(outputs):
        mine = sources[which::count]
        if how.kind is None:
            rows = plan.room(plan.size * how.pairs * output.numel(), how.dtype)
            _exchange_rows(plan, mine, rows)
            how.combine(rows.view(plan.size, -1), output)
            continue
        target = how.target(output)
        for root, data in enumerate(mine):
            own = target if root == plan.rank else None
            plan.call("reduce", data, own, data.numel(), how.dtype, root, how.kind, how.factor)


def _exchange_rows(plan: LoweredBatch, shares: Sequence[Tensor], rows: Tensor) -> None:
    """Send each rank its share, and receive all ranks' shares for this rank, as rows."""
    received = rows.view(_BYTE).chunk(plan.size) if rows.numel() else [rows.view(_BYTE)] * plan.size
    for rank, (share, row) in enumerate(zip(shares, received, strict=True)):
        plan.call("send", share.view(_BYTE), None, share.nbytes, peer=rank)
        plan.call("recv", None, row, row.nbytes, peer=rank)
