"""The backend "asynccomm" of torch.distributed, for programs without event loops.

::

    import asynccomm.interop.torch_backend  # torch 2.15 imports it itself

    dist.init_process_group("asynccomm")

The import registers the backend, for the CPU and for GPUs. All of torch's users of collectives run on it:
DistributedDataParallel, ``fully_shard``, DTensor, checkpoints, pipelines.

Where torch accepts Python backends, a TorchGroup is a torch group in front of a TorchBackend. Its methods go through
torch's dispatcher, as those of any group, but return the backend's own Works instead of torch's wrappers, which cannot
report completion. A group with several backends ("cpu:asynccomm,cuda:nccl") is torch's, and its Works support only
waiting. Where torch does not accept Python backends, a TorchGroup implements the whole group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

from asynccomm.comm.comm import Comm
from asynccomm.interop.group_comms import GroupComms
from asynccomm.interop.loop_thread import detached
from asynccomm.interop.torch_collectives import NAME, TorchCollectives
from asynccomm.interop.torch_version import PYTHON_BACKENDS, as_backend, group_arguments, uncompiled
from asynccomm.interop.torch_words import check_split

DEVICES: Final = ("cpu", "cuda")
LONG: Final = timedelta(days=365)  # stands for no timeout, as a timedelta cannot be infinite
CUSTOM: Final = c10d.ProcessGroup.BackendType.CUSTOM

if PYTHON_BACKENDS:

    @uncompiled
    @as_backend
    class TorchBackend(TorchCollectives, c10d.Backend):
        """Backend called by torch's own group."""

        supports_splitting = True
        supports_coalescing = True

        def __init__(self, comms: GroupComms) -> None:
            c10d.Backend.__init__(self, comms.rank, comms.size)
            self.set_up(comms)
            self._own_options = c10d.Backend.Options(NAME, comms.timeout)

        @property
        def options(self) -> c10d.Backend.Options:
            self._own_options._timeout = self.comms.timeout
            return self._own_options

        def split(self, store: Any, ranks: list[int], opts: Any) -> Any:
            """The backend of a split of torch's own group, which calls this on all ranks.

            torch expects None on ranks outside the split, but ends the process if a Python backend returns None.
            """
            _store_of(self.comms)
            check_split(ranks, self.comms.size)
            if self.comms.rank not in ranks:
                raise RuntimeError(
                    f"rank {self.comms.rank} of group {self.comms.name!r} is not among ranks {list(ranks)}: a group "
                    f"that has other backends beside {NAME!r} can only be split into parts that each rank is in"
                )
            timeout, name = (None, "") if opts is None else (opts._timeout, opts.group_name)
            return TorchBackend(_part(self.comms, ranks, timeout, name or _part_name(self.comms.name, ranks)))

    @uncompiled
    class TorchGroup(c10d.ProcessGroup):
        """A torch group in front of a TorchBackend."""

        splits = 0  # number of splits without a description

        def __init__(self, comms: GroupComms) -> None:
            super().__init__(*group_arguments(comms.store, comms.rank, comms.size))
            self.comms = comms
            self._store = comms.store
            self._backend = TorchBackend(comms)
            for device in DEVICES:
                self._register_backend(torch.device(device), CUSTOM, self._backend)
            self._set_default_backend(CUSTOM)

        def _ours(self, work: Any) -> Any:
            """The backend's Work of the call just dispatched; ``work`` if the backend made none."""
            ours = self._backend.taken()
            return work if ours is None else ours

        # torch's C++ compares the name of the frame that calls ``super()``, so each method is written out

        def allreduce(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().allreduce(*args, **options))

        def allreduce_coalesced(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().allreduce_coalesced(*args, **options))

        def broadcast(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().broadcast(*args, **options))

        def reduce(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().reduce(*args, **options))

        def allgather(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().allgather(*args, **options))

        def allgather_coalesced(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().allgather_coalesced(*args, **options))

        def all_gather_single(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().all_gather_single(*args, **options))

        def all_gather_single_coalesced(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().all_gather_single_coalesced(*args, **options))

        def gather(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().gather(*args, **options))

        def gather_single(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().gather_single(*args, **options))

        def scatter(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().scatter(*args, **options))

        def reduce_scatter(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().reduce_scatter(*args, **options))

        def reduce_scatter_single(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().reduce_scatter_single(*args, **options))

        def reduce_scatter_single_coalesced(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().reduce_scatter_single_coalesced(*args, **options))

        def alltoall(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().alltoall(*args, **options))

        def all_to_all_single(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().all_to_all_single(*args, **options))

        def barrier(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().barrier(*args, **options))

        def send(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().send(*args, **options))

        def recv(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().recv(*args, **options))

        def recv_anysource(self, *args: Any, **options: Any) -> Any:
            return self._ours(super().recv_anysource(*args, **options))

        def _start_coalescing(self, device: torch.device) -> None:
            self._backend.start_coalescing()

        def _end_coalescing(self, device: torch.device) -> Any:
            return self._backend.end_coalescing()

        def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
            self.comms.extend_timeout(timeout)

        def getBackendName(self) -> str:
            return NAME

        def split_group(
            self,
            new_ranks: list[int],
            timeout: timedelta | None = None,
            opts: Any = None,
            group_name: str | None = None,
            group_desc: str | None = None,
            device_types: list[torch.device] | None = None,
        ) -> Any:
            return _split(self, new_ranks, timeout, opts, group_name, group_desc)

