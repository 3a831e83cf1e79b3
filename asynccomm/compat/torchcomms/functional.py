"""Collectives that give new tensors, as operators that a compiled graph keeps; see ``asynccomm.compat.operators``.

::

    layer = torch.compile(lambda x: functional.all_reduce(comm, x) + 1, fullgraph=True)

The functions block the thread. They have gradients: of reductions, for SUM, AVG and PREMUL_SUM. ``op`` may be any
reduction; with PREMUL_SUM, the product of the tensor and the factor has the dtype of the tensor, and the factor has a
gradient, too. Raises: the errors of the comm's methods; WouldBlockError in a coroutine; NotImplementedError for a
tensor with a forward-mode derivative.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asynccomm.compat.torchcomms.comm import TorchComm
from asynccomm.compat.torchcomms.errors import RefusedError
from asynccomm.ops.reduce_op import RedOpType, ReduceOp, ReduceOpLike
from asynccomm.ops.validation import as_index, check_is_tensor, check_no_tangent, check_sizes


def _check(comm: object, name: str, tensor: object) -> None:
    if not isinstance(comm, TorchComm):
        raise TypeError(f"comm must be a TorchComm, got {comm!r}")
    check_is_tensor(name, tensor)
    if tensor.layout is not torch.strided:  # type: ignore[attr-defined]
        raise TypeError(f"{name} must be a dense tensor, got one of layout {tensor.layout}")  # type: ignore[attr-defined]
    check_no_tangent(name, tensor)


def _check_root(comm: TorchComm, root: object) -> None:
    number = as_index(root)
    if number is None:
        raise TypeError(f"root must be an integer, got {root!r}")
    if not 0 <= number < comm.get_size():
        raise RefusedError(f"root must be in [0, {comm.get_size()}), got {number}")


def _check_dim(dim: object, tensor: Tensor) -> None:
    number, dims = as_index(dim), max(tensor.dim(), 1)  # a scalar counts as one row
    if number is None:
        raise TypeError(f"dim must be an integer, got {dim!r}")
    if not -dims <= number < dims:
        raise RefusedError(f"dim must be in [{-dims}, {dims}) for input of shape {tuple(tensor.shape)}, got {number}")


def _prepared(tensor: Tensor, op: ReduceOpLike) -> tuple[Tensor, str]:
    """``tensor`` and the name of a reduction without a factor."""
    reduction = ReduceOp.of(op)
    if reduction.type is not RedOpType.PREMUL_SUM:
        return tensor, reduction.type.name
    reduction.check(tensor.dtype)
    factor = reduction.factor
    assert factor is not None
    if isinstance(factor, Tensor):
        check_no_tangent("the factor of op", factor)
        factor = factor.reshape(()).to(tensor.device)
    return (tensor * factor).to(tensor.dtype), "SUM"


def all_reduce(comm: TorchComm, tensor: Tensor, op: ReduceOpLike = ReduceOp.SUM) -> Tensor:
    """The ranks' ``tensor``, combined by ``op``, on all ranks; ``tensor`` is not changed."""
    _check(comm, "tensor", tensor)
    given, name = _prepared(tensor, op)
    return torch.ops.asynccomm.all_reduce(given, comm.operator_name, name)  # type: ignore[no-any-return]


def reduce(comm: TorchComm, tensor: Tensor, root: int, op: ReduceOpLike = ReduceOp.SUM) -> Tensor:
    """The ranks' ``tensor``, combined by ``op``, on rank ``root``; zeros on the other ranks."""
    _check(comm, "tensor", tensor)
    _check_root(comm, root)
    given, name = _prepared(tensor, op)
    size = comm.get_size()
    return torch.ops.asynccomm.reduce(given, root, size, comm.operator_name, name)  # type: ignore[no-any-return]


def broadcast(comm: TorchComm, tensor: Tensor, root: int) -> Tensor:
    """The ``tensor`` of rank ``root``; ``tensor`` is not changed."""
    _check(comm, "tensor", tensor)
    _check_root(comm, root)
    return torch.ops.asynccomm.broadcast(tensor, root, comm.operator_name)  # type: ignore[no-any-return]


def all_gather(comm: TorchComm, tensor: Tensor) -> list[Tensor]:
    """Every rank's ``tensor``, of one shape on all ranks."""
    _check(comm, "tensor", tensor)
    return list(all_gather_single(comm, tensor[None]).unbind())


def all_gather_single(comm: TorchComm, input: Tensor, dim: int = 0) -> Tensor:
    """All ranks' ``input``, concatenated along ``dim``."""
    _check(comm, "input", input)
    _check_dim(dim, input)
    size = comm.get_size()
    return torch.ops.asynccomm.all_gather(input, dim, size, comm.operator_name)  # type: ignore[no-any-return]


def reduce_scatter(comm: TorchComm, input_list: Sequence[Tensor], op: ReduceOpLike = ReduceOp.SUM) -> Tensor:
    """The ranks' ``input_list[r]`` for this rank r, combined by ``op``; all tensors have one shape."""
    if not isinstance(input_list, Sequence) or not input_list:
        raise TypeError(f"input_list must be a list of tensors, got {input_list!r}")
    for tensor in input_list:
        _check(comm, "each item of input_list", tensor)
    if len(input_list) != comm.get_size():
        raise RefusedError(f"input_list must have {comm.get_size()} tensors, got {len(input_list)}")
    first = input_list[0]
    for tensor in input_list:
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise RefusedError(
                f"input_list must have tensors of one shape and dtype, got {tuple(first.shape)} of {first.dtype} and "
                f"{tuple(tensor.shape)} of {tensor.dtype}"
            )
    return reduce_scatter_single(comm, torch.stack(list(input_list)), op)[0]


def reduce_scatter_single(comm: TorchComm, input: Tensor, op: ReduceOpLike = ReduceOp.SUM, dim: int = 0) -> Tensor:
    """This rank's chunk along ``dim`` of the ranks' ``input``, combined by ``op``."""
    _check(comm, "input", input)
    _check_dim(dim, input)
    given, name = _prepared(input, op)
    size = comm.get_size()
    return torch.ops.asynccomm.reduce_scatter(given, dim, size, comm.operator_name, name)  # type: ignore[no-any-return]


def all_to_all_single(comm: TorchComm, input: Tensor) -> Tensor:
    """Chunk r of dim 0 of ``input`` for rank r; the result has this rank's chunks of all ranks, in rank order."""
    _check(comm, "input", input)
    size = comm.get_size()
    if not input.dim() or len(input) % size:
        raise RefusedError(f"input must have a dim 0 that {size} divides, got shape {tuple(input.shape)}")
    return torch.ops.asynccomm.all_to_all(input, comm.operator_name)  # type: ignore[no-any-return]


def all_to_all_v_single(
    comm: TorchComm, input: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int]
) -> Tensor:
    """``input_split_sizes[r]`` rows of ``input`` for each rank r; ``output_split_sizes[s]`` come from each rank s."""
    _check(comm, "input", input)
    splits = []
    for name, sizes in (("output_split_sizes", output_split_sizes), ("input_split_sizes", input_split_sizes)):
        try:
            splits.append(check_sizes(name, sizes, comm.get_size()))
        except ValueError as exc:
            raise RefusedError(str(exc)) from exc
    return torch.ops.asynccomm.all_to_all_v(input, *splits, comm.operator_name)  # type: ignore[no-any-return]
