"""The comms of all processes, which GroupCoordinators split."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
from torch import distributed as dist

from asynccomm.comm.new_comm import new_comm
from asynccomm.comm.pending import PendingComm
from asynccomm.compat.either import EitherComm, in_order, same
from asynccomm.interop.wrap import wrap


@final
@dataclass(frozen=True, slots=True)
class Environment:
    """The comms of all processes: for objects, and for tensors on the device. The same comm on the CPU."""

    cpu: EitherComm
    device: EitherComm
    weights_only: bool  #: of objects
    counts: Counter[str] = field(default_factory=Counter)  #: of groups, by name

    def name_of_next(self, name: str) -> str:
        """A name for the comms of the next group called ``name``: equal on all processes, as they make equal groups."""
        self.counts[name] += 1
        return f"{name}:{self.counts[name] - 1}"


_environment: Environment | None = None


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str = "auto",
    timeout: timedelta | None = None,
    *,
    weights_only: bool = True,
) -> Any:
    """Connect all processes; in a coroutine, ``await`` the call. If torch's default group exists, over its store.

    Args:
        world_size, rank: -1: from the environment, or torch's group.
        distributed_init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        local_rank: number of the GPU, for ``"nccl"``; -1: that of LOCAL_RANK is the current device.
        backend: ``"nccl"`` connects the GPUs, and the CPUs beside; any other backend connects the CPUs.
        weights_only: whether objects are safe values only, or any that can be pickled.

    Raises: RuntimeError if the processes are connected already; the errors of ``asynccomm.new_comm``.
    """
    if _environment is not None:
        raise RuntimeError("the processes are connected already: call destroy_distributed_environment() first")
    gpu = backend == "nccl"
    group = dist.group.WORLD if dist.is_initialized() else None

    def make(name: str, device: torch.device, transport: str) -> PendingComm[Any]:
        if group is not None:
            return wrap(group, transport, name=name, device=device, timeout=timeout)
        store = None if distributed_init_method == "env://" else distributed_init_method
        place = {"rank": None if rank < 0 else rank, "size": None if world_size < 0 else world_size}
        return new_comm(transport, device, name=name, timeout=timeout, store=store, **place)  # type: ignore[arg-type]

    def keep(comms: list[EitherComm]) -> None:
        global _environment
        _environment = Environment(comms[0], comms[-1], weights_only)

    cpu = partial(make, "vllm/cpu", torch.device("cpu"), "auto" if gpu else backend)
    makers = [cpu]
    if gpu:
        where = torch.device("cuda", local_rank if local_rank >= 0 else torch.cuda.current_device())
        makers.append(partial(make, "vllm/device", where, backend))
    return in_order([partial(EitherComm.make, each, same) for each in makers], keep)


def environment() -> Environment:
    """The comms of all processes. Raises: RuntimeError before ``init_distributed_environment``."""
    if _environment is None:
        raise RuntimeError("the processes are not connected: call init_distributed_environment() first")
    return _environment


def destroy_distributed_environment() -> Any:
    """Close the comms of all processes; GroupCoordinators stay. In a coroutine, ``await`` the call. Idempotent."""
    global _environment
    old, _environment = _environment, None
    comms = [] if old is None else [old.cpu] if old.device is old.cpu else [old.device, old.cpu]
    return in_order([comm.close for comm in comms], _nothing)


def _nothing(_: object) -> None:
    """The result of closing."""
