"""Lists of tensors as one operation: one per dtype for reductions, a single one for moves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import SupportsIndex

import torch
from torch import Tensor

from asynccomm.ops.base import Call, Several, layout_of, moved_together
from asynccomm.ops.dims import parts_along, put, whole_of
from asynccomm.ops.movement import AllGather, Broadcast
from asynccomm.ops.reductions import AllReduce, ReduceScatter
from asynccomm.ops.validation import (
    CommInfo,
    check_dim,
    check_length,
    check_reduction,
    check_several,
    check_sizes,
    counts_of,
    divided,
    empty,
    empty_like,
)


def all_reduce(group: CommInfo, tensors: Sequence[Tensor], op: object) -> Several:
    """One call for each dtype."""
    items = check_several(group, "tensors", tensors, written=True)
    calls = [
        AllReduce.of_several(group, [items[i] for i in numbers], op)
        if len(numbers) > 1
        else AllReduce.of(group, items[numbers[0]], op)
        for numbers in _by_dtype(items)
    ]
    return Several(calls, tensors)


def broadcast(group: CommInfo, tensors: Sequence[Tensor], root: SupportsIndex) -> Call:
    return Broadcast.of_several(group, tensors, root)


def all_gather(group: CommInfo, output_lists: Sequence[Sequence[Tensor]] | None, tensors: Sequence[Tensor]) -> Call:
    items = check_several(group, "tensors", tensors)
    if output_lists is None:
        return AllGather.of_several(group, [[empty_like(t) for t in items] for _ in range(group.size)], items)
    if isinstance(output_lists, Tensor) or not isinstance(output_lists, Sequence):
        raise TypeError(f"output_lists must be a list of lists of tensors, got {type(output_lists).__name__}")
    check_length("output_lists", output_lists, group.size, "list")
    for rank, share in enumerate(output_lists):
        name = f"output_lists[{rank}]"
        _check_alike(name, check_several(group, name, share, written=True), "tensors", items, 1)
    return AllGather.of_several(group, output_lists, items)


def reduce_scatter(
    group: CommInfo, outputs: Sequence[Tensor] | None, inputs: Sequence[Tensor], op: object
) -> tuple[list[Call], Sequence[Tensor]]:
    """One call for each dtype, and all outputs."""
    items = check_several(group, "inputs", inputs)
    if outputs is None:
        outputs = [empty(t, divided(f"inputs[{i}]", t, group.size)) for i, t in enumerate(items)]
    else:
        _check_alike("inputs", items, "outputs", check_several(group, "outputs", outputs, written=True), group.size)
    calls = []
    for numbers in _by_dtype(items):
        wholes = [_divisible(items[i], group.size) for i in numbers]
        shares = [_chunks(whole, group.size) for whole in wholes]
        by_rank = [[share[r] for share in shares] for r in range(group.size)]
        call = ReduceScatter.of_several(group, [outputs[i] for i in numbers], by_rank, op)
        copies = [
            (partial(put, whole), items[i]) for i, whole in zip(numbers, wholes, strict=True) if whole is not items[i]
        ]
        calls.append(call._replace(copies=tuple(copies)))
    return calls, outputs


def all_gather_v(
    group: CommInfo, outputs: Sequence[Tensor] | None, inputs: Sequence[Tensor], sizes: object, dim: SupportsIndex
) -> Call:
    """Gather inputs that have the extent ``sizes[r]`` along ``dim`` on rank r."""
    items = check_several(group, "inputs", inputs)
    dims = [check_dim(dim, tensor, f"inputs[{i}]") for i, tensor in enumerate(items)]
    extents = check_sizes("sizes", sizes, group.size)
    if one_extent(items, dims) != extents[group.rank]:
        raise ValueError(
            f"sizes[{group.rank}] must be this rank's extent of inputs along dim {dim}, {items[0].shape[dims[0]]}, "
            f"got {extents[group.rank]}"
        )
    if outputs is not None:
        as_many("outputs", check_several(group, "outputs", outputs, written=True), "inputs", items)
    wholes, views = [], []
    for i, (tensor, along) in enumerate(zip(items, dims, strict=True)):
        shape = [*tensor.shape[:along], sum(extents), *tensor.shape[along + 1 :]]
        given = None if outputs is None else outputs[i]
        wholes.append(whole_of(group, f"outputs[{i}]", given, f"inputs[{i}]", tensor, shape))
        views.append(parts_along(wholes[i], along, extents))
    shares = [[parts[rank] for parts in views] for rank in range(group.size)]
    dtype, codes = moved_together(items)
    numel, counts = counts_of([sum([view.nbytes for view in share]) // dtype.itemsize for share in shares])
    layout = layout_of([*dims, *[view.nbytes for share in shares for view in share], *codes])
    op = AllGather(dtype, numel, layout=layout, counts=counts)
    views_in_order = tuple([view for share in shares for view in share])
    return Call(op, tuple(items), views_in_order, wholes if outputs is None else outputs)


def reduce_scatter_v(
    group: CommInfo,
    outputs: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    sizes: object,
    op: object,
    dim: SupportsIndex,
) -> tuple[list[Call], Sequence[Tensor]]:
    """Rank r gets the extent ``sizes[r]`` of each input along ``dim``. One call for each dtype, and all outputs."""
    items = check_several(group, "inputs", inputs)
    dims = [check_dim(dim, tensor, f"inputs[{i}]") for i, tensor in enumerate(items)]
    total = one_extent(items, dims)
    extents = check_sizes("sizes", sizes, group.size)
    if sum(extents) != total:
        raise ValueError(f"sizes must add up to inputs' extent along dim {dim}, {total}, got {extents}")
    if outputs is not None:
        as_many("outputs", check_several(group, "outputs", outputs, written=True), "inputs", items)
    parts, views = [], []
    for i, (tensor, along) in enumerate(zip(items, dims, strict=True)):
        shape = [*tensor.shape[:along], extents[group.rank], *tensor.shape[along + 1 :]]
        given = None if outputs is None else outputs[i]
        parts.append(whole_of(group, f"outputs[{i}]", given, f"inputs[{i}]", tensor, shape))
        views.append(parts_along(tensor, along, extents))
    calls = []
    for numbers in _by_dtype(items):
        shares = [[views[i][rank] for i in numbers] for rank in range(group.size)]
        numels = [[view.numel() for view in share] for share in shares]
        numel, counts = counts_of([sum(share) for share in numels])
        dtype = items[numbers[0]].dtype
        layout = layout_of([*dims, *[n for share in numels for n in share]])
        value = ReduceScatter(dtype, numel, check_reduction(op, dtype), layout=layout, counts=counts)
        in_order = tuple([view for share in shares for view in share])
        calls.append(Call(value, in_order, tuple([parts[i] for i in numbers]), None))
    return calls, parts if outputs is None else outputs


def one_extent(tensors: Sequence[Tensor], dims: Sequence[int]) -> int:
    """The extent along the dimension, which must be equal for all inputs."""
    extent = tensors[0].shape[dims[0]]
    for i, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
        if tensor.shape[dim] != extent:
            raise ValueError(
                f"inputs must all have one extent along the dimension: inputs[0] has {extent}, inputs[{i}] has "
                f"{tensor.shape[dim]} (shape {tuple(tensor.shape)}, dim {dim})"
            )
    return extent


def as_many(name: str, tensors: Sequence[Tensor], like_name: str, likes: Sequence[Tensor]) -> None:
    if len(tensors) != len(likes):
        raise ValueError(f"{name} must have as many tensors as {like_name}, {len(likes)}, got {len(tensors)}")


def _divisible(tensor: Tensor, size: int) -> Tensor:
    """``tensor`` if its equal parts in row-major order are views, else memory for a copy of it."""
    if tensor.is_contiguous() or (tensor.dim() and tensor.shape[0] % size == 0):
        return tensor
    try:
        tensor.view(size, tensor.numel() // size)
    except RuntimeError:  # no single stride fits each part
        with torch.inference_mode(False):  # any thread may write it
            return empty_like(tensor)
    return tensor


def _chunks(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """Equal parts in row-major order, as views."""
    if tensor.dim() and tensor.shape[0] % size == 0:
        return tensor.chunk(size) if tensor.shape[0] else [tensor] * size
    return tensor.view(size, tensor.numel() // size).unbind()


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The indices of the tensors, grouped by dtype."""
    found: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(i)
    return list(found.values())


def _check_alike(name: str, tensors: Sequence[Tensor], like_name: str, likes: Sequence[Tensor], times: int) -> None:
    """Check for as many tensors, of the same dtypes, with ``times`` as many elements."""
    as_many(name, tensors, like_name, likes)
    for i, (tensor, like) in enumerate(zip(tensors, likes, strict=True)):
        if tensor.dtype != like.dtype:
            raise ValueError(f"{name}[{i}] has dtype {tensor.dtype}, but {like_name}[{i}] has {like.dtype}")
        if tensor.numel() != times * like.numel():
            raise ValueError(
                f"{name}[{i}] must have {times * like.numel()} elements ({times} x {like_name}[{i}]), "
                f"got {tensor.numel()} (shape {tuple(tensor.shape)})"
            )
