"""Collectives that give new tensors, as operators that a compiled graph keeps; see ``asynccomm.compat.operators``.

::

    layer = torch.compile(lambda x: functional.all_reduce(comm, x) + 1, fullgraph=True)

The functions block the thread. They have gradients: of reductions, for SUM, AVG and PREMUL_SUM. ``op`` may be any
reduction; with PREMUL_SUM, the product of the tensor and the factor has the dtype of the tensor, and the factor has a
gradient, too. Raises: the errors of the comm's methods; WouldBlockError in a coroutine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asynccomm.compat.torchcomms.comm import TorchComm
from asynccomm.ops.reduce_op import RedOpType, ReduceOp, ReduceOpLike


def _prepared(tensor: Tensor, op: ReduceOpLike) -> tuple[Tensor, str]:
    """``tensor`` and the name of a reduction without a factor."""
    reduction = ReduceOp.of(op)
    if reduction.type is not RedOpType.PREMUL_SUM:
        return tensor, reduction.type.name
    reduction.check(tensor.dtype)
    factor = reduction.factor
    assert factor is not None
    if isinstance(factor, Tensor):
        factor = factor.reshape(()).to(tensor.device)
    return (tensor * factor).to(tensor.dtype), "SUM"


def all_reduce(comm: TorchComm, tensor: Tensor, op: ReduceOpLike = ReduceOp.SUM) -> Tensor:
    """The ranks' ``tensor``, combined by ``op``, on all ranks; ``tensor`` is not changed."""
    given, name = _prepared(tensor, op)
    return torch.ops.asynccomm.all_reduce(given, comm.operator_name, name)  # type: ignore[no-any-return]


def reduce(comm: TorchComm, tensor: Tensor, root: int, op: ReduceOpLike = ReduceOp.SUM) -> Tensor:
    """The ranks' ``tensor``, combined by ``op``, on rank ``root``; zeros on the other ranks."""
    given, name = _prepared(tensor, op)
    size = comm.get_size()
    return torch.ops.asynccomm.reduce(given, root, size, comm.operator_name, name)  # type: ignore[no-any-return]


def broadcast(comm: TorchComm, tensor: Tensor, root: int) -> Tensor:
    """The ``tensor`` of rank ``root``; ``tensor`` is not changed."""
    return torch.ops.asynccomm.broadcast(tensor, root, comm.operator_name)  # type: ignore[no-any-return]


def all_gather(comm: TorchComm, tensor: Tensor) -> list[Tensor]:
    """Every rank's ``tensor``, of one shape on all ranks."""
    return list(all_gather_single(comm, tensor[None]).unbind())


def all_gather_single(comm: TorchComm, input: Tensor, dim: int = 0) -> Tensor:
    """All ranks' ``input``, concatenated along ``dim``."""
    size = comm.get_size()
    return torch.ops.asynccomm.all_gather(input, dim, size, comm.operator_name)  # type: ignore[no-any-return]


def reduce_scatter(comm: TorchComm, input_list: Sequence[Tensor], op: ReduceOpLike = ReduceOp.SUM) -> Tensor:
    """The ranks' ``input_list[r]`` for this rank r, combined by ``op``; all tensors have one shape."""
    if len(input_list) != comm.get_size():
        raise RuntimeError(f"input_list must have {comm.get_size()} tensors, got {len(input_list)}")
    return reduce_scatter_single(comm, torch.stack(list(input_list)), op)[0]


def reduce_scatter_single(comm: TorchComm, input: Tensor, op: ReduceOpLike = ReduceOp.SUM, dim: int = 0) -> Tensor:
    """This rank's chunk along ``dim`` of the ranks' ``input``, combined by ``op``."""
    given, name = _prepared(input, op)
    size = comm.get_size()
    return torch.ops.asynccomm.reduce_scatter(given, dim, size, comm.operator_name, name)  # type: ignore[no-any-return]


def all_to_all_single(comm: TorchComm, input: Tensor) -> Tensor:
    """Chunk r of dim 0 of ``input`` for rank r; the result has this rank's chunks of all ranks, in rank order."""
    return torch.ops.asynccomm.all_to_all(input, comm.operator_name)  # type: ignore[no-any-return]


def all_to_all_v_single(
    comm: TorchComm, input: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int]
) -> Tensor:
    """``input_split_sizes[r]`` rows of ``input`` for each rank r; ``output_split_sizes[s]`` come from each rank s."""
    splits = list(output_split_sizes), list(input_split_sizes)
    return torch.ops.asynccomm.all_to_all_v(input, *splits, comm.operator_name)  # type: ignore[no-any-return]
