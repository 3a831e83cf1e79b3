"""Collectives as operators of torch, so that a compiled graph keeps them: ``torch.ops.asynccomm.all_reduce``, ...

An operator takes the name of a group, since a graph holds strings and no groups. Operators have fake implementations,
by which torch finds the shape of a result, and return new tensors. Their real implementations block the thread, and
raise WouldBlockError on a thread with a running loop: a compiled model runs in a thread of its own there.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from asynccomm.errors import WouldBlockError


class OperatorGroup(Protocol):
    """A group with operations that the operators run: on a thread without a loop, each blocks and gives a tensor."""

    def _all_reduce_out_place(self, input_: Tensor) -> Any: ...

    def _all_gather_out_place(self, input_: Tensor, dim: int) -> Any: ...

    def _reduce_scatter_out_place(self, input_: Tensor, dim: int) -> Any: ...

    def _all_to_all_out_place(self, input_: Tensor) -> Any: ...

    def _broadcast_out_place(self, input_: Tensor, root: int) -> Any: ...


_groups: Final[weakref.WeakValueDictionary[str, Any]] = weakref.WeakValueDictionary()
_counts: Final[dict[str, int]] = {}
_naming: Final = threading.Lock()


def unique_name(name: str) -> str:
    """``name`` with the number of earlier groups of this process that had it: "tp:0", "tp:1"."""
    with _naming:
        number = _counts.get(name, 0)
        _counts[name] = number + 1
    return f"{name}:{number}"


def register(name: str, group: OperatorGroup) -> None:
    """Let operators find ``group`` by ``name``, as long as the group exists and is not removed."""
    _groups[name] = group


def unregister(name: str) -> None:
    """Remove a group. Idempotent."""
    _groups.pop(name, None)


def group_called(name: str) -> OperatorGroup:
    """The group called ``name``. Raises: ValueError if there is none, or it was destroyed."""
    group: OperatorGroup | None = _groups.get(name)
    if group is None:
        raise ValueError(f"group_name must be of a group that exists, got {name!r}; there are {sorted(_groups)}")
    return group


def _blocking(name: str) -> OperatorGroup:
    if asyncio._get_running_loop() is not None:
        raise WouldBlockError(
            f"an operator of group {name!r} would block the event loop of this thread: run the model in another thread"
        )
    return group_called(name)


@torch.library.custom_op("asynccomm::all_reduce", mutates_args=())
def all_reduce(input: Tensor, group_name: str) -> Tensor:
    """The sum of all ranks' ``input``."""
    return _blocking(group_name)._all_reduce_out_place(input)  # type: ignore[no-any-return]


@torch.library.custom_op("asynccomm::all_gather", mutates_args=())
def all_gather(input: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    """All ranks' ``input``, concatenated along ``dim``."""
    return _blocking(group_name)._all_gather_out_place(input, dim)  # type: ignore[no-any-return]


@torch.library.custom_op("asynccomm::reduce_scatter", mutates_args=())
def reduce_scatter(input: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    """This rank's chunk along ``dim`` of the sum of all ranks' ``input``."""
    return _blocking(group_name)._reduce_scatter_out_place(input, dim)  # type: ignore[no-any-return]


@torch.library.custom_op("asynccomm::all_to_all", mutates_args=())
def all_to_all(input: Tensor, group_name: str) -> Tensor:
    """Chunk r of dim 0 of ``input`` goes to rank r; the result has the chunks of all ranks, in rank order."""
    return _blocking(group_name)._all_to_all_out_place(input)  # type: ignore[no-any-return]


@torch.library.custom_op("asynccomm::broadcast", mutates_args=())
def broadcast(input: Tensor, root: int, group_name: str) -> Tensor:
    """The ``input`` of rank ``root``, on all ranks; the other ranks' must have its shape and dtype."""
    return _blocking(group_name)._broadcast_out_place(input, root)  # type: ignore[no-any-return]


@broadcast.register_fake
def _copied(input: Tensor, root: int, group_name: str) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@all_to_all.register_fake
@all_reduce.register_fake
def _reduced(input: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@all_gather.register_fake
def _gathered(input: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    shape = list(input.shape)
    shape[dim] *= world_size
    return input.new_empty(shape)


@reduce_scatter.register_fake
def _scattered(input: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    shape = list(input.shape)
    torch._check(shape[dim] % world_size == 0)
    shape[dim] //= world_size
    return input.new_empty(shape)
