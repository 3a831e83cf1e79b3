"""Collectives that give new tensors, as operators that a compiled graph keeps; see ``asynccomm.compat.operators``.

::

    layer = torch.compile(lambda x: functional.all_reduce(comm, x) + 1, fullgraph=True)

They block the thread, reduce by SUM, and have no gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asynccomm.compat.torchcomms.comm import TorchComm


def all_reduce(comm: TorchComm, tensor: Tensor) -> Tensor:
    """The sum of all ranks' ``tensor``; ``tensor`` is not changed."""
    return torch.ops.asynccomm.all_reduce(tensor, comm.operator_name)  # type: ignore[no-any-return]


def all_gather_single(comm: TorchComm, input: Tensor, dim: int = 0) -> Tensor:
    """All ranks' ``input``, concatenated along ``dim``."""
    size = comm.get_size()
    return torch.ops.asynccomm.all_gather(input, dim, size, comm.operator_name)  # type: ignore[no-any-return]


def reduce_scatter_single(comm: TorchComm, input: Tensor, dim: int = 0) -> Tensor:
    """This rank's chunk along ``dim`` of the sum of all ranks' ``input``."""
    size = comm.get_size()
    return torch.ops.asynccomm.reduce_scatter(input, dim, size, comm.operator_name)  # type: ignore[no-any-return]


def all_to_all_single(comm: TorchComm, input: Tensor) -> Tensor:
    """Chunk r of dim 0 of ``input`` for rank r; the result has this rank's chunks of all ranks, in rank order."""
    return torch.ops.asynccomm.all_to_all(input, comm.operator_name)  # type: ignore[no-any-return]


def broadcast(comm: TorchComm, tensor: Tensor, root: int) -> Tensor:
    """The ``tensor`` of rank ``root``; ``tensor`` is not changed."""
    return torch.ops.asynccomm.broadcast(tensor, root, comm.operator_name)  # type: ignore[no-any-return]
