"""The ``asynccomm`` command.

From outside of ``cli`` this module imports only modules that need no torch: a command must start, and reject bad input,
at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence

from asynccomm.cli import bench, diagnose, doctor, run, top, trace
from asynccomm.version import __version__

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of full disks and lost terminals


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; bad input exits with 2, naming the argument and its value.

    A reader of the output that ends early, as in ``asynccomm doctor | head``, ends the command quietly. Output that
    cannot be written for another reason is an error, with exit code 1.
    """
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # the descriptor was replaced by one without a position; errors are set then
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: names of hosts and files may be any text
    try:
        try:
            return _main(argv)
        finally:
            if sys.stdout is not None:  # closed from the start
                sys.stdout.flush()
    except BrokenPipeError:
        _discard()
        return 128 + signal.SIGPIPE
    except OSError as exc:
        if exc.errno not in _WRITE_ERRORS or exc.filename is not None:  # an error of a file has its name
            raise
        _discard()
        print(f"asynccomm: cannot write the output: {exc.strerror}", file=sys.stderr)
        return 1


def _discard() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left for the flush at exit


def _open_standard_streams() -> None:
    """Give descriptors 0 to 2 to the null device where they are closed: other files would get these numbers.

    Child processes inherit them, as they do the open ones: rank 0 has the launcher's stdin.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)


def _main(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="asynccomm",
        description="Collective communication for PyTorch tensors that you can await.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asynccomm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run.add_command(commands)
    doctor.add_command(commands)
    diagnose.add_command(commands)
    trace.add_command(commands)
    top.add_command(commands)
    bench.add_command(commands)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    code: int = arguments.command(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
