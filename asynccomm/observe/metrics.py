"""Counters and histograms of a comm's operations, and their text for Prometheus."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, final

from asynccomm.core.work import Work
from asynccomm.observe.lateness import Lateness
from asynccomm.observe.watchers import Called, Watcher, Watchers, once
from asynccomm.ops import Call

BOUNDS: Final = tuple(float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 3))  # seconds
Labels = Mapping[str, str]


@final
class Histogram:
    """Counts of seconds by ranges; ``counts`` has one entry more than ``BOUNDS``, for longer ones."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts: list[int] = [0] * (len(BOUNDS) + 1)
        self.seconds: float = 0.0  #: in sum

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds


@final
class OpMetrics:
    """The operations of one kind."""

    __slots__ = ("completed", "failed", "latency", "nbytes")

    def __init__(self) -> None:
        self.completed: int = 0
        self.failed: int = 0
        self.nbytes: int = 0  #: one rank's share, in sum
        self.latency: Histogram = Histogram()  #: from the call to the end, of completed operations

    def complete(self, nbytes: int, seconds: float) -> None:
        """Count an operation that is done."""
        self.completed += 1
        self.nbytes += nbytes
        self.latency.add(seconds)


class Recording:
    """Gets each operation that ends and each wait, for an exporter. The methods must be quick, and not raise."""

    def ended(self, kind: str, nbytes: int, seconds: float, error: str) -> None:
        """An operation has ended; ``error`` is the name of the error's type, or empty."""

    def waited_for_last(self, seconds: float) -> None:
        """This rank has waited for the last rank of a collective."""

    def closed(self) -> None:
        """The comm has closed."""


@final
class Metrics(Watcher):
    """Counts the operations of a comm that end. From any thread.

    Args:
        watchers: of the comm.
    """

    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers
        self._kinds: dict[str, OpMetrics] = {}
        self.waits: Histogram = Histogram()  #: for the last rank of a collective
        self._recordings: tuple[Recording, ...] = ()
        self._closed = False
        self._lock = threading.Lock()

    @property
    def kinds(self) -> dict[str, OpMetrics]:
        """The operations so far, by their kind."""
        self._watchers.flush()
        return self._kinds

    def record(self, recording: Recording) -> bool:
        """Have an exporter record each operation that ends from now on, when it ends. Returns: False once closed."""
        self._watchers.hurry(self)  # first: it reports the calls so far
        with self._lock:
            if not self._closed:
                self._recordings = (*self._recordings, recording)
            return not self._closed

    def finished(self, calls: Sequence[Called]) -> None:
        recordings, before = self._recordings, None
        with self._lock:
            for op, _, _, started, finished in calls:
                assert finished is not None
                if op is not before:  # a call that is repeated has the same operation
                    before, kind, nbytes = op, op.kind, op.nbytes
                    of_kind = self._of_kind(kind)
                    latency = of_kind.latency
                    counts = latency.counts
                seconds = finished - started
                of_kind.completed += 1  # without calls: this loop is on the way of small collectives
                of_kind.nbytes += nbytes
                latency.seconds += seconds
                counts[bisect_left(BOUNDS, seconds)] += 1
                for recording in recordings:
                    recording.ended(kind, nbytes, seconds, "")

    def _of_kind(self, kind: str) -> OpMetrics:
        """The counts of ``kind``. Under the lock."""
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = OpMetrics()
        return found

    def called(self, call: Call, work: Work[Any]) -> None:
        work.listen(partial(once, [work], self._settled))

    def _settled(self, work: Work[Any]) -> None:
        end = time.monotonic() if work.finished is None else work.finished
        error = work._error  # exception() would mark the error as retrieved
        self._add(work.op.kind, work.op.nbytes, end - work.started, "" if error is None else type(error).__name__)

    def _add(self, kind: str, nbytes: int, seconds: float, error: str) -> None:
        with self._lock:
            of_kind = self._of_kind(kind)
            if error:
                of_kind.failed += 1
            else:
                of_kind.complete(nbytes, seconds)
        for recording in self._recordings:
            recording.ended(kind, nbytes, seconds, error)

    def waited_for_last(self, seconds: float) -> None:
        """This rank was ``seconds`` earlier than the last rank of a collective."""
        with self._lock:
            self.waits.add(seconds)
        for recording in self._recordings:
            recording.waited_for_last(seconds)

    def closed(self) -> None:
        with self._lock:
            self._closed = True
        for recording in self._recordings:
            recording.closed()


class Gauge(NamedTuple):
    """A number that the text shows as it is."""

    name: str
    kind: str  #: "gauge" or "counter"
    help: str
    value: float


def prometheus(metrics: Metrics, lateness: Lateness, gauges: Iterable[Gauge], labels: Labels) -> str:
    """All metrics in Prometheus' text format, version 0.0.4; each line has ``labels``."""
    kinds = sorted(metrics.kinds.items())
    lines = [
        *_family("operations_total", "counter", "Operations completed."),
        *(_line("operations_total", {**labels, "op": kind}, each.completed) for kind, each in kinds),
        *_family("failures_total", "counter", "Operations that failed."),
        *(_line("failures_total", {**labels, "op": kind}, each.failed) for kind, each in kinds),
        *_family("bytes_total", "counter", "Bytes of one rank's share of the operations completed."),
        *(_line("bytes_total", {**labels, "op": kind}, each.nbytes) for kind, each in kinds),
        *_family("latency_seconds", "histogram", "Time from the call to the end of operations."),
        *(line for kind, each in kinds for line in _histogram("latency_seconds", {**labels, "op": kind}, each.latency)),
        *_family("wait_for_last_seconds", "histogram", "Time that this rank waited for the last rank of a collective."),
        *_histogram("wait_for_last_seconds", labels, metrics.waits),
        *_family("last_total", "counter", "Collectives to which a rank came last."),
        *(_line("last_total", {**labels, "last": str(each.rank)}, each.times_last) for each in lateness.ranks),
        *_family("lateness_seconds_total", "counter", "Time for which all other ranks waited for one rank alone."),
        *(_line("lateness_seconds_total", {**labels, "last": str(each.rank)}, each.seconds) for each in lateness.ranks),
    ]
    for gauge in gauges:
        lines += [*_family(gauge.name, gauge.kind, gauge.help), _line(gauge.name, labels, gauge.value)]
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP asynccomm_{name} {text}"
    yield f"# TYPE asynccomm_{name} {kind}"


def _line(name: str, labels: Labels, value: float) -> str:
    shown = ",".join([f'{key}="{_escaped(text)}"' for key, text in labels.items()])
    return f"asynccomm_{name}{{{shown}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _histogram(name: str, labels: Labels, histogram: Histogram) -> Iterator[str]:
    count = 0
    for bound, more in zip((*map(repr, BOUNDS), "+Inf"), histogram.counts, strict=True):
        count += more
        yield _line(f"{name}_bucket", {**labels, "le": bound}, count)
    yield _line(f"{name}_sum", labels, histogram.seconds)
    yield _line(f"{name}_count", labels, count)
