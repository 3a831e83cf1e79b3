"""The operations that combine the ranks' tensors: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex, final

import torch
from torch import Tensor

from asynccomm.ops.base import Call, TensorOp, layout_of, layout_of_shares
from asynccomm.ops.reduce_op import RedOpType, ReduceOp
from asynccomm.ops.validation import (
    CommInfo,
    as_list,
    check_dtype,
    check_length,
    check_list,
    check_numel,
    check_pair,
    check_rank,
    check_reduction,
    check_tensor,
    counts_of,
    divided,
    empty_like,
)

MOST_KNOWN = 1024  # cached all_reduce operations


@final
@dataclass(frozen=True, slots=True)
class AllReduce(TensorOp):
    """``outputs[i]`` becomes the reduction of all ranks' ``inputs[i]``, bitwise the same on all ranks.

    The outputs are the inputs, or other tensors with as many elements.
    """

    kind = "all_reduce"
    reduction: ReduceOp = field()

    @classmethod
    def of(cls, group: CommInfo, tensor: Tensor, op: object, out: Tensor | None = None) -> Call:
        check_tensor(group, "tensor", tensor, written=out is None)
        value = _all_reduce(tensor.dtype, tensor.numel(), op)
        inputs = (tensor,)
        if out is None:
            return Call(value, inputs, inputs, tensor)
        _check_out(group, out, tensor)
        return Call(value, inputs, (out,), out)

    @classmethod
    def of_several(cls, group: CommInfo, tensors: Sequence[Tensor], op: object) -> Call:
        """Reduce ``tensors``, all of one dtype, in one operation."""
        items = tuple(tensors)
        dtype = items[0].dtype
        numels = [tensor.numel() for tensor in items]
        value = cls(dtype, sum(numels), check_reduction(op, dtype), layout=layout_of(numels))
        return Call(value, items, items, tensors)


@final
@dataclass(frozen=True, slots=True)
class Reduce(TensorOp):
    """On the root the output becomes the reduction; the other ranks' tensors stay unchanged."""

    kind = "reduce"
    one_sided = True
    root: int = field()
    reduction: ReduceOp = field()

    @classmethod
    def of(cls, group: CommInfo, tensor: Tensor, root: SupportsIndex, op: object, out: Tensor | None = None) -> Call:
        rank = check_rank(group, "root", root)
        mine = rank == group.rank
        check_tensor(group, "tensor", tensor, written=mine and out is None)
        reduction = check_reduction(op, tensor.dtype)
        value = cls(tensor.dtype, tensor.numel(), rank, reduction)
        inputs = (tensor,)
        if out is not None:
            _check_out(group, out, tensor)
        if not mine:
            return Call(value, inputs, (), None)
        return Call(value, inputs, inputs if out is None else (out,), tensor if out is None else out)


@final
@dataclass(frozen=True, slots=True)
class ReduceScatter(TensorOp):
    """The outputs become the reduction over all ranks of the inputs for this rank.

    There are k outputs and ``size * k`` inputs; those for rank r start at ``r * k``. ``counts`` holds the number of
    elements of each rank's outputs, and is empty if all are equal; ``numel`` is the largest of them.
    """

    kind = "reduce_scatter"
    split = True
    reduction: ReduceOp = field()
    counts: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def one_sided(self) -> bool:  # type: ignore[override]  # a class attribute of all other operations
        return bool(self.counts)

    @classmethod
    def of(cls, group: CommInfo, output: Tensor | None, input_list: Sequence[Tensor], op: object) -> Call:
        like_name = "output"
        if output is None:
            inputs = as_list("input_list", input_list)
            check_length("input_list", inputs, group.size)
            like_name = f"input_list[{group.rank}]"
            check_tensor(group, like_name, inputs[group.rank])
            output = empty_like(inputs[group.rank])
        else:
            check_tensor(group, "output", output, written=True)
        inputs, target, numels = check_list(group, "input_list", input_list, output, like_name)
        mine = numels[group.rank]
        if mine != target.numel():
            check_numel("output", target, mine, f"as many as input_list[{group.rank}]")
        numel, counts = counts_of(numels)
        reduction = check_reduction(op, target.dtype, paired=inputs is not input_list)
        value = cls(target.dtype, numel, reduction, layout=layout_of_shares(counts), counts=counts)
        return Call(value, tuple(inputs), (target,), output)

    @classmethod
    def of_several(
        cls, group: CommInfo, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: object
    ) -> Call:
        """Reduce ``inputs[r]`` for each rank r, as many as outputs and all of one dtype, in one operation."""
        dtype = outputs[0].dtype
        numels = [tensor.numel() for tensor in outputs]
        value = cls(dtype, sum(numels), check_reduction(op, dtype), layout=layout_of(numels))
        return Call(value, tuple([tensor for share in inputs for tensor in share]), tuple(outputs), outputs)


@final
@dataclass(frozen=True, slots=True)
class ReduceScatterSingle(TensorOp):
    """``output`` becomes chunk ``rank`` of the reduction of all inputs, each of ``size`` times as many elements."""

    kind = "reduce_scatter_single"
    split = True
    reduction: ReduceOp = field()

    @classmethod
    def of(cls, group: CommInfo, output: Tensor | None, input: Tensor, op: object) -> Call:
        check_tensor(group, "input", input)
        source = input
        if output is None:
            output = target = input.new_empty(divided("input", input, group.size), requires_grad=False)
        else:
            target, source = check_pair(group, output, input)
            numel = group.size * target.numel()
            if source.numel() != numel:
                check_numel("input", source, numel, f"{group.size} (ranks) x {target.numel()} (output)")
        reduction = check_reduction(op, source.dtype, paired=output.dtype != input.dtype)
        return Call(cls(source.dtype, target.numel(), reduction), (source,), (target,), output)


_known: dict[tuple[torch.dtype, int, RedOpType], AllReduce] = {}


def _all_reduce(dtype: torch.dtype, numel: int, op: object) -> AllReduce:
    """The checked operation; cached, because programs repeat equal calls."""
    if type(op) is not ReduceOp or op.factor is not None:
        return AllReduce(dtype, numel, check_reduction(op, dtype))
    key = dtype, numel, op.type
    value = _known.get(key)
    if value is None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        value = _known[key] = AllReduce(dtype, numel, check_reduction(op, dtype))
    return value


def _check_out(group: CommInfo, out: Tensor, tensor: Tensor) -> None:
    check_tensor(group, "out", out, written=True)
    check_dtype("out", out, "tensor", tensor)
    check_numel("out", out, tensor.numel(), "as many as tensor")
