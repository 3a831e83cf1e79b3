"""Test support for programs that use asynccomm: a pytest plugin, loopback worlds, a conformance suite for backends.

Names are imported on first use: pytest imports this package with the plugin, and should not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynccomm.testing.conformance.suite import check_backend as check_backend
    from asynccomm.testing.fixtures import rank_fixture as rank_fixture
    from asynccomm.testing.local import loopback_world as loopback_world

_HOMES = {
    "check_backend": "asynccomm.testing.conformance.suite",
    "loopback_world": "asynccomm.testing.local",
    "rank_fixture": "asynccomm.testing.fixtures",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
