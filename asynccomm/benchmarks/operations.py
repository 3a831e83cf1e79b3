"""The operations that are measured, by asynccomm and by torch.distributed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from asynccomm.benchmarks.parts import uneven
from asynccomm.comm.comm import Comm

SIZES = [8, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]  # bytes each rank brings
# operations that gloo does not finish by a future
NO_FUTURE = {"send_recv", "ring", "reduce_scatter", "reduce_scatter_single", "all_gather_object", "broadcast_object"}

# torch 2.15 warns of the older names
_torch_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_torch_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class MeasuredOp:
    """One collective, by us and by torch.distributed; ``tensors`` makes its (output, input) for a size in floats."""

    name: str
    tensors: Callable[[int, int, int], tuple[Any, Any]]  # (floats, rank, size)
    ours: Callable[[Comm, Any, Any], Awaitable[object]]
    torch: Callable[[Any, Any, bool], Any]  # (output, input, async_op)


def _same(n: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    tensor = torch.ones(n)
    return tensor, tensor


def _gathered(n: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.empty(n * size), torch.ones(n)


def _scattered(n: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    share = max(1, n // size)
    return torch.empty(share), torch.ones(share * size)


def _swapped(n: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    share = max(1, n // size) * size
    return torch.empty(share), torch.ones(share)


def _list_out(n: int, rank: int, size: int) -> tuple[list[Tensor], Tensor]:
    return [torch.empty(n) for _ in range(size)], torch.ones(n)


def _list_at_root(n: int, rank: int, size: int) -> tuple[list[Tensor] | None, Tensor]:
    return ([torch.empty(n) for _ in range(size)] if rank == 0 else None), torch.ones(n)


def _list_in(n: int, rank: int, size: int) -> tuple[Tensor, list[Tensor]]:
    share = max(1, n // size)
    return torch.empty(share), [torch.ones(share) for _ in range(size)]


def _uneven_swap(n: int, rank: int, size: int) -> tuple[Any, Any]:
    """Each rank sends the same uneven parts, so each rank gets ``size`` times its own."""
    parts = uneven(n, size)
    return (torch.empty(parts[rank] * size), [parts[rank]] * size), (torch.ones(sum(parts)), parts)


def _bytes(n: int, rank: int, size: int) -> tuple[list[object], bytes]:
    return [b"" for _ in range(size)], bytes(4 * n)


def _passed(n: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.empty(n), torch.ones(n)


def _passed_on(n: int, rank: int, size: int) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    """With the ranks before and behind this one, as a program with a ring has them at hand."""
    return (torch.empty(n), (rank - 1) % size), (torch.ones(n), (rank + 1) % size)


async def _ping_pong(comm: Comm, out: Tensor, mine: Tensor) -> None:
    if comm.rank == 0:
        await comm.send(mine, 1)
        await comm.recv(out, 1)
    elif comm.rank == 1:
        await comm.recv(out, 0)
        await comm.send(mine, 0)


def _ping_pong_torch(out: Tensor, mine: Tensor, async_op: bool) -> None:
    if dist.get_rank() == 0:
        dist.send(mine, 1)
        dist.recv(out, 1)
    elif dist.get_rank() == 1:
        dist.recv(out, 0)
        dist.send(mine, 0)


async def _ring(comm: Comm, out: tuple[Tensor, int], mine: tuple[Tensor, int]) -> None:
    """Each rank sends to the next one, and has posted a receive from the one before."""
    (output, previous), (tensor, following) = out, mine
    receive = comm.recv(output, previous)
    await comm.send(tensor, following)
    await receive


def _ring_torch(out: tuple[Tensor, int], mine: tuple[Tensor, int], async_op: bool) -> None:
    receive, send = dist.irecv(*out), dist.isend(*mine)
    for work in (send, receive):
        assert work is not None
        work.wait()


OPS = {
    op.name: op
    for op in [
        MeasuredOp(
            "all_reduce", _same, lambda c, o, i: c.all_reduce(i), lambda o, i, a: dist.all_reduce(i, async_op=a)
        ),
        MeasuredOp(
            "broadcast", _same, lambda c, o, i: c.broadcast(i, 0), lambda o, i, a: dist.broadcast(i, 0, async_op=a)
        ),
        MeasuredOp("reduce", _same, lambda c, o, i: c.reduce(i, 0), lambda o, i, a: dist.reduce(i, 0, async_op=a)),
        MeasuredOp(
            "all_gather",
            _list_out,
            lambda c, o, i: c.all_gather(o, i),
            lambda o, i, a: dist.all_gather(o, i, async_op=a),
        ),
        MeasuredOp(
            "all_gather_single",
            _gathered,
            lambda c, o, i: c.all_gather_single(o, i),
            lambda o, i, a: _torch_all_gather(o, i, async_op=a),
        ),
        MeasuredOp(
            "reduce_scatter_single",
            _scattered,
            lambda c, o, i: c.reduce_scatter_single(o, i),
            lambda o, i, a: _torch_reduce_scatter(o, i, async_op=a),
        ),
        MeasuredOp(
            "all_to_all_single",
            _swapped,
            lambda c, o, i: c.all_to_all_single(o, i),
            lambda o, i, a: dist.all_to_all_single(o, i, async_op=a),
        ),
        MeasuredOp(
            "gather",
            _list_at_root,
            lambda c, o, i: c.gather(o, i, 0),
            lambda o, i, a: dist.gather(i, o, 0, async_op=a),
        ),
        MeasuredOp(
            "scatter",
            lambda n, r, s: tuple(reversed(_list_at_root(n, r, s))),  # type: ignore[arg-type,return-value]
            lambda c, o, i: c.scatter(o, i, 0),
            lambda o, i, a: dist.scatter(o, i, 0, async_op=a),
        ),
        MeasuredOp(
            "reduce_scatter",
            _list_in,
            lambda c, o, i: c.reduce_scatter(o, i),
            lambda o, i, a: dist.reduce_scatter(o, i, async_op=a),
        ),
        MeasuredOp(
            "all_to_all_v_single",
            _uneven_swap,
            lambda c, o, i: c.all_to_all_v_single(o[0], i[0], o[1], i[1]),
            lambda o, i, a: dist.all_to_all_single(o[0], i[0], o[1], i[1], async_op=a),
        ),
        MeasuredOp(
            "all_gather_object",
            _bytes,
            lambda c, o, i: c.all_gather_object(i),
            lambda o, i, a: dist.all_gather_object(o, i),
        ),
        MeasuredOp(
            "broadcast_object",
            _bytes,
            lambda c, o, i: c.broadcast_object(i, 0),
            lambda o, i, a: dist.broadcast_object_list([i], 0),
        ),
        MeasuredOp("barrier", _same, lambda c, o, i: c.barrier(), lambda o, i, a: dist.barrier(async_op=a)),
        MeasuredOp("send_recv", _passed, _ping_pong, _ping_pong_torch),
        MeasuredOp("ring", _passed_on, _ring, _ring_torch),
    ]
}


def floats(nbytes: int) -> int:
    """The number of floats in ``nbytes``; at least one."""
    return max(1, nbytes // 4)


def one_way(op: str, us: float) -> float:
    """``us`` of one operation as it is reported: a ping-pong is two messages, and its report is of one."""
    return us / 2 if op == "send_recv" else us
