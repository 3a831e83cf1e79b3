"""``asynccomm run --trace OUT.json``: the ranks write parts, of which the launcher makes a trace."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from asynccomm.observe.chrome import DIRECTORY, read_part, write_trace


@contextlib.contextmanager
def traced(out: Path | None) -> Iterator[None]:
    """Have the ranks that are started in the block write traces; None: they write none.

    Raises: OSError at the begin, if the folder of ``out`` cannot be written to.
    """
    if out is None:
        yield
        return
    directory = tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent)
    before = os.environ.get(DIRECTORY)
    os.environ[DIRECTORY] = os.path.abspath(directory)
    try:
        yield
        _merge(Path(directory), out)
    finally:
        os.environ.pop(DIRECTORY)
        if before is not None:
            os.environ[DIRECTORY] = before
        shutil.rmtree(directory, ignore_errors=True)


def _merge(directory: Path, out: Path) -> None:
    """Write the trace; parts of ranks that were killed are missing, and the run's exit code does not depend on it."""
    parts = []
    for path in sorted(directory.glob("*.json")):
        try:
            parts.append(read_part(path))
        except (OSError, ValueError) as exc:
            print(f"asynccomm run: {exc}", file=sys.stderr)
    try:
        write_trace(out, parts)
    except OSError as exc:
        print(f"asynccomm run: cannot write the trace to {str(out)!r}: {exc.strerror}", file=sys.stderr)
