"""Recording a trace of one comm on one rank: its operations, batches, waits, and the lag of the event loop.

The result is a part: plain data, of which ``chrome`` makes the file. Parts of several ranks and comms are merged there.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Final, final

from asynccomm.core.callsite import CallSite, show
from asynccomm.core.work import Work
from asynccomm.observe.clocks import ClockOffset
from asynccomm.observe.watchers import Called, Watcher
from asynccomm.ops import Call, Op
from asynccomm.ops.validation import CommInfo

MOST: Final = 1_000_000  # operations of a trace; later ones are counted
LAG_SECONDS: Final = 0.02  # between looks at the event loop

Part = dict[str, Any]


@final
class TraceRecorder(Watcher):
    """Records the operations of a comm from ``start`` to ``stop``.

    Args:
        group: the comm.
        key: tells comms with the same name apart; equal on all ranks.
        number: of this process, the same in all its comms.
    """

    def __init__(self, group: CommInfo, key: str, number: int) -> None:
        self._group = group
        self._key = key
        self._number = number
        self._done: list[Called] = []  # calls of the fast path
        self._rows: list[_Row] = []  # all other calls
        self._batches: list[tuple[float, float, int]] = []
        self._waits: list[tuple[float, float]] = []
        self._lags: list[tuple[float, float]] = []
        self._dropped = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.offset: ClockOffset | None = None  #: to the clock of the job's lowest rank; None: unknown

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to look at the lag of ``loop``. On it."""
        self._loop = loop
        self._look(time.monotonic())

    def stop(self) -> None:
        """End that. Idempotent. On the loop, or once it has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, due: float) -> None:
        assert self._loop is not None
        now = time.monotonic()
        self._lags.append((now, max(0.0, now - due)))
        self._timer = self._loop.call_later(LAG_SECONDS, self._look, now + LAG_SECONDS)

    # -- as a watcher -------------------------------------------------------------------------------------------------

    def finished(self, calls: Sequence[Called]) -> None:
        kept = calls[: MOST - len(self._done)]
        self._done += kept
        self._dropped += len(calls) - len(kept)

    def called(self, call: Call, work: Work[Any]) -> None:
        if len(self._rows) >= MOST:
            self._dropped += 1
            return
        row = _Row(work)
        self._rows.append(row)
        work.listen(row.settled)

    def sent(self, works: Sequence[Work[Any]]) -> None:
        if len(works) > 1:
            self._batches.append((min([work.started for work in works]), time.monotonic(), len(works)))

    def waited(self, seconds: float) -> None:
        now = time.monotonic()
        self._waits.append((now - seconds, now))

    # -- the result ---------------------------------------------------------------------------------------------------

    def part(self) -> Part:
        """The trace so far, as plain data. Times are seconds of this rank's monotonic clock."""
        group, offset = self._group, self.offset
        rows = [_plain(*call, "") for call in self._done]
        rows += [_plain(row.op, row.site, row.seq, row.started, row.finished, row.error) for row in self._rows]
        return {
            "comm": group.name,
            "key": self._key,
            "rank": group.rank,
            "size": group.size,
            "process": self._number,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "offset": 0.0 if offset is None else offset.seconds,
            "uncertainty": None if offset is None else offset.uncertainty,
            "ops": sorted(rows, key=lambda row: row["started"]),
            "batches": self._batches,
            "waits": self._waits,
            "lags": self._lags,
            "dropped": self._dropped,
        }


@final
class _Row:
    """An operation with a Work; the Work is dropped at the end, as it may hold tensors."""

    __slots__ = ("error", "finished", "op", "seq", "site", "started", "work")

    def __init__(self, work: Work[Any]) -> None:
        self.op, self.site, self.seq, self.started = work.op, work.site, work.seq, work.started
        self.finished: float | None = None
        self.error = ""
        self.work: Work[Any] | None = work

    def settled(self) -> None:
        work, self.work = self.work, None
        if work is not None:  # a Work may notify twice
            self.seq, self.finished = work.seq, work.finished
            self.error = "" if work._error is None else type(work._error).__name__


def _plain(
    op: Op, site: CallSite | None, seq: int, started: float, finished: float | None, error: str
) -> dict[str, Any]:
    return {
        "op": str(op),
        "kind": op.name,
        "p2p": op.p2p,
        "seq": seq,
        "bytes": op.nbytes,
        "site": show(site),
        "started": started,
        "finished": finished,
        "error": error,
    }
