"""A fork of a process that has threads."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def fork() -> int:
    """``os.fork``, without the warning that Python gives since 3.12 if there are other threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@contextmanager
def ending_child() -> Iterator[None]:
    """End the forked child after the body: with exit code 1 and a traceback on stderr if the body raises."""
    try:
        yield
    except BaseException:
        os.write(2, traceback.format_exc().encode())  # unlike sys.stderr, without a lock that a thread may have held
        os._exit(1)
    os._exit(0)


def exit_code(child: int) -> int:
    """The exit code of a forked child; blocks until the child ends."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
