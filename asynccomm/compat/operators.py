"""Collectives as operators of torch, so that a compiled graph keeps them: ``torch.ops.asynccomm.all_reduce``, ...

An operator takes the name of a group, since a graph holds strings and no groups. Operators have fake implementations,
by which torch finds the shape of a result. They return new tensors. Their real implementations block the thread, and
raise WouldBlockError on a thread with a running loop: a compiled model runs in a thread of its own there.

They have gradients. On rank s an operation gives ``y_s``, a linear function of all ranks' ``x_r``; the gradient of
``x_r`` is the sum over s of the transposed function, applied to the gradient ``g_s`` of ``y_s``. It is an operator,
too, so that all ranks run the backward pass, or none:

| operator         | gradient                               |
|------------------|----------------------------------------|
| all_reduce       | all_reduce                             |
| all_gather       | reduce_scatter                         |
| reduce_scatter   | all_gather                             |
| all_to_all       | all_to_all                             |
| all_to_all_v     | all_to_all_v, with the splits swapped  |
| broadcast        | reduce to the root                     |
| reduce           | broadcast from the root                |

The reductions SUM and AVG have gradients, and the others raise NotImplementedError in the backward pass.

There are no forward-mode derivatives: an ``input`` with a tangent of ``dual_level`` is refused with
NotImplementedError. ``torch.func`` hides its tangents from operators, and takes their results for constants: functions
that call operators check their arguments themselves.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from asynccomm.errors import WouldBlockError
from asynccomm.ops.reduce_op import RedOpType, ReduceOp
from asynccomm.ops.validation import check_no_tangent


class OperatorGroup(Protocol):
    """A group that runs the operations of the operators."""

    def _operate(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call the comm's method ``name``, and block the thread. Returns: the output."""
        ...


LINEAR: Final = ("SUM", "AVG")  # reductions with a gradient

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


def _blocking(name: str, input: Tensor) -> OperatorGroup:
    """The group called ``name``, for an operation on ``input``."""
    check_no_tangent("input", input)
    if asyncio._get_running_loop() is not None:
        raise WouldBlockError(
            f"an operator of group {name!r} would block the event loop of this thread: run the model in another thread"
        )
    return group_called(name)


def _reduction(op: str) -> ReduceOp:
    """The reduction with the name ``op``. Raises: ValueError."""
    try:
        return ReduceOp(RedOpType(op))
    except ValueError:
        plain = [kind.name for kind in RedOpType if kind is not RedOpType.PREMUL_SUM]
        raise ValueError(f"op must be one of {', '.join(plain)}, got {op!r}") from None


def _like(input: Tensor) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@torch.library.custom_op("asynccomm::all_reduce", mutates_args=())
def all_reduce(input: Tensor, group_name: str, op: str = "SUM") -> Tensor:
    """The ranks' ``input``, combined by the reduction ``op``."""
    out = _like(input)
    _blocking(group_name, input)._operate("all_reduce", input, _reduction(op), out=out)
    return out


