"""Collectives that move tensors unchanged, and barriers."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic
from typing_extensions import deprecated

from asynccomm.compat.c10d.backends import Backend, accelerator
from asynccomm.compat.c10d.coalescing import CollOp, recording
from asynccomm.compat.c10d.logs import collective
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.ranks import canonical_rank, root_rank
from asynccomm.compat.c10d.types import check_valid_timeout
from asynccomm.compat.c10d.validation import (
    check_root_list,
    check_same_dtype,
    check_tensor,
    check_tensor_list,
    member,
    member_of,
)
from asynccomm.compat.c10d.work import NOTHING, with_future
from asynccomm.compat.c10d.world import Group
from asynccomm.ops.validation import as_index, check_all_rows

MAX_DEVICES: Final = 128  # torch.device takes a larger index for another device, without an error


@collective()
def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Copy one rank's ``tensor`` into the ``tensor`` of all ranks. See ``Comm.broadcast``."""
    pg = member(group)
    root = canonical_rank(pg, src, group_src, name="src")
    check_tensor("tensor", tensor)
    return pg.comm(tensor.device).broadcast(tensor, root)


@collective()
def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False) -> Any:
    """Collect every rank's ``tensor`` in ``tensor_list``; sizes may differ. See ``Comm.all_gather``."""
    if has_torch_function_variadic(tensor_list, tensor):
        return handle_torch_function(
            all_gather, (tensor_list, tensor), tensor_list, tensor, group=group, async_op=async_op
        )
    pg = member(group)
    check_tensor_list("tensor_list", tensor_list)
    check_tensor("tensor", tensor)
    check_same_dtype(tensor_list, tensor)
    return pg.comm(tensor.device).all_gather(tensor_list, tensor)


@collective(names={"output": "output_tensor", "input": "input_tensor"})
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Concatenate or stack every rank's ``input_tensor`` in ``output_tensor``. See ``Comm.all_gather_single``."""
    if has_torch_function_variadic(output_tensor, input_tensor):
        return handle_torch_function(
            all_gather_into_tensor,
            (output_tensor, input_tensor),
            output_tensor,
            input_tensor,
            group=group,
            async_op=async_op,
        )
    pg = member(group)
    check_tensor("output_tensor", output_tensor)
    check_tensor("input_tensor", input_tensor)
    check_same_dtype(output_tensor, input_tensor)
    comm = pg.comm(input_tensor.device)
    records = recording(pg)
    if records is not None:
        record = CollOp(all_gather_into_tensor, input_tensor, output_tensor)
        return records.record(record, comm, lambda: comm.all_gather_single(output_tensor, input_tensor), async_op)
    return comm.all_gather_single(output_tensor, input_tensor)


@deprecated("_all_gather_base is deprecated: use all_gather_into_tensor", category=FutureWarning)
def all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False) -> Any:
    """Old name of :func:`all_gather_into_tensor`."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


@deprecated("all_gather_coalesced is deprecated: use a coalescing manager", category=FutureWarning)
@with_future
@collective(depth=5, names={"output_lists": "output_tensor_lists", "tensors": "input_tensor_list"})
def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """All-gather several tensors: ``output_tensor_lists[r][i]`` receives tensor i of rank r.

    ``async_op=True`` returns a future.
    """
    pg = member(group)
    check_tensor_list("input_tensor_list", input_tensor_list)
    if not isinstance(output_tensor_lists, list):
        raise TypeError(f"output_tensor_lists must be a list of lists of torch.Tensor, got {output_tensor_lists!r}")
    for i, outputs in enumerate(output_tensor_lists):
        check_tensor_list(f"output_tensor_lists[{i}]", outputs)
        check_same_dtype(outputs)
    check_same_dtype(input_tensor_list)
    comm = pg.comm(input_tensor_list[0].device if input_tensor_list else None)
    return comm.all_gather_coalesced(output_tensor_lists, input_tensor_list)


@collective(names={"output_list": "gather_list", "input": "tensor"})
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Collect every rank's ``tensor``, all of one size, on one rank; by default on global rank 0.

    Args:
        gather_list: on the root, one output tensor for each rank; None or empty on other ranks.
    """
    pg = member(group)
    check_tensor("tensor", tensor)
    if gather_list:
        check_tensor_list("gather_list", gather_list)
        check_same_dtype(tensor, gather_list)
    root = root_rank(pg, dst, group_dst, "dst")
    check_root_list(pg, root, "gather_list", gather_list)
    return pg.comm(tensor.device).gather(gather_list or None, tensor, root)


