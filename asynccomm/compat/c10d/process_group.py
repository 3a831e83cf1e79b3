"""A group of ranks: comms by type of device, under one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch

from asynccomm.comm.comm import Comm
from asynccomm.compat.c10d.backends import BackendConfig, backend_of
from asynccomm.core.handles import Handle
from asynccomm.errors import AsyncCommError


class ProcessGroup(Handle):
    """A group of ranks, created by functions such as ``init_process_group`` and ``new_group``.

    A program may also use the group's comms directly: ``group.comm().all_reduce(tensor)``.

    Args:
        name, desc: the attributes ``group_name`` and ``group_desc``.
        ranks: global ranks, by rank in the group.
        rank: this process's rank in the group.
        backend: the backend's name, as given by the program.
        config: the backends that ``backend`` stands for.
        comms: by type of device; types served by one backend share a comm.
        timeout: of operations.
        bound_device: this rank's device, if the program has given one.
    """

    _instead = "make a group there, by init_process_group() or new_group()"

    def __init__(
        self,
        name: str,
        desc: str,
        ranks: Sequence[int],
        rank: int,
        backend: str,
        config: BackendConfig,
        comms: Mapping[str, Comm],
        timeout: timedelta,
        bound_device: torch.device | None = None,
    ) -> None:
        """Not for users: see ``new_group``."""
        self.group_name = name
        self.group_desc = desc
        self.bound_device_id = bound_device
        self.backend = backend
        self.config = config
        self.global_ranks: tuple[int, ...] = tuple(ranks)
        self.timeout = timeout
        self.splits = 0  #: number of splits so far
        self.former_ranks: tuple[int, ...] | None = None  #: ranks before the shrink, of a shrunk group
        self._rank = rank
        self._comms = dict(comms)
        distinct = set(map(id, self._comms.values()))
        self._only = next(iter(self._comms.values())) if len(distinct) == 1 else None

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return len(self.global_ranks)

    def name(self) -> str:
        """Name of the group's backend; of one, if the group has several (see ``backend_of``)."""
        return backend_of(self.backend, self.config)

    @property
    def device_types(self) -> list[str]:
        """Types of device that the group serves."""
        return list(self._comms)

    @property
    def comms(self) -> list[Comm]:
        """The group's comms, each once."""
        return list({id(comm): comm for comm in self._comms.values()}.values())

    def comm(self, device: str | torch.device | None = None) -> Comm:
        """The comm for tensors on ``device``; for None, the comm for objects and barriers.

        Raises: RuntimeError if the group has no such comm.
        """
        if self._only is not None:  # this comm itself rejects tensors of other devices
            return self._only
        if device is None:
            kind = self.object_device
        else:
            kind = device.type if isinstance(device, torch.device) else torch.device(device).type
        comm = self._comms.get(kind)
        if comm is None:
            raise RuntimeError(
                f"group {self.group_name!r} has no backend for device type {kind!r}, only {self.config!r} was asked for"
            )
        return comm

    # -- features of the backends -------------------------------------------------------------------------------------

    @property
    def supports_splitting(self) -> bool:
        """Whether groups can be split off this group: True unless the group has no comm."""
        return bool(self._comms)

    @property
    def supports_coalescing(self) -> bool:
        """Whether operations can be coalesced: True unless the group has no comm."""
        return bool(self._comms)

    @property
    def supports_time_estimate(self) -> bool:
        """Whether the comm for objects and barriers can estimate times of operations, as only NCCL's can."""
        try:
            return bool(self._comms) and bool(self.comm().time_estimator())
        except (AsyncCommError, NotImplementedError):
            return False

    @property
    def supports_shrinking(self) -> bool:
        """Whether the group can be shrunk: True if all comms have a control channel."""
        return bool(self._comms) and not any(comm._why_fixed() for comm in self.comms)

    @property
    def object_device(self) -> str:
        """Type of device for objects: the type of the only comm, else the CPU if served, else the first served type."""
        types = self.device_types
        if self._only is not None:
            return self._only.device.type
        return "cpu" if not types or "cpu" in types else types[0]

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.group_name!r} rank {self._rank} of {self.size()}, {self.config!r}>"
