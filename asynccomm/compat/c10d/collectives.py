"""Collectives that move tensors as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic
from typing_extensions import deprecated

from asynccomm.compat.c10d.coalescing import CollOp, recording
from asynccomm.compat.c10d.logs import logged
from asynccomm.compat.c10d.ranks import canonical_rank, root_rank
from asynccomm.compat.c10d.validation import (
    check_root_list,
    check_same_dtype,
    check_tensor,
    check_tensor_list,
    member_of,
)
from asynccomm.compat.c10d.work import NOTHING, Work, with_future
from asynccomm.compat.c10d.world import Group

__all__ = [
    "all_gather",
    "all_gather_base",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "scatter",
]


@logged
def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Copy one rank's ``tensor`` into everybody's, in place. See ``Comm.broadcast``."""
    pg = member_of(group, "broadcast")
    if pg is None:
        return None if async_op else NOTHING
    root = canonical_rank(pg, src, group_src, name="src")
    check_tensor("tensor", tensor)
    work = pg.comm(tensor.device).broadcast(tensor, root)
    return Work(work) if async_op else work


@logged
def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False) -> Any:
    """Collect every rank's ``tensor`` in ``tensor_list``, also of different sizes. See ``Comm.all_gather``."""
    if has_torch_function_variadic(tensor_list, tensor):
        return handle_torch_function(
            all_gather, (tensor_list, tensor), tensor_list, tensor, group=group, async_op=async_op
        )
    pg = member_of(group, "all_gather")
    if pg is None:
        return None if async_op else NOTHING
    check_tensor_list("tensor_list", tensor_list)
    check_tensor("tensor", tensor)
    check_same_dtype(tensor_list, tensor)
    work = pg.comm(tensor.device).all_gather(tensor_list, tensor)
    return Work(work) if async_op else work


@logged
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Collect every rank's ``input_tensor`` in one, concatenated or stacked. See ``Comm.all_gather_single``."""
    if has_torch_function_variadic(output_tensor, input_tensor):
        return handle_torch_function(
            all_gather_into_tensor,
            (output_tensor, input_tensor),
            output_tensor,
            input_tensor,
            group=group,
            async_op=async_op,
        )
    pg = member_of(group, "all_gather_into_tensor")
    if pg is None:
        return None if async_op else NOTHING
    check_tensor("output_tensor", output_tensor)
    check_tensor("input_tensor", input_tensor)
    check_same_dtype(output_tensor, input_tensor)
    comm = pg.comm(input_tensor.device)
    records = recording(pg)
    if records is not None:
        record = CollOp(all_gather_into_tensor, input_tensor, output_tensor)
        return records.record(record, comm, lambda: comm.all_gather_single(output_tensor, input_tensor), async_op)
    work = comm.all_gather_single(output_tensor, input_tensor)
    return Work(work) if async_op else work


@deprecated("_all_gather_base is deprecated: use all_gather_into_tensor", category=FutureWarning)
def all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False) -> Any:
    """:func:`all_gather_into_tensor`, by its old name."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


@deprecated("all_gather_coalesced is deprecated: use a coalescing manager", category=FutureWarning)
@with_future
@logged
def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Collect each of the ranks' tensors: ``output_tensor_lists[r][i]`` is the i-th of rank r's.

    ``async_op=True`` gives a future.
    """
    pg = member_of(group, "all_gather_coalesced", 6)
    if pg is None:
        return None if async_op else NOTHING
    check_tensor_list("input_tensor_list", input_tensor_list)
    if not isinstance(output_tensor_lists, list):
        raise TypeError(f"output_tensor_lists must be a list of lists of torch.Tensor, got {output_tensor_lists!r}")
    for i, outputs in enumerate(output_tensor_lists):
        check_tensor_list(f"output_tensor_lists[{i}]", outputs)
        check_same_dtype(outputs)
    check_same_dtype(input_tensor_list)
    comm = pg.comm(input_tensor_list[0].device if input_tensor_list else None)
    work = comm.all_gather_coalesced(output_tensor_lists, input_tensor_list)
    return Work(work) if async_op else work


@logged
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Collect every rank's ``tensor``, of one size, on one rank: without a choice, on global rank 0.

    Args:
        gather_list: there, and only there, one for each rank.
    """
    pg = member_of(group, "gather")
    if pg is None:
        return None if async_op else NOTHING
    check_tensor("tensor", tensor)
    if gather_list:
        check_tensor_list("gather_list", gather_list)
        check_same_dtype(tensor, gather_list)
    root = root_rank(pg, dst, group_dst, "dst")
    check_root_list(pg, root, "gather_list", gather_list)
    work = pg.comm(tensor.device).gather(gather_list or None, tensor, root)
    return Work(work) if async_op else work


@logged
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Give each rank one of one rank's tensors, of one size: without a choice, of global rank 0.

    Args:
        scatter_list: there, and only there, one for each rank.
    """
    pg = member_of(group, "scatter")
    if pg is None:
        return None if async_op else NOTHING
    check_tensor("tensor", tensor)
    if scatter_list:
        check_tensor_list("scatter_list", scatter_list)
        check_same_dtype(tensor, scatter_list)
    root = root_rank(pg, src, group_src, "src")
    check_root_list(pg, root, "scatter_list", scatter_list)
    work = pg.comm(tensor.device).scatter(tensor, scatter_list or None, root)
    return Work(work) if async_op else work


@logged
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Send each rank its rows of ``input``, and receive rows of ``output``.

    Args:
        output_split_sizes, input_split_sizes: rows (of dim 0) by rank; None or empty: equally many. Ranks that give
            neither do not go with those that give one: where some have to, the others give equal ones.
    """
    if has_torch_function_variadic(output, input):
        return handle_torch_function(
            all_to_all_single,
            (output, input),
            output,
            input,
            output_split_sizes=output_split_sizes,
            input_split_sizes=input_split_sizes,
            group=group,
            async_op=async_op,
        )
    pg = member_of(group, "all_to_all_single")
    if pg is None:
        return None if async_op else NOTHING
    check_tensor("output", output)
    check_tensor("input", input)
    check_same_dtype(output, input)
    comm = pg.comm(input.device)
    if output_split_sizes or input_split_sizes:
        outputs = output_split_sizes or _even("output", output, pg.size())
        work = comm.all_to_all_v_single(output, input, outputs, input_split_sizes or _even("input", input, pg.size()))
    else:
        _even("input", input, pg.size())
        work = comm.all_to_all_single(output, input)
    return Work(work) if async_op else work


def _even(name: str, tensor: Tensor, size: int) -> list[int]:
    """As many rows for each rank. Raises: ValueError."""
    rows = len(tensor) if tensor.dim() else 1
    if rows % size:
        raise ValueError(f"dim 0 of {name} is {rows}, which the {size} ranks do not divide: give split sizes")
    return [rows // size] * size


@logged
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Send each rank one tensor, and receive one from each; of any sizes. See ``Comm.all_to_all``."""
    pg = member_of(group, "all_to_all")
    if pg is None:
        return None if async_op else NOTHING
    check_tensor_list("output_tensor_list", output_tensor_list)
    check_tensor_list("input_tensor_list", input_tensor_list)
    check_same_dtype(output_tensor_list, input_tensor_list)
    work = pg.comm(input_tensor_list[0].device if input_tensor_list else None).all_to_all(
        output_tensor_list, input_tensor_list
    )
    return Work(work) if async_op else work
