"""The metrics of a comm through OpenTelemetry's API (extra ``otel``), which the program's own SDK exports.

::

    async with asynccomm.new_comm(hints={"metrics": "on"}) as comm:
        asynccomm.observe.otel.instrument(comm)

Counts come from observable instruments, which read the statistics when the SDK collects; latencies and waits go to
histograms as operations end.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, final, runtime_checkable
from weakref import WeakKeyDictionary

from asynccomm.errors import ClosedError
from asynccomm.observe.lateness import Lateness
from asynccomm.observe.metrics import Metrics, OpMetrics, Recording

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
else:
    try:
        from opentelemetry.metrics import Meter  # for get_type_hints
    except ImportError:  # an extra
        Meter = Any

NAME: Final = "asynccomm"

_Labels = tuple[tuple[str, str | int], ...]
_Read = Callable[["_Instrumented"], Iterable[tuple[_Labels, int]]]
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


@runtime_checkable
class MeasuredComm(Protocol):
    """A comm with metrics."""

    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int: ...

    def statistics(self) -> _Statistics: ...


def instrument(comm: MeasuredComm, meter: Meter | None = None) -> None:
    """Report the metrics of ``comm``, until it closes. Its counts stay; those of later comms of its name add to them.

    Counts are those since the comm was made; histograms begin with this call. Idempotent for each meter.

    Args:
        comm: a comm with the hint ``metrics``.
        meter: None: the meter "asynccomm" of the global provider.

    Raises: RuntimeError without OpenTelemetry's API, or for a comm without metrics; TypeError; ClosedError.
    """
    global _default
    if not isinstance(comm, MeasuredComm):
        raise TypeError(f"comm must be a Comm, got {comm!r} ({type(comm).__name__})")
    try:
        from opentelemetry import metrics  # noqa: PLC0415 (an extra)
    except ImportError as exc:
        raise RuntimeError("OpenTelemetry's API is not installed: pip install 'asynccomm[otel]'") from exc
    if meter is not None and not isinstance(meter, metrics.Meter):
        raise TypeError(f"meter must be an OpenTelemetry Meter, got {meter!r} ({type(meter).__name__})")
    measured = comm.statistics().measured
    if measured is None:
        raise RuntimeError("the comm has no metrics: make it with hints={'metrics': 'on'}, or set ASYNCCOMM_METRICS")
    with _making:
        if meter is None:
            meter = _default = _default or metrics.get_meter(NAME)
        instruments = _instruments.get(meter)
        if instruments is None:
            instruments = _instruments[meter] = _Instruments(meter, metrics.Observation)
    instruments.open(comm, measured)


@final
class _Instruments:
    """The instruments of a meter, which has one of each name: all comms report by them."""

    def __init__(self, meter: Meter, observation: Callable[..., Observation]) -> None:
        self.comms: dict[_Instrumented, None] = {}  # open ones, in the order of their instrumentation
        self._observation = observation
        self._counters: list[tuple[Counter[_Labels], _Read]] = []  # of each, the counts of closed comms
        self._reading = threading.Lock()
        self.latency = meter.create_histogram("asynccomm.latency", "s", "Time from the call to the end of operations.")
        self.wait = meter.create_histogram("asynccomm.wait_for_last", "s", "Time of waiting for the last rank.")
        counter, gauge = meter.create_observable_counter, meter.create_observable_gauge
        counter("asynccomm.operations", self._counted(_of_kinds(lambda each: each.completed)), "{operation}")
        counter("asynccomm.failures", self._counted(_of_kinds(lambda each: each.failed)), "{operation}")
        counter("asynccomm.bytes", self._counted(_of_kinds(lambda each: each.nbytes)), "By")
        counter("asynccomm.ready_waits", self._counted(_waits), "{wait}")
        counter("asynccomm.last", self._counted(_last), "{operation}", "Collectives to which a rank came last.")
        gauge("asynccomm.in_flight", self._gauged(lambda each: each.in_flight), "{operation}")
        gauge("asynccomm.in_flight_bytes", self._gauged(lambda each: each.bytes_in_flight), "By")

    def _counted(self, read: _Read) -> Sequence[_Callback]:
        closed = Counter[_Labels]()
        self._counters.append((closed, read))

        def observe(options: CallbackOptions) -> Iterable[Observation]:
            with self._reading:
                counts = closed.copy()
                for each in list(self.comms):
                    _add(counts, read(each))
            return [self._observation(count, dict(labels)) for labels, count in counts.items()]

        return [observe]

    def _gauged(self, value: Callable[[_Statistics], int]) -> Sequence[_Callback]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            return [self._observation(value(each.comm.statistics()), dict(each.labels)) for each in list(self.comms)]

        return [observe]

    def open(self, comm: MeasuredComm, measured: _Measured) -> None:
        """Report a comm. Idempotent. Raises: ClosedError."""
        with self._reading:  # a comm that closes meanwhile waits in ``close``
            if any(each.measured is measured for each in self.comms):  # as of the comm in a BlockingComm
                return
            added = _Instrumented(comm, measured, self)
            if not measured.metrics.record(added):
                raise ClosedError(f"comm {comm.name!r} is closed")
            self.comms[added] = None

    def close(self, comm: _Instrumented) -> None:
        """Keep the counts of a comm, and drop the comm. Idempotent."""
        with self._reading:
            if comm in self.comms:
                del self.comms[comm]
                for closed, read in self._counters:
                    _add(closed, read(comm))


def _add(counts: Counter[_Labels], more: Iterable[tuple[_Labels, int]]) -> None:
    for labels, count in more:
        counts[labels] += count  # also 0, unlike update


def _of_kinds(value: Callable[[OpMetrics], int]) -> _Read:
    def read(comm: _Instrumented) -> Iterable[tuple[_Labels, int]]:
        kinds = comm.measured.metrics.kinds.copy()
        return [((*comm.labels, ("op", kind)), value(each)) for kind, each in kinds.items()]

    return read


def _waits(comm: _Instrumented) -> Iterable[tuple[_Labels, int]]:
    return [(comm.labels, comm.comm.statistics().waits)]


def _last(comm: _Instrumented) -> Iterable[tuple[_Labels, int]]:
    return [((*comm.labels, ("last", each.rank)), each.times_last) for each in comm.measured.lateness.ranks]


@final
class _Instrumented(Recording):
    """A comm that reports by instruments."""

    def __init__(self, comm: MeasuredComm, measured: _Measured, instruments: _Instruments) -> None:
        self.comm = comm
        self.measured = measured
        self.labels: _Labels = (("comm", comm.name), ("rank", comm.rank))
        self._instruments = instruments

    def ended(self, kind: str, nbytes: int, seconds: float, error: str) -> None:
        if not error:
            self._instruments.latency.record(seconds, {**dict(self.labels), "op": kind})

    def waited_for_last(self, seconds: float) -> None:
        self._instruments.wait.record(seconds, dict(self.labels))

    def closed(self) -> None:
        self._instruments.close(self)
