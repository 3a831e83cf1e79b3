"""Argument checks of the functions, and the check whether this rank is in the group.

Each function checks membership first, so a rank outside the group gets no error about the group's ranks or tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.types import NON_GROUP_MEMBER
from asynccomm.compat.c10d.world import Group, default_group, world
from asynccomm.ops.dtypes import REAL


class OutsideError(Exception):
    """This rank is not in the group of a call, so the call does nothing."""


def member(group: Group) -> ProcessGroup:
    """The group. Raises: OutsideError; TypeError if ``group`` is not a group."""
    if group is None:
        return default_group()
    if isinstance(group, ProcessGroup):
        return group
    if group == NON_GROUP_MEMBER:
        raise OutsideError
    raise TypeError(f"group must be a ProcessGroup, got {group!r} ({type(group).__name__})")


def member_of(group: Group, what: str, depth: int = 3) -> ProcessGroup | None:
    """The group; None, with a warning, if this rank is not in the group: see :func:`warn_outside`."""
    try:
        return member(group)
    except OutsideError:
        warn_outside(what, depth + 1)
        return None


def warn_outside(what: str, depth: int) -> None:
    """Warn that the function ``what`` does nothing. ``depth``: the ``stacklevel``, which points to its caller."""
    default = world().default_pg
    rank = -1 if default is None else default.rank()
    warnings.warn(f"{what} does nothing on global rank {rank}, which is not in the group", stacklevel=depth)


def check_tensor(name: str, tensor: object) -> None:
    """Raise TypeError unless ``tensor`` is a tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {tensor!r} ({type(tensor).__name__})")


def check_tensor_list(name: str, tensors: object) -> None:
    """Raise TypeError unless ``tensors`` is a list of tensors; a tuple is rejected, as in torch."""
    if not isinstance(tensors, list) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(f"{name} must be a list of torch.Tensor, got {tensors!r} ({type(tensors).__name__})")


def check_same_dtype(*tensors: Any) -> None:
    """Raise ValueError unless all tensors, also in lists, have one dtype; a complex dtype matches its real dtype."""
    first: torch.dtype | None = None
    for tensor in _flat(tensors):
        dtype = REAL.get(tensor.dtype, tensor.dtype)
        if first is None:
            first = dtype
        elif dtype != first:
            raise ValueError(f"all tensors must have one dtype, got {first} and {dtype}")


def _flat(tensors: Iterable[Any]) -> Iterable[Tensor]:
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            yield tensor
        else:
            yield from _flat(tensor)


def check_not_self(pg: ProcessGroup, group_rank: int | None, name: str) -> None:
    """Raise ValueError if ``group_rank`` is this process's rank."""
    if group_rank is not None and group_rank == pg.rank():
        raise ValueError(f"{name} should not be the same as the rank of the current process, {group_rank}")


def check_root_list(pg: ProcessGroup, root: int, name: str, items: object) -> None:
    """Raise ValueError unless ``items`` is given on the root and on no other rank."""
    if root == pg.rank():
        if not items:
            raise ValueError(f"{name} must be given on the rank that the operation is rooted at")
    elif items:
        raise ValueError(f"{name} must be given only on the rank that the operation is rooted at, {root} in the group")
