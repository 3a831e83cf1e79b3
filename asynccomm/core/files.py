"""Files that are written whole or not at all. Without torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

MOST_LINKS: Final = 40  # of one path, as in Linux


def write_whole(path: Path | str, data: bytes, folder: Path | str | None = None) -> None:
    """Write ``data`` to ``path``: a reader finds the former content or ``data``, also after an error or a kill.

    A link stays, and the file that it leads to is replaced. A device, a pipe or an open file, such as ``/dev/stdout``,
    gets the bytes directly, behind those that it has.

    Args:
        folder: for the temporary file, on the file system of ``path``; None: the folder of the file.

    Raises: OSError with ``path``.
    """
    try:
        if not is_replaced(path):
            with open(path, "ab") as place:
                place.write(data)
            return
        mode = _mode_of(path)
        target = os.path.realpath(path)
        temporary = Path(folder or os.path.dirname(target), f".asynccomm-{os.urandom(8).hex()}.new")
        try:
            with temporary.open("xb") as file:  # with the mode that the umask gives, unlike files of ``tempfile``
                file.write(data)
            if mode is not None:
                temporary.chmod(stat.S_IMODE(mode))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, str(path)) from exc


def is_replaced(path: Path | str) -> bool:
    """Whether ``write_whole`` makes or replaces a file at ``path``: it is no device, no pipe and no open file."""
    mode = _mode_of(path)
    return mode is None or (stat.S_ISREG(mode) and not _is_descriptor(path))


def _is_descriptor(path: Path | str) -> bool:
    """Whether links lead from ``path`` to an open file of a process, as from ``/dev/stdout``."""
    for _ in range(MOST_LINKS):
        folder, name = os.path.realpath(os.path.dirname(path)), os.path.basename(path)
        path = os.path.join(folder, name)
        if not os.path.islink(path):
            break
        if folder.startswith("/proc/"):
            return True
        path = os.path.join(folder, os.readlink(path))
    return False


def _mode_of(path: Path | str) -> int | None:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None
