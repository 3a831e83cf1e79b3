"""The names of backends, without torch: commands check them before ranks start."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

ENTRY_POINT_GROUP: Final = "asynccomm.backends"
BUILTIN: Final = {
    "gloo": ("asynccomm.backends.gloo.backend", "GlooBackend"),
    "hierarchical": ("asynccomm.backends.hierarchical.backend", "HierarchicalBackend"),
    "nccl": ("asynccomm.backends.nccl.backend", "NcclBackend"),
    "loopback": ("asynccomm.backends.loopback", "LoopbackBackend"),
    "shm": ("asynccomm.backends.shm.backend", "ShmBackend"),
}  # module and class


def backend_names() -> list[str]:
    """All names that ``load_backend`` accepts: the built-in backends and those of installed packages."""
    return sorted({*BUILTIN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})
