"""The executor of collectives in C, if it was built. ``asynccomm doctor`` imports this module, hence no torch here."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

VARIABLE = "ASYNCCOMM_EXECUTOR"


class CoreUnavailable(NamedTuple):
    """The reason that the executor in Python is in use."""

    reason: str


def load_core() -> Any:
    """The module ``_core``, or :class:`CoreUnavailable`; ``ASYNCCOMM_EXECUTOR=reference`` asks for the latter.

    Raises: ValueError for another value of the variable; ImportError if it is ``core`` and the module is missing.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "core", "reference"):
        raise ValueError(f"{VARIABLE} must be 'core' or 'reference', got {wanted!r}")
    if wanted == "reference":
        return CoreUnavailable(f"{VARIABLE}=reference")
    try:
        from asynccomm.backends.shm import _core  # noqa: PLC0415 - it may be missing
    except ImportError as exc:
        if wanted:
            raise
        return CoreUnavailable(f"it was not built when the package was installed ({exc})")
    return _core
