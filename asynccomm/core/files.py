"""Files that are written whole or not at all. Without torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def write_whole(path: Path | str, data: bytes, folder: Path | str | None = None) -> None:
    """Write ``data`` to ``path``: a reader finds the former content or ``data``, also after an error or a kill.

    A link stays, and the file that it leads to is replaced. A device or a pipe gets the bytes directly.

    Args:
        folder: for the temporary file, on the file system of ``path``; None: the folder of the file.

    Raises: OSError with ``path``.
    """
    try:
        mode = _mode_of(path)
        if mode is not None and not stat.S_ISREG(mode):
            with open(path, "wb") as place:
                place.write(data)
            return
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


def _mode_of(path: Path | str) -> int | None:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None
