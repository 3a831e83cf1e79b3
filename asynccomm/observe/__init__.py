"""Events, the flight recorder, traces and metrics of comms.

The public module is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynccomm.observe import otel as otel

_MODULES = ("otel",)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"asynccomm.observe.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
