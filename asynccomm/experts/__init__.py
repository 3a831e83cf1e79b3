"""Expert parallelism with gradients. Names are imported on first use: they need torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynccomm.experts.autograd import combine as combine
    from asynccomm.experts.autograd import dispatch as dispatch
    from asynccomm.experts.autograd import local_experts as local_experts

_NAMES = ("combine", "dispatch", "local_experts")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("asynccomm.experts.autograd"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
