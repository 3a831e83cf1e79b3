"""A group of ranks, as the face has it: comms by type of device, under one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch

from asynccomm.comm.comm import Comm
from asynccomm.compat.c10d.backends import BackendConfig, backend_of
from asynccomm.core.handles import Handle
from asynccomm.errors import AsyncCommError

__all__ = ["ProcessGroup"]


class ProcessGroup(Handle):
    """A group of ranks; made by ``init_process_group``, ``new_group`` and their like.

    Its comms are ours, and may be used beside the face's functions: ``group.comm().all_reduce(tensor)``.

    Args:
        name, desc: as ``group_name`` and ``group_desc`` show them.
        ranks: global ranks, by rank in the group.
        rank: this process's, in the group.
        backend: the name it was asked for by.
        config: what that means.
        comms: by type of device; types that one backend serves share one.
        timeout: for operations.
        bound_device: the device of this rank, if that was said.
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
        self.global_ranks = tuple(ranks)
        self.timeout = timeout
        self.splits = 0  #: how often it was split
        self.former_ranks: tuple[int, ...] | None = None  #: of a group that was shrunk: what its ranks were before
        self._rank = rank
        self._comms = dict(comms)
        distinct = set(map(id, self._comms.values()))
        self._only = next(iter(self._comms.values())) if len(distinct) == 1 else None

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """How many ranks there are."""
        return len(self.global_ranks)

    def name(self) -> str:
        """The backend that stands for the group."""
        return backend_of(self.backend, self.config)

    @property
    def device_types(self) -> list[str]:
        """The types of device it serves."""
        return list(self._comms)

    @property
    def comms(self) -> list[Comm]:
        """Its comms, each once."""
        return list({id(comm): comm for comm in self._comms.values()}.values())

    def comm(self, device: str | torch.device | None = None) -> Comm:
        """The comm for tensors on ``device``; None: the one for objects and barriers.

        Raises: RuntimeError if there is none.
        """
        if self._only is not None:  # it says itself if the device is not its own
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

    # -- what its backends can ----------------------------------------------------------------------------------------

    @property
    def supports_splitting(self) -> bool:
        """Whether groups can be split off it: if it has a comm at all."""
        return bool(self._comms)

    @property
    def supports_coalescing(self) -> bool:
        """Whether operations can leave together: if it has a comm at all."""
        return bool(self._comms)

    @property
    def supports_time_estimate(self) -> bool:
        """Whether the comm for objects and barriers can say how long operations would take, as only NCCL's can."""
        try:
            return bool(self._comms) and bool(self.comm().time_estimator())
        except (AsyncCommError, NotImplementedError):
            return False

    @property
    def supports_shrinking(self) -> bool:
        """Whether it can go on without some ranks: if all of them have a control channel."""
        return bool(self._comms) and not any(comm._why_fixed() for comm in self.comms)

    @property
    def object_device(self) -> str:
        """The type of device for objects: that of the only backend, else the CPU, where objects are, if it can be."""
        types = self.device_types
        if self._only is not None:
            return self._only.device.type
        return "cpu" if not types or "cpu" in types else types[0]

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.group_name!r} rank {self._rank} of {self.size()}, {self.config!r}>"
