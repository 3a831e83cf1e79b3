"""The metrics of a comm through OpenTelemetry's API (extra ``otel``), which the program's own SDK exports.

::

    async with asynccomm.new_comm(hints={"metrics": "on"}) as comm:
        asynccomm.observe.otel.instrument(comm)

Counts come from observable instruments, which read the statistics when the SDK collects; latencies and waits go to
histograms as operations end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, final

from asynccomm.observe.lateness import Lateness
from asynccomm.observe.metrics import Metrics, OpMetrics, Recording

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

NAME: Final = "asynccomm"


class _Measured(Protocol):
    @property
    def metrics(self) -> Metrics: ...

    @property
    def lateness(self) -> Lateness: ...


class _Statistics(Protocol):
    @property
    def in_flight(self) -> int: ...

    @property
    def bytes_in_flight(self) -> int: ...

    @property
    def waits(self) -> int: ...

    @property
    def measured(self) -> _Measured | None: ...


class MeasuredComm(Protocol):
    """A comm with metrics."""

    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int: ...

    def statistics(self) -> _Statistics: ...


def instrument(comm: MeasuredComm, meter: Meter | None = None) -> None:
    """Report the metrics of ``comm``, until it closes.

    Args:
        comm: a comm with the hint ``metrics``.
        meter: None: the meter "asynccomm" of the global provider.

    Raises: RuntimeError without OpenTelemetry's API, or for a comm without metrics.
    """
    try:
        from opentelemetry import metrics  # noqa: PLC0415 (an extra)
    except ImportError as exc:
        raise RuntimeError("OpenTelemetry's API is not installed: pip install 'asynccomm[otel]'") from exc
    measured = comm.statistics().measured
    if measured is None:
        raise RuntimeError("the comm has no metrics: make it with hints={'metrics': 'on'}, or set ASYNCCOMM_METRICS")
    _Instruments(comm, measured, metrics.get_meter(NAME) if meter is None else meter, metrics.Observation)


@final
class _Instruments(Recording):
    """The instruments of one comm."""

    def __init__(
        self, comm: MeasuredComm, measured: _Measured, meter: Meter, observation: Callable[..., Observation]
    ) -> None:
        self._comm: MeasuredComm | None = comm
        self._measured = measured
        self._observation = observation
        self._labels: dict[str, str | int] = {"comm": comm.name, "rank": comm.rank}
        self._latency = meter.create_histogram("asynccomm.latency", "s", "Time from the call to the end of operations.")
        self._wait = meter.create_histogram("asynccomm.wait_for_last", "s", "Time of waiting for the last rank.")
        counter, gauge = meter.create_observable_counter, meter.create_observable_gauge
        counter("asynccomm.operations", self._of_kinds(lambda each: each.completed), "{operation}")
        counter("asynccomm.failures", self._of_kinds(lambda each: each.failed), "{operation}")
        counter("asynccomm.bytes", self._of_kinds(lambda each: each.nbytes), "By")
        counter("asynccomm.ready_waits", self._of_statistics(lambda each: each.waits), "{wait}")
        counter("asynccomm.last", [self._last], "{operation}", "Collectives to which a rank came last.")
        gauge("asynccomm.in_flight", self._of_statistics(lambda each: each.in_flight), "{operation}")
        gauge("asynccomm.in_flight_bytes", self._of_statistics(lambda each: each.bytes_in_flight), "By")
        measured.metrics.record(self)

    def ended(self, kind: str, nbytes: int, seconds: float, error: str) -> None:
        if not error:
            self._latency.record(seconds, {**self._labels, "op": kind})

    def waited_for_last(self, seconds: float) -> None:
        self._wait.record(seconds, self._labels)

    def closed(self) -> None:
        self._comm = None  # instruments cannot be removed from a meter: they report no more, and hold no comm

    def _of_kinds(
        self, value: Callable[[OpMetrics], int]
    ) -> Sequence[Callable[[CallbackOptions], Iterable[Observation]]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            kinds = self._measured.metrics.kinds.copy()
            return [self._observation(value(each), {**self._labels, "op": kind}) for kind, each in kinds.items()]

        return [observe]

    def _of_statistics(
        self, value: Callable[[_Statistics], int]
    ) -> Sequence[Callable[[CallbackOptions], Iterable[Observation]]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            comm = self._comm
            return [] if comm is None else [self._observation(value(comm.statistics()), self._labels)]

        return [observe]

    def _last(self, options: CallbackOptions) -> Iterable[Observation]:
        ranks = self._measured.lateness.ranks
        return [self._observation(each.times_last, {**self._labels, "last": each.rank}) for each in ranks]
