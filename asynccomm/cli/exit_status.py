"""The failure of a run in words: the rank that failed first, its exit, and its last output. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

EXCERPT_LINES = 20  # lines of stderr shown when there is no traceback in it

_TRACEBACK = b"Traceback (most recent call last)"
_CAUSED = re.compile(rb"AbortedError: aborted by rank \d|PeerLostError: rank \d")  # errors that another rank causes


def exit_code(code: int) -> int:
    """The exit code that reports the same end to a shell."""
    return code if code >= 0 else 128 - code


def culprit(failed: Sequence[Sequence[bytes]], decisive: int = 0) -> int:
    """The failure to blame, as an index: ``decisive``, or the nearest that no other rank has caused.

    An aborting rank notifies the other ranks before it exits itself, so a victim is often the first to exit. The rank
    that an error names does not help: it is a rank in the comm that failed, and may have another number in the run.

    Args:
        failed: the last lines of stderr of the ranks that failed by themselves, in the order of their ends.
        decisive: the failure that ended the run: later ones may be its cause, and then those before it.
    """
    order = [*range(decisive, len(failed)), *reversed(range(decisive))]
    return next((each for each in order if not _is_caused(failed[each])), decisive)


def _is_caused(tail: Sequence[bytes]) -> bool:
    """Whether the last error of a rank is one that another rank causes."""
    return any(_CAUSED.search(line) for line in tail[-EXCERPT_LINES:])


def excerpt(tail: Sequence[bytes]) -> Sequence[bytes]:
    """The end of a stderr to show: from its first traceback on, or the last lines."""
    start = next((i for i, line in enumerate(tail) if line.startswith(_TRACEBACK)), None)
    return tail[-EXCERPT_LINES:] if start is None else tail[start:]