@collective(names={"output": "gather_tensor", "input": "tensor"})
def gather_single(
    tensor: Tensor,
    gather_tensor: Tensor | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Concatenate or stack every rank's ``tensor`` in one tensor of one rank; by default of global rank 0.

    Args:
        gather_tensor: on the root, the output; None on other ranks.
    """
    pg = member(group)
    check_tensor("tensor", tensor)
    root = root_rank(pg, dst, group_dst, "dst")
    if gather_tensor is not None:
        check_tensor("gather_tensor", gather_tensor)
        check_same_dtype(tensor, gather_tensor)
    elif root == pg.rank():
        raise ValueError("gather_tensor must be given on the root, got None")
    return pg.comm(tensor.device).gather_single(gather_tensor, tensor, root)


gather_into_tensor = gather_single
all_gather_single = all_gather_into_tensor


@collective(names={"output": "tensor", "input_list": "scatter_list"})
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Send each rank one tensor of one rank's list, all of one size; by default from global rank 0.

    Args:
        scatter_list: on the root, one input tensor for each rank; None or empty on other ranks.
    """
    pg = member(group)
    check_tensor("tensor", tensor)
    if scatter_list:
        check_tensor_list("scatter_list", scatter_list)
        check_same_dtype(tensor, scatter_list)
    root = root_rank(pg, src, group_src, "src")
    check_root_list(pg, root, "scatter_list", scatter_list)
    return pg.comm(tensor.device).scatter(tensor, scatter_list or None, root)


@collective()
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
        output_split_sizes, input_split_sizes: numbers of rows (of dim 0) by rank, which add up to the rows of
            ``output`` and ``input``; None or empty: equal numbers. If one rank gives split sizes, all ranks must give
            at least one of the two; equal sizes are allowed.
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
    pg = member(group)
    check_tensor("output", output)
    check_tensor("input", input)
    check_same_dtype(output, input)
    comm = pg.comm(input.device)
    if output_split_sizes or input_split_sizes:
        receives = _rows("output", output, output_split_sizes, pg.size())
        sends = _rows("input", input, input_split_sizes, pg.size())
        return comm.all_to_all_v_single(output, input, receives, sends)
    _even("input", input, pg.size())
    return comm.all_to_all_single(output, input)


def _rows(name: str, tensor: Tensor, sizes: Sequence[int] | None, size: int) -> list[int]:
    """The split sizes. A comm's tensors may have more rows than these add up to, torch's may not."""
    return check_all_rows(f"{name}_split_sizes", sizes, name, tensor, size) if sizes else _even(name, tensor, size)


def _even(name: str, tensor: Tensor, size: int) -> list[int]:
    """Split sizes with equally many rows for each rank. Raises: ValueError."""
    rows = len(tensor) if tensor.dim() else 1
    if rows % size:
        raise ValueError(f"dim 0 of {name} is {rows}, which the {size} ranks do not divide: give split sizes")
    return [rows // size] * size


@collective(names={"output_list": "output_tensor_list", "input_list": "input_tensor_list"})
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Send one tensor to each rank, and receive one from each, of any sizes. See ``Comm.all_to_all``."""
    pg = member(group)
    check_tensor_list("output_tensor_list", output_tensor_list)
    check_tensor_list("input_tensor_list", input_tensor_list)
    check_same_dtype(output_tensor_list, input_tensor_list)
    comm = pg.comm(input_tensor_list[0].device if input_tensor_list else None)
    return comm.all_to_all(output_tensor_list, input_tensor_list)


@collective()
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Wait until every rank of the group has called ``barrier``.

    Args:
        device_ids: a list; the first item is the index of this rank's accelerator. None or empty: the bound device,
            else the CPU if the group serves it, else the current accelerator.
        timeout: of this barrier; None: the group's.
    """
    pg = member(group)
    if device_ids is not None:
        if not isinstance(device_ids, list) or any(as_index(index) is None for index in device_ids):
            raise TypeError(f"device_ids must be a list of indices, got {device_ids!r}")
        if not all(0 <= int(index) < MAX_DEVICES for index in device_ids):
            raise ValueError(f"device_ids must be in [0, {MAX_DEVICES}), got {device_ids!r}")
    if timeout is not None:
        check_valid_timeout(timeout)
    return pg.comm(_barrier_device(pg, device_ids)).barrier(timeout=timeout)


def _barrier_device(pg: ProcessGroup, device_ids: list[int] | None) -> torch.device:
    """Device of a barrier: the given device, or the bound one, or the CPU if the group serves it."""
    kind = accelerator()
    if device_ids:
        return torch.device(kind, int(device_ids[0]))
    if pg.bound_device_id is not None:
        return pg.bound_device_id
    if kind == "cpu" or pg.object_device == "cpu":
        return torch.device("cpu")
    if pg.rank() == 0:
        warnings.warn(
            f"barrier() of {pg!r} uses the current device: pass device_ids=, or device_id= to init_process_group",
            stacklevel=4,
        )
    return torch.device(kind, torch.accelerator.current_device_index())


def monitored_barrier(
    group: Group = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> Awaitable[None]:
    """Barrier over the store with errors that name the missing ranks; ``await`` it. See ``Comm.monitored_barrier``.

    Args:
        timeout: None: the group's timeout. A number counts as seconds, with a warning.
        wait_all_ranks: name all missing ranks, instead of the first.

    Raises: ValueError if the group does not serve the CPU or is fake; TypeError.
    """
    pg = member_of(group, "monitored_barrier", 3)
    if pg is None:
        return NOTHING
    if "cpu" not in pg.device_types or pg.backend == Backend.FAKE:
        raise ValueError(f"monitored_barrier needs a group with a backend for the CPU, not {pg!r}")
    if isinstance(timeout, float):
        warnings.warn(f"timeout should be a timedelta; {timeout} counts as seconds", stacklevel=2)
        timeout = timedelta(seconds=timeout)
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a timedelta, got {timeout!r} ({type(timeout).__name__})")
    return pg.comm("cpu").monitored_barrier(pg.timeout if timeout is None else timeout, wait_all_ranks)
