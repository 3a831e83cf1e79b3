"""Metrics through OpenTelemetry's API, read by its SDK."""

import asyncio
from typing import Any

import pytest
import torch

pytest.importorskip("opentelemetry.sdk.metrics", reason="OpenTelemetry's SDK is not installed")

from opentelemetry import metrics
from opentelemetry.metrics._internal import _ProxyMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from asynccomm.errors import ClosedError
from asynccomm.observe import otel
from asynccomm.observe.otel import instrument
from asynccomm.testing.local import loopback_world


def read(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    if data is None:
        return {}
    metrics = [m for resource in data.resource_metrics for scope in resource.scope_metrics for m in scope.metrics]
    return {metric.name: list(metric.data.data_points) for metric in metrics}


async def test_counters_gauges_and_histograms() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    async with loopback_world(2, hints={"metrics": "on"}) as (a, b):
        instrument(a, provider.get_meter("test"))
        await asyncio.gather(a.all_reduce(torch.ones(4)), b.all_reduce(torch.ones(4)))
        work = a.barrier()
        found = read(reader)
        (operations,) = found["asynccomm.operations"]
        assert operations.value == 1
        assert dict(operations.attributes) == {"comm": "test", "rank": 0, "op": "all_reduce"}
        assert found["asynccomm.bytes"][0].value == 16
        assert found["asynccomm.in_flight"][0].value == 1
        assert found["asynccomm.latency"][0].count == 1
        assert found["asynccomm.latency"][0].sum > 0
        await asyncio.gather(work, b.barrier())
    assert "asynccomm.in_flight" not in read(reader), "the comm has closed"
    provider.shutdown()


async def test_all_comms_report_by_the_instruments_of_a_meter_until_they_close() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    async with (
        loopback_world(1, name="first", hints={"metrics": "on"}) as (first,),
        loopback_world(1, name="second", hints={"metrics": "on"}) as (second,),
    ):
        for comm in (first, second):
            instrument(comm, provider.get_meter("test"))
            await comm.barrier()

        def comms(name: str) -> list[Any]:
            return [point.attributes["comm"] for point in read(reader).get(name, [])]

        names = ("asynccomm.operations", "asynccomm.in_flight", "asynccomm.ready_waits")
        assert [comms(name) for name in names] == [["first", "second"]] * 3
        await first.aclose()
        assert [comms(name) for name in names] == [["first", "second"], ["second"], ["first", "second"]]
    async with loopback_world(1, name="first", hints={"metrics": "on"}) as (again,):
        instrument(again, provider.get_meter("test"))
        await again.barrier()
    found = {point.attributes["comm"]: point.value for point in read(reader)["asynccomm.operations"]}
    assert found == {"first": 2, "second": 1}, "the counts of closed comms stay"
    provider.shutdown()


async def test_a_comm_is_reported_by_a_provider_that_is_set_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, reader = _ProxyMeterProvider(), InMemoryMetricReader()  # the global provider cannot be reset
    monkeypatch.setattr(otel, "_default", None)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    async with loopback_world(2, hints={"metrics": "on"}) as (a, b):
        instrument(a)
        instrument(b)
        await asyncio.gather(a.barrier(), b.barrier())
        provider.on_set_meter_provider(MeterProvider([reader]))
        ranks = [point.attributes["rank"] for point in read(reader)["asynccomm.operations"]]
        assert ranks == [0, 1]


async def test_a_comm_without_metrics_is_refused() -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(RuntimeError, match="the comm has no metrics"):
            instrument(comm)


async def test_a_comm_is_reported_once_until_it_closes() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    meter = provider.get_meter("test")

    def counted() -> list[int]:
        return [point.value for point in read(reader)["asynccomm.operations"]]

    async with loopback_world(1, hints={"metrics": "on"}) as (comm,):
        await comm.barrier()
        instrument(comm, meter)
        instrument(comm, meter)
        await comm.barrier()
        assert counted() == [2]
        assert [point.count for point in read(reader)["asynccomm.latency"]] == [1], "the first barrier was before"
    with pytest.raises(ClosedError, match="comm 'test' is closed"):
        instrument(comm, meter)
    assert counted() == [2]
    assert not otel._instruments[meter].comms
    provider.shutdown()


def test_another_object_is_refused() -> None:
    with pytest.raises(TypeError, match=r"comm must be a Comm, got None \(NoneType\)"):
        instrument(None)  # type: ignore[arg-type]


async def test_a_meter_must_be_one_of_opentelemetry() -> None:
    async with loopback_world(1, hints={"metrics": "on"}) as (comm,):
        meter: Any
        for meter, kind in [(3, "int"), ("test", "str"), (MeterProvider(), "MeterProvider")]:
            with pytest.raises(TypeError, match=rf"^meter must be an OpenTelemetry Meter, got .*\({kind}\)$"):
                instrument(comm, meter)
