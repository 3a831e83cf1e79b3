"""Creation and end of one group: its stores, its comms by type of device, its registration."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, final

import torch
from torch.distributed import distributed_c10d as _torch

from asynccomm.backends.names import backend_names
from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.compat.c10d.backends import Backend, BackendConfig, is_gloo_available, is_nccl_available
from asynccomm.compat.c10d.fake import fake_comm
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.types import check_valid_timeout
from asynccomm.compat.c10d.world import world
from asynccomm.options import CommOptions
from asynccomm.store.base import PrefixStore, Store

_log: Final = logging.getLogger("asynccomm")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Options passed to the constructor of a registered backend with the extended API."""

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackendPlan:
    """Parameters of a group to create."""

    name: str
    ranks: Sequence[int]  #: global ranks, by rank in the group
    rank: int  #: this process's rank in the group
    backend: str
    store: Store  #: of the world
    timeout: timedelta
    options: object = None
    tag: str | None = None
    desc: str | None = None
    device: torch.device | None = None  #: bound to the group
    parent: ProcessGroup | None = None  #: the default group; its connections may be split

    @property
    def own_store(self) -> PrefixStore:
        """Store of this group alone, with torch's prefix: two slashes follow the name."""
        return PrefixStore(f"{self.name}/", self.store)


async def make_group(plan: BackendPlan) -> ProcessGroup:
    """Connect a group and register it. Collective over its ranks. Cancelling is safe.

    Raises: ValueError for a name in use, and for a device that cannot be bound; RuntimeError and AssertionError for an
        unavailable backend; and the errors of ``new_comm``.
    """
    known = world()
    if plan.name in known.pg_names.values():
        raise ValueError(f"there is a group of the name {plan.name!r} already: take another")
    check_device(plan.device)
    check_valid_timeout(plan.timeout)
    config = BackendConfig(plan.backend)
    for backend in config.device_backend_map.values():
        _check_backend(backend)
    async with AsyncExitStack() as unless_made:
        comms: dict[str, Comm] = {}
        backends = set(config.device_backend_map.values())
        alone = len(backends) == 1 and Backend.FAKE not in backends  # each device gets its own fake comm
        for device, backend in config.device_backend_map.items():
            made = await _connect(plan, device, backend)
            if isinstance(made, ProcessGroup):
                made.group_name = plan.name
                known.add(made, plan.own_store, plan.tag)
                unless_made.pop_all()
                async with AsyncExitStack() as unused:  # comms already connected for other devices
                    for comm in comms.values():
                        unused.push_async_callback(comm.aclose)
                return made
            unless_made.push_async_callback(give_up, made)
            comms[device] = made
            if alone:
                comms = dict.fromkeys(config.device_backend_map, made)
                break
        desc = "undefined" if plan.desc is None else plan.desc
        pg = ProcessGroup(
            plan.name, desc, plan.ranks, plan.rank, plan.backend, config, comms, plan.timeout, plan.device
        )
        unless_made.pop_all()
    known.add(pg, plan.own_store, plan.tag)
    return pg


def check_device(device: torch.device | None) -> None:
    """Raise ValueError unless ``device`` is None or an accelerator with an index: others cannot be bound to a group.

    Raises: also TypeError.
    """
    if device is not None and not isinstance(device, torch.device):
        raise TypeError(f"device_id must be a torch.device, got {device!r}")
    if device is not None and (device.index is None or device.type == "cpu"):
        raise ValueError(f"device_id must be an accelerator with an index, got {device}")


def _check_backend(backend: str) -> None:
    missing = {
        Backend.MPI: False,
        Backend.UCC: False,
        Backend.XCCL: False,
        Backend.GLOO: is_gloo_available(),
        Backend.NCCL: is_nccl_available(),
    }
    if backend.upper() in Backend._plugins:
        return
    if not missing.get(backend, True):
        raise RuntimeError(f"backend {backend!r} is not available here")
    if backend not in ("auto", Backend.FAKE) and backend not in backend_names():
        raise AssertionError(
            f"unknown backend type {backend!r}: choose from {', '.join(['auto', 'fake', *backend_names()])}"
        )