@torch.library.custom_op("asynccomm::all_gather", mutates_args=())
def all_gather(input: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    """All ranks' ``input``, concatenated along ``dim``."""
    return _blocking(group_name, input)._operate("all_gather_single", None, input, dim)  # type: ignore[no-any-return]


@torch.library.custom_op("asynccomm::reduce_scatter", mutates_args=())
def reduce_scatter(input: Tensor, dim: int, world_size: int, group_name: str, op: str = "SUM") -> Tensor:
    """This rank's chunk along ``dim`` of the ranks' ``input``, combined by the reduction ``op``."""
    group = _blocking(group_name, input)
    return group._operate("reduce_scatter_single", None, input, _reduction(op), dim)  # type: ignore[no-any-return]


@torch.library.custom_op("asynccomm::all_to_all", mutates_args=())
def all_to_all(input: Tensor, group_name: str) -> Tensor:
    """Chunk r of dim 0 of ``input`` goes to rank r; the result has the chunks of all ranks, in rank order."""
    return _blocking(group_name, input)._operate("all_to_all_single", _like(input), input)  # type: ignore[no-any-return]


@torch.library.custom_op("asynccomm::all_to_all_v", mutates_args=())
def all_to_all_v(
    input: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group_name: str
) -> Tensor:
    """``input_split_sizes[r]`` rows of ``input`` go to each rank r, ``output_split_sizes[s]`` come from each rank s."""
    out = input.new_empty((sum(output_split_sizes), *input.shape[1:]))
    splits = list(output_split_sizes), list(input_split_sizes)
    _blocking(group_name, input)._operate("all_to_all_v_single", out, input, *splits)
    return out


@torch.library.custom_op("asynccomm::broadcast", mutates_args=())
def broadcast(input: Tensor, root: int, group_name: str) -> Tensor:
    """The ``input`` of rank ``root``, on all ranks; the other ranks' must have its shape and dtype."""
    copy = input.clone(memory_format=torch.contiguous_format)
    _blocking(group_name, input)._operate("broadcast", copy, root)
    return copy


@torch.library.custom_op("asynccomm::reduce", mutates_args=())
def reduce(input: Tensor, root: int, world_size: int, group_name: str, op: str = "SUM") -> Tensor:
    """The ranks' ``input``, combined by the reduction ``op``, on rank ``root``; zeros on the other ranks."""
    copy = input.clone(memory_format=torch.contiguous_format)
    at_root = _blocking(group_name, input)._operate("reduce", copy, root, _reduction(op)) is not None
    return copy if at_root else copy.zero_()


@broadcast.register_fake
def _copied(input: Tensor, root: int, group_name: str) -> Tensor:
    return _like(input)


@reduce.register_fake
def _reduced_at_root(input: Tensor, root: int, world_size: int, group_name: str, op: str = "SUM") -> Tensor:
    return _like(input)


@all_to_all.register_fake
def _exchanged(input: Tensor, group_name: str) -> Tensor:
    return _like(input)


@all_to_all_v.register_fake
def _exchanged_rows(
    input: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group_name: str
) -> Tensor:
    return input.new_empty((sum(output_split_sizes), *input.shape[1:]))


@all_reduce.register_fake
def _reduced(input: Tensor, group_name: str, op: str = "SUM") -> Tensor:
    return _like(input)


@all_gather.register_fake
def _gathered(input: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    shape = list(input.shape) or [1]  # a scalar counts as one row
    shape[dim] *= world_size
    return input.new_empty(shape)


@reduce_scatter.register_fake
def _scattered(input: Tensor, dim: int, world_size: int, group_name: str, op: str = "SUM") -> Tensor:
    shape = list(input.shape)
    torch._check(shape[dim] % world_size == 0)
    shape[dim] //= world_size
    return input.new_empty(shape)


# -- gradients --------------------------------------------------------------------------------------------------------


def _check_linear(op: str) -> None:
    if op not in LINEAR:
        raise NotImplementedError(f"reductions have gradients for op SUM and AVG, got {op}")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    """Keep all arguments but the tensor, which no gradient needs."""
    ctx.arguments = inputs[1:]


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    """Keep the number of rows as well: an input may have more than it sends."""
    ctx.arguments = inputs[1:]
    ctx.rows = inputs[0].shape[0]


def _of_all_reduce(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    group_name, op = ctx.arguments
    _check_linear(op)
    return torch.ops.asynccomm.all_reduce(grad, group_name, op), None, None


def _of_all_gather(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dim, world_size, group_name = ctx.arguments
    return torch.ops.asynccomm.reduce_scatter(grad, dim, world_size, group_name), None, None, None


def _of_reduce_scatter(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dim, world_size, group_name, op = ctx.arguments
    _check_linear(op)
    found = torch.ops.asynccomm.all_gather(grad, dim, world_size, group_name)
    return found / world_size if op == "AVG" else found, None, None, None, None


def _of_all_to_all(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (group_name,) = ctx.arguments
    return torch.ops.asynccomm.all_to_all(grad, group_name), None


def _of_all_to_all_v(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    output_split_sizes, input_split_sizes, group_name = ctx.arguments
    found = torch.ops.asynccomm.all_to_all_v(grad, input_split_sizes, output_split_sizes, group_name)
    unused = ctx.rows - sum(input_split_sizes)
    if unused:
        found = torch.cat([found, found.new_zeros((unused, *found.shape[1:]))])
    return found, None, None, None


def _of_broadcast(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    root, group_name = ctx.arguments
    return torch.ops.asynccomm.reduce(grad, root, 1, group_name), None, None


def _of_reduce(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    root, world_size, group_name, op = ctx.arguments
    _check_linear(op)
    found = torch.ops.asynccomm.broadcast(grad, root, group_name)
    return found / world_size if op == "AVG" else found, None, None, None, None


for _operator, _gradient in (
    (all_reduce, _of_all_reduce),
    (all_gather, _of_all_gather),
    (reduce_scatter, _of_reduce_scatter),
    (all_to_all, _of_all_to_all),
    (broadcast, _of_broadcast),
    (reduce, _of_reduce),
):
    _operator.register_autograd(_gradient, setup_context=_keep)
all_to_all_v.register_autograd(_of_all_to_all_v, setup_context=_keep_rows)
