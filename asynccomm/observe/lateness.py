"""Which rank comes last to collectives, and by how much: the ranks exchange the times of their calls.

Each rank notes the times of its own calls, and sends them to the others now and then over the control channel, by a
common clock. Of many calls it sends those with multiples of a power of two as numbers, so the ranks send the same ones.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple, final

from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.observe.watchers import Called, Watcher
from asynccomm.ops import Call, Op

SENT: Final = 256  # calls that a rank sends at once
KEPT: Final = 4096  # collectives that wait for the times of all ranks
RECENT: Final = 50  # collectives by which a straggler is found
SHARE: Final = 0.9  # of them, in which a straggler is last

Arrivals = Mapping[int, float]


@final
class RankLateness(NamedTuple):
    """The collectives to which one rank came last."""

    rank: int
    times_last: int
    seconds: float  #: in sum, for which all other ranks waited for this one alone
    longest: float  #: of these, in one collective

    @property
    def mean(self) -> float:
        """Seconds for each collective to which the rank came last."""
        return self.seconds / self.times_last if self.times_last else 0.0


@final
class Lateness(NamedTuple):
    """The ranks that came last, over the collectives that were compared so far."""

    compared: int
    ranks: tuple[RankLateness, ...]  #: in rank order

    @property
    def last(self) -> RankLateness | None:
        """The rank that the others waited for the longest; None: no collective was compared."""
        return max(self.ranks, key=lambda rank: rank.seconds) if self.compared else None

    def __str__(self) -> str:
        lines = [f"{self.compared} collectives compared"]
        lines += [
            f"rank {each.rank} was last in {each.times_last}, by {each.mean * 1e3:.3g} ms on average, "
            f"{each.longest * 1e3:.3g} ms at most"
            for each in self.ranks
        ]
        return "\n".join(lines)


@final
class ArrivalLog(Watcher):
    """The times of this rank's calls of collectives that were not sent yet.

    Of many calls the log keeps those with multiples of 2, of 4, and so on as numbers: the same ones on all ranks.

    Args:
        on_closed: called when the comm closes.
    """

    def __init__(self, on_closed: Callable[[], object]) -> None:
        self._on_closed = on_closed
        self._calls: deque[tuple[int, Op, float]] = deque()  # appending is atomic
        self._mask = 0  # bits that the number of a kept call does not have
        self._lock = threading.Lock()
        self._deferred: set[Work[Any]] = set()

    def closed(self) -> None:
        self._on_closed()

    def finished(self, calls: Sequence[Called]) -> None:
        mask = self._mask
        for op, _, seq, started, _ in calls:
            if not seq & mask and not op.p2p:
                self._add(seq, op, started)

    def called(self, call: Call, work: Work[Any]) -> None:
        if call.op.p2p:
            return
        if work.seq == UNNUMBERED:
            self._deferred.add(work)
            work.listen(lambda: self.sent([work]))
        else:
            self._add(work.seq, work.op, work.started)

    def sent(self, works: Sequence[Work[Any]]) -> None:
        for work in works:
            if work in self._deferred:
                self._deferred.discard(work)
                if work.seq != UNNUMBERED:
                    self._add(work.seq, work.op, work.started)

    def take(self) -> list[tuple[int, Op, float]]:
        """Number, operation and time of the calls since the last time, at most ``SENT`` of them."""
        with self._lock:
            self._thin(SENT)
            self._mask = 0
            return [self._calls.popleft() for _ in range(len(self._calls))]

    def _add(self, seq: int, op: Op, started: float) -> None:
        self._calls.append((seq, op, started))
        if len(self._calls) >= 2 * SENT:
            with self._lock:
                self._thin(SENT)

    def _thin(self, most: int) -> None:
        """Keep at most ``most`` calls. Under the lock."""
        while len(self._calls) > most:
            self._mask = 2 * self._mask + 1
            for _ in range(len(self._calls)):
                call = self._calls.popleft()
                if not call[0] & self._mask:
                    self._calls.append(call)


@final
class LatenessTable:
    """Joins the times of all ranks. From any thread.

    Args:
        size: the number of ranks.
        on_row: called with number and times of each collective for which all ranks' times are known.
    """

    def __init__(self, size: int, on_row: Callable[[int, Arrivals], object]) -> None:
        self._size = size
        self._on_row = on_row
        self._rows: dict[int, dict[int, float]] = {}  # by number, the oldest first
        self._compared = 0
        self._times, self._seconds, self._longest = [0] * size, [0.0] * size, [0.0] * size
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._lock = threading.Lock()

    def add(self, rank: int, calls: Sequence[tuple[int, float]]) -> None:
        """Add the times of calls of ``rank``, by the common clock."""
        complete = []
        with self._lock:
            for seq, when in calls:
                row = self._rows.setdefault(seq, {})
                row[rank] = when
                if len(row) == self._size:
                    complete.append((seq, self._rows.pop(seq)))
                elif len(self._rows) > KEPT:
                    del self._rows[next(iter(self._rows))]
            for _, row in complete:
                self._count(row)
        for seq, row in complete:
            self._on_row(seq, row)

    def _count(self, row: Arrivals) -> None:
        order = sorted(row, key=row.__getitem__)
        last = order[-1]
        alone = row[last] - row[order[-2]] if len(order) > 1 else 0.0
        self._compared += 1
        self._times[last] += 1
        self._seconds[last] += alone
        self._longest[last] = max(self._longest[last], alone)
        self._recent.append((last, alone))

    def lateness(self) -> Lateness:
        """The sums so far."""
        with self._lock:
            values = zip(range(self._size), self._times, self._seconds, self._longest, strict=True)
            return Lateness(self._compared, tuple([RankLateness(*each) for each in values]))

    def straggler(self, limit: float) -> tuple[int, int, int, float] | None:
        """A rank that is last in most of the recent collectives, by more than ``limit`` seconds; None: there is none.

        Returns: the rank, how often it was last, of how many collectives, and the median of the seconds.
        """
        with self._lock:
            recent = list(self._recent)
        if len(recent) < RECENT:
            return None
        for rank in {rank for rank, _ in recent}:
            late = [seconds for each, seconds in recent if each == rank and seconds > limit]
            if len(late) >= SHARE * len(recent):
                return rank, len(late), len(recent), median(late)
        return None