async def _connect(plan: BackendPlan, device: str, backend: str) -> Comm | ProcessGroup:
    store = PrefixStore(f"{device}/", plan.own_store)
    plugin = Backend._plugins.get(backend.upper())
    if plugin is None and (comm := _splittable(plan, device, backend)) is not None:
        split = await comm.split(plan.ranks, plan.name, timeout=plan.timeout)
        assert split is not None, "this rank is in it"
        return split
    if plugin is None:
        where = plan.device if plan.device is not None and plan.device.type == device else torch.device(device)
        if backend == Backend.FAKE:
            return await fake_comm(plan.name, plan.rank, len(plan.ranks), where, plan.timeout)
        return await new_comm(
            backend,
            where,
            name=plan.name,
            store=store,
            rank=plan.rank,
            size=len(plan.ranks),
            timeout=plan.timeout,
            **options_of(backend, plan.options, plan.timeout),
        )
    if plugin.extended_api:
        told = BackendOptions(
            store=store,
            group_rank=plan.rank,
            group_size=len(plan.ranks),
            timeout=plan.timeout,
            group_id=plan.name,
            global_ranks_in_group=list(plan.ranks),
        )
        made = plugin.creator_fn(told, plan.options)
    else:
        made = plugin.creator_fn(store, plan.rank, len(plan.ranks), plan.timeout)
    if inspect.isawaitable(made):
        made = await made
    if not isinstance(made, (Comm, ProcessGroup)):
        raise TypeError(f"backend {backend!r} must make a Comm or a ProcessGroup, got {made!r}")
    return made


def _splittable(plan: BackendPlan, device: str, backend: str) -> Comm | None:
    """The default group's comm, if bound to a device and of the new group's device type and backend; else None.

    On GPUs a split costs less than a new connection. Only ranks of the new group take part.
    """
    parent = plan.parent
    if parent is None or parent.bound_device_id is None or plan.options is not None:
        return None
    if device not in parent.device_types or parent.config.device_backend_map[device] != backend:
        return None
    return parent.comm(device)


def options_of(backend: str, options: object, timeout: timedelta) -> Mapping[str, Any]:
    """Arguments for ``new_comm`` from ``pg_options``: our ``CommOptions``, or torch's options of NCCL.

    Raises: AssertionError for options of another type with NCCL; TypeError with another backend.
    """
    if options is None:
        return {}
    if isinstance(options, CommOptions):
        return {
            "hints": options.hints,
            "abort_process_on_timeout_or_error": options.abort_process_on_timeout_or_error,
            "high_priority_stream": options.high_priority_stream,
            "ordering": options.ordering,
            "max_ops": options.max_ops,
            "max_bytes": options.max_bytes,
        }
    if backend == Backend.NCCL:
        kind = getattr(_torch, "ProcessGroupNCCL", None)
        if kind is None or not isinstance(options, kind.Options):
            raise AssertionError(f"pg_options must be CommOptions or ProcessGroupNCCL.Options, got {options!r}")
        if options._timeout != timeout:
            warnings.warn("pg_options has a timeout of its own, which is ignored: timeout= counts", stacklevel=2)
        return {"high_priority_stream": bool(options.is_high_priority_stream)}
    raise TypeError(f"pg_options must be CommOptions for backend {backend!r}, got {options!r}")


async def give_up(comm: Comm) -> None:
    """Abort and close one backend's comm, after the creation of its group failed."""
    comm.abort("another backend of the group could not connect")
    await comm.aclose()


async def end_groups(groups: Sequence[ProcessGroup], abort: bool) -> None:
    """Close the comms of ``groups`` in this order; with ``abort``, abort all first. Raises the first error."""
    if abort:
        for pg in groups:
            for comm in pg.comms:
                comm.abort(f"process group {pg.group_name!r} was aborted")
    errors: list[Exception] = []
    for pg in groups:
        for comm in pg.comms:
            try:
                await comm.aclose()
            except Exception as exc:
                _log.warning("process group %r did not end well: %s", pg.group_name, exc)
                errors.append(exc)
    if errors:
        raise errors[0]


async def drop_groups(groups: Sequence[ProcessGroup]) -> None:
    """Abort and unregister groups, after a failed call or when their global ranks became invalid. Raises nothing."""
    for pg in groups:
        world().remove(pg)
    try:
        await end_groups(groups, abort=True)
    except Exception as exc:
        _log.warning("not all groups could be aborted: %s", exc)
