"""Every collective as a frozen value, with all its argument checks.

``AllReduce.of(group, tensor, op)`` looks at the arguments of one call, raises ``TypeError`` or ``ValueError`` naming
the argument and the value, and returns a :class:`Call`: the description (an :class:`Op`: no tensors, so it can be
compared, printed, pickled and kept), the tensors that are read, those that are written, and what ``await`` will return.
A backend never has to check an argument again.

What is common to all of them:

- tensors are dense and live on the comm's device; any shape, strides and zero sizes are fine, only a written tensor
  must not overlap itself (``expand``);
- all tensors of one call have one dtype;
- where one tensor stands for all ranks ("single" forms) only the number of elements counts and the flat, row-major
  order: ``(size * n, ...)`` (concatenated) and ``(size, n, ...)`` (stacked) are the same;
- a rank is anything with ``__index__`` except a bool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, SupportsIndex, final

import torch
from torch import Tensor

from asynccomm.checks import (
    Group,
    as_list,
    check_dtype,
    check_length,
    check_list,
    check_numel,
    check_rank,
    check_reduction,
    check_tag,
    check_tensor,
    divided,
    empty_like,
    times,
)
from asynccomm.reduce_op import ReduceOp

__all__ = [
    "AllGather",
    "AllGatherSingle",
    "AllReduce",
    "AllToAllSingle",
    "Barrier",
    "Broadcast",
    "Call",
    "Gather",
    "Op",
    "Recv",
    "Reduce",
    "ReduceScatter",
    "ReduceScatterSingle",
    "Scatter",
    "Send",
    "TensorOp",
]


@dataclass(frozen=True, slots=True)
class Op:
    """What one rank asked for. Equal on all ranks unless a field is marked as the rank's own."""

    kind: ClassVar[str]
    p2p: ClassVar[bool] = False  # point-to-point operations stand outside the sequence of collectives

    @property
    def nbytes(self) -> int:
        """Size of one rank's share, the same on all ranks."""
        return 0

    def fits(self, other: Op) -> bool:
        """Whether ``other``, issued by another rank at the same place, is the same collective."""
        return self == other


@dataclass(frozen=True, slots=True)
class TensorOp(Op):
    """An operation on tensors of one dtype.

    ``numel`` are the elements of one rank's tensor: its input, or with reduce_scatter and scatter its output.
    """

    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Call(NamedTuple):
    """One checked call."""

    op: Op
    inputs: tuple[Tensor, ...]  #: read; never written unless also in ``outputs``
    outputs: tuple[Tensor, ...]  #: written
    result: Any  #: what awaiting gives: a tensor, a list of tensors, or None


@final
@dataclass(frozen=True, slots=True)
class AllReduce(TensorOp):
    """In place, on all ranks; bitwise the same everywhere."""

    kind = "all_reduce"
    reduction: ReduceOp

    @classmethod
    def of(cls, group: Group, tensor: Tensor, op: object) -> Call:
        check_tensor(group, "tensor", tensor, written=True)
        reduction = check_reduction(op, tensor.dtype)
        both = (tensor,)
        return Call(cls(tensor.dtype, tensor.numel(), reduction), both, both, tensor)

    def fits(self, other: Op) -> bool:
        return type(other) is AllReduce and _reductions_fit(self, other)

    def __str__(self) -> str:
        return f"all_reduce({_elements(self)}, {self.reduction})"


@final
@dataclass(frozen=True, slots=True)
class Broadcast(TensorOp):
    """In place: read on the root, written elsewhere."""

    kind = "broadcast"
    root: int

    @classmethod
    def of(cls, group: Group, tensor: Tensor, root: SupportsIndex) -> Call:
        rank = check_rank(group, "root", root)
        mine = rank == group.rank
        check_tensor(group, "tensor", tensor, written=not mine)
        op = cls(tensor.dtype, tensor.numel(), rank)
        return Call(op, (tensor,) if mine else (), () if mine else (tensor,), tensor)

    def __str__(self) -> str:
        return f"broadcast({_elements(self)}, root={self.root})"


@final
@dataclass(frozen=True, slots=True)
class Reduce(TensorOp):
    """In place on the root; the other ranks' tensors stay as they were."""

    kind = "reduce"
    root: int
    reduction: ReduceOp

    @classmethod
    def of(cls, group: Group, tensor: Tensor, root: SupportsIndex, op: object) -> Call:
        rank = check_rank(group, "root", root)
        mine = rank == group.rank
        check_tensor(group, "tensor", tensor, written=mine)
        reduction = check_reduction(op, tensor.dtype)
        value = cls(tensor.dtype, tensor.numel(), rank, reduction)
        both = (tensor,)
        return Call(value, both, both if mine else (), tensor if mine else None)

    def fits(self, other: Op) -> bool:
        return type(other) is Reduce and self.root == other.root and _reductions_fit(self, other)

    def __str__(self) -> str:
        return f"reduce({_elements(self)}, root={self.root}, {self.reduction})"


