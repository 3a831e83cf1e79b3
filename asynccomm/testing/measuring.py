"""Coverage in ranks, while pytest's own process is measured: by coverage.py, with or without pytest-cov.

Each rank writes a data file beside that of pytest's process, which pytest-cov and ``coverage combine`` find.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Any, final

__all__ = ["RankCoverage", "coverage_settings"]


def coverage_settings() -> str | None:
    """The settings of the measurement of this process; None: there is none."""
    module = sys.modules.get("coverage")
    if module is None:
        return None
    current = module.Coverage.current()
    if current is None:
        return None
    if not hasattr(current.config, "serialize"):
        warnings.warn(f"coverage {module.__version__} cannot measure ranks: it needs to be 7.10 or later", stacklevel=2)
        return None
    return str(current.config.serialize())


@final
class RankCoverage:
    """The measurement of a rank process.

    Args:
        settings: those of pytest's process; None: nothing is measured.
    """

    def __init__(self, settings: str | None) -> None:
        self._coverage: Any = None
        if settings is None:
            return
        coverage = import_module("coverage")
        self._coverage = coverage.Coverage.current()  # its own support of subprocesses may have started it
        if self._coverage is None:
            self._coverage = coverage.Coverage(config_file=f":data:{settings}", data_suffix=True)
            # a rank imports few of the files that are measured, and perhaps none
            quiet = ["no-data-collected", "module-not-imported", "module-not-measured", "module-not-python"]
            self._coverage.set_option("run:disable_warnings", quiet)
            self._coverage.start()

    def save(self) -> None:
        """Write the data file: a rank may be killed at any time after a test."""
        if self._coverage is not None:
            self._coverage.save()
