"""The process that hosts the store of a run: ``python -m asynccomm.cli.store_process FD GROUP...``

It is a process of its own so that the launcher needs no torch: ranks start at once, and a Ctrl-C never waits for an
import. It also is the last to go if the launcher is killed: the kernel kills the ranks then, but not what they had
started, so this one kills their groups.

FD is the listening socket. GROUPs are the ranks' process groups; the launcher writes the ones that are gone to our
stdin, a line each. The end of stdin is the end of the launcher.
"""

from __future__ import annotations

import socket
import sys
import time

from asynccomm.cli.processes import GROUP_SECONDS, kill_group
from asynccomm.errors import RendezvousError
from asynccomm.store.server import serve


def main() -> int:
    """Serve until the launcher is gone."""
    listening, *numbers = map(int, sys.argv[1:])
    groups = set(numbers)
    try:
        hosted = serve("127.0.0.1", socket.socket(fileno=listening))
    except RendezvousError as exc:
        print(f"asynccomm: {exc}", file=sys.stderr)
        return 1
    for line in sys.stdin:
        groups.discard(int(line))
    if groups:
        time.sleep(GROUP_SECONDS)
        for group in groups:
            kill_group(group)
    hosted.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
