"""The operations that are under way when something goes wrong: each called the same way on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from asynccomm.comm.comm import Comm
from asynccomm.core.work import Work

__all__ = ["SMALL", "LARGE", "call"]

SMALL: Final = 24  # elements; all sizes of jobs divide it
LARGE: Final = 3 << 19  # 6 MiB of float32

Make = Callable[[Comm, int, torch.dtype, int, float], Sequence[Work[Any]]]


def call(
    name: str, comm: Comm, numel: int, root: int, timeout: float, dtype: torch.dtype = torch.float32
) -> Sequence[Work[Any]]:
    """Issue operation ``name``, which may be several, with about ``numel`` elements."""
    return _CALLS[name](comm, numel, dtype, root, timeout)


def _all_reduce(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    return [comm.all_reduce(torch.ones(numel, dtype=dtype), timeout=timeout)]


def _broadcast(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    return [comm.broadcast(torch.ones(numel, dtype=dtype), root, timeout=timeout)]


def _reduce(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    return [comm.reduce(torch.ones(numel, dtype=dtype), root, timeout=timeout)]


def _all_gather(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    return [comm.all_gather(None, torch.ones(numel, dtype=dtype), timeout=timeout)]


def _all_gather_single(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    return [comm.all_gather_single(None, torch.ones(numel, dtype=dtype), timeout=timeout)]


def _reduce_scatter(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    parts = [torch.ones(numel, dtype=dtype) for _ in range(comm.size)]
    return [comm.reduce_scatter(None, parts, timeout=timeout)]


def _reduce_scatter_single(
    comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float
) -> Sequence[Work[Any]]:
    return [comm.reduce_scatter_single(None, torch.ones(comm.size * numel, dtype=dtype), timeout=timeout)]


def _scatter(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    parts = [torch.ones(numel, dtype=dtype) for _ in range(comm.size)] if comm.rank == root else None
    return [comm.scatter(torch.zeros(numel, dtype=dtype), parts, root, timeout=timeout)]


def _gather(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    return [comm.gather(None, torch.ones(numel, dtype=dtype), root, timeout=timeout)]


def _all_to_all(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    parts = [torch.ones(numel, dtype=dtype) for _ in range(comm.size)]
    outputs = [torch.zeros(numel, dtype=dtype) for _ in range(comm.size)]
    return [comm.all_to_all(outputs, parts, timeout=timeout)]


def _all_to_all_single(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    return [comm.all_to_all_single(None, torch.ones(comm.size * numel, dtype=dtype), timeout=timeout)]


def _messages(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    """To and from all others."""
    works: list[Work[Any]] = []
    for other in range(comm.size):
        if other != comm.rank:
            works.append(comm.send(torch.ones(numel, dtype=dtype), other, timeout=timeout))
            works.append(comm.recv(torch.zeros(numel, dtype=dtype), other, timeout=timeout))
    return works


def _scope(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    with comm.coalesce():
        return [
            comm.all_reduce(torch.ones(numel, dtype=dtype), timeout=timeout),
            comm.all_reduce(torch.ones(numel, dtype=dtype), timeout=timeout),
            comm.broadcast(torch.ones(numel, dtype=dtype), root, timeout=timeout),
        ]


def _agreed(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    """In another order on each rank."""
    tags = ["a", "b", "c"]
    turned = tags[comm.rank % 3 :] + tags[: comm.rank % 3]
    return [comm.all_reduce(torch.ones(numel, dtype=dtype), tag=tag, timeout=timeout) for tag in turned]


def _barrier(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    return [comm.barrier(timeout=timeout)]


def _all_gather_object(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    return [comm.all_gather_object({"rank": comm.rank, "of": [comm.size]}, timeout=timeout)]


def _broadcast_object(comm: Comm, numel: int, dtype: torch.dtype, root: int, timeout: float) -> Sequence[Work[Any]]:
    return [comm.broadcast_object({"rank": comm.rank} if comm.rank == root else None, root, timeout=timeout)]


_CALLS: Final[dict[str, Make]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "scatter": _scatter,
    "gather": _gather,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "messages": _messages,
    "scope": _scope,
    "agreed": _agreed,
    "barrier": _barrier,
    "all_gather_object": _all_gather_object,
    "broadcast_object": _broadcast_object,
}
