"""The process that hosts the store of a run: ``python -m asynccomm.cli.store_process FD GROUP...``

A process of its own lets the launcher run without torch: ranks start at once, and a Ctrl-C never waits for an import.
The store process also outlives a killed launcher: the kernel then kills the ranks, but not their child processes, so
the store process kills the ranks' groups.

FD is the listening socket. GROUPs are the ranks' process groups; the launcher writes the numbers of ended groups to
stdin, one per line, and of new groups with a "+" in front. The end of stdin is the end of the launcher.
"""

from __future__ import annotations

import socket
import sys
import time

from asynccomm.cli.processes import GROUP_POLL_SECONDS, GROUP_SECONDS, group_exists, kill_group
from asynccomm.errors import RendezvousError
from asynccomm.store.server import serve


def main() -> int:
    """Serve until the launcher has ended."""
    listening, *numbers = map(int, sys.argv[1:])
    groups = set(numbers)
    try:
        hosted = serve("127.0.0.1", socket.socket(fileno=listening))
    except RendezvousError as exc:
        print(f"asynccomm: {exc}", file=sys.stderr)
        return 1
    for line in sys.stdin:
        if line.startswith("+"):
            groups.add(int(line))
        else:
            groups.discard(int(line))
    deadline = time.monotonic() + GROUP_SECONDS
    while any(map(group_exists, groups)) and time.monotonic() < deadline:
        time.sleep(GROUP_POLL_SECONDS)
    for group in groups:
        kill_group(group)
    hosted.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
