"""Collectives that reduce tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary, has_torch_function_variadic
from typing_extensions import deprecated

from asynccomm.comm.comm import Comm
from asynccomm.compat.c10d.coalescing import CollOp, recording
from asynccomm.compat.c10d.logs import collective
from asynccomm.compat.c10d.ranks import canonical_rank
from asynccomm.compat.c10d.types import ReduceOp, reduction
from asynccomm.compat.c10d.validation import check_same_dtype, check_tensor, check_tensor_list, member
from asynccomm.compat.c10d.work import with_future
from asynccomm.compat.c10d.world import Group
from asynccomm.core import work as _ours
from asynccomm.ops import AllReduce, lists
from asynccomm.ops.dtypes import in_reals
from asynccomm.ops.reduce_op import RedOpType
from asynccomm.ops.reduce_op import ReduceOp as _OurOp


@collective()
def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Any:
    """Reduce all ranks' ``tensor`` in place, on all ranks, with bitwise equal results. See ``Comm.all_reduce``.

    Complex numbers are sent as pairs of reals, so other ranks may pass real tensors; not so for lazily conjugated
    tensors, and not with PREMUL_SUM.

    Raises: ValueError for complex tensors and an op that is undefined for them.
    """
    if has_torch_function_unary(tensor):
        return handle_torch_function(all_reduce, (tensor,), tensor, op=op, group=group, async_op=async_op)
    pg = member(group)
    check_tensor("tensor", tensor)
    comm = pg.comm(tensor.device)
    records = recording(pg)
    if records is not None:
        record = CollOp(all_reduce, tensor, None, op)
        return records.record(record, comm, lambda: _all_reduce(comm, tensor, op), async_op)
    return _all_reduce(comm, tensor, op)


def _all_reduce(comm: Comm, tensor: Tensor, op: Any) -> _ours.Work[Any]:
    kind = reduction(op)
    if not _go_in_parts([tensor], kind):
        return comm.all_reduce(tensor, kind)
    return comm._submit(AllReduce.of(comm._group, in_reals(tensor), kind)._replace(result=tensor), None, None)


def _go_in_parts(tensors: Sequence[Tensor], op: _OurOp) -> bool:
    """Whether some tensors are complex and all can be reduced as the reals in their memory.

    The factor of PREMUL_SUM may be complex on some ranks. A lazily conjugated tensor has other values than its memory.

    Raises: ValueError if the op is undefined for complex numbers.
    """
    numbers = [tensor for tensor in tensors if tensor.is_complex()]
    if not numbers:
        return False
    for tensor in numbers:
        op.check(tensor.dtype)
    return op.type is not RedOpType.PREMUL_SUM and not any(tensor.is_conj() for tensor in numbers)


@deprecated("all_reduce_coalesced is deprecated: use a coalescing manager", category=FutureWarning)
@with_future
@collective(depth=5)
def all_reduce_coalesced(
    tensors: list[Tensor] | Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """All-reduce each of ``tensors``, all of one dtype; ``async_op=True`` returns a future."""
    pg = member(group)
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    check_tensor_list("tensors", tensors)
    check_same_dtype(tensors)
    comm, kind = pg.comm(tensors[0].device if tensors else None), reduction(op)
    if _go_in_parts(tensors, kind):
        reals = [in_reals(tensor) for tensor in tensors]
        return comm._submit_together(lists.all_reduce(comm._group, reals, kind).calls, tensors, None, None)
    return comm.all_reduce_coalesced(tensors, kind)


@collective()
def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Reduce all ranks' ``tensor`` in place on one rank; other ranks' tensors stay unchanged. See ``Comm.reduce``."""
    pg = member(group)
    root = canonical_rank(pg, dst, group_dst, name="dst")
    check_tensor("tensor", tensor)
    return pg.comm(tensor.device).reduce(tensor, root, reduction(op))


@collective()
def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce all ranks' ``input_list[r]`` into ``output`` of each rank r. See ``Comm.reduce_scatter``."""
    pg = member(group)
    check_tensor("output", output)
    check_tensor_list("input_list", input_list)
    check_same_dtype(output, input_list)
    return pg.comm(output.device).reduce_scatter(output, input_list, reduction(op))


@collective()
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce all ranks' ``input``, and leave this rank's part (concatenated or stacked) in ``output``."""
    if has_torch_function_variadic(output, input):
        return handle_torch_function(
            reduce_scatter_tensor, (output, input), output, input, op=op, group=group, async_op=async_op
        )
    pg = member(group)
    check_tensor("output", output)
    check_tensor("input", input)
    comm = pg.comm(output.device)
    records = recording(pg)
    if records is not None:
        record = CollOp(reduce_scatter_tensor, input, output, op)
        return records.record(record, comm, lambda: comm.reduce_scatter_single(output, input, reduction(op)), async_op)
    return comm.reduce_scatter_single(output, input, reduction(op))


reduce_scatter_single = reduce_scatter_tensor


@deprecated("_reduce_scatter_base is deprecated: use reduce_scatter_tensor", category=FutureWarning)
def reduce_scatter_base(
    output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Old name of :func:`reduce_scatter_tensor`."""
    return reduce_scatter_tensor(output, input, op, group, async_op)
