"""The metrics of real comms: an injected straggler is named by the statistics, the events and the warning."""

import asyncio
import contextlib
import io
import logging

import pytest
import torch

from asynccomm import Comm, new_comm
from asynccomm.comm import measuring
from asynccomm.observe.lateness import RECENT
from asynccomm.testing.local import loopback_world
from tests.waiting import until


@pytest.mark.ranks(3)
async def test_a_straggler_of_20_ms_is_named(comm: Comm) -> None:
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("asynccomm").addHandler(handler)
    try:
        async with new_comm(name="measured", hints={"metrics": "on"}) as measured:
            stream = measured.events()
            for _ in range(RECENT + 2):
                if measured.rank == 1:
                    await asyncio.sleep(0.02)
                await measured.all_reduce(torch.ones(4))
            await until(lambda: measured.statistics().lateness.compared >= RECENT)
            found = measured.statistics().lateness
            assert found.last is not None
            assert found.last.rank == 1
            assert found.last.times_last >= 0.9 * found.compared
            assert found.last.mean > 0.005
            text = measured.statistics().prometheus()
            assert (
                f'asynccomm_last_total{{comm="measured",rank="{measured.rank}",last="1"}} {found.last.times_last}'
                in text
            )
            assert 'op="all_reduce"' in text
            stream.close()
            arrivals = [event async for event in stream if event.kind == "arrivals"]
            assert len(arrivals) >= RECENT
            assert all(set(event.arrivals or ()) == {0, 1, 2} for event in arrivals)
            assert str(arrivals[0].op) == "all_reduce(float32[4], SUM)"
            if measured.rank == 0:
                await until(lambda: "rank 1 came last to" in said.getvalue())
            await comm.barrier()
    finally:
        logging.getLogger("asynccomm").removeHandler(handler)
    await comm.barrier()


async def test_without_the_hint_there_are_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(RuntimeError, match="the comm has no metrics"):
            comm.statistics().prometheus()
        with pytest.raises(RuntimeError, match="the comm has no metrics"):
            assert comm.statistics().lateness
    monkeypatch.setenv(measuring.VARIABLE, "1")
    async with loopback_world(1) as (comm,):
        await comm.barrier()
        assert "asynccomm_operations_total" in comm.statistics().prometheus()
    with pytest.raises(ValueError, match="hint 'metrics' must be 'on' or 'off', got 'yes'"):
        new_comm(alone=True, hints={"metrics": "yes"})


async def test_back_pressure_and_failures_are_in_the_text() -> None:
    async with loopback_world(2, hints={"metrics": "on"}, max_ops=1) as (a, b):
        work = a.all_reduce(torch.ones(2))
        ready = asyncio.create_task(a.ready())
        await asyncio.sleep(0)
        assert 'asynccomm_in_flight{comm="test",rank="0"} 1' in a.statistics().prometheus()
        await asyncio.gather(work, b.all_reduce(torch.ones(2)), ready)
        assert 'asynccomm_ready_waits_total{comm="test",rank="0"} 1' in a.statistics().prometheus()
        b.abort("enough")
        with contextlib.suppress(Exception):
            await a.barrier()
