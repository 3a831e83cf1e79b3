"""Making the default group."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import AsyncGenerator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _set_global_rank

from asynccomm.compat.c10d.backends import Backend, accelerator, get_default_backend_for_device
from asynccomm.compat.c10d.create import BackendPlan, check_device, drop_groups, make_group
from asynccomm.compat.c10d.logs import RankHook, logged_coroutine, timed
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.rendezvous_handlers import LeaveOnExit, as_store, rendezvous, store_based_barrier
from asynccomm.compat.c10d.types import check_valid_timeout, default_timeout
from asynccomm.compat.c10d.world import Ending, World, world
from asynccomm.core.tasks import shielded
from asynccomm.store.base import PrefixStore, Store
from asynccomm.store.memory import MemoryStore

__all__ = ["barrier_after_init", "init_process_group", "run_endings", "update_default_pg"]


@timed
@logged_coroutine
async def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | dist.Store | None = None,
    group_name: str = "",
    pg_options: object | None = None,
    device_id: torch.device | int | None = None,
    _ranks: Sequence[int] | None = None,
) -> None:
    """Make the default group, of all ranks. All do so, and end it by ``destroy_process_group``.

    Args:
        backend: a name, or pairs such as ``"cpu:gloo,cuda:nccl"``; see ``Backend``. None: what serves ``device_id``, or
            this machine's accelerator, or else the CPU.
        init_method: where to meet: ``env://`` (the default), ``tcp://host:port``, ``file:///path``, or an URL of a
            scheme that ``register_rendezvous_handler`` was given.
        timeout: for operations, and for connecting; None: 30 minutes, 10 for ``"nccl"``.
        world_size, rank: if a store is given, or the URL does not say.
        store: where to meet, in place of ``init_method``: one of ours or of torch's. Keys of groups begin with the
            group's name there; at what an URL names they have ``default_pg`` before them. So torch has it.
        group_name: has no effect, as in torch.
        pg_options: ``asynccomm.CommOptions`` (its timeout has no effect), or for NCCL torch's own.
        device_id: this rank's accelerator, which is then bound to the group.

    Raises: ValueError if there is a default group already, and for what a device or URL lacks; AssertionError for
        arguments that do not go together; TypeError; and what ``asynccomm.new_comm`` raises.

    Cancelling is safe.
    """
    known = world()
    if known.default_pg is not None or known.starting:
        raise ValueError("init_process_group was called before, and destroy_process_group was not")
    if store is None and backend == Backend.FAKE and not 0 <= rank < world_size:
        raise ValueError(f"backend 'fake' needs rank and world_size, got {rank} and {world_size}")
    if store is not None:
        if init_method is not None:
            raise AssertionError("init_method and store cannot both be given")
        if world_size <= 0:
            raise AssertionError("world_size must be positive where store is given")
        if rank < 0:
            raise AssertionError("rank must not be negative where store is given")
    device = _device(device_id)
    check_device(device)
    if backend is not None:
        name: str = Backend(backend)
    else:
        name = Backend.UNDEFINED if device is None else get_default_backend_for_device(device)
    limit = default_timeout(name) if timeout is None else timeout
    check_valid_timeout(limit)
    if name == Backend.MPI and (world_size != -1 or rank != -1):
        warnings.warn("backend 'mpi' finds out rank and world_size itself: those given are ignored", stacklevel=4)
    known.starting = True
    try:
        await _make_default(known, name, init_method, limit, world_size, rank, store, pg_options, device, _ranks or ())
    except BaseException:
        groups, endings = list(known.pg_map), known.endings
        known.clear()
        update_default_pg(None)
        await shielded(_undo(groups, endings))
        raise
    known.starting = False


async def _make_default(
    known: World,
    backend: str,
    init_method: str | None,
    timeout: timedelta,
    size: int,
    rank: int,
    given: Store | dist.Store | None,
    options: object,
    device: torch.device | None,
    ranks: Sequence[int],
) -> None:
    """Meet, connect, and make the group the default one."""
    if given is None and backend == Backend.FAKE:
        root: Store = PrefixStore("default_pg", MemoryStore())  # nobody is to be met there
    elif given is None:
        known.init_method = "env://" if init_method is None else init_method
        meeting = rendezvous(known.init_method, rank, size, timeout=timeout)
        known.endings.append(lambda waits_for: _leave(meeting, waits_for))
        met, rank, size = await anext(meeting)
        root = PrefixStore("default_pg", as_store(met))
    else:
        root = as_store(given)  # as it is: only what ranks meet at may be others', too
    name = known.hashed_name(ranks) if ranks else known.next_name()
    plan = BackendPlan(
        name=name,
        ranks=range(size),
        rank=rank,
        backend=backend,
        store=root,
        timeout=timeout,
        options=options,
        desc="default_pg",
        device=device,
    )
    pg = await make_group(plan)
    known.backend = backend
    update_default_pg(pg)
    hook = RankHook.install(rank)

    async def restore(waits_for: int) -> None:
        hook.remove()

    known.endings.append(restore)
    if barrier_after_init() and backend != Backend.FAKE:
        await store_based_barrier(rank, root, name, size, timeout)


async def _undo(groups: Sequence[ProcessGroup], endings: Sequence[Ending]) -> None:
    await drop_groups(groups)
    await run_endings(endings, 1)


async def _leave(meeting: AsyncGenerator[Any], waits_for: int) -> None:
    with contextlib.suppress(LeaveOnExit, StopAsyncIteration):
        await meeting.athrow(LeaveOnExit(waits_for))


async def run_endings(endings: Sequence[Ending], waits_for: int) -> None:
    """Await all of ``endings``, last first, whatever some of them raise."""
    async with contextlib.AsyncExitStack() as stack:
        for ending in endings:
            stack.push_async_callback(ending, waits_for)


def update_default_pg(pg: ProcessGroup | None) -> None:
    """Make ``pg`` the default group, and tell torch what rank this is, for what it logs."""
    world().default_pg = pg
    _set_global_rank(-1 if pg is None else pg.rank())


def barrier_after_init() -> bool:
    """Whether all ranks are to wait for each other once a group is made: TORCH_DIST_INIT_BARRIER is 1."""
    return int(os.environ.get("TORCH_DIST_INIT_BARRIER", "0")) == 1


def _device(device: torch.device | int | None) -> torch.device | None:
    """Raises: ValueError if this machine does not have it."""
    if device is None:
        return None
    kind = accelerator()
    if isinstance(device, int):
        if kind == "cpu":
            raise ValueError(f"device_id is {device}, but this machine has no accelerator")
        device = torch.device(kind, device)
    if device.type != "cpu":
        if device.type != kind:
            raise ValueError(f"device_id is {device}, but the accelerator of this machine is of type {kind!r}")
        if device.index is None:
            raise ValueError(f"device_id must have an index, got {device}")
        if not 0 <= device.index < torch.accelerator.device_count():
            raise ValueError(f"device_id is {device}, but there are {torch.accelerator.device_count()} devices")
    return device
