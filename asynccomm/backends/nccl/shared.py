"""State that all NCCL comms of one device share: the library, the device, and the poller of its streams."""

from __future__ import annotations

import threading
from typing import final

import torch

from asynccomm.backends.nccl.api import Nccl
from asynccomm.backends.nccl.bindings import load
from asynccomm.backends.nccl.device import Cuda, Device, Event
from asynccomm.backends.nccl.poller import Poller

_lock = threading.Lock()
_shared: dict[torch.device, DeviceRuntime] = {}


@final
class DeviceRuntime:
    """The library, device and poller of one device, shared by the callers of :meth:`of`.

    The poller's thread ends with the last :meth:`leave`.
    """

    def __init__(self, nccl: Nccl, device: Device) -> None:
        self.nccl = nccl
        self.device = device
        self.poller: Poller[Event] = Poller(device, name="asynccomm-nccl")
        self._users = 0

    @classmethod
    def of(cls, device: torch.device) -> DeviceRuntime:
        """The runtime of a CUDA device, with one more user. Raises: BackendError naming the missing part."""
        with _lock:
            platform = _shared.get(device)
            if platform is None:
                platform = _shared[device] = cls(load(), Cuda(device))
            platform._users += 1
            return platform

    def leave(self) -> None:
        """End one use. With the last user, blocks until the poller is closed."""
        with _lock:
            self._users -= 1
            if self._users > 0:
                return
            for device, platform in list(_shared.items()):
                if platform is self:
                    del _shared[device]
        self.poller.close()
