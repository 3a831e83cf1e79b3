"""Fusion of several operations of one kind into one on lists of tensors, which every backend supports."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    Broadcast,
    Call,
    Op,
    ReduceScatter,
    ReduceScatterSingle,
    layout_of,
)
from asynccomm.ops.dtypes import CODES

MERGED_BYTES: Final = 1 << 20  # the largest operation that is fused, unless the backend defines another limit

Tensors = tuple[Tensor, ...]


def fusion_key(op: Op, fusion_limit: int = MERGED_BYTES) -> object:
    """The key that operations must share to be fused; None: the operation is not fused."""
    if op.nbytes > fusion_limit:
        return None
    match op:
        case AllReduce(reduction=reduction) if reduction.factor is None:
            return AllReduce, op.dtype, reduction.type
        case ReduceScatter(reduction=reduction, counts=()) | ReduceScatterSingle(reduction=reduction) if (
            reduction.factor is None
        ):
            return ReduceScatter, op.dtype, reduction.type
        case Broadcast(root=root):
            return Broadcast, root
        case AllGather(counts=()) | AllGatherSingle():
            return AllGather
        case _:
            return None


def fuse(size: int, parts: Sequence[Submission]) -> Call:
    """One call that does the same on ``size`` ranks as ``parts``, at least two of one :func:`fusion_key`.

    Raises: the error of ``check_fusible``.
    """
    for part in parts:
        if isinstance(part.op, (AllGatherSingle, ReduceScatterSingle)):
            check_fusible(size, part)
    call = _MERGERS[type(parts[0].op)](size, parts)
    return call._replace(copies=tuple([copy for part in parts for copy in part.copies]))


def _all_reduce(size: int, parts: Sequence[Submission]) -> Call:
    first: Any = parts[0].op
    op = AllReduce(first.dtype, _numel(parts), first.reduction, layout=_layout(parts))
    inputs, outputs = _inputs(parts), _outputs(parts)
    in_place = all(part.inputs is part.outputs for part in parts)
    return Call(op, outputs if in_place else inputs, outputs, None)


def _broadcast(size: int, parts: Sequence[Submission]) -> Call:
    first: Any = parts[0].op
    op = Broadcast(torch.uint8, sum([part.op.nbytes for part in parts]), first.root, layout=_layout(parts))
    return Call(op, _inputs(parts), _outputs(parts), None)


def _all_gather(size: int, parts: Sequence[Submission]) -> Call:
    op = AllGather(torch.uint8, sum([part.op.nbytes for part in parts]), layout=_layout(parts))
    shares = [_shares(part.outputs, size, part.op) for part in parts]
    return Call(op, _inputs(parts), _by_rank(shares, size), None)


def _reduce_scatter(size: int, parts: Sequence[Submission]) -> Call:
    first: Any = parts[0].op
    op = ReduceScatter(first.dtype, _numel(parts), first.reduction, layout=_layout(parts))
    shares = [_shares(part.inputs, size, part.op) for part in parts]
    return Call(op, _by_rank(shares, size), _outputs(parts), None)


_MERGERS: Final[dict[type[Op], Callable[[int, Sequence[Submission]], Call]]] = {
    AllReduce: _all_reduce,
    Broadcast: _broadcast,
    AllGather: _all_gather,
    AllGatherSingle: _all_gather,
    ReduceScatter: _reduce_scatter,
    ReduceScatterSingle: _reduce_scatter,
}


def _inputs(parts: Sequence[Submission]) -> Tensors:
    return tuple([tensor for part in parts for tensor in part.inputs])


def _outputs(parts: Sequence[Submission]) -> Tensors:
    return tuple([tensor for part in parts for tensor in part.outputs])


def can_fuse(size: int, part: Call | Submission) -> bool:
    """Whether this rank's tensors of ``part`` can be divided without a copy; other ranks' tensors may lie otherwise."""
    whole = _whole(part)
    return whole is None or is_divisible(whole, size)


def check_fusible(size: int, part: Call | Submission) -> None:
    """Raise ValueError unless ``can_fuse``."""
    whole = _whole(part)
    if whole is not None and not is_divisible(whole, size):
        raise ValueError(
            f"{part.op}: a tensor that is not contiguous can only be sent together with others if the ranks divide its "
            f"first dimension, got shape {tuple(whole.shape)} for {size} ranks"
        )


def _whole(part: Call | Submission) -> Tensor | None:
    """The tensor that has a share for each rank, if the operation has such a single tensor."""
    if isinstance(part.op, AllGatherSingle):
        return part.outputs[0]
    return part.inputs[0] if isinstance(part.op, ReduceScatterSingle) else None


def is_divisible(whole: Tensor, size: int) -> bool:
    """Whether each rank's share of ``whole`` can be a view."""
    return size == 1 or not whole.numel() or whole.is_contiguous() or whole.shape[0] % size == 0


def _shares(tensors: Tensors, size: int, op: Op) -> Sequence[Sequence[Tensor]]:
    """The share of each rank in an operation's lists, or in its single tensor: views, so that no data is copied."""
    if size == 1:
        return [tensors]
    if not isinstance(op, (AllGatherSingle, ReduceScatterSingle)):
        each = len(tensors) // size
        return [tensors[rank * each : (rank + 1) * each] for rank in range(size)]
    (whole,) = tensors
    if not whole.numel():
        return [tensors] * size
    if whole.is_contiguous():
        return [(share,) for share in whole.view(size, -1).unbind()]
    return [(share,) for share in whole.chunk(size)]


def _by_rank(shares: Sequence[Sequence[Sequence[Tensor]]], size: int) -> Tensors:
    return tuple([tensor for rank in range(size) for share in shares for tensor in share[rank]])


def _numel(parts: Sequence[Submission]) -> int:
    ops: list[Any] = [part.op for part in parts]
    return sum([op.numel for op in ops])


def _layout(parts: Sequence[Submission]) -> int:
    """The layout of a fused operation: from each part's size, layout, dtype, label and method."""
    numbers: list[int] = []
    for part in parts:
        op: Any = part.op
        numbers.append(op.nbytes)
        numbers.append(op.layout)
        numbers.append(CODES[op.dtype])
        numbers += [zlib.crc32(text.encode()) for text in (op.label, op.method) if text]
    return layout_of(numbers)
