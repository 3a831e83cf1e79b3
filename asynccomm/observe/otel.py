"""The metrics of a comm through OpenTelemetry's API (extra ``otel``), which the program's own SDK exports.

::

    async with asynccomm.new_comm(hints={"metrics": "on"}) as comm:
        asynccomm.observe.otel.instrument(comm)

Counts come from observable instruments, which read the statistics when the SDK collects; latencies and waits go to
histograms as operations end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, final
from weakref import WeakKeyDictionary

from asynccomm.observe.lateness import Lateness
from asynccomm.observe.metrics import Metrics, OpMetrics, Recording

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

NAME: Final = "asynccomm"

_Callback = Callable[["CallbackOptions"], Iterable["Observation"]]
_instruments: WeakKeyDictionary[Meter, _Instruments] = WeakKeyDictionary()
_default: Meter | None = None  # kept: before the program sets its provider, each request makes another meter
_making = threading.Lock()


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
    global _default
    try:
        from opentelemetry import metrics  # noqa: PLC0415 (an extra)
    except ImportError as exc:
        raise RuntimeError("OpenTelemetry's API is not installed: pip install 'asynccomm[otel]'") from exc
    measured = comm.statistics().measured
    if measured is None:
        raise RuntimeError("the comm has no metrics: make it with hints={'metrics': 'on'}, or set ASYNCCOMM_METRICS")
    with _making:
        if meter is None:
            meter = _default = _default or metrics.get_meter(NAME)
        instruments = _instruments.get(meter)
        if instruments is None:
            instruments = _instruments[meter] = _Instruments(meter, metrics.Observation)
    measured.metrics.record(_Instrumented(comm, measured, instruments))


@final
class _Instruments:
    """The instruments of a meter, which has one of each name: all comms report by them."""

    def __init__(self, meter: Meter, observation: Callable[..., Observation]) -> None:
        self.comms: dict[_Instrumented, None] = {}  # open ones, in the order of their instrumentation
        self._observation = observation
        self.latency = meter.create_histogram("asynccomm.latency", "s", "Time from the call to the end of operations.")
        self.wait = meter.create_histogram("asynccomm.wait_for_last", "s", "Time of waiting for the last rank.")
        counter, gauge = meter.create_observable_counter, meter.create_observable_gauge
        counter("asynccomm.operations", self._of_kinds(lambda each: each.completed), "{operation}")
        counter("asynccomm.failures", self._of_kinds(lambda each: each.failed), "{operation}")
        counter("asynccomm.bytes", self._of_kinds(lambda each: each.nbytes), "By")
        counter("asynccomm.ready_waits", self._of_statistics(lambda each: each.waits), "{wait}")
        counter("asynccomm.last", [self._last], "{operation}", "Collectives to which a rank came last.")
        gauge("asynccomm.in_flight", self._of_statistics(lambda each: each.in_flight), "{operation}")
        gauge("asynccomm.in_flight_bytes", self._of_statistics(lambda each: each.bytes_in_flight), "By")

    def _of_kinds(self, value: Callable[[OpMetrics], int]) -> Sequence[_Callback]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            for each in self.comms.copy():
                for kind, metrics in each.measured.metrics.kinds.copy().items():
                    yield self._observation(value(metrics), {**each.labels, "op": kind})

        return [observe]

    def _of_statistics(self, value: Callable[[_Statistics], int]) -> Sequence[_Callback]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            for each in self.comms.copy():
                yield self._observation(value(each.comm.statistics()), each.labels)

        return [observe]

    def _last(self, options: CallbackOptions) -> Iterable[Observation]:
        for each in self.comms.copy():
            for rank in each.measured.lateness.ranks:
                yield self._observation(rank.times_last, {**each.labels, "last": rank.rank})


@final
class _Instrumented(Recording):
    """A comm that reports by instruments."""

    def __init__(self, comm: MeasuredComm, measured: _Measured, instruments: _Instruments) -> None:
        self.comm = comm
        self.measured = measured
        self.labels: dict[str, str | int] = {"comm": comm.name, "rank": comm.rank}
        self._instruments = instruments
        instruments.comms[self] = None

    def ended(self, kind: str, nbytes: int, seconds: float, error: str) -> None:
        if not error:
            self._instruments.latency.record(seconds, {**self.labels, "op": kind})

    def waited_for_last(self, seconds: float) -> None:
        self._instruments.wait.record(seconds, self.labels)

    def closed(self) -> None:
        self._instruments.comms.pop(self, None)
