"""Every collective as a frozen value, with all its argument checks.

``AllReduce.of(group, tensor, op)`` looks at the arguments of one call, raises ``TypeError`` or ``ValueError`` naming the
argument and the value, and returns a :class:`Call`: the description (an :class:`Op`: no tensors, so it can be compared,
printed, pickled and kept), the tensors that are read, those that are written, and what ``await`` will return.
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

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, SupportsIndex, final

import torch
from torch import Tensor

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
    "Group",
    "Op",
    "Recv",
    "Reduce",
    "ReduceScatter",
    "ReduceScatterSingle",
    "Scatter",
    "Send",
]


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Who takes part, seen from one rank: what argument checks need to know."""

    name: str
    rank: int
    size: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Op:
    """What one rank asked for. Equal on all ranks unless a field is marked as the rank's own."""

    kind: ClassVar[str]
    p2p: ClassVar[bool] = False  # point-to-point operations stand outside the sequence of collectives

    def fits(self, other: Op) -> bool:
        """Whether ``other``, issued by another rank at the same place, is the same collective."""
        return self == other


class Call(NamedTuple):
    """One checked call."""

    op: Op
    inputs: tuple[Tensor, ...]  #: read; never written unless also in ``outputs``
    outputs: tuple[Tensor, ...]  #: written
    result: Any  #: what awaiting gives: a tensor, a list of tensors, or None


@final
@dataclass(frozen=True, slots=True)
class AllReduce(Op):
    """In place, on all ranks; bitwise the same everywhere."""

    kind = "all_reduce"
    dtype: torch.dtype
    numel: int
    reduction: ReduceOp

    @classmethod
    def of(cls, group: Group, tensor: Tensor, op: object) -> Call:
        _check_tensor(group, "tensor", tensor, written=True)
        reduction = _check_reduction(op, tensor.dtype)
        return Call(cls(tensor.dtype, tensor.numel(), reduction), (tensor,), (tensor,), tensor)

    def fits(self, other: Op) -> bool:
        return type(other) is AllReduce and _reductions_fit(self, other)

    def __str__(self) -> str:
        return f"all_reduce({_elements(self)}, {self.reduction})"


@final
@dataclass(frozen=True, slots=True)
class Broadcast(Op):
    """In place: read on the root, written elsewhere."""

    kind = "broadcast"
    dtype: torch.dtype
    numel: int
    root: int

    @classmethod
    def of(cls, group: Group, tensor: Tensor, root: SupportsIndex) -> Call:
        rank = _check_rank(group, "root", root)
        mine = rank == group.rank
        _check_tensor(group, "tensor", tensor, written=not mine)
        op = cls(tensor.dtype, tensor.numel(), rank)
        return Call(op, (tensor,) if mine else (), () if mine else (tensor,), tensor)

    def __str__(self) -> str:
        return f"broadcast({_elements(self)}, root={self.root})"


@final
@dataclass(frozen=True, slots=True)
class Reduce(Op):
    """In place on the root; the other ranks' tensors stay as they were."""

    kind = "reduce"
    dtype: torch.dtype
    numel: int
    root: int
    reduction: ReduceOp

    @classmethod
    def of(cls, group: Group, tensor: Tensor, root: SupportsIndex, op: object) -> Call:
        rank = _check_rank(group, "root", root)
        mine = rank == group.rank
        _check_tensor(group, "tensor", tensor, written=mine)
        reduction = _check_reduction(op, tensor.dtype)
        value = cls(tensor.dtype, tensor.numel(), rank, reduction)
        return Call(value, (tensor,), (tensor,) if mine else (), tensor if mine else None)

    def fits(self, other: Op) -> bool:
        return type(other) is Reduce and self.root == other.root and _reductions_fit(self, other)

    def __str__(self) -> str:
        return f"reduce({_elements(self)}, root={self.root}, {self.reduction})"