@final
@dataclass(frozen=True, slots=True)
class AllGather(TensorOp):
    """``outputs[r]`` becomes rank r's tensor."""

    kind = "all_gather"

    @classmethod
    def of(cls, group: Group, tensor_list: Sequence[Tensor] | None, tensor: Tensor) -> Call:
        check_tensor(group, "tensor", tensor)
        if tensor_list is None:
            tensor_list = [empty_like(tensor) for _ in range(group.size)]
        else:
            tensor_list = check_list(group, "tensor_list", tensor_list, tensor, written=True)
        return Call(cls(tensor.dtype, tensor.numel()), (tensor,), tuple(tensor_list), tensor_list)

    def __str__(self) -> str:
        return f"all_gather({_elements(self)})"


@final
@dataclass(frozen=True, slots=True)
class AllGatherSingle(TensorOp):
    """All ranks' tensors, in rank order, in one output of ``size`` times as many elements."""

    kind = "all_gather_single"

    @classmethod
    def of(cls, group: Group, output: Tensor | None, input: Tensor) -> Call:
        check_tensor(group, "input", input)
        if output is None:
            output = input.new_empty(times(input.shape, group.size), requires_grad=False)
        else:
            check_tensor(group, "output", output, written=True)
            check_dtype("output", output, "input", input)
            check_numel("output", output, group.size * input.numel(), f"{group.size} (ranks) x {input.numel()} (input)")
        return Call(cls(input.dtype, input.numel()), (input,), (output,), output)

    def __str__(self) -> str:
        return f"all_gather_single({_elements(self)})"


@final
@dataclass(frozen=True, slots=True)
class ReduceScatter(TensorOp):
    """``output`` becomes the reduction over all ranks of ``input_list[rank]``."""

    kind = "reduce_scatter"
    reduction: ReduceOp

    @classmethod
    def of(cls, group: Group, output: Tensor | None, input_list: Sequence[Tensor], op: object) -> Call:
        if output is None:
            inputs = as_list("input_list", input_list)
            check_length("input_list", inputs, group.size)
            mine = f"input_list[{group.rank}]"
            check_tensor(group, mine, inputs[group.rank])
            inputs = check_list(group, "input_list", inputs, inputs[group.rank], like_name=mine)
            output = empty_like(inputs[group.rank])
        else:
            check_tensor(group, "output", output, written=True)
            inputs = check_list(group, "input_list", input_list, output, like_name="output")
        reduction = check_reduction(op, output.dtype)
        return Call(cls(output.dtype, output.numel(), reduction), tuple(inputs), (output,), output)

    def fits(self, other: Op) -> bool:
        return type(other) is ReduceScatter and _reductions_fit(self, other)

    def __str__(self) -> str:
        return f"reduce_scatter({_elements(self)}, {self.reduction})"


@final
@dataclass(frozen=True, slots=True)
class ReduceScatterSingle(TensorOp):
    """``output`` becomes chunk ``rank`` of the reduction of all inputs, each of ``size`` times as many elements."""

    kind = "reduce_scatter_single"
    reduction: ReduceOp

    @classmethod
    def of(cls, group: Group, output: Tensor | None, input: Tensor, op: object) -> Call:
        check_tensor(group, "input", input)
        if output is None:
            output = input.new_empty(divided("input", input, group.size), requires_grad=False)
        else:
            check_tensor(group, "output", output, written=True)
            check_dtype("output", output, "input", input)
            check_numel(
                "input", input, group.size * output.numel(), f"{group.size} (ranks) x {output.numel()} (output)"
            )
        reduction = check_reduction(op, input.dtype)
        return Call(cls(input.dtype, output.numel(), reduction), (input,), (output,), output)

    def fits(self, other: Op) -> bool:
        return type(other) is ReduceScatterSingle and _reductions_fit(self, other)

    def __str__(self) -> str:
        return f"reduce_scatter_single({_elements(self)}, {self.reduction})"


@final
@dataclass(frozen=True, slots=True)
class Scatter(TensorOp):
    """``output`` becomes the root's ``input_list[rank]``."""

    kind = "scatter"
    root: int

    @classmethod
    def of(cls, group: Group, output: Tensor, input_list: Sequence[Tensor] | None, root: SupportsIndex) -> Call:
        rank = check_rank(group, "root", root)
        check_tensor(group, "output", output, written=True)
        inputs: Sequence[Tensor] = ()
        if rank == group.rank:
            if input_list is None:
                raise ValueError(f"input_list must be given on the root (rank {rank}), got None")
            inputs = check_list(group, "input_list", input_list, output, like_name="output")
        elif input_list is not None and len(as_list("input_list", input_list)):
            raise ValueError(
                f"input_list must be None or empty off the root: this is rank {group.rank}, the root is {rank}, "
                f"got {len(input_list)} tensors"
            )
        return Call(cls(output.dtype, output.numel(), rank), tuple(inputs), (output,), output)

    def __str__(self) -> str:
        return f"scatter({_elements(self)}, root={self.root})"


