"""The interfaces of other communication libraries, over asynccomm: awaited, and most of them also without a loop.

The modules are imported on first use: they need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynccomm.compat import bagua as bagua
    from asynccomm.compat import c10d as c10d
    from asynccomm.compat import torchcomms as torchcomms
    from asynccomm.compat import vllm as vllm

_MODULES = ("bagua", "c10d", "torchcomms", "vllm")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"asynccomm.compat.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
