"""What one rank needs to know to check an argument, and the checks that all collectives share.

Each raises ``TypeError`` or ``ValueError`` naming the argument and the value.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from asynccomm.reduce_op import ReduceOp

__all__ = [
    "MAX_TAG",
    "Group",
    "as_list",
    "check_dtype",
    "check_length",
    "check_list",
    "check_numel",
    "check_rank",
    "check_reduction",
    "check_tag",
    "check_tensor",
    "divided",
    "empty_like",
    "overlaps_itself",
    "times",
]

MAX_TAG = 2**30 - 2  # what every transport can carry: gloo has 31 bits and needs one of them, and one tag, for itself


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Who takes part, seen from one rank: what argument checks need to know."""

    name: str
    rank: int
    size: int
    device: torch.device


def check_tensor(group: Group, name: str, tensor: object, *, written: bool = False) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {tensor!r} ({type(tensor).__name__})")
    device = tensor.device
    if device != group.device and (device.type != group.device.type or group.device.index is not None):
        raise ValueError(f"{name} is on {device}, but comm {group.name!r} is on {group.device}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise ValueError(f"{name} must be a dense tensor, got {kind}")
    if written and not tensor.is_contiguous() and overlaps_itself(tensor):
        raise ValueError(
            f"{name} overlaps itself (shape {tuple(tensor.shape)}, strides {tensor.stride()}) and cannot be written; "
            f"pass a clone"
        )


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two indices share memory, as far as can be told from strides alone (as_strided tricks included)."""
    extent = 1  # one more than the largest offset reached by the dimensions seen so far
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def as_list(name: str, tensors: object) -> Sequence[Any]:
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"{name} must be a list or tuple of tensors, got {type(tensors).__name__}")
    return tensors


def check_length(name: str, tensors: Sequence[Any], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"{name} must have one tensor for each of the {size} ranks, got {len(tensors)}")


def check_list(
    group: Group, name: str, tensors: object, like: Tensor, *, like_name: str = "tensor", written: bool = False
) -> Sequence[Tensor]:
    items = as_list(name, tensors)
    check_length(name, items, group.size)
    for i, tensor in enumerate(items):
        check_tensor(group, f"{name}[{i}]", tensor, written=written)
        check_dtype(f"{name}[{i}]", tensor, like_name, like)
        check_numel(f"{name}[{i}]", tensor, like.numel(), f"as many as {like_name}")
    return items


def check_dtype(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}, but {like_name} has {like.dtype}")


def check_numel(name: str, tensor: Tensor, expected: int, why: str) -> None:
    if tensor.numel() != expected:
        raise ValueError(
            f"{name} must have {expected} elements ({why}), got {tensor.numel()} (shape {tuple(tensor.shape)})"
        )


def check_rank(group: Group, name: str, rank: object) -> int:
    if type(rank) is int and 0 <= rank < group.size:
        return rank
    value = as_index(rank)
    if value is None:
        raise TypeError(f"{name} must be a rank (an integer), got {rank!r}")
    if not 0 <= value < group.size:
        raise ValueError(f"{name} must be in [0, {group.size}), got {value}")
    return value


def as_index(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_tag(tag: object) -> int:
    if type(tag) is int and 0 <= tag <= MAX_TAG:
        return tag
    value = as_index(tag)
    if value is None:
        raise TypeError(f"tag must be an integer, got {tag!r}")
    if not 0 <= value <= MAX_TAG:
        raise ValueError(f"tag must be in [0, {MAX_TAG}], got {value}")
    return value


def check_reduction(op: object, dtype: torch.dtype) -> ReduceOp:
    reduction = ReduceOp.of(op)
    reduction.check(dtype)
    return reduction.snapshot()


def empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def times(shape: Sequence[int], size: int) -> list[int]:
    """The concatenated form: dim 0 times ``size``; a scalar becomes a vector."""
    return [shape[0] * size, *shape[1:]] if shape else [size]


def divided(name: str, tensor: Tensor, size: int) -> list[int]:
    if not tensor.shape or tensor.shape[0] % size:
        raise ValueError(
            f"{name} must divide evenly among {size} ranks along dim 0 when output is None, "
            f"got shape {tuple(tensor.shape)}"
        )
    return [tensor.shape[0] // size, *tensor.shape[1:]]
