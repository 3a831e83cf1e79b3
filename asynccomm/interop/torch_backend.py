"""The backend "asynccomm" of torch.distributed, for programs without event loops.

::

    import asynccomm.interop.torch_backend  # torch 2.15 imports it itself

    dist.init_process_group("asynccomm")

The import registers the backend, for the CPU and for GPUs. All of torch's users of collectives run on it:
DistributedDataParallel, ``fully_shard``, DTensor, checkpoints, pipelines.

Where torch accepts Python backends, a TorchGroup is a torch group in front of a TorchBackend. Its methods go through
torch's dispatcher, as those of any group, but return the backend's own Works instead of torch's wrappers, which cannot
report completion. A group with several backends ("cpu:asynccomm,cuda:nccl") is torch's, and its Works support only
waiting. Where torch does not accept Python backends, a TorchGroup is a LegacyGroup.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

from asynccomm.comm.comm import Comm
from asynccomm.interop.group_comms import GroupComms, SplittableGroup, name_group, part_name
from asynccomm.interop.legacy_group import LegacyGroup
from asynccomm.interop.torch_collectives import DEVICES, NAME, TorchCollectives
from asynccomm.interop.torch_registry import default
from asynccomm.interop.torch_version import PYTHON_BACKENDS, as_backend, group_arguments, uncompiled

T = TypeVar("T")
LONG: Final = timedelta(days=365)  # stands for no timeout, as a timedelta cannot be infinite
CUSTOM: Final = c10d.ProcessGroup.BackendType.CUSTOM
# The methods, each with the name that torch's function has for the first argument if the method writes to it
FORWARDED: Final = {
    "allreduce": "tensor",
    "allreduce_coalesced": "tensors",
    "broadcast": "tensor",
    "reduce": "tensor",
    "allgather": "tensor_list",
    "allgather_coalesced": "output_tensor_lists",
    "all_gather_single": "output_tensor",
    "all_gather_single_coalesced": "output_tensor",
    "gather": "gather_list",
    "gather_single": "gather_tensor",
    "scatter": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_single": "output",
    "reduce_scatter_single_coalesced": "output",
    "alltoall": "output_tensor_list",
    "all_to_all_single": "output",
    "barrier": None,
    "send": None,
    "recv": "tensor",
    "recv_anysource": "tensor",
}


_WRITTEN: Final = ("output", "tensor")  # the begin of the first parameters' names


def forwarding(cls: type[T]) -> type[T]:
    """A decorator: add methods that call torch's methods of the same names and return the backend's own Works.

    They refuse lazily conjugated and negated outputs, which torch's dispatcher replaces by copies.
    """

    def method(name: str, output: str | None) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **options: Any) -> Any:
            written = args[0] if args else [each for key, each in options.items() if key.startswith(_WRITTEN)]
            if output is not None and _is_lazy(written) and self._writes(name, args, options):
                return self._backend.refuse_lazy(output)
            work = getattr(super(cls, self), name)(*args, **options)
            ours = self._backend.taken()
            return work if ours is None else ours  # torch's if the backend was not called

        # torch's C++ compares the name of the calling code, and would otherwise call this method again
        forward.__code__ = forward.__code__.replace(co_name=name)
        return forward

    for name, output in FORWARDED.items():
        setattr(cls, name, method(name, output))
    return cls


def _is_lazy(tensors: Any) -> bool:
    """Whether a tensor, also in nested lists, is lazily conjugated or negated."""
    if isinstance(tensors, Tensor):
        return tensors.is_conj() or tensors.is_neg()
    for each in tensors:
        if isinstance(each, Tensor):  # here, too: this is on the way of every call
            if each.is_conj() or each.is_neg():
                return True
        elif isinstance(each, (list, tuple)) and _is_lazy(each):
            return True
    return False


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
        timeout, name = (None, "") if opts is None else (opts._timeout, opts.group_name)
        comms = self.comms.part(ranks, timeout, name or part_name(self.comms.name, ranks))
        if comms is None:
            raise RuntimeError(
                f"rank {self.comms.rank} of group {self.comms.name!r} is not among ranks {list(ranks)}: a group "
                f"that has other backends beside {NAME!r} can only be split into parts that each rank is in"
            )
        return TorchBackend(comms)


@uncompiled
@forwarding
class TorchGroup(SplittableGroup, c10d.ProcessGroup):
    """A torch group in front of a TorchBackend."""

    def __init__(self, comms: GroupComms) -> None:
        super().__init__(*group_arguments(comms.store, comms.rank, comms.size))
        self.comms = comms
        self._store = comms.store
        self._backend = TorchBackend(comms)
        for device in DEVICES:
            self._register_backend(torch.device(device), CUSTOM, self._backend)
        self._set_default_backend(CUSTOM)

    def _writes(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether the method ``name`` writes to its first argument on this rank."""
        if name not in ("broadcast", "reduce"):
            return True
        given = args[1] if len(args) > 1 else options.get("root", options.get("opts", 0))
        is_root: bool = getattr(given, "rootRank", given) == self.comms.rank
        return is_root == (name == "reduce")

    def _start_coalescing(self, device: torch.device) -> None:
        self._backend.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._backend.end_coalescing()

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        self.comms.extend_timeout(timeout)

    def getBackendName(self) -> str:
        return NAME


if not PYTHON_BACKENDS:
    TorchGroup = LegacyGroup  # type: ignore[misc, assignment]


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
    group = TorchGroup(GroupComms(label, None, comm.rank, comm.size, timeout, comms))
    name_group(group, label, "undefined")
    return group


def _create(opts: Any, backend_options: Any) -> Any:
    """Constructor that torch calls for a group, or for a backend of a group."""
    if backend_options is not None and not isinstance(backend_options, c10d.Backend.Options):
        raise TypeError(f"pg_options must be Backend.Options, got {backend_options!r}")
    whole = getattr(default(), "comms", None)
    comms = GroupComms.opened(
        opts.group_id,
        opts.store,
        opts.group_rank,
        opts.group_size,
        opts.timeout,
        (whole, opts.global_ranks_in_group) if isinstance(whole, GroupComms) else None,
    )
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
