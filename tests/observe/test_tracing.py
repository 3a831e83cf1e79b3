"""The recording of a trace on one rank; real traces are in tests/comm/test_tracing.py."""

import asyncio

import pytest
import torch

from asynccomm import AbortedError
from asynccomm.observe import tracing
from asynccomm.observe.tracing import TraceRecorder
from asynccomm.ops import Barrier
from asynccomm.testing.local import loopback_world
from tests.waiting import until


async def test_calls_with_their_ends_and_errors() -> None:
    async with loopback_world(2) as (a, b):
        recorder = TraceRecorder(a._group, "k", 7)
        a._submitter.watch(recorder)
        await asyncio.gather(a.all_reduce(torch.ones(2)), b.all_reduce(torch.ones(2)))
        await asyncio.gather(a.all_gather_object(1), b.all_gather_object(2))
        work = a.barrier()
        assert recorder.part()["ops"][2]["finished"] is None
        b.abort("enough")
        with pytest.raises(AbortedError):
            await work
        recorder.finished([(Barrier(), None, 5, 1.0, 2.0)])
        part = recorder.part()
        assert (part["comm"], part["rank"], part["process"], part["offset"]) == ("test", 0, 7, 0.0)
        assert [(op["kind"], op["seq"], op["error"]) for op in part["ops"]] == [
            ("barrier", 5, ""),
            ("all_reduce", 0, ""),
            ("all_gather_object", 1, ""),
            ("barrier", 2, "AbortedError"),
        ]
        assert part["ops"][1]["started"] <= part["ops"][1]["finished"]
        assert __file__ in part["ops"][1]["site"]
        assert all(row.work is None for row in recorder._rows), "a Work may hold tensors"


async def test_a_long_trace_counts_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST", 2)
    async with loopback_world(1) as (comm,):
        recorder = TraceRecorder(comm._group, "k", 0)
        comm._submitter.watch(recorder)
        for _ in range(5):
            await comm.barrier()
            recorder.finished([(Barrier(), None, 5, 1.0, 2.0)])
        part = recorder.part()
        assert (len(part["ops"]), part["dropped"]) == (4, 6)


async def test_the_lag_of_the_loop_is_sampled_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "LAG_SECONDS", 0.001)
    async with loopback_world(1) as (comm,):
        recorder = TraceRecorder(comm._group, "k", 0)
        recorder.start(asyncio.get_running_loop())
        await until(lambda: len(recorder.part()["lags"]) > 3)
        recorder.stop()
        recorder.stop()
        assert all(lag >= 0 for _, lag in recorder.part()["lags"])
