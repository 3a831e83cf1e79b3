"""``asynccomm run --trace OUT.json``: the ranks write parts, of which the launcher makes a trace.

The parts are in a folder of the run. A process beside the launcher removes the folder where the launcher cannot: after
``kill -9``, or a signal while the trace is written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from asynccomm.core.files import is_replaced
from asynccomm.observe.chrome import DIRECTORY, read_part, write_trace

# -I and -S: without the user's modules and settings. The end of stdin is the end of the launcher or of its trace
_REMOVER = (sys.executable, "-I", "-S", "-c", "import shutil, sys; shutil.rmtree(sys.stdin.buffer.read(), True)")


@contextlib.contextmanager
def traced(out: Path | None) -> Iterator[None]:
    """Have the ranks that are started in the block write traces; None: they write none.

    Raises: OSError with ``out`` at the begin, if its folder cannot be written to.
    """
    if out is None:
        yield
        return
    with contextlib.ExitStack() as resources:
        try:
            directory = resources.enter_context(_folder(out))
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror, str(out)) from exc
        before = os.environ.get(DIRECTORY)
        os.environ[DIRECTORY] = str(directory)
        try:
            yield
        finally:
            os.environ.pop(DIRECTORY)
            if before is not None:
                os.environ[DIRECTORY] = before
        _merge(directory, out)


@contextlib.contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """A folder for the parts on the file system of ``out``, or among the system's temporary files for a device."""
    beside = Path(os.path.realpath(out)).parent if is_replaced(out) else None
    directory = Path(tempfile.mkdtemp(prefix=".asynccomm-", dir=beside)).absolute()
    try:
        with _removed(directory):
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _removed(directory: Path) -> Iterator[None]:
    """Have a process remove the folder if this one ends in the block; without it where it cannot be started."""
    try:
        remover = subprocess.Popen(
            _REMOVER,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the launcher, and the remover after it
        )
    except OSError:
        yield
        return
    with remover:
        assert remover.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            remover.stdin.write(os.fsencode(directory))
        yield


def _merge(directory: Path, out: Path) -> None:
    """Write the trace; parts of ranks that were killed are missing, and the run's exit code does not depend on it."""
    parts = []
    for path in sorted(directory.glob("*.json")):
        try:
            parts.append(read_part(path))
        except (OSError, ValueError) as exc:
            print(f"asynccomm run: {exc}", file=sys.stderr)
    try:
        write_trace(out, parts, directory)
    except OSError as exc:
        print(f"asynccomm run: cannot write the trace to {str(out)!r}: {exc.strerror}", file=sys.stderr)
