"""Calls of every kind, on tensors whose sums and products are exact."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from asynccomm import ops
from asynccomm.ops import Call
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo

KINDS = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
    "gather",
    "all_to_all_single",
    "barrier",
    # shares of several tensors
    "all_reduce_several",
    "broadcast_several",
    "all_gather_several",
    "reduce_scatter_several",
    # results beside the inputs
    "all_reduce_out",
    "reduce_out",
    # shares of each rank's own size
    "all_gather_uneven",
    "reduce_scatter_uneven",
    "all_to_all",
]
DTYPES = [torch.float32, torch.int64, torch.float64, torch.int8, torch.bfloat16, torch.bool, torch.complex64]


def values(n: int, dtype: torch.dtype, strided: bool, choose: random.Random) -> Tensor:
    """Small whole numbers: sums and products of few are exact in any type and order."""
    generator = torch.Generator().manual_seed(choose.randrange(1 << 30))
    numbers = torch.randint(0, 3, (n, 2) if strided else (n,), generator=generator).to(dtype)
    return numbers[:, 0] if strided else numbers


def make(kind: str, group: CommInfo, n: int, root: int, op: ReduceOp, new: Callable[[int], Tensor]) -> Call:
    size, me = group.size, group.rank
    match kind:
        case "all_reduce":
            return ops.AllReduce.of(group, new(n), op)
        case "broadcast":
            return ops.Broadcast.of(group, new(n), root)
        case "reduce":
            return ops.Reduce.of(group, new(n), root, op)
        case "all_gather":
            return ops.AllGather.of(group, [new(n) for _ in range(size)], new(n))
        case "all_gather_single":
            return ops.AllGatherSingle.of(group, new(n * size), new(n))
        case "reduce_scatter":
            return ops.ReduceScatter.of(group, new(n), [new(n) for _ in range(size)], op)
        case "reduce_scatter_single":
            return ops.ReduceScatterSingle.of(group, new(n), new(n * size), op)
        case "scatter":
            return ops.Scatter.of(group, new(n), [new(n) for _ in range(size)] if me == root else None, root)
        case "gather":
            return ops.Gather.of(group, [new(n) for _ in range(size)] if me == root else None, new(n), root)
        case "all_to_all_single":
            return ops.AllToAllSingle.of(group, new(n * size), new(n * size))
        case "all_reduce_out":
            return ops.AllReduce.of(group, new(n), op, new(n))
        case "reduce_out":
            return ops.Reduce.of(group, new(n), root, op, new(n) if me == root else None)
        case "barrier":
            return ops.Barrier.of(group)
        case _:
            return make_of_many(kind, group, n, root, op, new)


def make_of_many(kind: str, group: CommInfo, n: int, root: int, op: ReduceOp, new: Callable[[int], Tensor]) -> Call:
    """Shares of several tensors, and those that differ between ranks."""
    size, me = group.size, group.rank
    divided = [n // 3, 0, 5, n - n // 3, 1]
    # from 0 to n, and what goes from s to r depends on both
    uneven = [n * (rank + 1) // size if rank % 3 else 0 for rank in range(size)]
    match kind:
        case "all_reduce_several":
            return ops.AllReduce.of_several(group, [new(k) for k in divided], op)
        case "broadcast_several":
            return ops.Broadcast.of_several(group, mixed(new, divided), root)
        case "all_gather_several":
            return ops.AllGather.of_several(group, [mixed(new, divided) for _ in range(size)], mixed(new, divided))
        case "reduce_scatter_several":
            inputs = [[new(k) for k in divided] for _ in range(size)]
            return ops.ReduceScatter.of_several(group, [new(k) for k in divided], inputs, op)
        case "all_gather_uneven":
            return ops.AllGather.of(group, [new(k) for k in uneven], new(uneven[me]))
        case "reduce_scatter_uneven":
            return ops.ReduceScatter.of(group, new(uneven[me]), [new(k) for k in uneven], op)
        case "all_to_all":
            outputs = [new(uneven[(s + 2 * me) % size]) for s in range(size)]
            return ops.AllToAll.of(group, outputs, [new(uneven[(me + 2 * r) % size]) for r in range(size)])
        case _:
            raise AssertionError(kind)


def mixed(new: Callable[[int], Tensor], numels: list[int]) -> list[Tensor]:
    """Of several dtypes, the same on all ranks."""
    return [new(n) if i % 2 else new(n).real.to(torch.int16) for i, n in enumerate(numels)]


def copied(call: Call) -> Call:
    """The same on tensors of its own, aliases kept."""
    twins: dict[int, Tensor] = {}

    def twin(tensor: Tensor) -> Tensor:
        return twins.setdefault(id(tensor), tensor.clone())

    inputs = tuple(map(twin, call.inputs))
    return Call(call.op, inputs, inputs if call.outputs is call.inputs else tuple(map(twin, call.outputs)), None)


def legal(op: ReduceOp, dtype: torch.dtype) -> bool:
    try:
        op.check(dtype)
    except ValueError:
        return False
    return True
