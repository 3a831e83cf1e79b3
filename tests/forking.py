"""A fork of a process that has threads."""

from __future__ import annotations

import os
import warnings


def fork() -> int:
    """``os.fork``, without the warning that Python gives since 3.12 if there are other threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
