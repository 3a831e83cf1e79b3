"""The checks of ``asynccomm doctor``: a probe examines one subject of a system, and returns a section of the report.

All inputs of a probe come from a :class:`SystemInfo`, so that a test can replace them. The probes that need torch
import it, not their module: the launcher must start without torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, final


@final
@dataclass(frozen=True, slots=True)
class CheckWarning:
    """A problem; ``serious`` if a feature will not work."""

    text: str
    serious: bool = False


@final
@dataclass(frozen=True, slots=True)
class Section:
    """The result of a probe. Facts with names in ``_bytes`` are sizes; None stands for an absent thing."""

    facts: Mapping[str, object]
    warned: Sequence[CheckWarning] = ()
    error: str | None = None  #: why the probe failed


@final
@dataclass(frozen=True, slots=True)
class SystemInfo:
    """The inputs of probes."""

    module: Callable[[str], Any] = import_module
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")  #: of /proc, /sys and /dev
    resolve: Callable[[], Iterable[str]] = lambda: _addresses(socket.gethostname())

    def version(self, package: str) -> str | None:
        """The version of an installed package; None if it is not installed."""
        metadata = self.module("importlib.metadata")
        try:
            found: str = metadata.version(package)
        except metadata.PackageNotFoundError:
            return None
        return found

    def read(self, path: str) -> str | None:
        """The content of a system file; None if it cannot be read."""
        try:
            return (self.root / path).read_text()
        except OSError:
            return None


def _addresses(name: str) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]


def size_text(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
