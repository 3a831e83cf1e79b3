"""What is left in the log and in torch's counters."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm.compat.c10d import logs
from tests.compat.c10d.worlds import alone

ONE = torch.ones(1)
LOGGED = {
    "send": lambda: dist.send(ONE, 0),
    "recv": lambda: dist.recv(ONE, 0),
    "broadcast": lambda: dist.broadcast(ONE, 9),
    "all_reduce": lambda: dist.all_reduce(3),  # type: ignore[arg-type]
    "reduce": lambda: dist.reduce(ONE, 9),
    "all_gather": lambda: dist.all_gather([], ONE),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ONE, torch.ones(2)),
    "gather": lambda: dist.gather(ONE),
    "scatter": lambda: dist.scatter(ONE),
    "reduce_scatter": lambda: dist.reduce_scatter(ONE, []),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.ones(2), ONE),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(2), ONE),
    "all_to_all": lambda: dist.all_to_all([], []),
    "barrier": lambda: dist.barrier(device_ids=3),  # type: ignore[arg-type]
    "all_gather_object": lambda: dist.all_gather_object([], 1),
    "gather_object": lambda: dist.gather_object(1),
    "broadcast_object_list": lambda: dist.broadcast_object_list(3),  # type: ignore[arg-type]
    "scatter_object_list": lambda: dist.scatter_object_list([]),
    "send_object_list": lambda: dist.send_object_list([1], 0),
    "recv_object_list": lambda: dist.recv_object_list([1], 0),
}
UNLOGGED = {
    "isend": lambda: dist.isend(ONE, 9),
    "irecv": lambda: dist.irecv(ONE, 9),
    "batch_isend_irecv": lambda: dist.batch_isend_irecv([]),
    "monitored_barrier": lambda: dist.monitored_barrier(timeout="1"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", LOGGED)
async def test_errors_are_logged_and_raised(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async with alone():
        with caplog.at_level(logging.DEBUG, "asynccomm"), pytest.raises((TypeError, ValueError)):
            LOGGED[name]()
    said = [record.message for record in caplog.records if record.message.startswith(f"{name} on group '0'")]
    assert len(said) == 1
    assert "of backend 'loopback', rank 0 of 1, global rank 0 of 1 raised" in said[0]


@pytest.mark.parametrize("name", UNLOGGED)
async def test_errors_that_are_not_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async with alone():
        with caplog.at_level(logging.DEBUG, "asynccomm"), pytest.raises((TypeError, ValueError)):
            UNLOGGED[name]()
    assert not [record for record in caplog.records if "raised" in record.message]


async def test_errors_of_coroutines_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with dist.use_world(dist.World()), caplog.at_level(logging.DEBUG, "asynccomm"), pytest.raises(TypeError):
        await dist.init_process_group("gloo", timeout=3)  # type: ignore[arg-type]
    assert any(record.message.startswith("init_process_group on no group raised") for record in caplog.records)


async def test_the_error_matters_more_than_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise RuntimeError("the state is broken")

    async with alone():
        with monkeypatch.context() as patch:
            patch.setattr(logs, "world", fail)
            with caplog.at_level(logging.DEBUG, "asynccomm"), pytest.raises(ValueError, match="in \\[0, 1\\)"):
                dist.broadcast(ONE, 9)
    assert any(record.message == "broadcast raised ValueError" for record in caplog.records)


async def test_nothing_is_made_up_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with alone():
        with monkeypatch.context() as patch:
            patch.setattr(logs, "world", lambda: pytest.fail("it was looked at"))
            with pytest.raises(ValueError, match="in \\[0, 1\\)"):
                dist.broadcast(ONE, 9)


async def test_waits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    class Counter:
        def __init__(self, name: str) -> None:
            self.name = name

        def guard(self) -> AbstractContextManager[None]:
            @contextmanager
            def count() -> Any:
                counted.append(self.name.removeprefix("pytorch.wait_counter.c10d."))
                yield

            return count()

    monkeypatch.setattr(logs, "_WaitCounter", Counter)
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    async with alone():
        await dist.new_group([0])
        await dist.split_group(None, [[0]])
        with pytest.raises(TypeError):
            await dist.shrink_group(())  # type: ignore[arg-type]
    assert counted == [
        "init_process_group",
        "store_based_barrier",
        "new_group_with_tag",
        "store_based_barrier",
        "split_group",
        "shrink_group",
    ]


def test_counters_are_torch_s() -> None:
    with logs._WaitCounter("pytorch.wait_counter.c10d.test").guard():
        pass
