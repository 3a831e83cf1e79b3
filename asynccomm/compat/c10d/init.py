"""Creation of the default group."""

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
from asynccomm.compat.c10d.types import check_reconfigure, check_valid_timeout, default_timeout
from asynccomm.compat.c10d.world import Ending, World, world
from asynccomm.core.tasks import shielded
from asynccomm.store.base import PrefixStore, Store
from asynccomm.store.memory import MemoryStore


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
    enable_reconfigure: bool = False,
) -> None:
    """Create the default group, of all ranks. All ranks call this, and end the group by ``destroy_process_group``.

    Args:
        backend: a name, or pairs such as ``"cpu:gloo,cuda:nccl"``; see ``Backend``. None: the default backend of
            ``device_id``, or of this machine's accelerator, or else of the CPU.
        init_method: URL of the rendezvous: ``env://`` (the default), ``tcp://host:port``, ``file:///path``, or a URL of
            a scheme registered by ``register_rendezvous_handler``.
        timeout: of operations, and of connecting; None: 30 minutes, 10 for ``"nccl"``.
        world_size, rank: required with a store, and if the URL lacks them.
        store: for the rendezvous, in place of ``init_method``: our store or torch's. As in torch, a group's keys begin
            with the group's name; in the store of a URL the prefix ``default_pg`` precedes the name.
        group_name: has no effect, as in torch.
        pg_options: ``asynccomm.CommOptions``, whose timeout has no effect; or torch's own options of NCCL.
        device_id: this rank's accelerator, which is then bound to the group.
        enable_reconfigure: not supported: ``Comm.reconfigure`` and ``shrink_group`` go on after a loss.

    Raises: ValueError if there is a default group already, and for an incomplete device or URL; AssertionError for
        arguments that exclude each other; TypeError; and the errors of ``asynccomm.new_comm``.

    Cancelling is safe.
    """
    check_reconfigure(enable_reconfigure)
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
    """Run the rendezvous, connect, and register the group as the default group."""
    if given is None and backend == Backend.FAKE:
        root: Store = PrefixStore("default_pg", MemoryStore())  # without a rendezvous
    elif given is None:
        known.init_method = "env://" if init_method is None else init_method
        meeting = rendezvous(known.init_method, rank, size, timeout=timeout)
        known.endings.append(lambda waits_for: _leave(meeting, waits_for))
        met, rank, size = await anext(meeting)
        root = PrefixStore("default_pg", as_store(met))
    else:
        root = as_store(given)  # without a prefix: only the store of a rendezvous may be shared with other programs
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
    """Await all of ``endings``, last first, also if some raise."""
    async with contextlib.AsyncExitStack() as stack:
        for ending in endings:
            stack.push_async_callback(ending, waits_for)


def update_default_pg(pg: ProcessGroup | None) -> None:
    """Set the default group, and set the rank in torch's log messages."""
    world().default_pg = pg
    _set_global_rank(-1 if pg is None else pg.rank())


def barrier_after_init() -> bool:
    """Whether creating a group ends with a barrier of all ranks: TORCH_DIST_INIT_BARRIER is 1."""
    return int(os.environ.get("TORCH_DIST_INIT_BARRIER", "0")) == 1


def _device(device: torch.device | int | None) -> torch.device | None:
    """The device with its type and index. Raises: ValueError if this machine lacks the device."""
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