else:

    @uncompiled
    @as_backend
    class TorchGroup(TorchCollectives, c10d.ProcessGroup):  # type: ignore[no-redef, misc]  # torch's are overloaded
        """A group written in Python, with the attributes that torch otherwise keeps for a group's backends."""

        supports_splitting = True
        supports_coalescing = False  # batch_isend_irecv reads this of a backend
        use_pg_for_symm_mem_rendezvous = False
        splits = 0  # number of splits without a description

        def __init__(self, comms: GroupComms) -> None:
            c10d.ProcessGroup.__init__(self, *group_arguments(comms.store, comms.rank, comms.size))
            self.set_up(comms)
            self._name = comms.name
            self._description = "undefined"

        def getGroupName(self) -> str:
            return self._name

        def setGroupName(self, name: str) -> None:
            self._name = name

        _set_group_name = setGroupName
        group_name = property(getGroupName)

        def getGroupDesc(self) -> str:
            return self._description

        def setGroupDesc(self, desc: str) -> None:
            self._description = desc

        _set_group_desc = setGroupDesc
        group_desc = property(getGroupDesc)

        @property
        def _device_types(self) -> list[torch.device]:
            return [torch.device(device) for device in DEVICES]

        def _get_backend(self, device: torch.device) -> Any:
            return self

        def _get_backend_name(self) -> str:
            return NAME

        @property
        def options(self) -> Any:
            return c10d.Backend.Options(NAME, self.comms.timeout)

        def get_group_store(self) -> Any:
            return self.comms.store

        def _has_hooks(self) -> bool:
            return False

        def _wait_for_pending_works(self) -> None:
            raise RuntimeError(f"Backend {NAME} does not support _wait_for_pending_works")

        def _start_coalescing(self, device: torch.device | None = None) -> None:
            self.start_coalescing()

        def _end_coalescing(self, device: torch.device | None = None) -> Any:
            return self.end_coalescing()

        def split_group(
            self,
            new_ranks: list[int],
            timeout: timedelta | None = None,
            opts: Any = None,
            group_name: str | None = None,
            group_desc: str | None = None,
            device_types: list[torch.device] | None = None,
        ) -> Any:
            return _split(self, new_ranks, timeout, opts, group_name, group_desc)


