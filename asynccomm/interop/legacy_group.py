"""A torch group for versions of torch that accept no Python backends, before 2.14: the whole group is in Python."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from asynccomm.interop.group_comms import GroupComms, SplittableGroup
from asynccomm.interop.torch_collectives import DEVICES, NAME, TorchCollectives
from asynccomm.interop.torch_version import as_backend, group_arguments, uncompiled


@uncompiled
@as_backend
class LegacyGroup(TorchCollectives, SplittableGroup, c10d.ProcessGroup):  # type: ignore[misc]  # torch's methods are overloaded
    """A group written in Python, with the attributes that torch otherwise keeps for a group's backends."""

    supports_splitting = True
    supports_coalescing = False  # batch_isend_irecv reads this of a backend
    use_pg_for_symm_mem_rendezvous = False

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
