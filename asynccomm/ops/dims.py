"""The single-tensor forms along any dimension, and with a different extent for each rank.

These operations become list forms: each rank's part is a view of the one tensor, made here. Along dim 0 with equal
parts, the parts lie one after the other, and the plain single form is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import torch
from torch import Tensor

from asynccomm.ops.base import Call, layout_of_shares, moved
from asynccomm.ops.movement import AllGather, AllGatherSingle, AllToAll, Gather, Scatter
from asynccomm.ops.reductions import ReduceScatter, ReduceScatterSingle
from asynccomm.ops.validation import (
    CommInfo,
    as_index,
    check_dim,
    check_dtype,
    check_rank,
    check_reduction,
    check_sizes,
    check_tensor,
    counts_of,
    empty,
)


def all_gather_single(group: CommInfo, output: Tensor | None, input: Tensor, dim: SupportsIndex) -> Call:
    """Parts of ``output`` along ``dim`` become the ranks' inputs."""
    if type(dim) is int and dim == 0:
        return AllGatherSingle.of(group, output, input)
    check_tensor(group, "input", input)
    shape, along = _shape(input, dim)
    if along == 0:
        return AllGatherSingle.of(group, output, input)
    output = whole_of(group, "output", output, "input", input, _with(shape, along, group.size * shape[along]))
    views = parts_along(output, along, [shape[along]] * group.size)
    return Call(AllGather.of_counts(input.dtype, [input.numel()], along, shape), (input,), views, output)


def all_gather_v(group: CommInfo, output: Tensor | None, input: Tensor, sizes: object, dim: SupportsIndex) -> Call:
    """As ``all_gather_single``, where rank r's input has the extent ``sizes[r]`` along ``dim``."""
    check_tensor(group, "input", input)
    along = check_dim(dim, input, "input")
    extents = check_sizes("sizes", sizes, group.size)
    if input.shape[along] != extents[group.rank]:
        raise ValueError(
            f"sizes[{group.rank}] must be this rank's extent of input along dim {along}, {input.shape[along]}, "
            f"got {extents[group.rank]}"
        )
    output = whole_of(group, "output", output, "input", input, _with(input.shape, along, sum(extents)))
    if along == 0 and len(set(extents)) == 1:
        return Call(AllGatherSingle(*moved(input.dtype, input.numel())), (input,), (output,), output)
    views = parts_along(output, along, extents)
    op = AllGather.of_counts(input.dtype, [view.numel() for view in views], along, input.shape)
    return Call(op, (input,), views, output)


