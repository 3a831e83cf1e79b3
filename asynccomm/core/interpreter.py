"""The interpreters that this package does not support."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module

_MODULES = ("_interpreters", "_xxsubinterpreters")  # of Python 3.13 and later, and of earlier ones


def check_interpreter() -> None:
    """Refuse interpreters in which collectives could be wrong, or never end. Raises: ImportError."""
    enabled = getattr(sys, "_is_gil_enabled", None)  # of Python 3.13 and later
    if enabled is not None and not enabled():
        raise ImportError("asynccomm does not support Python without the GIL; set PYTHON_GIL=1")
    for name in _MODULES:
        with suppress(ModuleNotFoundError):
            interpreters = import_module(name)
            if interpreters.get_current() != interpreters.get_main():
                raise ImportError("asynccomm does not support subinterpreters, as torch does not")
