"""Counters, histograms, and their text."""

import asyncio
import re

import pytest
import torch

from asynccomm import CollectiveTimeoutError
from asynccomm.core.state import CallCounts
from asynccomm.observe.lateness import LatenessTable
from asynccomm.observe.metrics import BOUNDS, Gauge, Histogram, Metrics, Recording, prometheus
from asynccomm.observe.watchers import NOTED, Watchers
from asynccomm.ops import Barrier
from asynccomm.testing.local import loopback_world

LINE = re.compile(r'asynccomm_[a-z_]+(\{([a-z]+="(\\.|[^"\\])*",?)*\})? [-+0-9.e]+(inf)?')


def test_a_histogram_counts_by_ranges() -> None:
    histogram = Histogram()
    for seconds in (0.0, 1e-6, 2e-6, 1e9):
        histogram.add(seconds)
    assert (histogram.counts[0], histogram.counts[1], histogram.counts[-1]) == (2, 1, 1)
    assert sum(histogram.counts) == 4


async def test_operations_that_end_are_counted_once() -> None:
    async with loopback_world(2) as (a, b):
        metrics = Metrics(a._submitter.watchers)
        a._submitter.watch(metrics)
        await asyncio.gather(a.all_reduce(torch.ones(4)), b.all_reduce(torch.ones(4)))
        metrics.finished([(Barrier(), None, 1, 1.0, 1.5)])
        assert (metrics.kinds["all_reduce"].completed, metrics.kinds["all_reduce"].nbytes) == (1, 16)
        assert metrics.kinds["barrier"].latency.seconds == 0.5
        with pytest.raises(CollectiveTimeoutError):
            await a.barrier(timeout=0.02)
        assert (metrics.kinds["barrier"].completed, metrics.kinds["barrier"].failed) == (1, 1)
        a._submitter.unwatch(metrics)


def test_a_reading_counts_the_calls_of_the_fast_path_that_are_noted() -> None:
    watchers = Watchers(CallCounts())
    metrics = Metrics(watchers)
    watchers.add(metrics)
    watchers.notes += [(Barrier(), None, seq, 1.0, 1.5) for seq in range(3)]
    assert (metrics.kinds["barrier"].completed, metrics.kinds["barrier"].latency.seconds) == (3, 1.5)
    watchers.notes.append((Barrier(), None, 3, 1.0, 1.5))
    assert metrics.kinds["barrier"].completed == 4


def test_an_exporter_gets_each_call_at_once() -> None:
    watchers, seen = Watchers(counts := CallCounts()), []
    metrics = Metrics(watchers)
    watchers.add(metrics)
    assert counts.noted_calls == NOTED

    class Seen(Recording):
        def ended(self, kind: str, nbytes: int, seconds: float, error: str) -> None:
            seen.append((kind, seconds))

    metrics.finished([(Barrier(), None, 0, 1.0, 1.5)])
    watchers.notes.append((Barrier(), None, 0, 1.0, 1.5))
    assert metrics.record(Seen())
    assert seen == [], "the call was made before"
    assert counts.noted_calls == 1
    metrics.finished([(Barrier(), None, 1, 1.0, 3.0)])
    assert seen == [("barrier", 2.0)]
    metrics.closed()
    assert not metrics.record(Seen())


def test_the_text_is_prometheus_format() -> None:
    metrics = Metrics(Watchers(CallCounts()))
    metrics.finished([(Barrier(), None, 0, 1.0, 1.5)])
    metrics.waited_for_last(0.25)
    labels = {"comm": 'a "name"\n\\', "rank": "0"}
    text = prometheus(
        metrics, LatenessTable(2, lambda *_: None).lateness(), [Gauge("held", "gauge", "Held.", 3)], labels
    )
    lines = text.splitlines()
    assert text.endswith("\n")
    for line in lines:
        assert line.startswith(("# HELP asynccomm_", "# TYPE asynccomm_")) or LINE.fullmatch(line), line
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    place = r'comm="a \"name\"\n\\",rank="0"'
    assert f"asynccomm_held{{{place}}} 3" in lines
    assert f'asynccomm_operations_total{{{place},op="barrier"}} 1' in lines
    buckets = [line for line in lines if line.startswith("asynccomm_latency_seconds_bucket")]
    assert len(buckets) == len(BOUNDS) + 1
    assert buckets[-1] == f'asynccomm_latency_seconds_bucket{{{place},op="barrier",le="+Inf"}} 1'
    counts = [int(line.rpartition(" ")[2]) for line in buckets]
    assert counts == sorted(counts)
    assert f"asynccomm_wait_for_last_seconds_sum{{{place}}} 0.25" in lines