@final
@dataclass(frozen=True, slots=True)
class AllGather(Op):
    """``outputs[r]`` becomes rank r's tensor."""

    kind = "all_gather"
    dtype: torch.dtype
    numel: int  # elements of each rank's tensor

    @classmethod
    def of(cls, group: Group, tensor_list: Sequence[Tensor] | None, tensor: Tensor) -> Call:
        _check_tensor(group, "tensor", tensor)
        if tensor_list is None:
            tensor_list = [_empty_like(tensor) for _ in range(group.size)]
        else:
            tensor_list = _check_list(group, "tensor_list", tensor_list, tensor, written=True)
        return Call(cls(tensor.dtype, tensor.numel()), (tensor,), tuple(tensor_list), tensor_list)

    def __str__(self) -> str:
        return f"all_gather({_elements(self)})"


@final
@dataclass(frozen=True, slots=True)
class AllGatherSingle(Op):
    """All ranks' tensors, in rank order, in one output of ``size`` times as many elements."""

    kind = "all_gather_single"
    dtype: torch.dtype
    numel: int  # elements of each rank's input

    @classmethod
    def of(cls, group: Group, output: Tensor | None, input: Tensor) -> Call:
        _check_tensor(group, "input", input)
        if output is None:
            output = input.new_empty(_times(input.shape, group.size), requires_grad=False)
        else:
            _check_tensor(group, "output", output, written=True)
            _check_dtype("output", output, "input", input)
            _check_numel(
                "output", output, group.size * input.numel(), f"{group.size} (ranks) x {input.numel()} (input)"
            )
        return Call(cls(input.dtype, input.numel()), (input,), (output,), output)

    def __str__(self) -> str:
        return f"all_gather_single({_elements(self)})"


@final
@dataclass(frozen=True, slots=True)
class ReduceScatter(Op):
    """``output`` becomes the reduction over all ranks of ``input_list[rank]``."""

    kind = "reduce_scatter"
    dtype: torch.dtype
    numel: int  # elements of the output
    reduction: ReduceOp

    @classmethod
    def of(cls, group: Group, output: Tensor | None, input_list: Sequence[Tensor], op: object) -> Call:
        if output is None:
            inputs = _as_list("input_list", input_list)
            _check_length("input_list", inputs, group.size)
            _check_tensor(group, "input_list[0]", inputs[0])
            output = _empty_like(inputs[group.rank] if isinstance(inputs[group.rank], Tensor) else inputs[0])
        _check_tensor(group, "output", output, written=True)
        inputs = _check_list(group, "input_list", input_list, output, like_name="output")
        reduction = _check_reduction(op, output.dtype)
        return Call(cls(output.dtype, output.numel(), reduction), tuple(inputs), (output,), output)

    def fits(self, other: Op) -> bool:
        return type(other) is ReduceScatter and _reductions_fit(self, other)

    def __str__(self) -> str:
        return f"reduce_scatter({_elements(self)}, {self.reduction})"


@final
@dataclass(frozen=True, slots=True)
class ReduceScatterSingle(Op):
    """``output`` becomes chunk ``rank`` of the reduction of all inputs, each of ``size`` times as many elements."""

    kind = "reduce_scatter_single"
    dtype: torch.dtype
    numel: int  # elements of the output
    reduction: ReduceOp

    @classmethod
    def of(cls, group: Group, output: Tensor | None, input: Tensor, op: object) -> Call:
        _check_tensor(group, "input", input)
        if output is None:
            output = input.new_empty(_divided("input", input, group.size), requires_grad=False)
        else:
            _check_tensor(group, "output", output, written=True)
            _check_dtype("output", output, "input", input)
            _check_numel(
                "input", input, group.size * output.numel(), f"{group.size} (ranks) x {output.numel()} (output)"
            )
        reduction = _check_reduction(op, input.dtype)
        return Call(cls(input.dtype, output.numel(), reduction), (input,), (output,), output)

    def fits(self, other: Op) -> bool:
        return type(other) is ReduceScatterSingle and _reductions_fit(self, other)

    def __str__(self) -> str:
        return f"reduce_scatter_single({_elements(self)}, {self.reduction})"


