"""Log records, torch's wait counters, and uncaught exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm import BrokenError, PayloadError
from asynccomm.compat.c10d import logs
from asynccomm.compat.c10d.logs import RankHook
from tests.compat.c10d.worlds import alone, run_ranks

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
    assert any(record.message.startswith("broadcast raised ValueError: ") for record in caplog.records)


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


def said_of(name: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith(f"{name} on group")]


@pytest.mark.parametrize("async_op", [False, True])
async def test_errors_of_awaiting_are_logged(async_op: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([0, 1])
        if rank == 1:
            await dist.barrier()
            await dist._abort_process_group(pg)
            return
        work = dist.all_reduce(ONE.clone(), group=pg, async_op=async_op)
        await dist.barrier()
        with pytest.raises(BrokenError):
            await work

    with caplog.at_level(logging.DEBUG, "asynccomm"):
        await run_ranks(2, body)
    (said,) = said_of("all_reduce", caplog)
    assert "all_reduce on group '1' of backend 'loopback', rank 0 of 2, global rank 0 of 2 raised AbortedError" in said


FUTURES = {
    "all_reduce_coalesced": lambda pg: dist.all_reduce_coalesced([ONE.clone()], group=pg, async_op=True),
    "all_gather_coalesced": lambda pg: dist.all_gather_coalesced(
        [[ONE.clone()] for _ in range(2)], [ONE.clone()], group=pg, async_op=True
    ),
}


@pytest.mark.parametrize("name", FUTURES)
async def test_errors_of_futures_are_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([0, 1])
        if rank == 1:
            await dist.barrier()
            await dist._abort_process_group(pg)
            return
        with pytest.warns(FutureWarning, match=name):
            future = FUTURES[name](pg)
        assert asyncio.isfuture(future)
        await dist.barrier()
        with pytest.raises(BrokenError):
            await future

    with caplog.at_level(logging.DEBUG, "asynccomm"):
        await run_ranks(2, body)
    (said,) = said_of(name, caplog)
    assert "on group '1' of backend 'loopback', rank 0 of 2, global rank 0 of 2 raised AbortedError" in said


async def test_errors_of_unpickling_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def body(rank: int) -> None:
        with contextlib.nullcontext() if rank == 0 else pytest.raises(PayloadError, match="2 objects"):
            await dist.broadcast_object_list([1, 2] if rank == 0 else [None], 0)

    with caplog.at_level(logging.DEBUG, "asynccomm"):
        await run_ranks(2, body)
    (said,) = said_of("broadcast_object_list", caplog)
    assert "rank 1 of 2" in said
    assert "raised PayloadError" in said


async def test_a_log_does_not_count_as_looking_at_the_error(caplog: pytest.LogCaptureFixture) -> None:
    reports: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context["message"]))
    async with alone() as pg:
        with caplog.at_level(logging.DEBUG, "asynccomm"):
            dropped = pg.comm().recv(ONE.clone(), 0)
            logs._watch(dropped, dist.recv, (ONE,), {})
            pg.comm().abort("no")
            while not said_of("recv", caplog):
                await asyncio.sleep(0)
        del dropped
        while not reports:
            await asyncio.sleep(0)
    assert "never retrieved" in reports[0]


async def test_nothing_is_watched_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_watch", lambda *_: pytest.fail("it was watched"))
    async with alone():
        await dist.all_reduce(ONE.clone())


@pytest.fixture
def printing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hook that prints three lines, one of them empty."""

    def hook(kind: Any, error: Any, traceback: Any) -> None:
        print(f"oh\n\n{error}", file=sys.stderr)

    monkeypatch.setattr(sys, "excepthook", hook)
    return hook


def test_each_line_of_an_uncaught_exception_says_the_rank(printing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hook = RankHook.install(3)
    sys.excepthook(ValueError, ValueError("no"), None)
    assert capsys.readouterr().err == "[rank3]: oh\n\n[rank3]: no\n"
    hook.remove()
    assert sys.excepthook is printing


def test_hooks_do_not_nest(printing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    RankHook.install(3)
    hook = RankHook.install(4)
    sys.excepthook(ValueError, ValueError("no"), None)
    assert capsys.readouterr().err == "[rank4]: oh\n\n[rank4]: no\n"
    hook.remove()
    assert sys.excepthook is printing


def test_a_hook_that_came_later_stays(printing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = RankHook.install(3)
    monkeypatch.setattr(sys, "excepthook", print)
    hook.remove()
    assert sys.excepthook is print
