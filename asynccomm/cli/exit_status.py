"""The failure of a run in words: the rank that failed first, its exit, and its last output. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

EXCERPT_LINES = 20  # lines of stderr shown when there is no traceback in it

_TRACEBACK = b"Traceback (most recent call last)"
# errors that mostly another rank causes, and its rank in the comm that failed
_CAUSED = re.compile(rb"(?:AbortedError: aborted by rank|PeerLostError: rank) (\d+)")


def exit_code(code: int) -> int:
    """The exit code that reports the same end to a shell."""
    return code if code >= 0 else 128 - code


def culprit(failed: Sequence[tuple[int, Sequence[bytes]]], decisive: int = 0) -> int:
    """The failure to blame, as an index: ``decisive``, or the nearest that no other rank has caused.

    An aborting rank notifies the other ranks before it exits itself, so a victim is often the first to exit. The rank
    that an error names decides only where each error names one, as after ``comm.abort()``: it is a rank in the comm
    that failed, and may have another number in the run.

    Args:
        failed: the ranks that failed by themselves, in the order of their ends, and the last lines of their stderr.
        decisive: the failure that ended the run: later ones may be its cause, and then those before it.
    """
    causes = [_cause(tail) for _, tail in failed]
    order = [*range(decisive, len(failed)), *reversed(range(decisive))]
    own = (each for each in order if causes[each] is None)
    named = (each for each in order if failed[each][0] == causes[decisive])
    return next(own, next(named, decisive))


def _cause(tail: Sequence[bytes]) -> int | None:
    """The rank that has caused the last error of a rank; None: no other rank has."""
    found = [match for line in tail[-EXCERPT_LINES:] if (match := _CAUSED.search(line))]
    return int(found[-1][1]) if found else None


def excerpt(tail: Sequence[bytes]) -> Sequence[bytes]:
    """The end of a stderr to show: from its first traceback on, or the last lines."""
    start = next((i for i, line in enumerate(tail) if line.startswith(_TRACEBACK)), None)
    return tail[-EXCERPT_LINES:] if start is None else tail[start:]