@final
@dataclass(frozen=True, slots=True)
class Scatter(Op):
    """``output`` becomes the root's ``input_list[rank]``."""

    kind = "scatter"
    dtype: torch.dtype
    numel: int
    root: int

    @classmethod
    def of(cls, group: Group, output: Tensor, input_list: Sequence[Tensor] | None, root: SupportsIndex) -> Call:
        rank = _check_rank(group, "root", root)
        _check_tensor(group, "output", output, written=True)
        inputs: Sequence[Tensor] = ()
        if rank == group.rank:
            if input_list is None:
                raise ValueError(f"input_list must be given on the root (rank {rank}), got None")
            inputs = _check_list(group, "input_list", input_list, output, like_name="output")
        elif input_list is not None and len(_as_list("input_list", input_list)):
            raise ValueError(
                f"input_list must be None or empty off the root: this is rank {group.rank}, the root is {rank}, "
                f"got {len(input_list)} tensors"
            )
        return Call(cls(output.dtype, output.numel(), rank), tuple(inputs), (output,), output)

    def __str__(self) -> str:
        return f"scatter({_elements(self)}, root={self.root})"


@final
@dataclass(frozen=True, slots=True)
class Gather(Op):
    """On the root ``outputs[r]`` becomes rank r's tensor."""

    kind = "gather"
    dtype: torch.dtype
    numel: int
    root: int

    @classmethod
    def of(cls, group: Group, output_list: Sequence[Tensor] | None, input: Tensor, root: SupportsIndex) -> Call:
        rank = _check_rank(group, "root", root)
        _check_tensor(group, "input", input)
        outputs: Sequence[Tensor] | None = None
        if rank == group.rank:
            if output_list is None:
                outputs = [_empty_like(input) for _ in range(group.size)]
            else:
                outputs = _check_list(group, "output_list", output_list, input, like_name="input", written=True)
        elif output_list is not None and len(_as_list("output_list", output_list)):
            raise ValueError(
                f"output_list must be None or empty off the root: this is rank {group.rank}, the root is {rank}, "
                f"got {len(output_list)} tensors"
            )
        return Call(cls(input.dtype, input.numel(), rank), (input,), tuple(outputs or ()), outputs)

    def __str__(self) -> str:
        return f"gather({_elements(self)}, root={self.root})"


@final
@dataclass(frozen=True, slots=True)
class AllToAllSingle(Op):
    """Chunk ``r`` of the input goes to rank r; chunk ``s`` of the output came from rank s; all chunks are equal."""

    kind = "all_to_all_single"
    dtype: torch.dtype
    numel: int  # elements of the whole input

    @classmethod
    def of(cls, group: Group, output: Tensor | None, input: Tensor) -> Call:
        _check_tensor(group, "input", input)
        if output is None:
            output = _empty_like(input)
        else:
            _check_tensor(group, "output", output, written=True)
            _check_dtype("output", output, "input", input)
            _check_numel("output", output, input.numel(), "as many as input")
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
class Send(Op):
    """To ``peer`` under ``tag``."""

    kind = "send"
    p2p = True
    dtype: torch.dtype
    numel: int
    peer: int
    tag: int

    @classmethod
    def of(cls, group: Group, tensor: Tensor, dst: SupportsIndex, tag: SupportsIndex) -> Call:
        rank = _check_rank(group, "dst", dst)
        _check_tensor(group, "tensor", tensor)
        return Call(cls(tensor.dtype, tensor.numel(), rank, _check_tag(tag)), (tensor,), (), tensor)

    def __str__(self) -> str:
        return f"send({_elements(self)}, dst={self.peer}, tag={self.tag})"


@final
@dataclass(frozen=True, slots=True)
class Recv(Op):
    """From ``peer`` under ``tag``."""

    kind = "recv"
    p2p = True
    dtype: torch.dtype
    numel: int
    peer: int
    tag: int

    @classmethod
    def of(cls, group: Group, tensor: Tensor, src: SupportsIndex, tag: SupportsIndex) -> Call:
        rank = _check_rank(group, "src", src)
        _check_tensor(group, "tensor", tensor, written=True)
        return Call(cls(tensor.dtype, tensor.numel(), rank, _check_tag(tag)), (), (tensor,), tensor)

    def takes(self, send: Send) -> bool:
        """Whether a message sent so fits into this receive."""
        return self.dtype == send.dtype and self.numel == send.numel

    def __str__(self) -> str:
        return f"recv({_elements(self)}, src={self.peer}, tag={self.tag})"


