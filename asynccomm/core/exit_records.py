"""The ends of the ranks of a launcher, in a file that the launcher writes and its ranks read.

The end of a connection tells a rank that another process has ended; the exit code is known to the parent of that
process alone. The file has no name: it lives as long as the launcher.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final, final

VARIABLE: Final = "ASYNCCOMM_EXITS"  # the path of the file, in the environment of the ranks


@final
class ExitRecords:
    """The launcher's side: one line for each process, with its pid and its exit code in subprocess's form.

    Raises: OSError when the file cannot be made.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("asynccomm exits")
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def add(self, pid: int, code: int) -> None:
        """Record the end of a process."""
        os.write(self._fd, b"%d %d\n" % (pid, code))

    def close(self) -> None:
        """Free the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def exits_are_recorded() -> bool:
    """Whether this process was started by a launcher that records exits."""
    return VARIABLE in os.environ


def recorded_exit(pid: int) -> str:
    """The end of the process ``pid`` of this host in words, such as "was killed by SIGKILL"; empty: not recorded."""
    try:
        lines = Path(os.environ[VARIABLE]).read_text().splitlines()
    except (KeyError, OSError):  # no such launcher, or the launcher has ended
        return ""
    codes = [int(code) for found, code in map(str.split, lines) if int(found) == pid]
    return describe_exit(codes[-1]) if codes else ""


def describe_exit(code: int) -> str:
    """The end of a process in words, from its exit code in subprocess's form."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