def group_over(comm: Comm, *more: Comm, name: str | None = None) -> TorchGroup:
    """Create a torch group over existing comms: one comm, or one for each type of device.

    All functions that take a torch group accept the result. The creator of the comms closes them; ``shutdown`` of the
    group does not.

    Args:
        name: of the group; None: the first comm's.

    Raises:
        ValueError: the comms have different ranks or sizes, or two are on one type of device.
        TypeError: an argument is not a comm.
    """
    comms = [comm, *more]
    if not all(isinstance(each, Comm) for each in comms):
        raise TypeError(f"group_over takes comms, got {comms}")
    if len({(each.rank, each.size) for each in comms}) > 1 or len({each.device.type for each in comms}) < len(comms):
        raise ValueError(f"comms must be of the same ranks, and of a type of device each, got {comms}")
    timeout = timedelta(seconds=min(comm.options.timeout, LONG.total_seconds()))
    label = comm.name if name is None else name
    return _named(TorchGroup(GroupComms(label, None, comm.rank, comm.size, timeout, comms)), label, "undefined")


def _split(
    group: Any, ranks: list[int], timeout: timedelta | None, opts: Any, name: str | None, description: str | None
) -> Any:
    """Split ``ranks`` off ``group``; None on other ranks. Names and errors are as in torch's groups."""
    comms: GroupComms = group.comms
    _store_of(comms)
    check_split(ranks, comms.size)
    label = _part_name(group.group_name, ranks) if name is None else name
    if description is None:
        group.splits += 1
        description = f"{group.group_desc}:split:{group.splits - 1}"
    if timeout is None and opts is not None:
        timeout = opts._timeout
    if comms.rank not in ranks:
        return None
    made = TorchGroup(_part(comms, ranks, timeout, label))
    made.bound_device_id = group.bound_device_id
    return _named(made, label, description)


def _part_name(name: str, ranks: list[int]) -> str:
    return f"{name}:split:{list(ranks)}"


def _part(comms: GroupComms, ranks: list[int], timeout: timedelta | None, name: str) -> GroupComms:
    """The comms of some ranks, connected over the store of ``comms``."""
    limit = comms.timeout if timeout is None else timeout
    return _connected(name, dist.PrefixStore(f"{name}/", _store_of(comms)), ranks.index(comms.rank), len(ranks), limit)


def _store_of(comms: GroupComms) -> dist.Store:
    """The store of ``comms``. Raises: RuntimeError if there is none."""
    if comms.store is None:
        raise RuntimeError(f"group {comms.name!r} was made over comms, and cannot be split: split these")
    return comms.store


def _named(group: TorchGroup, name: str, description: str) -> TorchGroup:
    group._set_group_name(name)  # type: ignore[arg-type]  # torch declares a NewType of str
    group._set_group_desc(description)
    return group


def _connected(name: str, store: Any, rank: int, size: int, timeout: timedelta) -> GroupComms:
    """Create comms, with the CPU comm connected."""
    comms = GroupComms(name, store, rank, size, timeout)
    try:
        with detached():
            comms.connect(torch.device("cpu"))
    except BaseException:
        comms.close()
        raise
    return comms


def _create(opts: Any, backend_options: Any) -> Any:
    """Constructor that torch calls for a group, or for a backend of a group."""
    if backend_options is not None and not isinstance(backend_options, c10d.Backend.Options):
        raise TypeError(f"pg_options must be Backend.Options, got {backend_options!r}")
    comms = _connected(opts.group_id, opts.store, opts.group_rank, opts.group_size, opts.timeout)
    torchs = getattr(opts, "process_group", None)
    if torchs is None:
        return TorchGroup(comms)
    if PYTHON_BACKENDS and (torchs._device_types or torchs.name() != "custom"):
        return TorchBackend(comms)  # one of several backends of the group
    group = TorchGroup(comms)
    if torchs.bound_device_id is not None:
        group.bound_device_id = torchs.bound_device_id
    return group


def register() -> None:
    """Register "asynccomm" as a backend of torch. Idempotent."""
    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


register()
