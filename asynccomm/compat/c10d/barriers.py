"""Barriers."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable
from datetime import timedelta
from typing import Any

import torch

from asynccomm.compat.c10d.backends import Backend, accelerator
from asynccomm.compat.c10d.logs import logged
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.validation import member_of
from asynccomm.compat.c10d.work import NOTHING, Work
from asynccomm.compat.c10d.world import Group

__all__ = ["barrier", "monitored_barrier"]


@logged
def barrier(group: Group = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
    """Done when every rank of the group has called it.

    Args:
        device_ids: the index of this rank's accelerator, the first of them; where the group has one for several.
    """
    pg = member_of(group, "barrier")
    if pg is None:
        return None if async_op else NOTHING
    if device_ids is not None and not isinstance(device_ids, list):
        raise TypeError(f"device_ids must be a list of indices, got {device_ids!r}")
    work = pg.comm(_barrier_device(pg, device_ids)).barrier()
    return Work(work) if async_op else work


def _barrier_device(pg: ProcessGroup, device_ids: list[int] | None) -> torch.device:
    """Where a barrier is: on the device that is named, or bound, or on the CPU if that will do."""
    kind = accelerator()
    if device_ids:
        return torch.device(kind, device_ids[0])
    if pg.bound_device_id is not None:
        return pg.bound_device_id
    if kind == "cpu" or pg.object_device == "cpu":
        return torch.device("cpu")
    if pg.rank() == 0:
        warnings.warn(
            f"barrier() of {pg!r} uses the current device: pass device_ids=, or device_id= to init_process_group",
            stacklevel=4,
        )
    return torch.device(kind, torch.accelerator.current_device_index())


def monitored_barrier(
    group: Group = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> Awaitable[None]:
    """A barrier that says who is missing; ``await`` it. See ``Comm.monitored_barrier``: it runs over the store.

    Args:
        timeout: None: the group's. A number counts as seconds, with a warning.
        wait_all_ranks: name all ranks that are missing, instead of the first.

    Raises: ValueError for a group of accelerators alone, and for a fake one; TypeError.
    """
    pg = member_of(group, "monitored_barrier", 3)
    if pg is None:
        return NOTHING
    if "cpu" not in pg.device_types or pg.backend == Backend.FAKE:
        raise ValueError(f"monitored_barrier needs a group with a backend for the CPU, not {pg!r}")
    if isinstance(timeout, float):
        warnings.warn(f"timeout should be a timedelta; {timeout} counts as seconds", stacklevel=2)
        timeout = timedelta(seconds=timeout)
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a timedelta, got {timeout!r} ({type(timeout).__name__})")
    return pg.comm("cpu").monitored_barrier(pg.timeout if timeout is None else timeout, wait_all_ranks)