def reduce_scatter_single(
    group: CommInfo, output: Tensor | None, input: Tensor, op: object, dim: SupportsIndex
) -> Call:
    """``output`` becomes part ``rank`` along ``dim`` of the reduction of all inputs."""
    if type(dim) is int and dim == 0:
        return ReduceScatterSingle.of(group, output, input, op)
    check_tensor(group, "input", input)
    shape, along = _shape(input, dim)
    if along == 0:
        return ReduceScatterSingle.of(group, output, input, op)
    if shape[along] % group.size:
        raise ValueError(
            f"input must divide evenly among {group.size} ranks along dim {along}, got shape {tuple(input.shape)}"
        )
    return _reduce_scatter(group, output, input, along, [shape[along] // group.size] * group.size, op)


def reduce_scatter_v(
    group: CommInfo, output: Tensor | None, input: Tensor, sizes: object, op: object, dim: SupportsIndex
) -> Call:
    """As ``reduce_scatter_single``, where rank r gets the extent ``sizes[r]`` along ``dim``; None: equal extents."""
    if sizes is None:
        return reduce_scatter_single(group, output, input, op, dim)
    check_tensor(group, "input", input)
    along = check_dim(dim, input, "input")
    extents = check_sizes("sizes", sizes, group.size)
    if sum(extents) != input.shape[along]:
        raise ValueError(f"sizes must add up to input's extent along dim {along}, {input.shape[along]}, got {extents}")
    return _reduce_scatter(group, output, input, along, extents, op)


def _reduce_scatter(
    group: CommInfo, output: Tensor | None, input: Tensor, along: int, extents: Sequence[int], op: object
) -> Call:
    reduction = check_reduction(op, input.dtype)
    output = whole_of(group, "output", output, "input", input, _with(input.shape, along, extents[group.rank]))
    if along == 0 and len(set(extents)) == 1:
        return Call(ReduceScatterSingle(input.dtype, output.numel(), reduction), (input,), (output,), output)
    views = parts_along(input, along, extents)
    numel, counts = counts_of([view.numel() for view in views])
    value = ReduceScatter(
        input.dtype, numel, reduction, layout=layout_of_shares(counts, along, input.shape), counts=counts
    )
    return Call(value, views, (output,), output)


def gather_single(
    group: CommInfo, output: Tensor | None, input: Tensor, root: SupportsIndex, dim: SupportsIndex
) -> Call:
    """On the root parts of ``output`` along ``dim`` become the ranks' inputs."""
    rank = check_rank(group, "root", root)
    check_tensor(group, "input", input)
    shape, along = _shape(input, dim)
    op = Gather(*moved(input.dtype, input.numel()), rank, layout=layout_of_shares((), along, shape))
    if rank != group.rank:
        if output is not None:
            raise ValueError(_not_here("output", group, rank, output))
        return Call(op, (input,), (), None)
    output = whole_of(group, "output", output, "input", input, _with(shape, along, group.size * shape[along]))
    return Call(op, (input,), parts_along(output, along, [shape[along]] * group.size), output)


def scatter_single(
    group: CommInfo, output: Tensor | None, input: Tensor | None, root: SupportsIndex, dim: SupportsIndex
) -> Call:
    """``output`` becomes part ``rank`` along ``dim`` of the root's input. ``output`` may be None on the root only."""
    rank = check_rank(group, "root", root)
    if rank != group.rank:
        if input is not None:
            raise ValueError(_not_here("input", group, rank, input))
        if output is None:
            raise ValueError(f"output must be given off the root (rank {rank}), which alone knows its shape; got None")
        check_tensor(group, "output", output, written=True)
        shape, along = _shape(output, dim, "output")
        op = Scatter(*moved(output.dtype, output.numel()), rank, layout=layout_of_shares((), along, shape))
        return Call(op, (), (output,), output)
    if input is None:
        raise ValueError(f"input must be given on the root (rank {rank}), got None")
    check_tensor(group, "input", input)
    along = check_dim(dim, input, "input")
    if input.shape[along] % group.size:
        raise ValueError(
            f"input must divide evenly among {group.size} ranks along dim {along}, got shape {tuple(input.shape)}"
        )
    part = input.shape[along] // group.size
    output = whole_of(group, "output", output, "input", input, _with(input.shape, along, part))
    op = Scatter(*moved(input.dtype, output.numel()), rank, layout=layout_of_shares((), along, input.shape))
    return Call(op, parts_along(input, along, [part] * group.size), (output,), output)


def all_to_all_v_single(
    group: CommInfo, output: Tensor | None, input: Tensor, output_split_sizes: object, input_split_sizes: object
) -> Call:
    """Rows of dim 0: the first ``input_split_sizes[0]`` rows go to rank 0, and so on. Both sizes are given."""
    sends = rows_to_send(group, input, input_split_sizes)
    receives = check_sizes("output_split_sizes", output_split_sizes, group.size)
    if sends[group.rank] != receives[group.rank]:
        raise ValueError(
            f"output_split_sizes[{group.rank}] must be input_split_sizes[{group.rank}], {sends[group.rank]}: both "
            f"count the rows from this rank to itself; got {receives[group.rank]}"
        )
    output = room_for_rows(group, output, input, sum(receives))
    row = input[0:1].numel() if input.shape[0] else input.shape[1:].numel()
    op = AllToAll.of_counts(input.dtype, [n * row for n in sends], [n * row for n in receives])
    return Call(op, parts_along(input, 0, sends), parts_along(output, 0, receives), output)


def rows_to_send(group: CommInfo, input: Tensor, sizes: object) -> list[int]:
    """The number of rows of ``input`` for each rank; None: equal numbers."""
    check_tensor(group, "input", input)
    if not input.dim():
        raise ValueError("input must have rows (a dim 0) to be split, got a scalar")
    rows = input.shape[0]
    if sizes is None:
        if rows % group.size:
            raise ValueError(
                f"input must divide evenly among {group.size} ranks along dim 0 when input_split_sizes is None, "
                f"got shape {tuple(input.shape)}"
            )
        return [rows // group.size] * group.size
    sends = check_sizes("input_split_sizes", sizes, group.size)
    if sum(sends) > rows:
        raise ValueError(f"input_split_sizes must add up to at most the {rows} rows of input, got {sends}")
    return sends


def room_for_rows(group: CommInfo, output: Tensor | None, input: Tensor, rows: int) -> Tensor:
    """``output``, which may have more rows than needed, or a new tensor."""
    if output is None:
        return empty(input, [rows, *input.shape[1:]])
    check_tensor(group, "output", output, written=True)
    check_dtype("output", output, "input", input)
    if output.shape[1:] != input.shape[1:] or not output.dim() or output.shape[0] < rows:
        raise ValueError(
            f"output must have at least {rows} rows of shape {tuple(input.shape[1:])}, got shape {tuple(output.shape)}"
        )
    return output


def parts_along(tensor: Tensor, dim: int, extents: Sequence[int]) -> tuple[Tensor, ...]:
    """Adjacent views of ``tensor`` with these extents along ``dim``; the remainder of ``tensor`` is in no view."""
    total = sum(extents)
    if total != tensor.shape[dim]:
        tensor = tensor.narrow(dim, 0, total)
    return tensor.split_with_sizes(extents, dim)


def put(target: Tensor, source: Tensor) -> None:
    """Copy ``source`` to ``target``, which has as many elements and shares no memory with it."""
    with torch.inference_mode(target.is_inference()):
        target.detach().copy_(source.detach().reshape(target.shape))


def whole_of(
    group: CommInfo, name: str, tensor: Tensor | None, like_name: str, like: Tensor, shape: Sequence[int]
) -> Tensor:
    """``tensor``, checked to be writable and of this shape and the dtype of ``like``, or a new tensor."""
    if tensor is None:
        return empty(like, shape)
    check_tensor(group, name, tensor, written=True)
    check_dtype(name, tensor, like_name, like)
    if list(tensor.shape) != list(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    return tensor


def _shape(tensor: Tensor, dim: SupportsIndex, name: str = "input") -> tuple[Sequence[int], int]:
    """The shape and the dimension, counted from 0; a scalar counts as a vector of one element."""
    if not tensor.dim() and as_index(dim) in (0, -1):
        return [1], 0
    return tensor.shape, check_dim(dim, tensor, name)


def _not_here(name: str, group: CommInfo, root: int, value: object) -> str:
    return (
        f"{name} must be None off the root: this is rank {group.rank}, the root is {root}, got {type(value).__name__}"
    )


def _with(shape: Sequence[int], dim: int, extent: int) -> list[int]:
    return [*shape[:dim], extent, *shape[dim + 1 :]]
