"""The metrics of a comm: its counters, and the exchange of arrival times with the other ranks."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Final, final

from asynccomm.comm.in_flight import CommStatistics
from asynccomm.comm.reporter import Reporter
from asynccomm.comm.session import Session
from asynccomm.comm.submission import Submitter
from asynccomm.observe.clocks import ClockOffset
from asynccomm.observe.lateness import ArrivalLog, Arrivals, Lateness, LatenessTable
from asynccomm.observe.metrics import Gauge, Metrics, prometheus
from asynccomm.ops import Op

VARIABLE: Final = "ASYNCCOMM_METRICS"  # any text but "" and "0": all comms have metrics
EXCHANGE_SECONDS: Final = 0.5  # between the messages about arrivals
STRAGGLER_SECONDS: Final = 0.005  # for which all ranks wait for one alone, above which it is a straggler
WARN_SECONDS: Final = 60.0  # between warnings about the same rank

_log = logging.getLogger("asynccomm")


def measure_if_wanted(session: Session) -> None:
    """Measure a new comm until it closes, if its hint or the environment asks for it. On its loop."""
    if session.measures or os.environ.get(VARIABLE, "0") not in ("", "0"):
        measurements = Measurements(session.submitter, session.reporter)
        session.in_flight.measured = measurements
        if session.reporter is not None:
            measurements.begin(session.mailbox.loop)


@final
class Measurements:
    """The metrics of one comm, as its statistics show them.

    Args:
        submitter: of the comm.
        reporter: the way to the other ranks; None: arrivals are not compared.
    """

    def __init__(self, submitter: Submitter, reporter: Reporter | None) -> None:
        self.metrics: Metrics = Metrics(submitter.watchers)
        self._group = submitter.group
        self._submitter = submitter
        self._reporter = reporter
        self._log = ArrivalLog(self._end)
        self._table = LatenessTable(submitter.group.size, self._compared)
        self._own: dict[int, tuple[Op, float]] = {}  # operation and time of calls that were sent
        self._offset = ClockOffset()
        self._warned: dict[int, float] = {}
        self._task: asyncio.Task[None] | None = None
        submitter.watch(self.metrics)
        if reporter is not None:
            submitter.watch(self._log)
            reporter.on_arrivals = self._table.add

    @property
    def lateness(self) -> Lateness:
        """Which rank came last to collectives, and by how much."""
        return self._table.lateness()

    def text(self, statistics: CommStatistics) -> str:
        """The metrics in Prometheus' format."""
        gauges = [
            Gauge("in_flight", "gauge", "Operations that have not ended.", statistics.in_flight),
            Gauge(
                "in_flight_bytes", "gauge", "Bytes of the operations that have not ended.", statistics.bytes_in_flight
            ),
            Gauge("held", "gauge", "Operations that are not sent yet.", statistics.held),
            Gauge("batches_total", "counter", "Batches of more than one operation.", statistics.batches),
            Gauge("ready_waiting", "gauge", "Tasks that wait in ready().", statistics.waiting),
            Gauge("ready_waits_total", "counter", "Calls of ready() that had to wait.", statistics.waits),
        ]
        labels = {"comm": self._group.name, "rank": str(self._group.rank)}
        return prometheus(self.metrics, self.lateness, gauges, labels)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Exchange arrivals with the other ranks until the comm closes. On the loop."""
        self._task = loop.create_task(self._exchange(), name="asynccomm metrics")

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _exchange(self) -> None:
        """Send the times of this rank's calls to the others now and then, until cancelled."""
        reporter = self._reporter
        assert reporter is not None
        if (offset := await reporter.clock_offset()) is not None:
            self._offset = offset
        while True:
            await asyncio.sleep(EXCHANGE_SECONDS)
            self._submitter.watchers.flush()
            calls = self._log.take()
            if calls:
                self._own |= {seq: (op, when) for seq, op, when in calls}
                while len(self._own) > 2 * len(calls) + 4096:
                    del self._own[next(iter(self._own))]
                times = [(seq, when + self._offset.seconds) for seq, _, when in calls]
                self._table.add(self._group.rank, times)
                reporter.send_arrivals(times)
            self._warn()

    def _compared(self, seq: int, row: Arrivals) -> None:
        own = self._own.pop(seq, None)
        if own is None:
            return
        mine = row[self._group.rank]
        self.metrics.waited_for_last(max(row.values()) - mine)
        here = {rank: when - self._offset.seconds for rank, when in sorted(row.items())}
        self._submitter.watchers.arrived(own[0], seq, here)

    def _warn(self) -> None:
        found = self._table.straggler(STRAGGLER_SECONDS)
        if found is None or self._group.rank != 0:
            return
        rank, times, count, seconds = found
        now = time.monotonic()
        if now - self._warned.get(rank, -WARN_SECONDS) >= WARN_SECONDS:
            self._warned[rank] = now
            _log.warning(
                "comm %r: rank %d came last to %d of the last %d collectives compared; all other ranks waited for it "
                "alone, for %.3g ms (median)",
                self._group.name,
                rank,
                times,
                count,
                seconds * 1e3,
            )
