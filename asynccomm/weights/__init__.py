"""Pushing weights from trainers to servers that go on answering requests. Names are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynccomm.weights.crew import PushResult as PushResult
    from asynccomm.weights.errors import LayoutError as LayoutError
    from asynccomm.weights.errors import PushAbandonedError as PushAbandonedError
    from asynccomm.weights.layout import Region as Region
    from asynccomm.weights.layout import Shard as Shard
    from asynccomm.weights.publisher import Publisher as Publisher
    from asynccomm.weights.server import Server as Server
    from asynccomm.weights.updates import Update as Update
    from asynccomm.weights.updates import Updates as Updates

_HOMES = {
    "LayoutError": "asynccomm.weights.errors",
    "Publisher": "asynccomm.weights.publisher",
    "PushAbandonedError": "asynccomm.weights.errors",
    "PushResult": "asynccomm.weights.crew",
    "Region": "asynccomm.weights.layout",
    "Server": "asynccomm.weights.server",
    "Shard": "asynccomm.weights.layout",
    "Update": "asynccomm.weights.updates",
    "Updates": "asynccomm.weights.updates",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