@final
@dataclass(frozen=True, slots=True)
class Gather(TensorOp):
    """On the root ``outputs[r]`` becomes rank r's tensor."""

    kind = "gather"
    root: int

    @classmethod
    def of(cls, group: Group, output_list: Sequence[Tensor] | None, input: Tensor, root: SupportsIndex) -> Call:
        rank = check_rank(group, "root", root)
        check_tensor(group, "input", input)
        outputs: Sequence[Tensor] | None = None
        if rank == group.rank:
            if output_list is None:
                outputs = [empty_like(input) for _ in range(group.size)]
            else:
                outputs = check_list(group, "output_list", output_list, input, like_name="input", written=True)
        elif output_list is not None and len(as_list("output_list", output_list)):
            raise ValueError(
                f"output_list must be None or empty off the root: this is rank {group.rank}, the root is {rank}, "
                f"got {len(output_list)} tensors"
            )
        return Call(cls(input.dtype, input.numel(), rank), (input,), tuple(outputs or ()), outputs)

    def __str__(self) -> str:
        return f"gather({_elements(self)}, root={self.root})"


@final
@dataclass(frozen=True, slots=True)
class AllToAllSingle(TensorOp):
    """Chunk ``r`` of the input goes to rank r; chunk ``s`` of the output came from rank s; all chunks are equal."""

    kind = "all_to_all_single"

    @classmethod
    def of(cls, group: Group, output: Tensor | None, input: Tensor) -> Call:
        check_tensor(group, "input", input)
        if output is None:
            output = empty_like(input)
        else:
            check_tensor(group, "output", output, written=True)
            check_dtype("output", output, "input", input)
            check_numel("output", output, input.numel(), "as many as input")
        if input.numel() % group.size:
            raise ValueError(
                f"input must divide evenly among {group.size} ranks, got {input.numel()} elements "
                f"(shape {tuple(input.shape)})"
            )
        return Call(cls(input.dtype, input.numel()), (input,), (output,), output)

    def __str__(self) -> str:
        return f"all_to_all_single({_elements(self)})"


@final
@dataclass(frozen=True, slots=True)
class Barrier(Op):
    """Done when every rank has called it."""

    kind = "barrier"

    @classmethod
    def of(cls, group: Group) -> Call:
        return Call(cls(), (), (), None)

    def __str__(self) -> str:
        return "barrier()"


@final
@dataclass(frozen=True, slots=True)
class Send(TensorOp):
    """To ``peer`` under ``tag``."""

    kind = "send"
    p2p = True
    peer: int
    tag: int

    @classmethod
    def of(cls, group: Group, tensor: Tensor, dst: SupportsIndex, tag: SupportsIndex) -> Call:
        rank = check_rank(group, "dst", dst)
        check_tensor(group, "tensor", tensor)
        return Call(cls(tensor.dtype, tensor.numel(), rank, check_tag(tag)), (tensor,), (), tensor)

    def __str__(self) -> str:
        return f"send({_elements(self)}, dst={self.peer}, tag={self.tag})"


@final
@dataclass(frozen=True, slots=True)
class Recv(TensorOp):
    """From ``peer``, or from any rank if that is None, under ``tag``."""

    kind = "recv"
    p2p = True
    peer: int | None
    tag: int

    @classmethod
    def of(cls, group: Group, tensor: Tensor, src: SupportsIndex | None, tag: SupportsIndex) -> Call:
        rank = None if src is None else check_rank(group, "src", src)
        check_tensor(group, "tensor", tensor, written=True)
        return Call(cls(tensor.dtype, tensor.numel(), rank, check_tag(tag)), (), (tensor,), tensor)

    def takes(self, send: Send) -> bool:
        """Whether a message sent so fits into this receive."""
        return self.dtype == send.dtype and self.numel == send.numel

    def __str__(self) -> str:
        return f"recv({_elements(self)}, src={'any' if self.peer is None else self.peer}, tag={self.tag})"


def _elements(op: TensorOp) -> str:
    return f"{str(op.dtype).removeprefix('torch.')}[{op.numel}]"


def _reductions_fit(mine: Any, other: Any) -> bool:
    # each rank has its own factor, so only the kind of the reduction must agree
    return bool(mine.dtype == other.dtype and mine.numel == other.numel and mine.reduction.type is other.reduction.type)
