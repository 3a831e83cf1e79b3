"""What all NCCL comms of one device share: the library, the device, and the poller that watches its streams."""

from __future__ import annotations

import threading
from typing import final

import torch

from asynccomm.backends.nccl.api import Nccl, load
from asynccomm.backends.nccl.device import Cuda, Device, Event
from asynccomm.backends.nccl.poller import Poller

_lock = threading.Lock()
_shared: dict[torch.device, DeviceRuntime] = {}


@final
class DeviceRuntime:
    """Shared by those who :meth:`join`; its thread ends when the last one has left."""

    def __init__(self, nccl: Nccl, device: Device) -> None:
        self.nccl = nccl
        self.device = device
        self.poller: Poller[Event] = Poller(device, name="asynccomm-nccl")
        self._users = 0

    @classmethod
    def of(cls, device: torch.device) -> DeviceRuntime:
        """That of a CUDA device, joined. Raises: BackendError, saying what is missing."""
        with _lock:
            platform = _shared.get(device)
            if platform is None:
                platform = _shared[device] = cls(load(), Cuda(device))
            platform._users += 1
            return platform

    def leave(self) -> None:
        """No more use of it. May block a little."""
        with _lock:
            self._users -= 1
            if self._users > 0:
                return
            for device, platform in list(_shared.items()):
                if platform is self:
                    del _shared[device]
        self.poller.close()
