"""The modules in C, if they were built. ``asynccomm doctor`` imports this module, hence no torch here."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, NamedTuple

VARIABLE = "ASYNCCOMM_EXECUTOR"


class CoreUnavailable(NamedTuple):
    """The reason that Python is in use in place of C."""

    reason: str


def load_core() -> Any:
    """The executor in C, or :class:`CoreUnavailable`; ``ASYNCCOMM_EXECUTOR=reference`` asks for the latter.

    Raises: ValueError for another value of the variable; ImportError if it is ``core`` and the module is missing.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "core", "reference"):
        raise ValueError(f"{VARIABLE} must be 'core' or 'reference', got {wanted!r}")
    return load("asynccomm.backends.shm._core", required=bool(wanted))


def load(name: str, *, required: bool = False) -> Any:
    """The module in C called ``name``, or :class:`CoreUnavailable`. Raises: ImportError if it is ``required``."""
    if os.environ.get(VARIABLE) == "reference":
        return CoreUnavailable(f"{VARIABLE}=reference")
    if (loaded := sys.modules.get(name)) is not None:  # a fifth of the time
        return loaded
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        if required:
            raise
        return CoreUnavailable(f"it was not built when the package was installed ({exc})")
