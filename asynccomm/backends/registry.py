"""Backends by name, imported on first use: ``import asynccomm`` loads no transport.

Another package adds a backend with an entry point::

    [project.entry-points."asynccomm.backends"]
    mine = "my_package.backend:MyBackend"
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

import torch

from asynccomm.backends.base import Backend
from asynccomm.backends.names import BUILTIN, ENTRY_POINT_GROUP, backend_names

_AUTO = {
    "cpu": ("shm", "hierarchical", "gloo"),
    "cuda": ("nccl",),
}  # by type of device: the fastest backend first, the backend that serves any ranks last


def candidates(name: str, device: torch.device) -> tuple[str, ...]:
    """The backends that ``"auto"`` tries on ``device``, in this order; any other name stands for itself."""
    if not isinstance(name, str):
        raise TypeError(f"backend must be a name, got {name!r}")
    if name != "auto":
        return (name,)
    if device.type in _AUTO:
        return _AUTO[device.type]
    raise ValueError(f"backend 'auto' has no choice for device {device}: only 'cpu' and 'cuda' have one")


def load_backend(name: str, device: torch.device) -> type[Backend]:
    """The class of backend ``name``. Raises ``ValueError`` if it is unknown or does not support ``device``."""
    if name in BUILTIN:
        module, attribute = BUILTIN[name]
        backend = getattr(import_module(module), attribute)
    else:
        found = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
        if not found:
            raise ValueError(f"backend {name!r} is unknown; choose from {', '.join(['auto', *backend_names()])}")
        backend = found[0].load()
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise TypeError(f"backend {name!r} is {backend!r}, not a subclass of asynccomm.backends.base.Backend")
    if device.type not in backend.devices:
        raise ValueError(f"backend {name!r} takes tensors on {sorted(backend.devices)}, not on device {device}")
    return backend
