"""The failure of a run in words: the rank that failed first, its exit, and its last output. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

EXCERPT_LINES = 20  # lines of stderr shown when there is no traceback in it

_TRACEBACK = b"Traceback (most recent call last)"
_BLAME = re.compile(rb"(?:AbortedError: aborted by rank|PeerLostError: rank) (\d+)")


def exit_code(code: int) -> int:
    """The exit code that reports the same end to a shell."""
    return code if code >= 0 else 128 - code


def culprit(first: int, failed: Mapping[int, Sequence[bytes]]) -> int:
    """The rank to blame: ``first``, or the rank that its last error names, if that rank failed too.

    An aborting rank notifies the other ranks before it exits itself, so a victim is often the first to exit.

    Args:
        first: the rank that ended first.
        failed: the last lines of stderr of all ranks that failed by themselves.
    """
    seen = set[int]()
    while first not in seen:
        seen.add(first)
        named = next((m for line in reversed(failed[first][-EXCERPT_LINES:]) if (m := _BLAME.search(line))), None)
        if named is not None and int(named[1]) in failed:
            first = int(named[1])
    return first


def excerpt(tail: Sequence[bytes]) -> Sequence[bytes]:
    """The end of a stderr to show: from its first traceback on, or the last lines."""
    start = next((i for i, line in enumerate(tail) if line.startswith(_TRACEBACK)), None)
    return tail[-EXCERPT_LINES:] if start is None else tail[start:]
