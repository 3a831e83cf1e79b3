"""Tracebacks in the output of ranks: one that another rank has printed, or that an interrupt causes, becomes a line.

A traceback begins with its first line, continues over indented lines, and ends with the line of the exception, or with
the frame of a group; a chain of tracebacks is one. All other lines pass unchanged. Pure: the caller has the timer.
"""

from __future__ import annotations

import enum
import re
from typing import Final, final

KEPT_BYTES: Final = 1 << 20  # of tracebacks to compare with; later ones are printed by each rank
FOLDED_LINES: Final = 2000  # a longer traceback passes unchanged, because the process may have printed no end

_START: Final = b"Traceback (most recent call last):"
_GROUP: Final = b"  + Exception Group Traceback (most recent call last):"
_GROUP_LINE: Final = re.compile(rb"  \| (?P<error>[^ ])| +(?:\+-+(?P<end>$)|[|+])")
_CHAIN: Final = (b"During handling of the above exception", b"The above exception was the direct cause")
# exceptions that an interrupt of all ranks causes
_INTERRUPTS: Final = (b"KeyboardInterrupt", b"asyncio.exceptions.CancelledError", b"asynccomm.errors.")


class _State(enum.Enum):
    OUTSIDE = enum.auto()
    STACK = enum.auto()  # within the indented lines
    END = enum.auto()  # behind the line of the exception: a chain may follow
    LINK = enum.auto()  # behind the sentence that links two tracebacks


@final
class SeenTracebacks:
    """The tracebacks of all ranks of a run."""

    def __init__(self) -> None:
        self.interrupted = False  #: whether the user has interrupted the run
        self._ranks: dict[bytes, int] = {}  # by traceback, the rank that has printed it
        self._bytes = 0

    def first(self, traceback: bytes, rank: int) -> int:
        """The rank that has printed ``traceback`` first."""
        if traceback not in self._ranks and self._bytes + len(traceback) <= KEPT_BYTES:
            self._ranks[traceback] = rank
            self._bytes += len(traceback)
        return self._ranks.get(traceback, rank)


@final
class TracebackFolder:
    """Folds the tracebacks of one rank."""

    def __init__(self, rank: int, seen: SeenTracebacks) -> None:
        self._rank = rank
        self._seen = seen
        self._state = _State.OUTSIDE
        self._lines: list[bytes] = []  # of a traceback that may go on
        self._error = b""  # the line of its last exception
        self._in_group = False  # whether its last part is that of an exception group

    @property
    def holds(self) -> bool:
        """Whether lines are held back; call ``flush`` if no line comes soon."""
        return bool(self._lines)

    @property
    def complete(self) -> bool:
        """Whether the lines that are held back may be all of a traceback, unless a chain follows."""
        return self._state is _State.END

    def feed(self, lines: list[bytes]) -> list[bytes]:
        """The lines to print now."""
        shown: list[bytes] = []
        for line in lines:
            if not self._takes(line):
                shown += self.flush()
                if not self._takes(line):
                    shown.append(line)
            elif len(self._lines) >= FOLDED_LINES:
                shown += self._lines
                self._reset()
        return shown

    def flush(self) -> list[bytes]:
        """The lines that are held back: the traceback, or the line in its place."""
        lines, error, complete = self._lines, self._error, self.complete
        self._reset()
        if not complete or not error:
            return lines
        end = len(lines)
        while end and not lines[end - 1].strip():  # empty lines behind the traceback are not part of it
            end -= 1
        first = self._seen.first(b"".join(lines[:end]), self._rank)
        if self._seen.interrupted and error.startswith(_INTERRUPTS):
            return [error, *lines[end:]]
        if first != self._rank:
            return [b"traceback as on rank %d: %s" % (first, error), *lines[end:]]
        return lines

    def _takes(self, line: bytes) -> bool:
        """Whether ``line`` belongs to the traceback that is held back, or begins one."""
        text = line.rstrip(b"\r\n")
        state = self._state
        if text in (_START, _GROUP) and state is not _State.STACK:
            if state is _State.END:
                return False  # a traceback of its own
            self._state, self._in_group, self._error = _State.STACK, text == _GROUP, b""
        elif self._in_group and (found := _GROUP_LINE.match(text)):
            self._error = self._error or (line[4:] if found["error"] else b"")
            if found["end"] is not None:
                self._state = _State.END
        elif state is _State.STACK:
            if not text.startswith(b" "):
                self._state, self._error = _State.END, line
        elif state is _State.END and text.startswith(_CHAIN):
            self._state = _State.LINK
        elif state is _State.OUTSIDE or text:
            return False
        self._lines.append(line)
        return True

    def _reset(self) -> None:
        self._state, self._lines, self._error, self._in_group = _State.OUTSIDE, [], b"", False
