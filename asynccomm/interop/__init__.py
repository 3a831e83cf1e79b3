"""Adapters between asynccomm and other libraries.

The public modules are imported on first use: they need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynccomm.interop import mesh as mesh
    from asynccomm.interop import torch_backend as torch_backend

_MODULES = ("mesh", "torch_backend")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"asynccomm.interop.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
