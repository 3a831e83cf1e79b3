"""Async versions of the interfaces of other communication libraries.

``c10d`` is imported on first use: it needs torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynccomm.compat import c10d as c10d


def __getattr__(name: str) -> Any:
    if name != "c10d":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("asynccomm.compat.c10d")


def __dir__() -> list[str]:
    return sorted({*globals(), "c10d"})