MAX_TAG = 2**30 - 2  # what every transport can carry: gloo has 31 bits and needs one of them, and one tag, for itself


def _elements(op: Any) -> str:
    return f"{str(op.dtype).removeprefix('torch.')}[{op.numel}]"


def _reductions_fit(mine: Any, other: Any) -> bool:
    # each rank has its own factor, so only the kind of the reduction must agree
    return bool(mine.dtype == other.dtype and mine.numel == other.numel and mine.reduction.type is other.reduction.type)


def _check_tensor(group: Group, name: str, tensor: object, *, written: bool = False) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {tensor!r} ({type(tensor).__name__})")
    device = tensor.device
    if device != group.device and (device.type != group.device.type or group.device.index is not None):
        raise ValueError(f"{name} is on {device}, but comm {group.name!r} is on {group.device}")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ValueError(f"{name} must be a dense tensor, got {kind}")
    if written and not tensor.is_contiguous() and _overlaps_itself(tensor):
        raise ValueError(
            f"{name} overlaps itself (shape {tuple(tensor.shape)}, strides {tensor.stride()}) and cannot be written; "
            f"pass a clone"
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two indices share memory, as far as can be told from strides alone (as_strided tricks included)."""
    extent = 1  # one more than the largest offset reached by the dimensions seen so far
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def _as_list(name: str, tensors: object) -> Sequence[Any]:
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"{name} must be a list or tuple of tensors, got {type(tensors).__name__}")
    return tensors


def _check_length(name: str, tensors: Sequence[Any], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"{name} must have one tensor for each of the {size} ranks, got {len(tensors)}")


def _check_list(
    group: Group, name: str, tensors: object, like: Tensor, *, like_name: str = "tensor", written: bool = False
) -> Sequence[Tensor]:
    items = _as_list(name, tensors)
    _check_length(name, items, group.size)
    for i, tensor in enumerate(items):
        _check_tensor(group, f"{name}[{i}]", tensor, written=written)
        _check_dtype(f"{name}[{i}]", tensor, like_name, like)
        _check_numel(f"{name}[{i}]", tensor, like.numel(), f"as many as {like_name}")
    return items


def _check_dtype(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}, but {like_name} has {like.dtype}")


def _check_numel(name: str, tensor: Tensor, expected: int, why: str) -> None:
    if tensor.numel() != expected:
        raise ValueError(
            f"{name} must have {expected} elements ({why}), got {tensor.numel()} (shape {tuple(tensor.shape)})"
        )


def _check_rank(group: Group, name: str, rank: object) -> int:
    if isinstance(rank, bool) or not hasattr(rank, "__index__"):
        raise TypeError(f"{name} must be a rank (an integer), got {rank!r}")
    value = operator.index(rank)
    if not 0 <= value < group.size:
        raise ValueError(f"{name} must be in [0, {group.size}), got {value}")
    return value


def _check_tag(tag: object) -> int:
    if isinstance(tag, bool) or not hasattr(tag, "__index__"):
        raise TypeError(f"tag must be an integer, got {tag!r}")
    value = operator.index(tag)
    if not 0 <= value <= MAX_TAG:
        raise ValueError(f"tag must be in [0, {MAX_TAG}], got {value}")
    return value


def _check_reduction(op: object, dtype: torch.dtype) -> ReduceOp:
    reduction = ReduceOp.of(op)
    reduction.check(dtype)
    return reduction


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _times(shape: Sequence[int], size: int) -> list[int]:
    """The concatenated form: dim 0 times ``size``; a scalar becomes a vector."""
    return [shape[0] * size, *shape[1:]] if shape else [size]


def _divided(name: str, tensor: Tensor, size: int) -> list[int]:
    if not tensor.shape or tensor.shape[0] % size:
        raise ValueError(
            f"{name} must divide evenly among {size} ranks along dim 0 when output is None, "
            f"got shape {tuple(tensor.shape)}"
        )
    return [tensor.shape[0] // size, *tensor.shape[1:]]
